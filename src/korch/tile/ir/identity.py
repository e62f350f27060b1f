"""The identity elements of the accumulators."""

from __future__ import annotations

import math

from korch.primitive.types import DType


def identity(op: str, dtype: DType) -> float | int:
    """Return the identity of `op` (sum, prod, max or min): accumulating it changes nothing."""
    if op in ("sum", "prod"):
        return (0 if op == "sum" else 1) * (1.0 if dtype.is_float else 1)
    if dtype.is_float:
        return -math.inf if op == "max" else math.inf
    if dtype is DType.BOOL:
        return 0 if op == "max" else 1
    bits = 8 * dtype.size_bytes
    is_signed = dtype.value.startswith("i")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
    return low if op == "max" else high
