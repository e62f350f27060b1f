"""Shapes and steps as oneDNN counts them."""

from __future__ import annotations

from typing import Any

from korch.candidate.layout import Layout
from korch.primitive.types import row_major_strides
from korch.provider.onednn.match import Match


def operand(shape: tuple[int, ...], is_transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims and strides with which a matrix product reads an operand."""
    strides = row_major_strides(shape)
    if not is_transposed:
        return shape, strides
    return (
        (*shape[:-2], shape[-1], shape[-2]),
        (*strides[:-2], strides[-1], strides[-2]),
    )


def conv_weights(found: Match, w: tuple[int, ...]) -> tuple[str, tuple[int, ...], str]:
    """Return oneDNN's name for a convolution, the weights' dims and the tag of their plain layout.

    With groups oneDNN's weights have an axis more, in front; those of a transposed convolution are
    output by input channels, where ONNX has input by output.
    """
    attributes: Any = found.primitive.attributes if found.primitive is not None else None
    groups, spatial = attributes.groups, w[2:]
    letters = "cdefg"[: len(spatial)] if groups == 1 else "defgh"[: len(spatial)]
    if found.op == "conv":
        dims = w if groups == 1 else (groups, w[0] // groups, *w[1:])
        return "convolution", dims, ("ab" if groups == 1 else "abc") + letters
    if groups == 1:
        return "deconvolution", (w[1], w[0], *spatial), "ba" + letters
    return "deconvolution", (groups, w[1], w[0] // groups, *spatial), "acb" + letters


def conv_steps(found: Match) -> tuple[tuple[int, ...], ...]:
    """Return strides, dilations (from 0) and pads of a convolution."""
    attributes: Any = found.primitive.attributes if found.primitive is not None else None
    begin = tuple(a + b for a, b in zip(attributes.pads_begin, found.pads_begin, strict=True))
    end = [a + b for a, b in zip(attributes.pads_end, found.pads_end, strict=True)]
    for i, extra in enumerate(getattr(attributes, "output_padding", ())):
        end[i] -= extra
    dilations = tuple(d - 1 for d in attributes.dilations)
    return attributes.strides, dilations, begin, tuple(end)


def tag_for(layout: Layout, rank: int) -> str:
    """Return oneDNN's tag for weights of `rank` axes that lie in one of ONNX's layouts."""
    if len(layout.order) == rank:
        return str(layout)
    position = layout.order.index(0)
    order = [axis + 1 if axis else 0 for axis in layout.order]
    order.insert(position + 1, 1)
    return str(Layout(tuple(order), tuple((a + 1 if a else 0, n) for a, n in layout.blocks)))
