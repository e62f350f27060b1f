"""The version of a built-in provider: a hash of the files that its kernels follow from.

Measured costs are kept under it, so an edited kernel or header is measured again.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

SHARED = ("provider", "schedule", "tile", "tile/cpp", "tile/triton", "native", "measure/toolchain.py")
"""What all providers use: modules of this folder, schedules, printers, headers and compiler flags."""

DIGITS = 12
"""Hexadecimal digits of a version."""


def content_version(*paths: str) -> str:
    """Return the version of a provider.

    Args:
        paths: its own files and folders in the package, beside the files that all share.
    """
    digest = hashlib.sha256()
    for path in sorted({*SHARED, *paths}):
        digest.update(_digest(PACKAGE / path))
    return digest.hexdigest()[:DIGITS]


@cache
def _digest(path: Path) -> bytes:
    """Return the hash of a file, or of the files of a folder without those of folders in it."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix in (".py", ".h", ".cpp"):
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.digest()
