"""Elementwise primitives as C++ expressions of float32 vectors, for kernels that fuse them."""

from __future__ import annotations

import math
from collections.abc import Sequence

INFIX = {"add": "+", "sub": "-", "mul": "*"}


def call(op: str, arguments: Sequence[str]) -> str:
    """Return an elementwise primitive of `arguments`, vectors of W floats, as an expression."""
    if op in INFIX and len(arguments) == 2:
        return f"{arguments[0]} {INFIX[op]} {arguments[1]}"
    return f"korch::op_{op}<float, W>({', '.join(arguments)})"


def scalar(value: float) -> str:
    """Return a number as C++."""
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return "-__builtin_inff()" if value < 0 else "__builtin_inff()"
    return f"{value!r}f"


def literal(value: float) -> str:
    """Return a vector whose elements all are `value`, as an expression."""
    return f"korch::splat<float, W>({scalar(value)})"
