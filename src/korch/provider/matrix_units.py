"""Sizes of products on matrix units, as `native/korch_amx.h` has them."""

TOGETHER = 32
"""Rows and columns that the matrix units compute together, and terms of a step."""

PIECES_BYTES = 6
"""Of a float32 that is split."""

STEP_BYTES = PIECES_BYTES * TOGETHER * TOGETHER
"""Bytes of the split operand of a step of so many rows or columns."""
