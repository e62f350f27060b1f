"""Arrays <-> a file .npz. Elements of bfloat16, which such files do not know, are stored as their bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from korch.primitive.types import DType
from korch.report.peers.peer import Array

BFLOAT16 = DType.BF16.numpy
"""NumPy's type of bfloat16."""


def save_arrays(path: Path, arrays: Sequence[Array]) -> None:
    """Write some arrays to a file, in order."""
    named = {f"{i} {np.asarray(array).dtype.name}": as_bits(np.asarray(array)) for i, array in enumerate(arrays)}
    np.savez(path, **named)  # type: ignore[arg-type]  # the stub takes the names for other parameters


def load_arrays(path: Path) -> list[Array]:
    """Return the arrays of a file that `save_arrays` wrote."""
    with np.load(path) as arrays:
        return [from_bits(arrays[key]) if key.endswith(BFLOAT16.name) else arrays[key] for key in arrays.files]


def as_bits(array: Array) -> Array:
    """Return elements of bfloat16 as integers, others as they are."""
    return np.ascontiguousarray(array).view(np.uint16) if array.dtype == BFLOAT16 else array


def from_bits(array: Array) -> Array:
    """Return what 16 bits are as bfloat16."""
    return array.view(BFLOAT16)
