"""The window geometry that convolutions and pooling share: pads from auto_pad, strides, dilations."""

from dataclasses import dataclass

from korch.fission.context import Context
from korch.primitive.ops.reduce import window_extent
from korch.primitive.verbs import Shape

FARTHEST = 2**31 - 1
"""The most elements of an axis, pads included, that windows may cover."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sizes, strides, pads and dilations per spatial axis."""

    kernel: Shape
    strides: Shape
    pads_begin: Shape
    pads_end: Shape
    dilations: Shape


def window_of(c: Context, kernel: Shape, *, crops: bool = False) -> Window:
    """Return an operator's window on its first input, with auto_pad resolved.

    `crops`: whether pads may be negative where auto_pad SAME has strides longer than windows, as in the standard's
    formula and in ONNX Runtime's pooling; otherwise they are 0.
    """
    spatial = len(kernel)
    sizes = c.shape(c.input(0))[2:]
    strides = c.attributes.integers("strides", (1,) * spatial)
    dilations = c.attributes.integers("dilations", (1,) * spatial)
    pads = c.attributes.integers("pads", (0,) * (2 * spatial))
    auto = c.attributes.text("auto_pad", "NOTSET")
    if auto == "VALID":
        pads = (0,) * (2 * spatial)
    elif auto in ("SAME_UPPER", "SAME_LOWER"):
        totals = [
            max(-FARTHEST if crops else 0, (-(-n // s) - 1) * s + window_extent(k, d) - n)
            for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
        ]
        first = [int((total + (auto == "SAME_LOWER")) / 2) for total in totals]
        pads = (*first, *(total - b for total, b in zip(totals, first, strict=True)))
    begin, end = pads[:spatial], pads[spatial:]
    reached = max((n + sum(more) for n, *more in zip(sizes, begin, end, strict=True)), default=0)
    if reached > FARTHEST:
        raise ValueError(f"its windows reach over {reached} elements of an axis")
    return Window(kernel, strides, begin, end, dilations)


def reach(window: Window, sizes: Shape, counts: Shape) -> Shape:
    """Return the end pads with which exactly `counts` windows fit axes of `sizes` elements."""
    return tuple(
        max(0, (count - 1) * s + window_extent(k, d) - n - b)
        for n, count, k, s, b, d in zip(
            sizes, counts, window.kernel, window.strides, window.pads_begin, window.dilations, strict=True
        )
    )
