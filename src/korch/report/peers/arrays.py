"""Arrays <-> an .npz file. bfloat16 elements, which the format does not support, are stored as 16-bit integers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from korch.primitive.types import DType
from korch.report.peers.peer import Array

BFLOAT16 = DType.BF16.numpy
"""The NumPy type for bfloat16."""


def save_arrays(path: Path, arrays: Sequence[Array]) -> None:
    """Write some arrays to a file, in order."""
    named = {f"{i} {np.asarray(array).dtype.name}": as_bits(np.asarray(array)) for i, array in enumerate(arrays)}
    np.savez(path, **named)  # type: ignore[arg-type]  # the stub takes the names for other parameters


def load_arrays(path: Path) -> list[Array]:
    """Return the arrays of a file that `save_arrays` wrote."""
    with np.load(path) as arrays:
        return [from_bits(arrays[key]) if key.endswith(BFLOAT16.name) else arrays[key] for key in arrays.files]


def as_bits(array: Array) -> Array:
    """Return bfloat16 elements as 16-bit integers with the same bits; other arrays are unchanged."""
    return np.ascontiguousarray(array).view(np.uint16) if array.dtype == BFLOAT16 else array


def from_bits(array: Array) -> Array:
    """Return 16-bit elements as bfloat16 with the same bits."""
    return array.view(BFLOAT16)
