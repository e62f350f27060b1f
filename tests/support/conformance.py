"""Runs ONNX's backend tests with Korch and, for comparison, with ONNX Runtime alone.

    python -m tests.support.conformance [--kind node] [--only PATTERN] [--jobs 2] [--resume]

The cases come from the package `onnx`, and ONNX's test runner compares the results. Each case runs in a
worker process with a time limit, so a crash or a hang fails only that case. Each result is appended to a
file, so that `--resume` continues an interrupted run.
"""

import argparse
import contextlib
import fnmatch
import io
import json
import os
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import onnx
from onnx.backend.base import Backend, BackendRep

from tests.support.workers import answer_lines, run_in_workers

KINDS = {
    "OnnxBackendNodeModelTest": "node",
    "OnnxBackendSimpleModelTest": "simple",
    "OnnxBackendPyTorchOperatorModelTest": "pytorch-operator",
    "OnnxBackendPyTorchConvertedModelTest": "pytorch-converted",
}
LIMIT_SECONDS = 120.0
CACHE_VARIABLE = "KORCH_CONFORMANCE_CACHE"
WAYS = ("native", "opaque", "host", "constant")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one test case."""

    name: str  # name of the case
    kind: str  # node, simple, pytorch-operator or pytorch-converted
    passed: bool  # whether the results agree with those that ONNX expects
    # what computed them: native (kernels of Korch), opaque (also kernels of ONNX Runtime), host (parts run
    # outside of the static graph), constant (known when the model was read); "" if it did not run
    way: str
    message: str  # the reason of a failure
    seconds: float  # the time that it took


class _Recorder(Backend):  # type: ignore[misc]
    """Korch's backend, which keeps the last model that it prepared."""

    last: Any = None

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> Any:
        from tests.support.onnx_backend import QUICK, KorchBackend

        options = dict(QUICK, threads=1)
        if folder := os.environ.get(CACHE_VARIABLE):
            options["cache_folder"] = Path(folder)
        cls.last = KorchBackend.prepare(model, device, **options)
        return cls.last

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


class _RuntimeRep(BackendRep):  # type: ignore[misc]
    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, inputs: Any, **_: Any) -> Any:
        names = [item.name for item in self._session.get_inputs()]
        return self._session.run(None, dict(zip(names, inputs, strict=True)))


class _Runtime(Backend):  # type: ignore[misc]
    """A backend that runs models with ONNX Runtime alone."""

    last = None

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **_: Any) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        return _RuntimeRep(
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        )

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device == "CPU"


BACKENDS: dict[str, type[Any]] = {"korch": _Recorder, "onnxruntime": _Runtime}


@cache
def cases(backend: str) -> dict[str, tuple[str, unittest.TestCase]]:
    """Return ONNX's cases by name, each with its kind."""
    from onnx.backend.test import BackendTest

    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        classes = BackendTest(BACKENDS[backend], __name__).test_cases
    found = {}
    for title, kind in KINDS.items():
        for method in dir(classes[title]):
            if method.startswith("test_") and method.endswith("_cpu"):
                found[method.removesuffix("_cpu")] = (kind, classes[title](method))
    return found


def run_case(name: str, backend: str = "korch") -> Outcome:
    """Run one case in this process; return its result."""
    kind, case = cases(backend)[name]
    BACKENDS[backend].last = None
    result = unittest.TestResult()
    begun_s = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.run(result)
    problems = [text for _, text in (*result.errors, *result.failures, *result.skipped)]
    message = problems[0].strip().splitlines()[-1][:400] if problems else ""
    if problems and not message:
        message = "it failed without a message"
    way = _way(getattr(BACKENDS[backend].last, "executable", None))
    return Outcome(name, kind, not problems, way, message, time.monotonic() - begun_s)


def _way(executable: Any) -> str:
    if executable is None:
        return ""
    if hasattr(executable, "parts"):
        return "host" if executable.parts else "constant"
    providers = {step.provider for step in executable.plan.steps}
    if not providers:
        return "constant"
    return "opaque" if "onnxruntime" in providers else "native"


def _work(line: str) -> dict[str, Any]:
    """Run the case that a line names; return its result."""
    backend, name = line.split()
    try:
        return asdict(run_case(name, backend))
    except MemoryError as error:
        return asdict(Outcome(name, cases(backend)[name][0], False, "", f"out of memory {error}", 0))


def run_cases(names: Sequence[str], backend: str, jobs: int) -> Iterator[Outcome]:
    """Run cases in worker processes; yield the result of each case when it ends."""
    command = [sys.executable, "-m", "tests.support.conformance", "--work"]
    lines = [f"{backend} {name}" for name in names]
    for line, answer, failure in run_in_workers(lines, command, jobs, LIMIT_SECONDS):
        name = line.split()[1]
        yield Outcome(**answer) if answer else Outcome(name, cases(backend)[name][0], False, "", failure, 0.0)


def read_exclusions(path: Path) -> dict[str, str]:
    """Return reasons by pattern from a file with `pattern: reason` on each line; # begins a comment.

    Raises:
        ValueError: a line has no reason.
    """
    found = {}
    for line in path.read_text("utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        pattern, _, reason = line.partition(":")
        if not reason.strip():
            raise ValueError(f"{path}: the exclusion {line!r} has no reason")
        found[pattern.strip()] = reason.strip()
    return found


def excluded(name: str, exclusions: Mapping[str, str]) -> str:
    """Return the reason why a case is excluded; "" if it is not."""
    return next((r for p, r in exclusions.items() if fnmatch.fnmatchcase(name, p)), "")


def format_table(korch: Iterable[Outcome], runtime: Iterable[Outcome]) -> str:
    """Return the counts for each kind as a table in Markdown."""
    found, other = list(korch), {o.name: o.passed for o in runtime}
    lines = [
        "| kind | cases | Korch passes | native | opaque | host | constant | ONNX Runtime passes |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kind in (*dict.fromkeys(KINDS.values()), "all"):
        chosen = [o for o in found if kind in (o.kind, "all")]
        ways = Counter(o.way for o in chosen if o.passed)
        cells = [
            kind,
            len(chosen),
            sum(o.passed for o in chosen),
            *(ways[w] for w in WAYS),
            sum(other.get(o.name, False) for o in chosen),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _load(path: Path) -> dict[str, Outcome]:
    found = {}
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, TypeError):  # a line that was cut short
            outcome = Outcome(**json.loads(line))
            found[outcome.name] = outcome
    return found


def _run_backend(backend: str, names: Sequence[str], folder: Path, args: argparse.Namespace) -> dict[str, Outcome]:
    path = folder / f"{backend}.jsonl"
    if not args.resume:
        path.unlink(missing_ok=True)
    known = _load(path)
    left = [name for name in names if name not in known]
    with path.open("a") as stream:
        for count, outcome in enumerate(run_cases(left, backend, args.jobs), 1):
            known[outcome.name] = outcome
            stream.write(json.dumps(asdict(outcome)) + "\n")
            stream.flush()
            if sys.stderr.isatty():
                print(f"\r{backend}: {count} of {len(left)}", end="", file=sys.stderr)
    return {name: known[name] for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return 1 if a case failed that is not excluded, or an excluded case passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.conformance")
    parser.add_argument("--kind", choices=tuple(KINDS.values()), help="only this kind")
    parser.add_argument("--only", default="*", help="only cases whose name matches")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    parser.add_argument("--resume", action="store_true", help="keep what an earlier run found")
    parser.add_argument("--folder", type=Path, default=Path("build/conformance"))
    parser.add_argument("--exclusions", type=Path, default=Path("tests/conformance/exclusions.txt"))
    parser.add_argument("--output", type=Path, help="also write the table to this file")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        answer_lines(_work)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault(CACHE_VARIABLE, str((args.folder / "cache").resolve()))
    names = [
        name
        for name, (kind, _) in cases("korch").items()
        if args.kind in (None, kind) and fnmatch.fnmatchcase(name, args.only)
    ]
    runtime = _run_backend("onnxruntime", names, args.folder, args)
    korch = _run_backend("korch", names, args.folder, args)
    return _report(korch, runtime, args)


def _report(korch: Mapping[str, Outcome], runtime: Mapping[str, Outcome], args: argparse.Namespace) -> int:
    exclusions = read_exclusions(args.exclusions) if args.exclusions.exists() else {}
    bad = 0
    for name, outcome in korch.items():
        reason = excluded(name, exclusions)
        if outcome.passed and reason:
            print(f"excluded, but it passes: {name} ({reason})")
            bad += 1
        elif not outcome.passed and not reason:
            mark = "ONNX Runtime passes" if runtime[name].passed else "ONNX Runtime fails too"
            print(f"failed ({mark}): {name}: {outcome.message}")
            bad += 1
    lost = [n for n, o in korch.items() if not o.passed and runtime[n].passed]
    table = format_table(korch.values(), runtime.values())
    text = f"{table}\n\nONNX Runtime passes and Korch does not: {len(lost)}" + (
        f" ({', '.join(lost[:20])})" if lost else ""
    )
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
