"""What this machine has, what it lacks, and how to get it."""

from __future__ import annotations

import importlib.util
from importlib.metadata import entry_points, version

from korch.errors import KorchError
from korch.libraries import find_headers, find_library
from korch.measure.compiler import Builder, find_compiler, usable_folder
from korch.options import default_cache_folder, default_threads
from korch.provider.provider import ENTRY_POINT_GROUP, load_providers
from korch.target import detect_target

_PACKAGES = (
    ("onnxruntime", "runs operators that have no fission rule; korch bench compares with it",
     "pip install 'korch[onnxruntime]'"),
    ("openvino", "korch bench compares with it", "pip install 'korch[openvino]'"),
    ("torch", "korch bench compares with eager PyTorch and Inductor", "pip install 'korch[torch]'"),
)  # fmt: skip


def examine() -> tuple[str, bool]:
    """Return a report, and whether Korch can optimize here."""
    lines: list[str] = []
    is_well = True

    def say(mark: str, name: str, text: str) -> None:
        lines.append(f"{mark:4} {name:14} {text}")

    try:
        compiler = find_compiler()
        say("ok", "compiler", f"{compiler.version} ({' '.join(compiler.command)})")
        target = detect_target(default_threads(), compiler.version)
        Builder(target.isa).library(['extern "C" int korch_probe() { return 0; }\n'])
        caches = ", ".join(
            f"L{i} {size >> 10} KiB"
            for i, size in enumerate((target.l1_bytes, target.l2_bytes, target.l3_bytes), 1)
        )
        say("ok", "target", f"{target.cpu}, {target.isa}, {target.threads} threads, {caches}")
    except KorchError as error:
        is_well = False
        say("FAIL", "compiler", str(error))
    if find_library("dnnl") and find_headers("dnnl.h"):
        say("ok", "oneDNN", str(find_library("dnnl")))
    else:
        say("--", "oneDNN", "missing: pip install onednn-cpu-gomp onednn-devel-cpu-gomp")
    for package, purpose, command in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            say("--", package, f"missing ({purpose}): {command}")
        else:
            say("ok", package, version(package))
    try:
        names = {provider.name for provider in load_providers()}
        say("ok", "providers", ", ".join(sorted(names)))
        for entry in entry_points(group=ENTRY_POINT_GROUP):
            try:
                entry.load()()
            except ImportError as error:
                say("--", "provider", f"{entry.name} is left out: {error}")
    except KorchError as error:
        is_well = False
        say("FAIL", "providers", str(error))
    folder = default_cache_folder()
    try:
        usable = usable_folder(folder)
        size_bytes = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        mark, note = (
            ("ok", "") if usable == folder else ("--", " can't be written; nothing is kept")
        )
        say(mark, "cache", f"{folder}{note}, {size_bytes / 1e6:.0f} MB")
    except KorchError as error:
        is_well = False
        say("FAIL", "cache", str(error))
    return "\n".join(lines), is_well
