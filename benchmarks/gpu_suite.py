"""The benchmark models on a CUDA device, against PyTorch, torch.compile, TensorRT, ONNX Runtime.

    python -m benchmarks.gpu_suite [--quick] [--seconds 520] [--budget 30] [--no-tests]
                                   [--folder build/gpu] [--output benchmarks/results/gpu.json]

First the tests that need a device, then one configuration after another, each in a process of its
own, until the seconds are spent; what is in the folder is not done again, so the next call goes on.
Engines take turns in one run; times are of the device, from events around a whole run: Korch's and
torch.compile's runs are CUDA graphs, eager PyTorch issues its kernels one by one. An engine that is
not installed, or fails, is named with the reason.

It needs Python, PyTorch, Triton, onnx and numpy, and Korch itself with its small dependencies:
`python -m pip install --no-deps --no-build-isolation -e .` where nothing can be fetched.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

ROUNDS = 15
RUNS = 5
"""Runs of an engine in one of its turns."""

SIZES = {"efficientvit": {"size": 2048}}
"""What the paper's evaluation on a GPU takes (Korch, section 6), where it is not the default."""

PAPER = ("candy", "segformer", "yolox", "yolov4", "efficientvit")
TRANSFORMER_NAMES = ("bert", "gpt2", "vit", "llama")
PACKAGES = ("torch", "triton", "onnx", "numpy", "onnxruntime-gpu", "tensorrt", "ortools")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models, no max-autotune")
    parser.add_argument("--seconds", type=float, default=520.0, help="of the whole call")
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of each search")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        name, precision, batch, output = args.one
        row = measure(name, precision, int(batch), args)
        Path(output).write_text(json.dumps(row, indent=1))
        return 0
    end_s = time.monotonic() + args.seconds
    args.folder.mkdir(parents=True, exist_ok=True)
    if not args.no_tests:
        _tests(args, end_s)
    for name, precision, batch in configurations(args.quick):
        path = args.folder / f"{name}-{precision}-{batch}{'-quick' * args.quick}.json"
        left_s = end_s - time.monotonic()
        if path.exists() or left_s < args.budget + 20:
            continue
        command = [sys.executable, "-m", "benchmarks.gpu_suite", "--one", name, precision,
                   str(batch), str(path), "--budget", str(args.budget), "--folder",
                   str(args.folder), *(["--quick"] if args.quick else [])]  # fmt: skip
        begun_s = time.monotonic()
        try:
            done = subprocess.run(command, timeout=left_s, check=False)
            ended = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = "out of time"
        print(f"{path.stem}: {ended}, {time.monotonic() - begun_s:.0f} s", flush=True)
    found = collect(args.folder, args.quick)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    return 0


def configurations(quick: bool) -> list[tuple[str, str, int]]:
    """Return model, precision and batch of each configuration, the telling ones first."""
    if quick:
        return [("candy", "tf32", 1), ("yolox", "tf32", 1)]
    found = [(name, precision, 1) for precision in ("tf32", "float16") for name in PAPER]
    found += [
        (name, precision, batch)
        for batch in (1, 16) for precision in ("float16", "tf32") for name in TRANSFORMER_NAMES
    ]  # fmt: skip
    return [*found, *((name, "float32", 1) for name in PAPER)]


def _tests(args: argparse.Namespace, end_s: float) -> None:
    """Run the tests that need a device; keep the end of what they print."""
    path = args.folder / "tests.txt"
    if path.exists():
        return
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:randomly", "tests/gpu"]
    limit_s = min(170.0, end_s - time.monotonic())
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        text = done.stdout[-6000:]
    except subprocess.TimeoutExpired as error:
        text = f"out of time\n{(error.stdout or b'')[-3000:]!r}"
    path.write_text(text)
    print(text[-3000:], flush=True)


def measure(name: str, precision: str, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Optimize a model and time it among the other engines."""
    import torch

    import korch

    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    module, inputs, model = _model(name, batch)
    options: dict[str, Any] = {
        "target": "cuda",
        "tf32": precision == "tf32",
        "budget": args.budget,
        "cache_folder": args.folder / "cache",
    }
    if precision == "float16":
        options["precision"] = "float16"
    row: dict[str, Any] = {"model": name, "precision": precision, "batch": batch, "engines": {}}
    runs: dict[str, Callable[[], Any]] = {}
    begun_s = time.monotonic()
    try:
        found = korch.optimize(*model, **options)
        executable = getattr(found, "flat", found)
        row["korch"] = _describe(executable, time.monotonic() - begun_s)
        runs["korch"] = executable.bind().replay
    except Exception as error:  # noqa: BLE001 - the others are measured all the same
        row["engines"]["korch"] = {"failure": f"{type(error).__name__}: {error}"[:600]}
        traceback.print_exc()
    if precision == "float16":
        module = module.half()
        inputs = [t.half() if t.is_floating_point() else t for t in inputs]
    engines: dict[str, Callable[[], Callable[[], Any]]] = {
        "eager": lambda: lambda: module(*inputs),
        "torch.compile": lambda: _compiled(module, inputs, args.quick),
        "tensorrt": lambda: _tensorrt(module, inputs, precision),
        "onnxruntime": lambda: _onnxruntime(model[0], inputs, precision),
    }
    with torch.no_grad():
        for engine, prepare in engines.items():
            begun_s = time.monotonic()
            try:
                runs[engine] = prepare()
                for _ in range(3):
                    runs[engine]()
                torch.cuda.synchronize()
                row["engines"][engine] = {"prepare_s": time.monotonic() - begun_s}
            except Exception as error:  # noqa: BLE001 - the others are measured all the same
                runs.pop(engine, None)
                row["engines"][engine] = {"failure": f"{type(error).__name__}: {error}"[:300]}
        for engine, times_ms in _interleaved(torch, runs).items():
            row["engines"].setdefault(engine, {})["times_ms"] = times_ms
    row["device"] = {
        "name": torch.cuda.get_device_name(0),
        "versions": {name: _version(name) for name in PACKAGES},
    }
    return row


def _model(name: str, batch: int) -> tuple[Any, list[Any], tuple[Any, ...]]:
    """Return a module on the device, its inputs, and what `korch.optimize` takes."""
    import torch

    if name in PAPER:
        from benchmarks.models import build
        from korch.report.peers.inputs import random_inputs
        from korch.report.peers.torch_operators.module import load_module

        model = build(name, **SIZES.get(name, {}))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.onnx"
            path.write_bytes(model.SerializeToString())
            arrays = random_inputs(path)
            module = load_module(path, {n: a.shape for n, a in arrays.items()})
        inputs = [torch.from_numpy(a).cuda() for a in arrays.values()]
        return module.cuda().eval(), inputs, (model,)
    from benchmarks.models.transformers import TRANSFORMERS

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
    inputs = [t.cuda() for t in example.values()]
    # Korch exports on the CPU; the module goes to the device afterwards.
    exported = torch.export.export(module, tuple(example.values()), strict=False)
    return module.cuda(), inputs, (exported,)


def _compiled(module: Any, inputs: list[Any], quick: bool) -> Callable[[], Any]:
    import torch

    mode = "reduce-overhead" if quick else "max-autotune"
    compiled = torch.compile(module, mode=mode, dynamic=False)
    return lambda: compiled(*inputs)


def _tensorrt(module: Any, inputs: list[Any], precision: str) -> Callable[[], Any]:
    """Return a run of the module compiled by TensorRT.

    Raises:
        ImportError: it is not installed.
    """
    import torch
    import torch_tensorrt

    kind = torch.float16 if precision == "float16" else torch.float32
    compiled = torch_tensorrt.compile(module, ir="dynamo", inputs=inputs, enabled_precisions={kind},
                                      disable_tf32=precision == "float32")  # fmt: skip
    return lambda: compiled(*inputs)


def _onnxruntime(model: Any, inputs: list[Any], precision: str) -> Callable[[], Any]:
    """Return a run of the model by ONNX Runtime's CUDA provider, its tensors on the device.

    Raises:
        RuntimeError: it is not there, or has no such precision.
    """
    import onnxruntime

    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise RuntimeError("this ONNX Runtime has no CUDA provider")
    if precision == "float16" or not hasattr(model, "SerializeToString"):
        raise RuntimeError("it is run on ONNX models of float32 only")
    options = {"use_tf32": int(precision == "tf32"), "cudnn_conv_algo_search": "EXHAUSTIVE"}
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=[("CUDAExecutionProvider", options)]
    )
    binding = session.io_binding()
    for described, tensor in zip(session.get_inputs(), inputs, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        binding.bind_input(described.name, "cuda", 0, np.dtype(kind), tuple(tensor.shape),
                           tensor.data_ptr())  # fmt: skip
    for described in session.get_outputs():
        binding.bind_output(described.name, "cuda")
    return lambda: session.run_with_iobinding(binding)


def _interleaved(torch: Any, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return the milliseconds of a run of each engine, one number for each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(ROUNDS + 2):
        for name, run in runs.items():
            run()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(RUNS):
                run()
            end.record()
            end.synchronize()
            if turn >= 2:
                times[name].append(begin.elapsed_time(end) / RUNS)
    return times


def _describe(executable: Any, seconds: float) -> dict[str, Any]:
    """Return what is kept of an executable: its report in short, and each kernel's distance."""
    report = executable.report
    kept = ("plan", "predicted_ms", "lower_bound_ms", "measured_ms", "gap", "kernels", "max_error",
            "candidates", "measured_candidates", "flop", "given_flop", "arena_bytes")  # fmt: skip
    kernels = [
        {"provider": step.provider, "variant": step.variant, "us": step.cost_ns / 1e3,
         "bound_us": step.bound_ns / 1e3, "bytes": step.size_bytes, "flop": step.work_flop}
        for step in executable.plan.steps
    ]  # fmt: skip
    return {"seconds": seconds, **{key: report.get(key) for key in kept}, "steps": kernels}


def collect(folder: Path, quick: bool) -> dict[str, Any]:
    """Return all rows that are in a folder."""
    rows = []
    for name, precision, batch in configurations(quick):
        path = folder / f"{name}-{precision}-{batch}{'-quick' * quick}.json"
        if path.exists():
            rows.append(json.loads(path.read_text()))
    tests = folder / "tests.txt"
    lines = tests.read_text().strip().splitlines() if tests.exists() else []
    return {"tests": lines[-1] if lines else "not run", "cpu_cores": os.cpu_count(), "rows": rows}


def table(found: dict[str, Any]) -> str:
    """Return a short table: medians in milliseconds, and Korch's ratio to the best peer."""
    lines = [f"tests: {found['tests']}",
             f"{'model':14}{'precision':10}{'batch':>5}{'korch':>9}{'eager':>9}{'compile':>9}"
             f"{'ratio':>7} (10-90 %)"]  # fmt: skip
    ratios: dict[str, list[float]] = {}
    for row in found["rows"]:
        times = {n: np.array(e["times_ms"]) for n, e in row["engines"].items() if "times_ms" in e}
        text = f"{row['model']:14}{row['precision']:10}{row['batch']:>5}"
        for name in ("korch", "eager", "torch.compile"):
            text += f"{np.median(times[name]):>9.3f}" if name in times else f"{'-':>9}"
        peers = {n: t for n, t in times.items() if n != "korch"}
        if "korch" in times and peers:
            best = min(peers.values(), key=np.median)
            paired = best / times["korch"]
            low, high = np.percentile(paired, [10, 90])
            text += f"{np.median(paired):>7.2f} ({low:.2f}-{high:.2f})"
            ratios.setdefault(f"{row['precision']} x{row['batch']}", []).append(np.median(paired))
        elif "korch" not in times:
            text += " " + row["engines"]["korch"]["failure"][:60]
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
