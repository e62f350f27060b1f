"""The ledger of a search: what was asked, and what was answered.

A search asks four things: what candidates cost (bounds and estimates), how long they take
(measurements), what the solver says of some costs, and how much time is left. Every answer is
appended to the ledger, and the search decides by the ledger alone. So a ledger that was written to
a file replays the search: the same questions get the same answers, nothing is measured or solved,
and the same plan comes out.

The file has one JSON list a line: the kind of the question, a digest of the question, the answer.
The first line says of which target and options the search was.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypedDict, TypeVar, Unpack

from korch.candidate.candidate import Candidate
from korch.deadline import Deadline
from korch.errors import InfeasibleError, OptionError, ReplayError
from korch.files import open_file
from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.measure.meter import NEVER, AnyMeter
from korch.measure.record import Failed, Measured, Record, from_text, to_text
from korch.program.problem import Certificate, Plan, Status
from korch.program.solve import Solver
from korch.program.verify import verify_plan
from korch.search.estimate import Experience

T = TypeVar("T")

SCHEMA = 1


class SolveLimits(TypedDict, total=False):
    """What `Solver.solve` takes beside the costs."""

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
        records: what is known of candidates, by key: the last measurement or failure.
        experience: measured times over guesses, for estimates.
        corrections: how often bounds were corrected.
        predicted_ns: better estimates of some candidates than those by experience, by key.
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
            meter: answers what the ledger does not know.
            limits: of the search.
            write_to: the file that gets each answer as soon as it is known.
            replay: a file that an earlier search wrote: answers come from there.
            about: what the first line says: plain data that must be the same in a replay.

        Raises:
            ReplayError: the file is damaged, or of another target or with other options.
            OptionError: a file can't be opened.
        """
        self.meter = meter
        self.limits = limits
        self.records: dict[str, Record] = {}
        self.experience = Experience()
        self.corrections = 0
        self.predicted_ns: dict[str, int] = {}
        self._bounds_ns: dict[str, int] = {}
        self._guesses_ns: dict[str, int] = {}
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
        """Return the answer to a question: the file's in a replay, otherwise that of `ask`.

        Args:
            kind: of the question.
            question: its text form decides whether it is the one that the file has next.
            ask: returns the answer as JSON has it; a replay returns one of the same type.

        Raises:
            ReplayError: the file has another question next, or none.
        """
        if self._replay is None and self._write_to is None:
            return ask()
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
        answer = ask()
        if self._write_to is not None:
            with _opened(self._write_to, "a") as file:
                file.write(json.dumps([kind, digest, answer], separators=(",", ":")) + "\n")
        return answer

    # What candidates cost.

    def bounds_ns(self, candidates: Sequence[Candidate]) -> list[int]:
        """Return admissible lower bounds."""
        return self._facts("bounds", self._bounds_ns, candidates, self.meter.bound_ns)

    def guesses_ns(self, candidates: Sequence[Candidate]) -> list[int]:
        """Return times computed from bytes and operations."""
        return self._facts("guesses", self._guesses_ns, candidates, self.meter.guess_ns)

    def _facts(
        self, kind: str, known: dict[str, int], candidates: Sequence[Candidate], ask: Callable[[Candidate], int]
    ) -> list[int]:
        new = list({c.key: c for c in candidates if c.key not in known}.values())
        if new:
            keys = [c.key for c in new]
            found = self.answer(kind, keys, lambda: [ask(c) for c in new])
            known.update(zip(keys, found, strict=True))
        return [known[c.key] for c in candidates]

    def look_up(self, candidates: Sequence[Candidate]) -> None:
        """Ask what the database knows of candidates that have no record yet."""
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
        """The number of candidates with a measured time; one that is timed at several sizes counts for each."""
        return sum(isinstance(record, Measured) for record in self.records.values())

    def has_failed(self, candidate: Candidate) -> bool:
        """Return whether a candidate can't be used."""
        return isinstance(self.records.get(candidate.key), Failed)

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        """Return the measured time, or the bound, and whether it is measured."""
        record = self.records.get(candidate.key)
        if isinstance(record, Measured):
            return record.time_ns, True
        bound_ns = self._bounds_ns.get(candidate.key)
        return self.meter.bound_ns(candidate) if bound_ns is None else bound_ns, False

    # What is measured.

    def measure(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> list[Record | None]:
        """Build and time candidates; None for those for which there was no time."""
        self._take("measure", candidates, lambda: self.meter.measure(candidates, deadline))
        return [self.records.get(c.key) for c in candidates]

    def confirm(self, candidates: Sequence[Candidate], deadline: Deadline = NEVER) -> None:
        """Time candidates a second time that were timed once; the longer time counts."""
        self._take("confirm", candidates, lambda: self.meter.confirm(candidates, deadline))

    def _take(self, kind: str, candidates: Sequence[Candidate], ask: Callable[[], Sequence[Record | None]]) -> None:
        def texts() -> list[str | None]:
            return [None if record is None else to_text(record) for record in ask()]

        if candidates:
            keys = [c.key for c in candidates]
            for key, text in zip(keys, self.answer(kind, keys, texts), strict=True):
                if text is not None:
                    self.records[key] = from_text(text)

    def correct(self, candidates: Sequence[Candidate]) -> None:
        """Lower all bounds so that they hold for what was measured of some candidates."""
        for candidate in candidates:
            self.meter.correct(candidate, self.records[candidate.key])
        self.corrections += 1
        self._bounds_ns.clear()
        self._guesses_ns.clear()

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds to compile those of the candidates that are not compiled."""
        return self.answer("compile", [c.key for c in candidates], lambda: self.meter.compile_s(candidates))

    def expect_compiling(self, seconds: float) -> None:
        """Tell the meter the predicted seconds to compile the kernels of a first plan."""
        if not self.is_replayed:
            self.meter.expect_compiling(seconds)

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Begin to build candidates that will likely be measured, beside other work."""
        if not self.is_replayed:
            self.meter.begin(candidates)

    # What the solver says.

    def solve(self, solver: Solver, costs_ns: Sequence[int], **limits: Unpack[SolveLimits]) -> Plan:
        """Return what `Solver.solve` does."""
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
        """Return what `Solver.relax` does."""

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
        """Return the time, as far as decisions depend on it."""
        return self.answer("now", (), time.monotonic)

    def is_over(self, deadline: Deadline) -> bool:
        """Return whether a deadline has passed."""
        left_s = self.left_s(deadline)
        return left_s is not None and left_s <= 0

    # What was chosen by other means.

    def record_choice(self, kind: str, choice: str) -> None:
        """Append a choice that was made by validation; a replay has read it before."""
        if not self.is_replayed:
            self.answer(kind, (), lambda: choice)

    def recorded_choice(self, kind: str) -> str | None:
        """Return the choice that is next in a replay; None if this is none."""
        return self.answer(kind, (), lambda: "") if self.is_replayed else None

    def fact(self, name: str) -> str | None:
        """Return a fact that the database keeps."""
        return self.answer("fact", name, lambda: self.meter.database.fact(name))

    def put_fact(self, name: str, value: str) -> None:
        """Keep a fact in the database; a replay keeps none."""
        if not self.is_replayed:
            self.meter.database.put_fact(name, value)


def _opened(path: Path, mode: str) -> IO[str]:
    """Return a file.

    Raises:
        OptionError: it can't be opened.
    """
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
    """Return the entries of a file; each line is read when it is asked for.

    Raises:
        OptionError: the file can't be opened.
        ReplayError: a line is no entry.
    """
    with _opened(path, "r") as file:
        lines = file.readlines()
    return (_entry(line, f"{path}, line {number}") for number, line in enumerate(lines, 1))


def _entry(line: str, where: str) -> list[Any]:
    try:
        kind, digest, answer = json.loads(line)
    except ValueError:
        hint = "Write the ledger again: korch optimize --ledger FILE"
        raise ReplayError(f"{line[:40]!r} is not an entry of a ledger", where, hint=hint) from None
    return [kind, digest, answer]
