"""Shared libraries that installed Python packages contain."""

from __future__ import annotations

import importlib.util
import site
import sys
from functools import cache
from pathlib import Path

ONNXRUNTIME = "onnxruntime"
"""ONNX Runtime, whose shared library is inside its Python package and not in a common library folder."""


def find_library(name: str) -> Path | None:
    """Return the shared library `lib<name>.so*` of the Python environment, or None."""
    if name == ONNXRUNTIME:
        return find_onnxruntime()
    for folder in library_folders():
        found = sorted(folder.glob(f"lib{name}.so*"))
        if found:
            # Other libraries link to lib<name>.so.<major>.
            return next((p for p in found if p.name.count(".") == 2), found[0])
    return None


@cache
def library_folders() -> tuple[Path, ...]:
    """Return the folders in which Python packages put shared libraries."""
    roots = [Path(sys.prefix), Path(site.getuserbase())]
    roots += [Path(p).parents[2] for p in site.getsitepackages() if len(Path(p).parents) > 2]
    return tuple(dict.fromkeys(root / "lib" for root in roots if (root / "lib").is_dir()))


@cache
def find_onnxruntime() -> Path | None:
    """Return ONNX Runtime's shared library, or None."""
    found = importlib.util.find_spec("onnxruntime")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(folder, "capi").glob("libonnxruntime.so*")):
            return path
    return None
