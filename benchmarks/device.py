"""Compares Korch on a CUDA device with PyTorch, torch.compile, TensorRT and ONNX Runtime; only timing needs the device.

    python -m benchmarks.device plan       what is missing
    python -m benchmarks.device prepare    here: the kernels of rows, as files jobs-N.zip
    python -m benchmarks.device measure    on the device: these kernels, without planning
    python -m benchmarks.device build      here: plans of the rows whose kernels were measured
    python -m benchmarks.device time       on the device: rows, with other engines
    python -m benchmarks.device table      the table
        [--only KEY,...] [--seconds S] [--folder build/device] [--output benchmarks/results/gpu.json] [--jobs 4]
        [--kernels N] [--budget S] [--target cuda:sm_90]
    python -m benchmarks.device --dry-run [--only KEY,...]    all of these steps here, with small models

Each step continues where the last call stopped: files in the folder say what is done. It is carried to the device
and back. Once a device is recorded, give its name to `prepare` and `build`: --target cuda:h200.

In a dry run every row passes through the same code with a small model: tensors lie on the CPU, kernels are not compiled
but run in Triton's interpreter, and times are made up.

In `time` each row has a process, and --jobs rows are prepared at the same time, but only one is timed. A row is written
after each of its engines. Engines are timed interleaved. Eager PyTorch and torch.compile are timed twice: as they are
called, which includes the host's time if the host is slower than the device, and captured in a CUDA graph (column
"+graph"). Korch and the captured graphs are timed on the device: a few replays between two events, behind a sleep of
the device. Inputs are not copied. In float16 all engines get the same model in this type. Korch's results are compared
with those of eager PyTorch. An engine that is not installed, fails or takes too long is listed with the reason.

In addition to Python, PyTorch, Triton, onnx and numpy it needs these packages, 45 MB as wheels for
CPython 3.12 on x86-64: ortools (30 MB) with absl-py, immutabledict, pandas (12 MB), python-
dateutil, six and tzdata; onnx-ir, onnxscript, tqdm and xxhash; pytest with pluggy, iniconfig,
packaging and pygments; and protobuf, ml-dtypes and typing-extensions if onnx was installed without them.
The models bert, gpt2, vit and llama need transformers (13 MB) with tokenizers, huggingface-hub, regex, pyyaml,
safetensors, filelock and fsspec, 20 MB more; without these packages their rows are errors. For a machine
without network access, download them and build Korch as a wheel (its providers are entry points):

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 NAME ...
    python -m pip wheel --no-deps -w wheels .
    python -m pip install --no-index --no-deps --target site wheels/*.whl      # on that machine
    PYTHONPATH=site python -m benchmarks.device
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_rows import Row, all_rows, source_of
from benchmarks.peers.captured import CLOCK, WARM_UP, Replay, interleaved, peers
from benchmarks.peers.cuda_engines import onnxruntime, tensorrt
from korch.ablation import Ablation
from korch.cuda.compile import CubinCompiler
from korch.cuda.measure.bulk import measure_jobs
from korch.cuda.measure.job_file import MOST_BYTES, JobFile
from korch.cuda.measure.lock import device_lock
from korch.cuda.runtime.early import early_program
from korch.cuda.runtime.executable import with_best_schedule
from korch.errors import KorchError
from korch.limits import SearchLimits
from korch.measure.exchange import export_to, import_from
from korch.options import Options
from korch.pipeline.prepare import build_apart, prepare_model

PEER_SECONDS = 150
"""The longest time, in seconds, that another engine may take to prepare and for its first three runs."""

PACKAGES = ("torch", "triton", "onnx", "numpy", "onnxruntime-gpu", "tensorrt", "ortools")

COLUMNS = {
    "korch": "korch",
    "eager": "eager",
    "eager captured": "+graph",
    "torch.compile": "compile",
    "torch.compile captured": "+graph",
    "tensorrt": "tensorrt",
    "onnxruntime": "ort",
}

ROW_SECONDS = 60.0
"""The estimated seconds in which one of --jobs processes prepares and times a row."""

STEPS = ("plan", "prepare", "measure", "build", "time", "table")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", nargs="?", choices=STEPS, default="plan")
    parser.add_argument("--dry-run", action="store_true", help="all steps here, with small models")
    parser.add_argument("--only", help="rows by their keys, separated by commas; all if not given")
    parser.add_argument("--seconds", type=float, default=480.0, help="of the whole call")
    parser.add_argument("--folder", type=Path, default=Path("build/device"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--records", type=Path, default=Path("benchmarks/results/gpu-records.gz"))
    parser.add_argument("--jobs", type=int, default=4, help="rows that are prepared for timing at the same time")
    parser.add_argument("--kernels", type=int, default=500, help="most kernels that are prepared for a row")
    parser.add_argument("--budget", type=float, help="seconds to prepare or plan a row; no limit if not given")
    parser.add_argument("--target", default="cuda:sm_90", help="cuda:sm_90, or cuda:NAME of a recorded device")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.rows = _rows_of(args.only)
    args.end_s = time.monotonic() + args.seconds
    if args.dry_run:
        return dry_run(args)
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.one:
        time_row(_rows_of(args.one)[0], args)
        return 0
    steps = {"plan": plan, "prepare": prepare, "measure": measure, "build": build, "time": time_rows}
    steps.get(args.step, print_table)(args)
    return 0


def _rows_of(only: str | None) -> list[Row]:
    known = {row.key: row for row in all_rows()}
    if unknown := [key for key in (only or "").split(",") if key and key not in known]:
        sys.exit(f"there is no row {unknown[0]!r}; `python -m benchmarks.device plan` lists them")
    return [known[key] for key in only.split(",")] if only else list(known.values())


def dry_run(args: argparse.Namespace) -> int:
    """Take all rows through all steps with small models, on a device that is not there."""
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    from benchmarks.peers import captured
    from tests.support.fake_cuda import fake_cuda

    captured.ROUNDS = captured.RUNS = 1  # times are made up
    failed = []
    with tempfile.TemporaryDirectory() as folder, fake_cuda(compiles=False):
        args.folder = Path(folder)
        args.output, args.records, args.jobs = args.folder / "gpu.json", args.folder / "records.gz", 1
        args.seconds, args.end_s, args.kernels = math.inf, math.inf, DRY_KERNELS
        wanted = args.rows
        for number, row in enumerate(wanted, 1):
            args.rows, args.target = [row], "cuda:sm_90"
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    prepare(args)
                    measure(args)
                    args.target = "cuda:h200"
                    build(args)
                    time_row(row, args)
            except Exception:  # noqa: BLE001 - the other rows are tried all the same
                traceback.print_exc()
            found = {"engines": {}, "is_whole": False, **_read(_path(args, row))}
            engines = {name: engine.get("failure", "timed") for name, engine in found["engines"].items()}
            error = found.get("korch", {}).get("max_error", math.inf)
            failed += [] if found["is_whole"] and error <= DRY_ERROR[row.precision] else [row.key]
            texts = "; ".join(f"{name}: {text[:80]}" for name, text in engines.items())
            kernels = _prepared(args).get(row.key, {}).get("added")
            print(f"{number}/{len(wanted)} {row.key}: {kernels} kernels, error {error:.1e}; {texts}", flush=True)
        args.rows, args.target = wanted, "cuda:sm_90"
        plan(args)
        print_table(args)
    print(f"{len(wanted) - len(failed)} of {len(wanted)} rows are right" + "".join(f"\n{key}" for key in failed))
    return 1 if failed else 0


DRY_KERNELS = 1
"""Only the kernels of the best plan by estimates are measured."""

DRY_ERROR = {"tf32": 2e-2, "float16": 2e-2, "float32": 1e-4}
"""The largest errors that Korch's results may have in a dry run, relative to the largest element."""


# What is done, and what is missing.


def plan(args: argparse.Namespace) -> None:
    """Print what is missing."""
    known, plans = _prepared(args), _plans(args)
    counts = {
        "prepared": sum("added" in known.get(row.key, {}) for row in args.rows),
        "planned": sum("predicted_ms" in plans.get(row.key, {}) for row in args.rows),
        "timed": sum(_is_whole(_path(args, row)) for row in args.rows),
    }
    print(f"{len(args.rows)} rows: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    for row in args.rows:
        found = known.get(row.key, {"failure": "not prepared"})
        text = found.get("failure") or (
            f"{found['added']} kernels of {found['candidates']} candidates, {found['known']} known before, "
            f"{found['left']} left"
        )
        print(f"  {row.key}: {text}; {plans.get(row.key, {}).get('failure', '')}".rstrip("; "))


RECORDS = "records.jsonl"


def _prepared(args: argparse.Namespace) -> dict[str, Any]:
    return _read(args.folder / "prepared.json")


def _plans(args: argparse.Namespace) -> dict[str, Any]:
    return _read(args.folder / "plans.json")


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _note(path: Path, row: Row, found: Mapping[str, Any]) -> None:
    """Add what is known of a row to a file."""
    path.write_text(json.dumps({**_read(path), row.key: found}, indent=1))
    print(f"{row.key}: {dict(found)}", flush=True)


def _path(args: argparse.Namespace, row: Row) -> Path:
    return Path(args.folder / f"{row.key}.json")


def _is_whole(path: Path) -> bool:
    """Return whether a row exists and all of its engines were tried."""
    return bool(_read(path).get("is_whole"))


# Steps without a device.


def options_of(row: Row, args: argparse.Namespace) -> Options:
    """Return Korch's options for a row; in a dry run, there are few candidates."""
    precision = "tf32" if row.precision == "tf32" else "float32"  # models of float16 have this type themselves
    found = Options(target=args.target, precision=precision, budget_s=args.budget, cache_folder=args.folder / "cache")
    return replace(found, search=DRY_LIMITS, ablation=DRY_METHOD) if args.dry_run else found


DRY_LIMITS, DRY_METHOD = SearchLimits(max_primitives=3), Ablation(rules="none", layouts="plain")


def prepare(args: argparse.Namespace) -> None:
    """Add the kernels of rows to files of jobs; rows that were prepared for the same target are left out."""
    for row in args.rows:
        if time.monotonic() > args.end_s:
            return
        if _prepared(args).get(row.key, {}).get("target") == args.target:
            continue
        begun_s, file = time.monotonic(), _file_with_room(args.folder)
        try:
            model, _ = source_of(row, args.dry_run)
            found = asdict(prepare_model(model, options_of(row, args), {}, file, args.kernels))
        except (KorchError, ImportError) as error:
            found = {"failure": f"{type(error).__name__}: {error}"[:600]}
        about = {"target": args.target, "file": file.path.name, "seconds": round(time.monotonic() - begun_s)}
        _note(args.folder / "prepared.json", row, {**found, **about})


def _file_with_room(folder: Path) -> JobFile:
    """Return the first file that is not nearly full."""
    for number in itertools.count():
        path = folder / f"jobs-{number}.zip"
        if not path.exists() or path.stat().st_size < 0.9 * MOST_BYTES:
            return JobFile(path)
    raise AssertionError("numbers do not end")


def build(args: argparse.Namespace) -> None:
    """Import the records, plan the rows, and export the records with the plans for `time`."""
    import_from(args.folder / "cache", [path for path in (args.folder / RECORDS, args.records) if path.exists()])
    for row in args.rows:
        if time.monotonic() > args.end_s:
            break
        try:
            report = build_apart(source_of(row, args.dry_run)[0], options_of(row, args), {}).report
        except (KorchError, ImportError) as error:
            found: dict[str, Any] = {"failure": f"{type(error).__name__}: {error}"[:600]}
        else:
            found = {"predicted_ms": report.predicted_ms, "kernels": report.kernels, "seconds": report.seconds}
        _note(args.folder / "plans.json", row, found)
    export_to(args.folder / "cache", args.records)


# Steps on a device.


def measure(args: argparse.Namespace) -> None:
    """Measure the kernels of all files of jobs."""
    for path in sorted(args.folder.glob("jobs-*.zip")):
        left_s = args.end_s - time.monotonic()
        if left_s > 0:
            tell = partial(print, flush=True)
            print(measure_jobs(path, args.folder / RECORDS, None if math.isinf(left_s) else left_s, tell))


def time_rows(args: argparse.Namespace) -> None:
    """Time the rows that are incomplete, each in a process of its own."""
    if args.records.exists():
        import_from(args.folder / "cache", [args.records])
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda row: _time_apart(row, args), args.rows))
    print_table(args)


def _time_apart(row: Row, args: argparse.Namespace) -> None:
    begun_s = time.monotonic()
    if _is_whole(_path(args, row)) or args.end_s - begun_s < ROW_SECONDS:
        return
    command = [sys.executable, "-m", "benchmarks.device", "--one", row.key, "--folder", str(args.folder)]
    ended = _run(command, args.end_s - begun_s)
    print(f"{row.key}: {ended}, {time.monotonic() - begun_s:.0f} s", flush=True)


def _run(command: list[str], limit_s: float) -> str:
    """Run a command within a time limit; return how it ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return f"exit code {process.wait(timeout=max(1.0, limit_s))}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the processes of compilers
        process.wait()
        return "out of time"


def _empty_row(row: Row, device: str) -> dict[str, Any]:
    versions = {package: _version(package) for package in PACKAGES}
    about = {"model": row.model, "precision": row.precision, "batch": row.batch, "clock": CLOCK}
    return {**about, "is_whole": False, "engines": {}, "device": {"name": device, "versions": versions}}


def time_row(row: Row, args: argparse.Namespace) -> None:
    """Time a row's plan interleaved with the other engines, and write the row after each engine."""
    import torch

    torch.backends.cudnn.benchmark = True
    model, make_module = source_of(row, args.dry_run)
    module, inputs = make_module()
    module, inputs = module.to("cuda"), [tensor.to("cuda") for tensor in inputs]
    found = _empty_row(row, torch.cuda.get_device_name(0))
    args.target = f"cuda:{torch.cuda.get_device_name(0)}"

    def korch_run() -> Replay:
        return _korch(torch, (model, options_of(row, args)), (module, inputs), found)

    with torch.no_grad():
        runs: dict[str, Callable[[], Any]] = {}
        _time_engine(torch, "korch", korch_run, runs, found)
        torch.backends.cuda.matmul.allow_tf32 = row.precision == "tf32"
        torch.backends.cudnn.allow_tf32 = row.precision == "tf32"
        engines: dict[str, Callable[[], Callable[[], Any]]] = {
            **peers(torch, module, inputs, args.dry_run),
            "tensorrt": lambda: tensorrt(module, model, inputs, row.precision),
            "onnxruntime": lambda: onnxruntime(model, inputs, row.precision),
        }
        for engine, prepare_engine in engines.items():
            _time_engine(torch, engine, prepare_engine, runs, found)
            found["is_whole"] = engine == list(engines)[-1]
            _path(args, row).write_text(json.dumps(found, indent=1))


def _korch(torch: Any, asked: tuple[Any, Options], peer: tuple[Any, list[Any]], found: dict[str, Any]) -> Replay:
    """Return a run of the plan of a row, after comparing its results with those of a module."""
    begun_s = time.monotonic()
    model, options = asked
    module, inputs = peer
    program = build_apart(model, options, {})
    compiler = CubinCompiler(program.arch, options.cache_folder)
    try:
        executable = with_best_schedule(program, early_program(program, compiler))
    finally:
        compiler.close()
    bound = executable.bind(inputs)
    bound.replay()
    torch.cuda.synchronize()
    wanted = module(*inputs)
    wanted = list(wanted) if isinstance(wanted, tuple | list) else [wanted]
    error = max(
        float((got.double() - want.double()).abs().max() / want.double().abs().max())
        for got, want in zip(bound.outputs, wanted, strict=False)
    )
    found["korch"] = {**_describe(executable, time.monotonic() - begun_s), "max_error": error}
    return Replay(bound)


def _time_engine(
    torch: Any, name: str, prepare_engine: Callable[[], Any], runs: dict[str, Any], found: dict[str, Any]
) -> None:
    """Prepare an engine, and time it with those that are ready."""
    begun_s = time.monotonic()
    try:
        with _limit(None if name == "korch" else PEER_SECONDS):
            run = prepare_engine()
            with device_lock():  # libraries time kernels in first runs
                for _ in range(WARM_UP):
                    run()
                torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        if name == "korch":
            traceback.print_exc()
        found["engines"][name] = {"failure": f"{type(error).__name__}: {error}"[:600]}
        return
    runs[name] = run
    found["engines"][name] = {"prepare_s": time.monotonic() - begun_s}
    for other, times_ms in interleaved(torch, runs).items():
        found["engines"][other]["times_ms"] = times_ms


@contextmanager
def _limit(seconds: int | None) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the context takes longer than `seconds`; None means no limit."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it is not ready after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds or 0)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _describe(executable: Any, seconds: float) -> dict[str, Any]:
    """Return what the row records of an executable: parts of its report, and the time and bound of each kernel."""
    from korch.records import plain

    report = executable.report
    kept = (
        "plan",
        "predicted_ms",
        "lower_bound_ms",
        "measured_ms",
        "gap",
        "kernels",
        "max_error",
        "candidates",
        "measured_candidates",
        "flop",
        "given_flop",
        "arena_bytes",
        "stages_s",
        "search_s",
    )
    kernels = [
        {
            "provider": step.provider,
            "variant": step.variant,
            "us": step.cost_ns / 1e3,
            "bound_us": step.bound_ns / 1e3,
            "bytes": step.size_bytes,
            "flop": step.work_flop,
        }
        for step in executable.plan.steps
    ]
    schedule = {"schedule": executable.schedule, "schedules_ns": executable.schedules_ns}
    return {"seconds": seconds, **schedule, **{key: plain(getattr(report, key)) for key in kept}, "steps": kernels}


def print_table(args: argparse.Namespace) -> None:
    """Write all rows of the folder to the file of results, and print them; the results are kept if there are none."""
    rows = [_read(path) for row in all_rows() if (path := _path(args, row)).exists()]
    found = {"cpu_cores": os.cpu_count(), "rows": rows}
    if rows:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


def table(found: dict[str, Any]) -> str:
    """Return a short table: medians in milliseconds, and the best peer's time divided by Korch's."""
    lines = [
        f"{'ms':14}{'precision':10}{'batch':>5}"
        + "".join(f"{name:>9}" for name in COLUMNS.values())
        + f"{'ratio':>7} (10-90 %)"
    ]
    ratios: dict[str, list[float]] = {}
    for row in found["rows"]:
        times = {n: np.array(e["times_ms"]) for n, e in row["engines"].items() if "times_ms" in e}
        text = f"{row['model']:14}{row['precision']:10}{row['batch']:>5}"
        for name in COLUMNS:
            text += f"{np.median(times[name]):>9.3f}" if name in times else f"{'-':>9}"
        peers = {n: t for n, t in times.items() if n != "korch"}
        if "korch" in times and peers:
            best = min(peers.values(), key=np.median)
            paired = best / times["korch"]
            low, high = np.percentile(paired, [10, 90])
            text += f"{np.median(paired):>7.2f} ({low:.2f}-{high:.2f})"
            ratios.setdefault(f"{row['precision']} x{row['batch']}", []).append(np.median(paired))
        elif "korch" not in times:
            text += " " + row["engines"].get("korch", {}).get("failure", "not run")[:60]
        text += "" if row.get("clock") == CLOCK else " (timed otherwise)"
        text += "" if row["is_whole"] else " (not all engines yet)"
        lines.append(text)
    for kind, values in ratios.items():
        mean = float(np.exp(np.mean(np.log(values))))
        lines.append(f"geometric mean, {kind}: {mean:.2f} over {len(values)}")
    return "\n".join(lines)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
