"""Sizes of products on matrix units, as `native/korch_amx.h` has them."""

from __future__ import annotations

from korch.candidate.layout import Layout

TOGETHER = 32
"""Rows and columns that the matrix units compute together, and terms of a step."""

COMPONENT_BYTES = 2
"""Bytes of a bfloat16."""

SPLIT_BYTES = 3 * COMPONENT_BYTES
"""Bytes of a float32 that is split into three."""

STEP_BYTES = SPLIT_BYTES * TOGETHER * TOGETHER
"""Bytes of a split operand in one step."""

BYTE_PAIRS = 0.5
"""What a product of two bytes counts as, in products of components: units multiply twice as many at a time."""

LEAST_ROWS_OF_BYTES = 8
"""Rows from which on matrix units multiply bytes: tiles of fewer take as long, and vector units no longer."""

LEAST_TERMS_OF_BYTES = 48
"""Terms from which on they multiply matrices of bytes: of fewer, most of the time goes into finishing sums."""


def components_layout(order: tuple[int, ...], columns: int, terms: int, is_split: bool) -> Layout:
    """Return the layout of an split operand, as matrix units read it: in strips, pairs of terms side by side.

    Args:
        order: its axes, outermost first.
        columns: the axis of columns, or of channels of the result.
        terms: the axis of terms, or of channels of the image.
        is_split: whether its elements are float32, each of which becomes three components; else they are bfloat16.
    """
    half = TOGETHER // 2
    return Layout(order, ((columns, 2), (terms, half), (columns, half), (terms, 2)), is_split)
