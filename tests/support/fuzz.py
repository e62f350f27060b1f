"""Fuzzes Korch with hostile models, artifacts and caches: each must give the right result or one clear error.

    python -m tests.support.fuzz [--cases 5000] [--seed 0] [--jobs 2] [--folder build/fuzz]
    python -m tests.support.fuzz --graphs 2000 [--every 20] [--seed 0] ...
    python -m tests.support.fuzz --modules 300 ...
    python -m tests.support.fuzz --ranges 200 ...

The other forms draw random graphs (`fuzz_graphs.py`), modules of PyTorch (`fuzz_modules.py`), and graphs and modules
with free axes (`fuzz_ranges.py`), whose results are compared with those of ONNX Runtime, `onnx.reference` and PyTorch.
Most are interpreted; one of `--every` is optimized within a budget, saved, loaded and run.

Case n of a seed is always the same. Cases run in child processes with limits on time and memory. A
child that dies or hangs is a finding, and another child continues after that case. The folder keeps the
models and artifacts of findings.
"""

import argparse
import contextlib
import re
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
from tests.support.fuzz_graphs import BATCH, Verdict, batches, check_batch, judge
from tests.support.fuzz_models import mutate
from tests.support.random_onnx import OPSETS, model_of, random_onnx
from tests.support.references import difference, settled
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

FINE = ("right", "disputed", "unsupported")
"""The verdicts on random graphs and modules that are not findings."""

FORMS = ("cases", "graphs", "modules", "ranges")
"""What the cases are: hostile ones, or random models."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case."""

    case: int  # the number of the case
    kind: str  # mutation, operators, artifact, cache, graphs, modules or ranges; any if its process failed
    outcome: str  # right, disputed, refused or unsupported (one clear error), or finding
    message: str  # the error, or what is wrong


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
    graph = random_onnx(rng, opset, "g", settled)
    if graph is None:
        return "right"
    (folder / "last.onnx").write_bytes(model_of([graph], opset).SerializeToString())
    verdict, message = judge({0: graph}, opset, folder, built=False)[0]
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
        graph = random_onnx(rng, OPSETS[-1], "g", settled)
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


def run_random(form: str, seed: int, cases: range, folder: Path, *, every: int = 1) -> Iterator[Outcome]:
    """Check random models in this process, batch by batch; one that hangs ends its batch.

    Args:
        form: graphs, modules or ranges.
        seed: the seed; it determines a model together with the case's number.
        cases: the numbers of the models.
        folder: the folder for models and for the cache of kernels.
        every: one of this number of batches is optimized and run, the others are interpreted; 0 for none.
    """
    check = _check_of(form)
    for batch in _parts(form, cases):
        done = batch.start
        built = every > 0 and batch.start // (BATCH if form == "graphs" else 1) % every == 0
        try:
            with limit(LIMIT_SECONDS * 2):
                for verdict in check(seed, batch, folder, built=built):
                    if verdict.verdict in FINE:
                        yield Outcome(verdict.case, form, verdict.verdict, verdict.message)
                    else:
                        yield Outcome(verdict.case, form, "finding", f"{verdict.verdict}: {verdict.message}")
                    done = verdict.case + 1
        except _LateError:
            for case in range(done, batch.stop):
                yield Outcome(case, form, "finding", "hang: it or one beside it took too long")


def _check_of(form: str) -> Callable[..., Iterator[Verdict]]:
    """Return the function that yields verdicts; only that of modules needs PyTorch."""
    if form == "graphs":
        return check_batch
    if form == "ranges":
        from tests.support.fuzz_ranges import check_range

        return check_range
    from tests.support.fuzz_modules import check_module

    return check_module


def _parts(form: str, cases: range) -> list[range]:
    """Return the cases that are run together."""
    return batches(cases) if form == "graphs" else [range(i, i + 1) for i in cases]


def _work(seed: int, folder: Path, scratch: Path, *, form: str, every: int) -> None:
    """Run the ranges of cases that the lines of the standard input name."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    is_random = form != "cases"
    whole_s = LIMIT_SECONDS + (20 if is_random else 3) * CHUNK + 60  # the only limit that stops native code that hangs
    resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s))
    if not is_random:
        _seeds()  # so that this time does not count for the first case

    def run(line: str) -> list[dict[str, Any]]:
        cases = range(*map(int, line.split(":")))
        if is_random:
            return [asdict(outcome) for outcome in run_random(form, seed, cases, folder, every=every)]
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


def run_cases(
    seed: int, cases: range, jobs: int, folder: Path, *, form: str = "cases", every: int = 1
) -> Iterator[Outcome]:
    """Run cases of one of `FORMS` in child processes; yield the result of each."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{part.start}:{part.stop}" for part in _parts(form, cases)]
    command = [sys.executable, "-m", "tests.support.fuzz", "--work", "--seed", str(seed), "--folder", str(folder)]
    command += [f"--{form}", str(len(cases)), "--every", str(every)]
    limit_s = PATIENCE * LIMIT_SECONDS * (2 if form == "cases" else 3)
    life = CHUNK // BATCH if form == "graphs" else CHUNK
    for line, answer, failure in run_in_workers(lines, command, jobs, limit_s, life):
        first, last = map(int, line.split(":"))
        yield from (Outcome(**row) for row in answer or ())
        if failure:
            yield from (Outcome(case, "any", "finding", failure) for case in range(first, last))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.fuzz")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--cases", type=int, help="hostile cases; by default, 5000 of them")
    for form in FORMS[1:]:
        forms.add_argument(f"--{form}", type=int, help=f"check this number of random {form} instead")
    parser.add_argument("--every", type=int, default=20, help="optimize and run one of this number of batches; 0: none")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    form = next((form for form in FORMS if getattr(args, form) is not None), "cases")
    if args.work:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            _work(args.seed, args.folder, Path(scratch), form=form, every=args.every)
        return 0
    begun_s, count = time.monotonic(), getattr(args, form) or 5000
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    cases = range(args.first, args.first + count)
    for outcome in run_cases(args.seed, cases, args.jobs, args.folder, form=form, every=args.every):
        counts[outcome.kind, outcome.outcome] += 1
        if outcome.outcome == "unsupported":
            reasons[_reason(outcome.message)] += 1
        if outcome.outcome == "finding":
            print(f"case {outcome.case} ({outcome.kind}): {outcome.message}", flush=True)
    for reason, cases_of in reasons.most_common():
        print(f"{cases_of:5} unsupported: {reason}")
    for (kind, what), cases_of in sorted(counts.items()):
        print(f"{kind:10} {what:11} {cases_of}")
    print(f"{count} cases of seed {args.seed}, {time.monotonic() - begun_s:.0f} s")
    return int(any(what == "finding" for _, what in counts))


def _reason(message: str) -> str:
    """Return a message without the names and numbers of its case."""
    return re.sub(r"'[^']*'|\[[^]]*\]|\b[\w.]*\d\S*", "...", message)[:200]


if __name__ == "__main__":
    sys.exit(main())
