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


def literal(value: float) -> str:
    """Return a vector whose elements all are `value`, as an expression."""
    if math.isnan(value):
        text = '__builtin_nanf("")'
    elif math.isinf(value):
        text = "-__builtin_inff()" if value < 0 else "__builtin_inff()"
    else:
        text = f"{value!r}f"
    return f"korch::splat<float, W>({text})"
