"""The CUDA device of this machine: its properties, and its best rates."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

from korch.cuda.driver import has_driver
from korch.cuda.flags import library_flags
from korch.cuda.measure.clock import elapsed_ms
from korch.cuda.module import require_triton
from korch.cuda.target import NOMINAL, CudaTarget
from korch.errors import OptionError, UnsupportedError
from korch.measure.exchange import stats
from korch.records import read_record
from korch.system.extras import install_command

CALIBRATION = "cuda-calibration-3"
"""The name of a device's measured rates in the database."""

COPY_BYTES = 2 << 30
SIDES = (4096, 8192)
"""The sides of the matrices whose products are timed, without and with matrix units."""
RATES = ("copy_bytes_per_s", "l2_bytes_per_s", "f32_flop_per_s", "tf32_flop_per_s", "half_flop_per_s", "launch_ns")
MARGIN = 1.1
"""Rates are raised by this factor, so that bounds stay below times."""


def require_torch() -> Any:
    """Return the module `torch`, after checking that it can use a device.

    Raises:
        UnsupportedError: no device can be used; the message says what is missing.
    """
    hint = "Use --target cpu, or --target cuda:sm_90 --dry-run to plan without a device"
    missing = UnsupportedError(
        "PyTorch is not installed, and the CUDA target runs through it",
        "option target",
        hint=f"Run: {install_command('cuda')}. {hint}",
    )
    if importlib.util.find_spec("torch") is None:
        raise missing
    if not has_driver():  # checked before PyTorch is imported, which takes seconds
        raise UnsupportedError("there is no CUDA driver here (libcuda.so.1)", "option target", hint=hint)
    try:
        import torch
    except ImportError as error:
        raise missing from error
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else "; this PyTorch is built without CUDA"
        raise UnsupportedError(f"no CUDA device can be used here{built}", "option target", hint=hint)
    return torch


def require_device(target: str) -> None:
    """Check that kernels for a target that is "cuda" or begins with "cuda:" can be measured here.

    Raises:
        OptionError: the target names a kind of device, not the device of this machine.
        UnsupportedError: there is no device.
    """
    require_torch()
    if target != "cuda":
        raise OptionError(
            f"{target} is for plans without a device",
            "option target",
            "cuda (the device of this machine), or --dry-run",
        )


def detect_cuda_target(triton: str = "") -> CudaTarget:
    """Return the device of this machine with the nominal rates of its kind.

    `triton`: the version of Triton that compiles the kernels; by default, that of this machine.

    Raises:
        UnsupportedError: there is no device, or it is older than sm_80.
    """
    torch = require_torch()
    found = torch.cuda.get_device_properties(0)
    arch = 10 * found.major + found.minor
    if arch < min(NOMINAL):
        raise UnsupportedError(
            f"{found.name} is sm_{arch}", where="option target", expected="sm_80 or newer", hint="Use --target cpu"
        )
    known = NOMINAL[max(a for a in NOMINAL if a <= arch)]
    triton = triton or require_triton().__version__
    shared = getattr(found, "shared_memory_per_block_optin", known.shared_bytes)
    versions = (f"torch {torch.__version__}", f"triton {triton}", f"cuda {torch.version.cuda}")
    return dataclasses.replace(
        known,
        arch=arch,
        name=found.name,
        processors=found.multi_processor_count,
        l2_bytes=getattr(found, "L2_cache_size", known.l2_bytes),
        shared_bytes=shared,
        versions=versions,
        is_nominal=False,
    )


def recorded_target(name: str, folder: Path) -> CudaTarget:
    """Return the device that a target such as `cuda:h200` names, as `korch measure` has described it.

    `folder`: the folder of the database with its records; the latest of several devices whose names match is taken.

    Raises:
        OptionError: the database has no such device.
        UnsupportedError: its kernels were compiled by another version of Triton.
    """
    wanted = name.partition(":")[2].lower()
    devices = [one for one in stats(folder) if "arch" in one.fields and not one.fields["is_nominal"]]
    found = max(
        (one for one in devices if wanted in one.fields["name"].lower()), key=lambda one: one.last_s, default=None
    )
    if found is None:
        known = ", ".join(sorted({f"cuda:{one.fields['name']}" for one in devices})) or "none yet"
        raise OptionError(
            f"no device called {wanted!r} is recorded in {folder}",
            "option target",
            f"a device that is recorded: {known}",
            "Import what `korch measure` wrote: korch database import FILE",
        )
    target = read_record(CudaTarget, dict(found.fields), "target")
    here = f"triton {require_triton().__version__}"
    if here not in target.versions:
        raise UnsupportedError(
            f"the kernels of {target.name} were compiled with other versions ({', '.join(target.versions)})",
            where="option target",
            hint=f"This machine has {here}: prepare and measure the kernels again, or install that version",
        )
    return target


def with_rates(target: CudaTarget, rated: CudaTarget) -> CudaTarget:
    """Return a target with the rates of another one."""
    return dataclasses.replace(target, **{name: getattr(rated, name) for name in RATES})


def calibrate(target: CudaTarget) -> CudaTarget:
    """Return a target with measured rates: of copies, of matrix products, and of an almost empty kernel.

    A bound must never exceed a true time, so each rate is the best of several tries, raised by a
    margin.
    """
    torch = require_torch()
    rates = {
        "copy_bytes_per_s": _copy_rate(torch, COPY_BYTES),
        "l2_bytes_per_s": max(_copy_rate(torch, max(1 << 20, target.l2_bytes // share)) for share in (4, 8, 16)),
        "half_flop_per_s": _product_rate(torch, torch.float16, False),
        "tf32_flop_per_s": _product_rate(torch, torch.float32, True),
        "f32_flop_per_s": _product_rate(torch, torch.float32, False),
    }
    raised: dict[str, Any] = {name: rate * MARGIN for name, rate in rates.items()}
    raised["l2_bytes_per_s"] = max(raised["l2_bytes_per_s"], raised["copy_bytes_per_s"])
    return dataclasses.replace(target, **raised, launch_ns=int(_launch_ns(torch) / MARGIN))


def to_text(target: CudaTarget) -> str:
    """Return a target as JSON."""
    return json.dumps(dataclasses.asdict(target))


def from_text(text: str) -> CudaTarget:
    """Return the target that `to_text` gives as `text`.

    Raises:
        ValueError: the text is not a target.
    """
    return read_record(CudaTarget, json.loads(text), "target")


def _replayed_ns(torch: Any, run: Any, repeats: int = 20, tries: int = 5) -> float:
    """Return the least time per run in a replayed CUDA graph of many runs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeats):
            run()
    return min(elapsed_ms(torch, graph.replay) * 1e6 / repeats for _ in range(tries))


def _copy_rate(torch: Any, size_bytes: int) -> float:
    source = torch.rand(size_bytes // 8, device="cuda")
    sink = torch.empty_like(source)
    repeats = 20 if size_bytes > 1 << 28 else 200
    return 8e9 * int(source.numel()) / _replayed_ns(torch, lambda: sink.copy_(source), repeats)


def _product_rate(torch: Any, dtype: Any, allow_tf32: bool) -> float:
    n = SIDES[dtype is torch.float16 or allow_tf32]
    a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    with library_flags(torch, allow_tf32):
        return 2e9 * n**3 / _replayed_ns(torch, lambda: torch.mm(a, b, out=out), 5)


def _launch_ns(torch: Any) -> float:
    cell = torch.zeros(1, device="cuda")
    # Adding launches a kernel; setting to zero would be a memset node of the graph.
    return _replayed_ns(torch, lambda: cell.add_(1.0), 200)
