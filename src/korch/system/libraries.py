"""Shared libraries and headers that installed Python packages contain."""

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
    """Set the environment variable in which kernels of this process find the path of ONNX Runtime's library."""
    path = find_onnxruntime()
    if path is not None:
        os.environ.setdefault("KORCH_ONNXRUNTIME_LIBRARY", str(path))


def needed_libraries(names: Iterable[str]) -> list[Path]:
    """Return the shared libraries to load for kernels that call the named ones, in loading order.

    If the Python environment has Intel's OpenMP library, it comes first. It also implements GCC's OpenMP
    interface, so that all kernels share one thread pool, whichever compiler built them.
    """
    found = (find_library(name) for name in dict.fromkeys(("iomp5", *names)))
    return [path for path in found if path is not None]


def load_globally(names: Iterable[str]) -> list[ctypes.CDLL]:
    """Load shared libraries and their dependencies with global symbols, so that other libraries link to them.

    Raises:
        OSError: a library can't be loaded.
    """
    return [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in needed_libraries(names)]
