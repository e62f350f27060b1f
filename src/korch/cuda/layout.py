"""Views flat memory in a layout as a strided tensor of the logical shape."""

from collections.abc import Sequence
from typing import Any

from korch.candidate.layout import Layout
from korch.primitive.types import row_major_strides


def strides_of(shape: Sequence[int], layout: Layout) -> tuple[int, ...]:
    """Return the stride of each axis in elements.

    Raises:
        ValueError: the layout has blocks.
    """
    if layout.blocks:
        raise ValueError(f"{layout} has blocks")
    physical = row_major_strides(tuple(shape[axis] for axis in layout.order))
    strides = [0] * len(shape)
    for step, axis in zip(physical, layout.order, strict=True):
        strides[axis] = step
    return tuple(strides)


def strided(flat: Any, shape: Sequence[int], layout: str | Layout) -> Any:
    """Return a flat tensor viewed with a logical shape and a layout."""
    found = Layout.parse(layout) if isinstance(layout, str) else layout
    return flat.as_strided(tuple(shape), strides_of(shape, found))
