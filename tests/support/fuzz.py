"""Fuzzes Korch with hostile models, artifacts and caches: each must give the right result or one clear error.

    python -m tests.support.fuzz [--cases 5000] [--seed 0] [--jobs 2] [--folder build/fuzz]
    python -m tests.support.fuzz --graphs 1000 [--seed 0] ...

The second form draws random graphs of operators that ONNX Runtime runs (`fuzz_graphs.py`): each is
optimized, built, run and compared with ONNX Runtime and with `onnx.reference`.

Case n of a seed is always the same. Cases run in child processes with limits on time and memory. A
child that dies or hangs is a finding, and another child continues after that case. The folder keeps the
models and artifacts of findings.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from korch.errors import KorchError
from korch.primitive.lowering import lower_products
from tests.support.fuzz_graphs import BATCH, batches, check_batch, difference, judge, onnx_runtime
from tests.support.fuzz_models import mutate
from tests.support.random_onnx import OPSETS, model_of, random_onnx
from tests.support.workers import answer_lines, run_in_workers

LIMIT_SECONDS = 60
"""The limit of a case's CPU time."""

PATIENCE = 10
"""The limit of a case's elapsed time, as a multiple of its CPU time limit, because the machine may be busy."""

MEMORY_BYTES = 8 << 30
CHUNK = 40
"""The number of cases that one process runs."""

BUILT = 10
"""One of this number of cases with a legal model is built and run; the others are interpreted."""

KINDS = ("mutation", "operators", "artifact", "cache")
WEIGHTS = (0.55, 0.3, 0.1, 0.05)

FINE = ("right", "disputed")
"""The verdicts on a random graph that are not findings."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case.

    Attributes:
        case: the number of the case.
        kind: mutation, operators, artifact, cache or graph; any if its process failed.
        outcome: right, disputed, refused (one clear error), or finding.
        message: the error, or what is wrong.
    """

    case: int
    kind: str
    outcome: str
    message: str


class _LateError(Exception):
    """A case took longer than its limit."""


class _WrongError(Exception):
    """A result is not what it should be."""


def run_case(seed: int, case: int, folder: Path) -> Outcome:
    """Run one case in this process; return its result."""
    rng = np.random.default_rng((seed, case))
    kind = str(rng.choice(KINDS, p=WEIGHTS))
    run: dict[str, Callable[[np.random.Generator, Path], str]] = {
        "mutation": _mutation,
        "operators": _operators,
        "artifact": _artifact,
        "cache": _cache,
    }
    try:
        with limit(LIMIT_SECONDS):
            return Outcome(case, kind, run[kind](rng, folder), "")
    except KorchError as error:
        text = str(error)
        is_clear = bool(error.what.strip()) and "\n" not in text
        return Outcome(case, kind, "refused" if is_clear else "finding", text[:300])
    except _LateError:
        return Outcome(case, kind, "finding", "it took too long")
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        return Outcome(case, kind, "finding", f"{type(error).__name__}: {error}"[:300])


@cache
def _seeds() -> tuple[bytes, ...]:
    """Return small legal models of many operators."""
    from tests.support.node_cases import node_cases

    models = [case.model for case in node_cases() if len(case.model.SerializeToString()) < 4000]
    return tuple(model.SerializeToString() for model in models)


def _mutation(rng: np.random.Generator, folder: Path) -> str:
    """Check a mutated model: if it is still legal, its results must agree with ONNX Runtime's."""
    content = mutate(rng, _seeds()[int(rng.integers(len(_seeds())))])
    (folder / "last.onnx").write_bytes(content)
    return _check_model(rng, content, folder)


def _operators(rng: np.random.Generator, folder: Path) -> str:
    """Check a random graph of operators, in the same way as the graphs of `--graphs`."""
    opset = int(rng.choice(OPSETS))
    graph = random_onnx(rng, opset, "g", onnx_runtime)
    if graph is None:
        return "right"
    (folder / "last.onnx").write_bytes(model_of([graph], opset).SerializeToString())
    verdict, message = judge({0: graph}, opset, folder, built=rng.integers(BUILT) == 0)[0]
    if verdict not in FINE:
        raise _WrongError(f"{verdict}: {message}")
    return "right"


def _check_model(rng: np.random.Generator, content: bytes, folder: Path) -> str:
    from korch.api import optimize
    from korch.fission import fission
    from korch.frontend.onnx import load_model
    from korch.primitive import reference
    from korch.primitive.check import check_graph

    if rng.integers(BUILT) == 0:
        executable: Any = optimize(content, measure=False, threads=1, cache_folder=folder / "cache")
        inputs = executable.get_inputs()
        if any(t.dtype == np.dtype(object) or -1 in t.shape for t in inputs):
            return "right"  # the build is all that is checked: there are no feeds for such inputs
        feeds = {t.name: _draw(rng, t.shape, t.dtype) for t in inputs}
        found = dict(zip([t.name for t in executable.get_outputs()], executable.run(None, feeds), strict=True))
    else:
        operators = load_model(content)
        graph = lower_products(fission(operators))
        check_graph(graph)
        if any(p.op == "opaque" for p in graph.primitives):
            return "right"  # the operator itself would be its own reference
        feeds = {n: _draw(rng, graph.types[v].shape, graph.types[v].dtype.numpy) for n, v in graph.inputs}
        found = reference.run(graph, feeds)
    expected = _elsewhere(content, feeds)
    if expected is None:
        return "right"
    for name, array in expected.items():
        is_number = isinstance(array, np.ndarray) and array.dtype.kind in "fiub"
        given = found[name]  # a mutated model may declare elements of another size
        if is_number and given.dtype.kind == array.dtype.kind:
            given = given.astype(array.dtype)
        if is_number and (text := difference(given, array)):
            raise _WrongError(f"output {name!r} differs from ONNX Runtime's: {text}")
    return "right"


def _draw(rng: np.random.Generator, shape: Sequence[int], dtype: Any) -> Any:
    if np.dtype(dtype).kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.uniform(0.25, 2.0, shape).astype(dtype)


def _elsewhere(content: bytes, feeds: dict[str, Any]) -> dict[str, Any] | None:
    """Return ONNX Runtime's results; None if it can't run the model."""
    from korch.host.engine import open_session

    session, _ = open_session(onnx.ModelProto.FromString(content), 1)
    if session is None:
        return None
    names = [item.name for item in session.get_outputs()]
    try:
        return dict(zip(names, session.run(names, feeds), strict=True))
    except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
        return None


@cache
def _good_artifact(folder: Path) -> tuple[bytes, Any]:
    from korch.api import optimize

    rng, graph = np.random.default_rng(1), None
    while graph is None or len(graph.nodes) < 3:
        graph = random_onnx(rng, OPSETS[-1], "g", onnx_runtime)
    model = model_of([graph], OPSETS[-1])
    executable: Any = optimize(model, measure=False, threads=1, cache_folder=folder / "cache")
    path = folder / "good.korch"
    executable.save(path)
    arrays = list(graph.feeds.values())
    return path.read_bytes(), (arrays, executable(*arrays))


def _damage(rng: np.random.Generator, content: bytes) -> bytes:
    data = bytearray(content)
    match int(rng.integers(4)):
        case 0:
            del data[int(rng.integers(len(data))) :]
        case 1:
            at = int(rng.integers(len(data)))
            data[at:at] = rng.bytes(int(rng.integers(1, 64)))
        case _:
            for _ in range(int(rng.integers(1, 20))):
                data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return bytes(data)


def _artifact(rng: np.random.Generator, folder: Path) -> str:
    """Check that a damaged artifact is refused, or still computes the same results."""
    from korch.loading import load

    content, (arrays, expected) = _good_artifact(folder)
    path = folder / "damaged.korch"
    path.write_bytes(_damage(rng, content))
    loaded: Any = load(path)
    for found, array in zip(loaded(*arrays), expected, strict=True):
        if not np.array_equal(found, array, equal_nan=found.dtype.kind == "f"):
            raise _WrongError("a damaged artifact computes something else")
    return "right"


def _cache(rng: np.random.Generator, folder: Path) -> str:
    """Check that a damaged database is repaired: each record is intact or missing, but never changed."""
    from korch.measure.database import Database
    from korch.measure.record import Measured

    place = folder / "database"
    place.mkdir(exist_ok=True)
    for old in place.iterdir():
        old.unlink()
    records = {f"key{i}": Measured(1000 + i, (1000 + i,)) for i in range(30)}
    with contextlib.closing(Database(place, "target")) as database:
        for key, record in records.items():
            database.put_record(key, record)
    for file in place.iterdir():
        file.write_bytes(_damage(rng, file.read_bytes()) if file.stat().st_size else b"x")
    with contextlib.closing(Database(place, "target")) as database:
        for key, record in records.items():
            found = database.record(key)
            if isinstance(found, Measured) and found.time_ns == record.time_ns:
                continue
            if found is not None:
                raise _WrongError(f"the record of {key} has become {found}")
        database.put_record("new", records["key0"])
        if database.record("new") != records["key0"]:
            raise _WrongError("a healed database does not keep a record")
    return "right"


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Limit the CPU time and the elapsed time of the context.

    Raises:
        _LateError: the CPU time is over `seconds`, or the elapsed time is over `PATIENCE` times as long.
    """

    def stop(*_: object) -> None:
        raise _LateError

    clocks = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, stop) for number in clocks}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE * seconds)
    try:
        yield
    finally:
        for number, clock in clocks.items():
            signal.setitimer(clock, 0)
            signal.signal(number, before[number])


def run_graphs(seed: int, cases: range, folder: Path, *, built: bool = True) -> Iterator[Outcome]:
    """Check random graphs in this process, batch by batch; a graph that hangs ends its batch."""
    for batch in batches(cases):
        done = batch.start
        try:
            with limit(LIMIT_SECONDS * 2):
                for verdict in check_batch(seed, batch, folder, built=built):
                    is_fine = verdict.verdict in FINE
                    text = f"{verdict.verdict}: {' '.join(verdict.operators)}: {verdict.message}"
                    yield Outcome(
                        verdict.case,
                        "graph",
                        verdict.verdict if is_fine else "finding",
                        text if verdict.message else "",
                    )
                    done = verdict.case + 1
        except _LateError:
            for case in range(done, batch.stop):
                yield Outcome(case, "graph", "finding", "hang: it or one beside it took too long")


def _work(seed: int, folder: Path, scratch: Path, *, graphs: bool) -> None:
    """Run the ranges of cases that the lines of the standard input name."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    whole_s = LIMIT_SECONDS + (20 if graphs else 3) * CHUNK + 60  # the only limit that stops native code that hangs
    resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s))
    if not graphs:
        _seeds()  # so that this time does not count for the first case

    def run(line: str) -> list[dict[str, Any]]:
        cases = range(*map(int, line.split(":")))
        if graphs:
            return [asdict(outcome) for outcome in run_graphs(seed, cases, folder)]
        outcomes = [run_case(seed, case, scratch) for case in cases]
        for outcome in outcomes:
            if outcome.outcome == "finding":
                _keep(scratch, folder, outcome)
        return [asdict(outcome) for outcome in outcomes]

    answer_lines(run)


def _keep(scratch: Path, folder: Path, outcome: Outcome) -> None:
    for name in ("last.onnx", "damaged.korch"):
        if (scratch / name).exists():
            (folder / f"{outcome.case}-{name}").write_bytes((scratch / name).read_bytes())


def run_cases(seed: int, cases: range, jobs: int, folder: Path, *, graphs: bool = False) -> Iterator[Outcome]:
    """Run cases, or random graphs, in child processes; yield the result of each."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = batches(cases) if graphs else [range(i, i + 1) for i in cases]
    lines = [f"{part.start}:{part.stop}" for part in parts]
    command = [sys.executable, "-m", "tests.support.fuzz", "--work", "--seed", str(seed), "--folder", str(folder)]
    command += ["--graphs", str(len(cases))] if graphs else []
    limit_s = PATIENCE * LIMIT_SECONDS * (3 if graphs else 2)
    life = CHUNK // BATCH if graphs else CHUNK
    for line, answer, failure in run_in_workers(lines, command, jobs, limit_s, life):
        first, last = map(int, line.split(":"))
        yield from (Outcome(**row) for row in answer or ())
        if failure:
            yield from (Outcome(case, "any", "finding", failure) for case in range(first, last))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--graphs", type=int, help="check this number of random graphs instead")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            _work(args.seed, args.folder, Path(scratch), graphs=args.graphs is not None)
        return 0
    begun_s = time.monotonic()
    counts: Counter[tuple[str, str]] = Counter()
    count = args.cases if args.graphs is None else args.graphs
    cases, graphs = range(args.first, args.first + count), args.graphs is not None
    for outcome in run_cases(args.seed, cases, args.jobs, args.folder, graphs=graphs):
        counts[outcome.kind, outcome.outcome] += 1
        if outcome.outcome == "finding":
            print(f"case {outcome.case} ({outcome.kind}): {outcome.message}", flush=True)
    for (kind, what), cases_of in sorted(counts.items()):
        print(f"{kind:10} {what:8} {cases_of}")
    print(f"{count} cases of seed {args.seed}, {time.monotonic() - begun_s:.0f} s")
    return int(any(what == "finding" for _, what in counts))


if __name__ == "__main__":
    sys.exit(main())
