"""Compares Korch on a CUDA device with PyTorch, torch.compile, TensorRT and ONNX Runtime, on the benchmark models.

    python -m benchmarks.device [--quick] [--seconds 520] [--budget 30] [--jobs 1] [--no-tests]
                                   [--folder build/gpu] [--output benchmarks/results/gpu.json]

It runs the tests that need a device, then one configuration after another, each in a separate
process, until the time of --seconds is used up. The next call continues where this one stopped. A row is
written after each of its engines; a row that lacks engines is measured again by the next call. With --quick
it runs two models within 170 seconds. The table is printed last.

With --jobs several configurations are prepared at the same time, but only one at a time is timed.
Engines are timed interleaved. Eager PyTorch and torch.compile are timed twice: as they are called, which
includes the host's time if the host is slower than the device, and captured in a CUDA graph (column "+graph").
Korch and the captured graphs are timed on the device: a few replays between two events, behind a sleep of the
device. Inputs are not copied. For float16 Korch gets the float32 model and float32 inputs, with
`--precision float16`; the others get a model in float16. An engine that is not installed, fails or takes too
long is listed with the reason.

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

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.captured import CLOCK, WARM_UP, Replay, interleaved, locked_capture, peers
from korch.cuda.measure.lock import device_lock

QUICK_SECONDS = 170.0
TEST_SECONDS = 170.0
QUICK_TEST_SECONDS = 50.0
PEER_SECONDS = 150
"""The longest time, in seconds, that another engine may take to prepare and for its first three runs."""

SIZES = {"efficientvit": {"size": 2048}}
"""Sizes in the paper's evaluation on a GPU (Korch, section 6) that differ from the default sizes."""

PAPER = ("candy", "segformer", "yolox", "yolov4", "efficientvit")
TRANSFORMER_NAMES = ("bert", "gpt2", "vit", "llama")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, no max-autotune")
    parser.add_argument("--seconds", type=float, help="of the whole call; 520, or 170 if quick")
    parser.add_argument("--budget", type=float, help="seconds of each search; 30, or 10 if quick")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--jobs", type=int, default=1, help="configurations that are prepared at the same time")
    parser.add_argument("--only", help="configurations as MODEL-PRECISION-BATCH, separated by commas; all if not given")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seconds = args.seconds or (QUICK_SECONDS if args.quick else 520.0)
    args.budget = args.budget or (10.0 if args.quick else 30.0)
    if args.one:
        name, precision, batch, output = args.one
        measure(name, precision, int(batch), args, Path(output))
        return 0
    end_s = time.monotonic() + args.seconds
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.no_tests:
        _tests(args, end_s)
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda item: _measure_apart(args, item, end_s), _configurations_of(args)))
    found = collect(args.folder, args.quick)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


def _configurations_of(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """Return the requested configurations: all, or those named by `--only`."""
    if not args.only:
        return configurations(args.quick)
    known = {"-".join(map(str, item)): item for item in configurations(False)}
    return [known[name] for name in args.only.split(",")]


def _measure_apart(args: argparse.Namespace, item: tuple[str, str, int], end_s: float) -> None:
    """Measure a configuration in a separate process, if its row is incomplete and enough time is left."""
    name, precision, batch = item
    path = _path(args.folder, args.quick, name, precision, batch)
    left_s = end_s - time.monotonic()
    if _is_whole(path) or left_s < args.budget + 20:
        return
    command = ["--one", name, precision, str(batch), str(path), "--budget", str(args.budget)]
    command += ["--folder", str(args.folder)]
    command += ["--quick"] * args.quick
    begun_s = time.monotonic()
    ended = _run([sys.executable, "-m", "benchmarks.device", *command], left_s)[0]
    print(f"{path.stem}: {ended}, {time.monotonic() - begun_s:.0f} s", flush=True)


def _run(command: list[str], limit_s: float, is_kept: bool = False) -> tuple[str, str]:
    """Run a command within a time limit; return how it ended, and its output if `is_kept`."""
    process = subprocess.Popen(command, start_new_session=True, text=True, stdout=subprocess.PIPE if is_kept else None)
    try:
        text, _ = process.communicate(timeout=max(1.0, limit_s))
        return f"exit code {process.returncode}", text or ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also ends the processes of compilers
        text, _ = process.communicate()
        return "out of time", text or ""


def _path(folder: Path, quick: bool, name: str, precision: str, batch: int) -> Path:
    return folder / f"{name}-{precision}-{batch}{'-quick' * quick}.json"


def _is_whole(path: Path) -> bool:
    """Return whether a row exists and all of its engines were tried."""
    return path.exists() and json.loads(path.read_text("utf-8"))["is_whole"]


def configurations(quick: bool) -> list[tuple[str, str, int]]:
    """Return model, precision and batch of each configuration, the most important ones first."""
    if quick:
        return [("candy", "tf32", 1), ("yolox", "tf32", 1)]
    found = [(name, precision, 1) for precision in ("tf32", "float16") for name in PAPER]
    found += [
        (name, precision, batch) for batch in (1, 16) for precision in ("float16", "tf32") for name in TRANSFORMER_NAMES
    ]
    return [*found, *((name, "float32", 1) for name in PAPER)]


def _tests(args: argparse.Namespace, end_s: float) -> None:
    """Run the tests that need a device, unless the folder has their output; write the end of the output to it."""
    path = args.folder / "tests.txt"
    if path.exists():
        return
    # Warnings of other packages are ignored in these tests.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "-W",
        "default",
        "tests/gpu",
    ]
    if find_spec("xdist") is not None:  # most of the time is spent by the compiler, on the host
        command += ["-n", "4"]
    limit_s = QUICK_TEST_SECONDS if args.quick else TEST_SECONDS
    ended, text = _run(command, min(limit_s, end_s - time.monotonic()), is_kept=True)
    if ended == "out of time":
        text += f"\nout of time after {limit_s:.0f} s"
    path.write_text(text[-20000:])
    print(text[-3000:], flush=True)


def options_of(precision: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `korch.optimize` for the models of one precision."""
    return {"target": "cuda", "precision": precision, "budget": args.budget, "cache_folder": args.folder / "cache"}


def _empty_row(name: str, precision: str, batch: int, device: str) -> dict[str, Any]:
    versions = {package: _version(package) for package in PACKAGES}
    return {
        "model": name,
        "precision": precision,
        "batch": batch,
        "is_whole": False,
        "engines": {},
        "clock": CLOCK,
        "device": {"name": device, "versions": versions},
    }


def measure(name: str, precision: str, batch: int, args: argparse.Namespace, output: Path) -> None:
    """Optimize a model, time it interleaved with the other engines, and write the row after each engine."""
    import torch

    import korch

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    module, inputs, model = _model(name, batch, "cuda")
    if precision == "float16":
        module.half()
        inputs = [t.half() if t.is_floating_point() else t for t in inputs]
    row = _empty_row(name, precision, batch, torch.cuda.get_device_name(0))

    def korch_run() -> Callable[[], Any]:
        begun_s = time.monotonic()
        found = korch.optimize(*model, **options_of(precision, args))
        executable = getattr(found, "flat", found)
        row["korch"] = _describe(executable, time.monotonic() - begun_s)
        return Replay(executable.bind())

    engines: dict[str, Callable[[], Callable[[], Any]]] = {
        "korch": korch_run,
        **peers(torch, module, inputs, args.quick),
        "tensorrt": lambda: _tensorrt(module, model[0], inputs, precision),
        "onnxruntime": lambda: _onnxruntime(model[0], inputs, precision),
    }
    runs: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for engine, prepare in engines.items():
            begun_s = time.monotonic()
            try:
                with _limit(None if engine.startswith("korch") else PEER_SECONDS):
                    run = prepare()
                    with device_lock():  # libraries time kernels in first runs
                        for _ in range(WARM_UP):
                            run()
                        torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                if engine.startswith("korch"):
                    traceback.print_exc()
                text = f"{type(error).__name__}: {error}"[:600]
                row["engines"][engine] = {"failure": text}
            else:
                runs[engine] = run
                row["engines"][engine] = {"prepare_s": time.monotonic() - begun_s}
                for other, times_ms in interleaved(torch, runs).items():
                    row["engines"][other]["times_ms"] = times_ms
            row["is_whole"] = engine == list(engines)[-1]
            output.write_text(json.dumps(row, indent=1))


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


def _model(name: str, batch: int, device: str) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Return a module on a device, its inputs, and the arguments for `korch.optimize`."""
    import torch

    if name in PAPER:
        from benchmarks.models import build
        from benchmarks.peers.torch_operators.module import load_module
        from korch.inputs import random_inputs

        model = build(name, **SIZES.get(name, {}))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            path.write_bytes(model.SerializeToString())
            arrays = random_inputs(path)
            module = load_module(path, {n: a.shape for n, a in arrays.items()})
        inputs = [torch.from_numpy(a).to(device) for a in arrays.values()]
        return module.to(device).eval(), inputs, (model,)
    from benchmarks.models.transformers import TRANSFORMERS

    if not TRANSFORMERS:
        raise ImportError("the package transformers is not installed")
    original, example = TRANSFORMERS[name].build()
    example = {k: t.expand(batch, *t.shape[1:]).contiguous() for k, t in example.items()}

    class Flat(torch.nn.Module):  # type: ignore[misc]
        """Takes tensors in order and returns the first result."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = original

        def forward(self, *tensors: Any) -> Any:
            """Run the model."""
            found = self.inner(**dict(zip(example, tensors, strict=True)))
            return found[0]

    module = Flat().eval()
    inputs = [t.to(device) for t in example.values()]
    # Korch exports on the CPU; the exported program shares the module's weights, so a copy goes to the device.
    exported = torch.export.export(module, tuple(example.values()), strict=False)
    return copy.deepcopy(module).to(device), inputs, (exported,)


def _tensorrt(module: Any, model: Any, inputs: list[Any], precision: str) -> Callable[[], Any]:
    """Return a run of the module compiled by TensorRT, through torch_tensorrt or, if that is missing, through ONNX.

    Raises:
        ImportError: no package for this model and precision is installed.
    """
    import torch

    try:
        import torch_tensorrt
    except ImportError:
        if precision == "float16" or not hasattr(model, "SerializeToString"):
            raise
        return _tensorrt_of_onnx(model, inputs, precision == "tf32")

    kind = torch.float16 if precision == "float16" else torch.float32
    with device_lock():
        compiled = torch_tensorrt.compile(
            module, ir="dynamo", inputs=inputs, enabled_precisions={kind}, disable_tf32=precision == "float32"
        )
    return lambda: compiled(*inputs)


def _tensorrt_of_onnx(model: Any, inputs: list[Any], allow_tf32: bool) -> Callable[[], Any]:
    """Return a run that replays a CUDA graph of the TensorRT engine of an ONNX model."""
    import torch

    from korch.cuda.engine import TensorRtEngine, build_engine

    outputs = [
        torch.empty([d.dim_value for d in o.type.tensor_type.shape.dim], device="cuda") for o in model.graph.output
    ]
    names = [item.name for item in (*model.graph.input, *model.graph.output)]
    with device_lock():
        engine = TensorRtEngine(build_engine(model.SerializeToString(), allow_tf32), names)
    tensors = [t.reshape(-1).view(torch.uint8) for t in (*inputs, *outputs)]
    return locked_capture(torch, lambda: engine.run(tensors, len(inputs), torch.cuda.current_stream().cuda_stream))


def _onnxruntime(model: Any, inputs: list[Any], precision: str) -> Callable[[], Any]:
    """Return a run of the model by ONNX Runtime's CUDA provider, its tensors on the device.

    Raises:
        RuntimeError: the CUDA provider is missing, or the model is not an ONNX model of float32.
    """
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise RuntimeError("this ONNX Runtime has no CUDA provider")
    if precision == "float16" or not hasattr(model, "SerializeToString"):
        raise RuntimeError("it is run on ONNX models of float32 only")
    options = {"use_tf32": int(precision == "tf32"), "cudnn_conv_algo_search": "EXHAUSTIVE"}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=[("CUDAExecutionProvider", options)])
    binding = session.io_binding()
    for described, tensor in zip(session.get_inputs(), inputs, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        binding.bind_input(described.name, "cuda", 0, np.dtype(kind), tuple(tensor.shape), tensor.data_ptr())
    for described in session.get_outputs():
        binding.bind_output(described.name, "cuda")
    return lambda: session.run_with_iobinding(binding)


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


def collect(folder: Path, quick: bool) -> dict[str, Any]:
    """Return all rows of a folder, with the last line of the tests."""
    paths = [_path(folder, quick, *item) for item in configurations(False)]
    rows = [json.loads(path.read_text("utf-8")) for path in paths if path.exists()]
    tests = folder / "tests.txt"
    lines = tests.read_text("utf-8").strip().splitlines() if tests.exists() else []
    return {"tests": lines[-1] if lines else "not run", "cpu_cores": os.cpu_count(), "rows": rows}


def table(found: dict[str, Any]) -> str:
    """Return a short table: medians in milliseconds, and the best peer's time divided by Korch's."""
    lines = [
        f"tests: {found['tests']}",
        f"{'ms':14}{'precision':10}{'batch':>5}"
        + "".join(f"{name:>9}" for name in COLUMNS.values())
        + f"{'ratio':>7} (10-90 %)",
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
