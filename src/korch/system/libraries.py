"""Shared libraries that installed Python packages contain."""

import importlib.util
from functools import cache
from pathlib import Path

ONNXRUNTIME = "onnxruntime"
"""ONNX Runtime, whose shared library is inside its Python package and not in a common library folder."""


@cache
def find_onnxruntime() -> Path | None:
    """Return ONNX Runtime's shared library, or None."""
    found = importlib.util.find_spec("onnxruntime")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for path in sorted(Path(folder, "capi").glob("libonnxruntime.so*")):
            return path
    return None
