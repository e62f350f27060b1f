"""The version of a built-in provider: a hash of the source files that determine its kernels.

The version is part of the key of a measured cost, so that kernels are measured again after such a file changes.
"""

import hashlib
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]

_TILE = ("tile/ir", "tile/check", "tile/lower", "tile/analysis", "tile/llvm", "tile/triton")
SHARED = ("provider", "schedule", *_TILE, "native", "measure/llvm_worker.py", "ranges/live.py")
"""Files and folders that all providers depend on: this folder's modules, schedules, printers, the compiler."""

DIGITS = 12
"""Hexadecimal digits of a version."""


def content_version(*paths: str) -> str:
    """Return the version of a provider.

    `paths`: the provider's own files and folders in the package, in addition to the shared ones.
    """
    digest = hashlib.sha256()
    for path in sorted({*SHARED, *paths}):
        digest.update(_digest(PACKAGE / path))
    return digest.hexdigest()[:DIGITS]


@cache
def _digest(path: Path) -> bytes:
    """Return the hash of a file, or of the files directly in a folder, not in its subfolders."""
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix in (".py", ".h", ".c"):
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.digest()
