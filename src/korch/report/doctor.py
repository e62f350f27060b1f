"""The report of `korch doctor`: what Korch finds on this machine, what is missing, and how to install it.

Each line begins with `ok`, `--` for a missing optional part, or `FAIL` for a missing part that Korch needs.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from korch.costs.model import model_for
from korch.cuda.measure.device import detect_cuda_target
from korch.errors import KorchError
from korch.measure.compiler import usable_folder
from korch.measure.llvm_process import llvm_identity
from korch.options import default_cache_folder, default_threads
from korch.provider.provider import CUDA_ENTRY_POINT_GROUP, ENTRY_POINT_GROUP, load_providers
from korch.system.extras import install_command
from korch.system.native import runtime, runtime_path
from korch.target import Target, detect_target

OK, MISSING, FAIL = "ok", "--", "FAIL"
_PACKAGES = (
    ("onnxruntime", "onnxruntime", "runs operators that have no fission rule; korch bench compares with it"),
    ("openvino", "openvino", "korch bench compares with it"),
    ("torch", "torch", "optimizes modules; korch bench compares with eager PyTorch and Inductor"),
)


def examine() -> tuple[str, bool]:
    """Return a report, and whether Korch can optimize here."""
    found = [*_machine(), *_libraries(), *_providers(), *_cuda(), *_cache(default_cache_folder())]
    return "\n".join(found), not any(line.startswith(FAIL) for line in found)


def _line(mark: str, part: str, text: str) -> str:
    return f"{mark:4} {part:12} {text}"


def _machine() -> Iterator[str]:
    """Check the runtime, and describe the machine: instruction set, threads and caches."""
    try:
        runtime()
        yield _line(OK, "runtime", str(runtime_path()))
    except (KorchError, OSError) as error:
        yield _line(FAIL, "runtime", f"it can't be loaded: {error}")
    yield _line(OK, "compiler", llvm_identity())
    target = detect_target(default_threads(), "")
    yield _describe(target)
    model = model_for(target.isa)
    if model is not None:
        yield _line(OK, "costs", f"learned from {model.about}")
    else:
        yield _line(MISSING, "costs", f"no learned model for {target.isa}: first plans follow bytes and operations")


def _describe(target: Target) -> str:
    sizes = (target.l1_bytes, target.l2_bytes, target.l3_bytes)
    caches = ", ".join(f"L{i} {size >> 10} KiB" for i, size in enumerate(sizes, 1))
    text = f"{target.cpu}, {target.isa}, {target.threads} threads, {caches}"
    return _line(OK, "machine", text)


def _libraries() -> Iterator[str]:
    for package, distribution, purpose in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            command = install_command(package)  # the extra has the name of the package
            yield _line(MISSING, package, f"missing ({purpose}): {command}")
            continue
        try:
            yield _line(OK, package, version(distribution))
        except PackageNotFoundError:  # another distribution, such as onnxruntime-gpu
            yield _line(OK, package, "of unknown version")


def _providers() -> Iterator[str]:
    try:
        names = [provider.name for provider in load_providers()]
    except KorchError as error:
        yield _line(FAIL, "providers", str(error))
        return
    yield _line(OK if names else FAIL, "providers", ", ".join(names) or "none is registered; install Korch again")
    for group in (ENTRY_POINT_GROUP, CUDA_ENTRY_POINT_GROUP):
        for entry in sorted(entry_points(group=group), key=lambda e: e.name):
            try:
                entry.load()()
            except ImportError as error:
                yield _line(MISSING, "providers", f"{entry.name} is disabled: {error}")


def _cuda() -> Iterator[str]:
    """Check the parts that the CUDA target needs: Triton to compile, PyTorch and a device to run."""
    if importlib.util.find_spec("triton") is None:
        yield _line(MISSING, "triton", "missing (compiles kernels for CUDA devices): " + install_command("cuda"))
    else:
        yield _line(OK, "triton", version("triton"))
    try:
        target = detect_cuda_target()
    except KorchError as error:
        yield _line(MISSING, "cuda", str(replace(error, where="")))  # no option was given
        return
    yield _line(
        OK, "cuda", f"{target.name}, {target.isa}, {target.processors} multiprocessors, L2 {target.l2_bytes >> 20} MiB"
    )
    names = [provider.name for provider in load_providers(CUDA_ENTRY_POINT_GROUP)]
    yield _line(OK, "cuda", f"providers {', '.join(names)}")


def _cache(folder: Path) -> Iterator[str]:
    try:
        usable = usable_folder(folder)
    except KorchError as error:
        yield _line(FAIL, "cache", str(error))
        return
    if usable != folder:
        yield _line(
            MISSING,
            "cache",
            f"{folder} can't be written, so nothing is kept for the next run: name another folder in $KORCH_CACHE",
        )
        return
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    yield _line(OK, "cache", f"{folder}, {len(sizes)} files, {sum(sizes) / 1e6:.0f} MB")
