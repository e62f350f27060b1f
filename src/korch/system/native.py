"""The C++ sources that are compiled on the machine at hand, in `korch/native`."""

from __future__ import annotations

from importlib.resources import files


def native_text(name: str) -> str:
    """Return the text of a file of `korch/native`."""
    return files("korch").joinpath("native", name).read_text(encoding="utf-8")
