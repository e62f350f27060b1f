"""Sizes of matrix products on matrix units (AMX); they match `tile/llvm/component_tiles.py`."""

from korch.candidate.layout import Layout

TOGETHER = 32
"""The rows and the columns of a block that the matrix units compute at once, and the terms (k) of a step."""

COMPONENT_BYTES = 2
"""Bytes of a bfloat16."""

SPLIT_BYTES = 3 * COMPONENT_BYTES
"""Bytes of a float32 that is split into three bfloat16 components."""

STEP_BYTES = SPLIT_BYTES * TOGETHER * TOGETHER
"""Bytes of a split operand in one step."""

BYTE_PAIRS = 0.5
"""The cost of a product of two bytes, in products of two components: matrix units multiply twice as many per step."""

LEAST_ROWS_OF_BYTES = 8
"""The least rows for which matrix units multiply bytes: with fewer, a tile takes as long, and vector units are as fast.
"""

LEAST_TERMS_OF_BYTES = 48
"""The least terms for which matrix units multiply bytes: with fewer, finishing the sums takes most of the time."""


def components_layout(order: tuple[int, ...], columns: int, terms: int, is_split: bool) -> Layout:
    """Return the layout of a split operand that matrix units read directly: strips, with pairs of terms adjacent.

    `terms`: the axis of terms (the reduction axis), or of channels of the image. `is_split`: whether its elements are
    float32, each of which becomes three components; else they are bfloat16.
    """
    half = TOGETHER // 2
    return Layout(order, ((columns, 2), (terms, half), (columns, half), (terms, 2)), is_split)
