"""Several engines and one model -> their times, their ratios, and the errors of their outputs.

Each engine has its own process (`peers/process.py`). In a round each engine has one turn, in an
order that changes from round to round, so that a temporary disturbance slows all engines. Ratios
are computed within a round; they vary much less than times. Before a turn begins, the threads of the
previous engine must be idle. A turn begins with an untimed run, which fills the caches and wakes
the threads. Short models run several times in a turn, and the median is used. To time runs after a rest,
a turn consists of the untimed run, the rest, and one timed run.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from korch.errors import MeasureError, OptionError, UnsupportedError
from korch.numerics import max_error
from korch.records import read_record
from korch.report.peers import get_peer
from korch.report.peers.arrays import load_arrays, save_arrays
from korch.report.peers.peer import Array, Arrays, require
from korch.report.peers.process import WorkerProcess
from korch.system.scratch import scratch_folder

_TURN_NS = 10_000_000  # a turn times at least this much work, ...
_MOST_RUNS = 50  # ... but no more runs than this


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """The engine and the model of one row of the comparison.

    Attributes:
        engine: a peer's name ("korch" for an artifact), or "package.module:OBJECT".
        path: the ONNX file (for "korch": the artifact).
        label: the row's name; the engine's if empty.
    """

    engine: str
    path: Path
    label: str = ""

    @property
    def name(self) -> str:
        """The row's name."""
        return self.label or self.engine


@dataclass(frozen=True, slots=True)
class Row:
    """One engine's result.

    Attributes:
        name: the engine's name.
        median_ms: median of the rounds.
        p10_ms: tenth percentile of the rounds.
        p90_ms: ninetieth percentile of the rounds.
        max_error: largest difference from the reference outputs, over all outputs, each relative
            to its largest element; infinite if shapes differ, or if NaNs or infinities are at other
            places.
        times_ns: the time of each round.
        memory_bytes: the memory of its process after the first runs, without mapped files; None if
            the system does not provide it.
        ready_s: seconds from the start of its process to the end of its first run, including compilation.
    """

    name: str
    median_ms: float
    p10_ms: float
    p90_ms: float
    max_error: float
    times_ns: tuple[int, ...]
    memory_bytes: int | None = None
    ready_s: float | None = None


def read_rows(data: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    """Return the rows from the data that `Comparison.to_json` returned.

    Raises:
        ValueError: the data has another form.
        TypeError: a row is not a mapping.
    """
    return tuple(
        read_record(Row, {**row, "max_error": row["max_error"] or 0.0}, f"rows[{i}]") for i, row in enumerate(data)
    )


@dataclass(frozen=True, slots=True)
class Speedup:
    """How much faster the subject is than the best other row; ratios of the same round.

    Attributes:
        over: name of the other row with the lowest median.
        median: above 1 if the subject is faster.
        p10: tenth percentile of the ratios.
        p90: ninetieth percentile of the ratios.
    """

    over: str
    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`.

    Attributes:
        rows: in the order of the runners.
        subject: name of the row that the others are compared with.
        speedup: the speed-up of the subject; None if it has no row, or is the only row.
        threads: the number of threads that each engine was told to use.
        unsettled: names of engines whose threads were still busy when the next turn began (their
            spinning may have slowed others down), or whose state the system doesn't report.
        notes: further lines on the subject.
        left_out: the reason why an engine has no row, by its name.
    """

    rows: tuple[Row, ...]
    subject: str
    speedup: Speedup | None
    threads: int
    unsettled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def speedup_over_best(self) -> float | None:
        """Median paired ratio of the best other row's time to the subject's."""
        return None if self.speedup is None else self.speedup.median

    def to_json(self) -> dict[str, object]:
        """Return plain values for `json.dumps`; a `max_error` of None means not comparable."""
        rows = []
        for row in self.rows:
            max_error = row.max_error if np.isfinite(row.max_error) else None
            rows.append(asdict(row) | {"max_error": max_error, "times_ns": list(row.times_ns)})
        return {
            "rows": rows,
            "speedup_over_best": self.speedup_over_best,
            "speedup": None if self.speedup is None else asdict(self.speedup),
            "subject": self.subject,
            "threads": self.threads,
            "rounds": len(self.rows[0].times_ns),
            "unsettled": list(self.unsettled),
            "left_out": dict(self.left_out),
        }

    def to_text(self) -> str:
        """Return a table, and a line on the speed-up."""
        width = max(len(row.name) for row in self.rows)
        lines = [f"{'':{width}}  median ms    p10 ms    p90 ms  max error    memory     ready"]
        for row in self.rows:
            times = f"{row.median_ms:9.3f} {row.p10_ms:9.3f} {row.p90_ms:9.3f}"
            memory = "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f} MB"
            ready = "" if row.ready_s is None else f"{row.ready_s:.1f} s"
            text = f"{row.name:{width}}  {times}  {row.max_error:9.1e} {memory:>9} {ready:>9}"
            lines.append(text.rstrip())
        rounds = f"{len(self.rows[0].times_ns)} rounds, {self.threads} thread{'s' * (self.threads != 1)}"
        if self.speedup is None:
            lines.append(rounds)
        else:
            s = self.speedup
            spread = f"{s.p10:.2f}x to {s.p90:.2f}x"
            lines.append(f"{self.subject} is {s.median:.2f}x as fast as {s.over} ({spread}); {rounds}")
        if self.unsettled:
            lines.append(f"still busy after their turns: {', '.join(self.unsettled)}")
        lines += [f"left out: {reason}" for reason in self.left_out.values()]
        return "\n".join([*lines, *self.notes])


@dataclass(frozen=True, slots=True)
class Settings:
    """How engines are compared.

    Attributes:
        threads: the number of threads of each engine.
        rounds: the number of turns of each engine.
        warm_up: untimed runs of each engine before the first round.
        rest_ms: milliseconds that an engine rests before each timed run, as if requests were rare; 0 for runs in
            immediate sequence.
        subject: the name of the row that the others are compared with.
        seed: random seed of the order of turns.
        prepare_timeout_s: the time limit for loading and compiling a model.
        run_timeout_s: the time limit for a turn.
        leave_out: whether to go on without an engine that can't run the model, crashes or hangs,
            unless it is the subject.

    Raises:
        OptionError: a number is too small.
    """

    threads: int
    rounds: int = 15
    warm_up: int = 3
    rest_ms: float = 0.0
    subject: str = "korch"
    seed: int = 0
    prepare_timeout_s: float = 900.0
    run_timeout_s: float = 120.0
    leave_out: bool = False

    def __post_init__(self) -> None:
        for name in ("threads", "rounds"):
            if getattr(self, name) < 1:
                raise OptionError(f"the value {getattr(self, name)} is too small", f"option --{name}", "at least 1")
        if not 0 <= self.rest_ms <= 10_000:
            raise OptionError(f"the value {self.rest_ms:g} is out of range", "option --rest", "0 to 10000 milliseconds")


def compare(
    runners: Sequence[RunnerSpec],
    inputs: Arrays,
    settings: Settings,
    reference: Sequence[Array] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Run engines in turns and compare their times and outputs.

    Args:
        runners: one for each row; their names must differ.
        inputs: name of each model input -> its array, in the model's order.
        settings: how to compare them.
        reference: outputs to compare with; if None, those of the first runner that is not left out.
        progress: called with a line before each step.

    Raises:
        OptionError: there are no runners, two have the same name, or an engine is unknown.
        UnsupportedError: an engine isn't installed, or can't run the model.
        MeasureError: an engine crashed, hung or failed; the message names it.
    """
    _check(runners)
    say = progress or (lambda text: None)
    left_out: dict[str, str] = {}

    def failed(name: str, error: UnsupportedError | MeasureError) -> None:
        if not settings.leave_out or name == settings.subject:
            raise error
        left_out[name] = str(error)
        say(f"left out: {error}")

    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        save_arrays(folder / "inputs.npz", [*inputs.values()])
        seats: list[_Seat] = []
        for spec in runners:
            say(f"preparing {spec.name}")
            worker = stack.enter_context(WorkerProcess(spec.name, settings.threads))
            request = _prepare_request(spec, inputs, folder, settings.threads)
            try:
                seats.append(_take_seat(spec, worker, request, folder, settings))
            except (UnsupportedError, MeasureError) as error:
                failed(spec.name, error)
                worker.close()
        unsettled = _take_turns(seats, settings, say, failed)
    seats = [seat for seat in seats if seat.name not in left_out]
    if not seats:
        raise MeasureError(" | ".join(left_out.values()), where="compare")
    expected = seats[0].outputs if reference is None else list(reference)
    rows = tuple(_row(seat, max_error(seat.outputs, expected)) for seat in seats)
    subject = settings.subject
    return Comparison(rows, subject, _speedup(rows, subject), settings.threads, unsettled, left_out=left_out)


def _check(runners: Sequence[RunnerSpec]) -> None:
    if not runners:
        raise OptionError("there is nothing to compare", "compare: runners", "at least one runner")
    names = [spec.name for spec in runners]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"two runners are called {name!r}", "compare: runners", "a label for each")
    for spec in runners:
        require(get_peer(spec.engine))


def _prepare_request(spec: RunnerSpec, inputs: Arrays, folder: Path, threads: int) -> dict[str, object]:
    return {
        "do": "prepare",
        "engine": spec.engine,
        "path": str(spec.path),
        "threads": threads,
        "inputs": str(folder / "inputs.npz"),
        "names": list(inputs),
    }


@dataclass(frozen=True, slots=True)
class _Seat:
    """An engine that has run the model, with the times of its turns."""

    name: str
    worker: WorkerProcess
    ready_s: float
    runs_a_turn: int
    memory_bytes: int | None
    outputs: list[Array]
    times_ns: list[int] = field(default_factory=list)


def _take_seat(
    spec: RunnerSpec, worker: WorkerProcess, request: dict[str, object], folder: Path, settings: Settings
) -> _Seat:
    """Prepare the model, warm it up, and keep its outputs."""
    start_s = time.monotonic()
    worker.ask(request, settings.prepare_timeout_s)
    some_runs_s = settings.run_timeout_s * (settings.warm_up + 1)  # the first one may compile
    worker.ask({"do": "run", "untimed": 1, "rest_ms": 0, "timed": 0}, some_runs_s)
    ready_s = time.monotonic() - start_s
    run = {"do": "run", "untimed": max(0, settings.warm_up - 1), "rest_ms": 0, "timed": 1}
    (time_ns,) = worker.ask(run, some_runs_s)["times_ns"]
    runs_a_turn = min(_MOST_RUNS, 1 + _TURN_NS // max(1, time_ns))
    memory_bytes = worker.memory_bytes()
    outputs = _outputs(worker, folder, settings.run_timeout_s)
    worker.settle()
    return _Seat(spec.name, worker, ready_s, runs_a_turn, memory_bytes, outputs)


def _outputs(worker: WorkerProcess, folder: Path, timeout_s: float) -> list[Array]:
    path = folder / "outputs.npz"
    worker.ask({"do": "outputs", "to": str(path)}, timeout_s)
    return load_arrays(path)


def _take_turns(
    seats: Sequence[_Seat],
    settings: Settings,
    say: Callable[[str], None],
    failed: Callable[[str, UnsupportedError | MeasureError], None],
) -> tuple[str, ...]:
    """Record each engine's time of each round; return the names of engines that were still busy after a turn."""
    shuffle = random.Random(settings.seed)
    order = list(seats)
    busy: dict[str, None] = {}
    for turn in range(settings.rounds):
        say(f"round {turn + 1} of {settings.rounds}")
        shuffle.shuffle(order)
        for seat in tuple(order):
            runs = 1 if settings.rest_ms else seat.runs_a_turn
            run = {"do": "run", "untimed": 1, "rest_ms": settings.rest_ms, "timed": runs}
            try:
                samples_ns = seat.worker.ask(run, settings.run_timeout_s)["times_ns"]
            except (UnsupportedError, MeasureError) as error:
                failed(seat.name, error)
                order.remove(seat)
                continue
            seat.times_ns.append(int(statistics.median(samples_ns)))
            if not seat.worker.settle():
                busy[seat.name] = None
    return tuple(busy)


def _row(seat: _Seat, error: float) -> Row:
    p10, median, p90 = (float(q) / 1e6 for q in np.percentile(seat.times_ns, (10, 50, 90)))
    return Row(seat.name, median, p10, p90, error, tuple(seat.times_ns), seat.memory_bytes, seat.ready_s)


def _speedup(rows: Sequence[Row], subject: str) -> Speedup | None:
    own = next((row for row in rows if row.name == subject), None)
    others = [row for row in rows if row.name != subject]
    if own is None or not others:
        return None
    best = min(others, key=lambda row: row.median_ms)
    ratios = np.array(best.times_ns) / np.array(own.times_ns)
    p10, median, p90 = (float(q) for q in np.percentile(ratios, (10, 50, 90)))
    return Speedup(best.name, median, p10, p90)
