"""Sizes of products on matrix units, as `native/korch_amx.h` has them, and how templates get theirs."""

from __future__ import annotations

from collections.abc import Mapping

TOGETHER = 32
"""Rows and columns that the matrix units compute together, and terms of a step."""

PIECE_BYTES = 2
"""Bytes of a bfloat16."""

SPLIT_BYTES = 3 * PIECE_BYTES
"""Bytes of a float32 that is split into three."""

STEP_BYTES = SPLIT_BYTES * TOGETHER * TOGETHER
"""Bytes of a split operand in one step."""


def constants_of(numbers: Mapping[str, object]) -> str:
    """Return numbers by name as constants of a C++ struct."""
    return "".join(f"  static constexpr long {name} = {number};\n" for name, number in numbers.items())
