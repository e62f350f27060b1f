"""Shared libraries and headers that Python packages bring along."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import site
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ONNXRUNTIME = "onnxruntime"
"""The library that its Python package keeps to itself."""


def find_library(name: str) -> Path | None:
    """Return the shared library `lib<name>.so*` of the Python environment, or None."""
    if name == ONNXRUNTIME:
        return find_onnxruntime()
    for folder in library_folders():
        found = sorted(folder.glob(f"lib{name}.so*"))
        if found:
            # lib<name>.so.<major> is the name that other libraries ask for.
            return next((p for p in found if p.name.count(".") == 2), found[0])
    return None


def find_headers(name: str) -> Path | None:
    """Return the folder of the header `name` in the Python environment, or None."""
    for folder in library_folders():
        if (folder.parent / "include" / name).exists():
            return folder.parent / "include"
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


def announce_onnxruntime() -> None:
    """Tell kernels that will be created in this process where ONNX Runtime's library is."""
    path = find_onnxruntime()
    if path is not None:
        os.environ.setdefault("KORCH_ONNXRUNTIME_LIBRARY", str(path))


def needed_libraries(names: Iterable[str]) -> list[Path]:
    """Return the shared libraries to load for kernels that call some, in order.

    Where Intel's OpenMP library is in the Python environment it comes first: it speaks for GCC's
    too, so that all kernels share one thread pool, whoever compiled them.
    """
    found = (find_library(name) for name in dict.fromkeys(("iomp5", *names)))
    return [path for path in found if path is not None]


def load_globally(names: Iterable[str]) -> list[ctypes.CDLL]:
    """Load shared libraries, and what they need, for others to link with.

    Raises:
        OSError: one can't be loaded.
    """
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in needed_libraries(names)]
