"""Types of values: an element type and a shape.

A value's layout (its order in memory) is not part of its type; candidates determine it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NewType

import ml_dtypes
import numpy as np

ValueId = NewType("ValueId", int)
"""The number of a value in a primitive graph."""


class DType(Enum):
    """The element types; the value of a member is its name in the text form."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype:
        """The NumPy type with the same meaning."""
        return _NUMPY[self]

    @property
    def size_bytes(self) -> int:
        """Bytes of one element in memory."""
        return int(_NUMPY[self].itemsize)

    @property
    def is_float(self) -> bool:
        """Whether it holds real numbers."""
        return self in (DType.F64, DType.F32, DType.F16, DType.BF16)

    @staticmethod
    def of(dtype: np.dtype) -> DType:
        """Return the element type for a NumPy type.

        Raises:
            KeyError: there is none, as for strings and complex numbers.
        """
        return _FROM_NUMPY[np.dtype(dtype)]


_NUMPY: dict[DType, np.dtype] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I16: np.dtype(np.int16),
    DType.I8: np.dtype(np.int8),
    DType.U64: np.dtype(np.uint64),
    DType.U32: np.dtype(np.uint32),
    DType.U16: np.dtype(np.uint16),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}
_FROM_NUMPY = {dtype: name for name, dtype in _NUMPY.items()}

NARROW = (DType.I8, DType.U8, DType.I16, DType.U16)
"""The integer types of quantized values."""


UNIT_ROUNDOFF: dict[DType, float] = {DType.F64: 2.0**-53, DType.F32: 2.0**-24, DType.F16: 2.0**-11, DType.BF16: 2.0**-8}
"""The largest relative error of one rounding."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """The shape (elements per axis) and element type of a value."""

    shape: tuple[int, ...]
    dtype: DType

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements in the dense row-major layout."""
        return self.size * self.dtype.size_bytes

    def with_shape(self, shape: tuple[int, ...]) -> ValueType:
        """Return the type with the same element type and another shape."""
        return ValueType(tuple(int(n) for n in shape), self.dtype)

    def __str__(self) -> str:
        return _text(self)

    @staticmethod
    def parse(text: str) -> ValueType:
        """Return the type that prints as `text`.

        Raises:
            ValueError: `text` is not a type.
        """
        name, bracket, rest = text.strip().partition("[")
        if not bracket or not rest.endswith("]"):
            raise ValueError(f"{text!r} is no type; expected one like f32[1,64,56,56]")
        sizes = rest[:-1].split(",") if rest != "]" else []
        return ValueType(tuple(int(n) for n in sizes), DType(name))


@lru_cache(4096)
def _text(type_: ValueType) -> str:
    return f"{type_.dtype.value}[{','.join(map(str, type_.shape))}]"


def pair(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the numbers for the two spatial axes of an image as a pair."""
    first, second = sizes
    return first, second


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense row-major array, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
