"""The ledger of a search: every question that the search asked, with its answer.

A search asks four kinds of questions: what candidates cost (bounds and estimates), how long they take
(measurements), what the solver finds for some costs, and how much time is left. Every answer is
appended to the ledger, and the search decides by the ledger alone. A ledger that was written to
a file can therefore replay the search: the same questions get the same answers, nothing is measured
or solved, and the result is the same plan.

The file has one JSON list per line: the kind of the question, a digest of the question, the answer, and the seconds
that it took.
The first line records the target and the options of the search.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict, TypeVar, Unpack

from korch.binary_program.problem import Certificate, Plan, Status
from korch.binary_program.solve import Solver
from korch.binary_program.verify import verify_plan
from korch.candidate.candidate import Candidate
from korch.costs.calibrated import ScoreTail
from korch.errors import InfeasibleError, OptionError, ReplayError
from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.measure.meter import NEVER, AnyMeter
from korch.measure.record import Failed, Measured, Record, from_text, to_text
from korch.records import plain, read_record, to_json
from korch.search.estimate import Experience
from korch.system.deadline import Deadline
from korch.system.files import open_file

T = TypeVar("T")

SCHEMA = 3


class SolveLimits(TypedDict, total=False):
    """The arguments of `Solver.solve` other than the costs."""

    is_measured: Sequence[bool] | None
    seconds: float
    first_seconds: float
    hint: Sequence[int] | None
    lower_bound_ns: int
    excluded: Collection[int]
    gap: float


class Ledger:
    """Questions and answers of one search, in order; only appended to.

    Attributes:
        records: the last measurement or failure of each candidate, by key.
        experience: ratios of measured times to guesses, from which estimates are computed.
        corrections: how often bounds were corrected, or a second measurement was shorter than the first. A bound of
            plans' costs holds only until then.
        spent_s: the seconds that answers took, by the kind of question.
        is_replayed: whether the answers come from a file.
    """

    def __init__(
        self,
        meter: AnyMeter,
        limits: SearchLimits = DEFAULT_LIMITS,
        *,
        write_to: Path | None = None,
        replay: Path | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin a search.

        Args:
            meter: answers questions about candidates that the ledger can't answer.
            limits: the limits of the search.
            write_to: the file to which each answer is appended as soon as it is known.
            replay: a file that an earlier search wrote; answers are read from it.
            about: the content of the first line: plain data that must be the same in a replay.

        Raises:
            ReplayError: the file is damaged, or was written for another target or with other options.
            OptionError: a file can't be opened.
        """
        self.meter = meter
        self.limits = limits
        self.records: dict[str, Record] = {}
        self.experience = Experience()
        self.corrections = 0
        self.spent_s: dict[str, float] = {}
        self._bounds_ns: dict[str, int] = {}
        self._predictions: dict[str, tuple[int, float]] = {}
        self._tails: Mapping[str, ScoreTail] | None = None
        self._looked_up: set[str] = set()
        self._replay = None if replay is None else _entries(replay)
        self._write_to = write_to
        if write_to is not None:
            _opened(write_to, "w").close()
        self._line = 0
        self.is_replayed = replay is not None
        begin = {"schema": SCHEMA, **(about or {})}
        self._check_begin(begin, self.answer("begin", (), lambda: begin))

    def _check_begin(self, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                raise ReplayError(
                    f"the ledger is of a search with {name} {found.get(name)!r}; here it is {expected.get(name)!r}",
                    hint="Replay it with the options, the version and the kind of machine that wrote it",
                )

    def answer(self, kind: str, question: object, ask: Callable[[], T]) -> T:
        """Return the answer to a question: read from the file in a replay, otherwise computed by `ask`.

        `question`: the question; a digest of its `repr` is compared with the file's next entry. `ask`: computes the
        answer as JSON data; a replay returns data of the same type.

        Raises:
            ReplayError: the file's next entry is another question, or there is none.
        """
        if self._replay is None and self._write_to is None:
            return self._asked(kind, ask)
        self._line += 1
        digest = hashlib.sha256(repr(question).encode()).hexdigest()[:12]
        if self._replay is not None:
            found = next(self._replay, None)
            if found is None or found[:2] != [kind, digest]:
                has = "nothing" if found is None else f"{found[0]} {found[1]}"
                raise ReplayError(
                    f"the search asks for {kind} {digest}, but the ledger has {has} next",
                    where=f"line {self._line}",
                    hint="The model, the options or the version differ from those of the search that wrote it",
                )
            recorded: T = found[2]
            return recorded
        before_s = self.spent_s.get(kind, 0.0)
        answer = self._asked(kind, ask)
        if self._write_to is not None:
            entry = [kind, digest, answer, round(self.spent_s[kind] - before_s, 4)]
            with _opened(self._write_to, "a") as file:
                file.write(json.dumps(entry, separators=(",", ":")) + "\n")
        return answer

    def _asked(self, kind: str, ask: Callable[[], T]) -> T:
        begun_s = time.monotonic()
        answer = ask()
        self.spent_s[kind] = self.spent_s.get(kind, 0.0) + time.monotonic() - begun_s
        return answer

    # What candidates cost.

    def bounds_ns(self, candidates: Sequence[Candidate]) -> list[int]:
        """Return admissible lower bounds."""
        return self._facts("bounds", self._bounds_ns, candidates, lambda new: [self.meter.bound_ns(c) for c in new])

    def guesses_ns(self, candidates: Sequence[Candidate]) -> list[int]:
        """Return times that the meter predicts without measuring."""
        return [guess_ns for guess_ns, _ in self._predicted(candidates)]

    def spreads(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the usual errors of the logarithms of `guesses_ns`."""
        return [spread for _, spread in self._predicted(candidates)]

    def tails(self) -> Mapping[str, ScoreTail]:
        """Return the scores of predictions for kernels of other models, by provider."""
        if self._tails is None:
            found = self.answer("tails", (), lambda: {kind: plain(tail) for kind, tail in self.meter.tails().items()})
            self._tails = {kind: read_record(ScoreTail, tail, "tail") for kind, tail in found.items()}
        return self._tails

    def _predicted(self, candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
        return self._facts("guesses", self._predictions, candidates, self.meter.predict)

    def _facts(
        self,
        kind: str,
        known: dict[str, T],
        candidates: Sequence[Candidate],
        ask: Callable[[Sequence[Candidate]], Sequence[T]],
    ) -> list[T]:
        new = list({c.key: c for c in candidates if c.key not in known}.values())
        if new:
            keys = [c.key for c in new]
            found = self.answer(kind, keys, lambda: ask(new))
            known.update(zip(keys, found, strict=True))
        return [known[c.key] for c in candidates]

    def look_up(self, candidates: Sequence[Candidate]) -> None:
        """Read the database's records of candidates that were not looked up yet."""
        new = list({c.key: c for c in candidates if c.key not in self._looked_up}.values())
        self._looked_up.update(c.key for c in new)
        self._take("known", new, lambda: [self.meter.known(c) for c in new])

    def known(self, candidate: Candidate) -> Record | None:
        """Return the record of a candidate that was looked up or measured."""
        return self.records.get(candidate.key)

    def is_measured(self, candidate: Candidate) -> bool:
        """Return whether a candidate has a measured time."""
        return isinstance(self.records.get(candidate.key), Measured)

    @property
    def timed_kernels(self) -> int:
        """The number of candidates with a measured time; a candidate timed at several sizes counts once per size."""
        return sum(isinstance(record, Measured) for record in self.records.values())

    def has_failed(self, candidate: Candidate) -> bool:
        """Return whether a candidate can't be used."""
        return isinstance(self.records.get(candidate.key), Failed)

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        """Return the measured time or, if there is none, the bound; and whether it is measured."""
        record = self.records.get(candidate.key)
        if isinstance(record, Measured):
            return record.time_ns, True
        bound_ns = self._bounds_ns.get(candidate.key)
        return self.meter.bound_ns(candidate) if bound_ns is None else bound_ns, False

    # What is measured.

    def measure(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Build and time candidates; return their records, None for candidates that the deadline left unmeasured."""
        self._take("measure", candidates, lambda: self.meter.measure(candidates, deadline))
        return [self.records.get(c.key) for c in candidates]

    @property
    def batch(self) -> int:
        """The number of candidates to measure between two checks of the deadline: a batch for each machine."""
        return self.limits.batch * self.answer("machines", (), lambda: self.meter.machines)

    def build(self, candidates: Sequence[Candidate]) -> None:
        """Build the sources of candidates; those that their providers refuse get a record."""
        self._take("build", candidates, lambda: self.meter.refused(candidates))

    def confirm(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> None:
        """Time candidates again that were timed once; the longer of two undisturbed times is recorded."""
        self._take("confirm", candidates, lambda: self.meter.confirm(candidates, deadline))

    def _take(self, kind: str, candidates: Sequence[Candidate], ask: Callable[[], Sequence[Record | None]]) -> None:
        def texts() -> list[str | None]:
            return [None if record is None else to_text(record) for record in ask()]

        if candidates:
            keys = [c.key for c in candidates]
            for key, text in zip(keys, self.answer(kind, keys, texts), strict=True):
                if text is not None:
                    record, first = from_text(text), self.records.get(key)
                    if isinstance(record, Measured) and isinstance(first, Measured) and record.time_ns < first.time_ns:
                        self.corrections += 1
                    self.records[key] = record

    def correct(self, candidates: Sequence[Candidate]) -> None:
        """Lower the meter's bounds so that they hold for the measured times of some candidates."""
        for candidate in candidates:
            self.meter.correct(candidate, self.records[candidate.key])
        self.corrections += 1
        self._bounds_ns.clear()
        self._predictions.clear()

    def rates(self) -> str:
        """Return a digest of the rates from which bounds are computed."""
        return self.answer("rates", (), lambda: hashlib.sha256(to_json(self.meter.rates()).encode()).hexdigest()[:12])

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds to compile the candidates that are not compiled yet."""
        return self.answer("compile", [c.key for c in candidates], lambda: self.meter.compile_s(candidates))

    def expect_compiling(self, seconds: float) -> None:
        """Tell the meter the predicted seconds to compile the kernels of a first plan."""
        if not self.is_replayed:
            self.meter.expect_compiling(seconds)

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Begin to build candidates that will likely be measured, in parallel with other work."""
        if not self.is_replayed:
            self.meter.begin(candidates)

    # What the solver finds.

    def solve(self, solver: Solver, costs_ns: Sequence[int], **limits: Unpack[SolveLimits]) -> Plan:
        """Return the result of `Solver.solve`, recorded in the ledger."""
        question = (costs_ns, limits.get("excluded"), limits.get("hint"), limits.get("gap"))

        def ask() -> list[Any]:
            try:
                plan = solver.solve(costs_ns, **limits)
            except InfeasibleError as error:
                return [error.what, error.where, error.expected, error.hint]
            found = plan.certificate
            return [plan.kernels, found.status.value, found.objective_ns, found.bound_ns, round(found.seconds, 3)]

        answer = self.answer("solve", question, ask)
        if isinstance(answer[0], str):
            raise InfeasibleError(*answer)
        kernels, status, objective_ns, bound_ns, seconds = answer
        flags = limits.get("is_measured") or [kernel.is_measured for kernel in solver.problem.kernels]
        certificate = Certificate(
            Status(status),
            objective_ns,
            bound_ns,
            len(flags),
            sum(flags),
            objective_ns is not None and all(flags[k] for k in kernels),
            seconds,
        )
        plan = Plan(tuple(kernels), certificate)
        if self.is_replayed:
            verify_plan(solver.problem.with_costs(costs_ns, flags), plan)
        return plan

    def relax(
        self, solver: Solver, costs_ns: Sequence[int], *, excluded: Collection[int], seconds: float
    ) -> tuple[int, dict[int, int]]:
        """Return the result of `Solver.relax`, recorded in the ledger."""

        def ask() -> list[Any]:
            bound_ns, slack_ns = solver.relax(costs_ns, excluded=excluded, seconds=seconds)
            return [bound_ns, list(slack_ns), list(slack_ns.values())]

        bound_ns, kernels, slacks_ns = self.answer("relax", (costs_ns, sorted(excluded)), ask)
        return bound_ns, dict(zip(kernels, slacks_ns, strict=True))

    # How much time is left, and what earlier searches found.

    def left_s(self, deadline: Deadline) -> float | None:
        """Return the seconds until a deadline; None if there is none."""
        return self.answer("time", (), lambda: deadline.left_s)

    def now_s(self) -> float:
        """Return the monotonic time in seconds, for decisions that depend on it."""
        return self.answer("now", (), time.monotonic)

    def is_over(self, deadline: Deadline) -> bool:
        """Return whether a deadline has passed."""
        left_s = self.left_s(deadline)
        return left_s is not None and left_s <= 0

    # Choices that validation made, and facts that the database keeps.

    def record_choice(self, kind: str, choice: str) -> None:
        """Append a choice that was made by validation; does nothing in a replay, which has read it already."""
        if not self.is_replayed:
            self.answer(kind, (), lambda: choice)

    def recorded_choice(self, kind: str) -> str | None:
        """Return the next choice of a replay; None if this is not a replay."""
        return self.answer(kind, (), lambda: "") if self.is_replayed else None

    def fact(self, name: str) -> str | None:
        """Return a fact that the database keeps."""
        return self.answer("fact", name, lambda: self.meter.database.fact(name))

    def put_fact(self, name: str, value: str) -> None:
        """Store a fact in the database; does nothing in a replay."""
        if not self.is_replayed:
            self.meter.database.put_fact(name, value)


def _opened(path: Path, mode: str) -> IO[str]:
    """Return an opened file."""
    try:
        if mode == "r":
            return io.TextIOWrapper(open_file(path), encoding="utf-8")
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"the ledger can't be opened: {error.strerror}",
            where=str(path),
            hint="Give --ledger a file in a folder that exists, and --replay a file that --ledger wrote",
        ) from error


def _entries(path: Path) -> Iterator[list[Any]]:
    """Return an iterator over the entries of a file; each line is parsed when it is requested."""
    with _opened(path, "r") as file:
        lines = file.readlines()
    return (_entry(line, f"{path}, line {number}") for number, line in enumerate(lines, 1))


def _entry(line: str, where: str) -> list[Any]:
    try:
        kind, digest, answer, _ = json.loads(line)
    except (ValueError, TypeError):
        hint = "Write the ledger again: korch optimize --ledger FILE"
        raise ReplayError(f"{line[:40]!r} is not an entry of a ledger", where, hint=hint) from None
    return [kind, digest, answer]
