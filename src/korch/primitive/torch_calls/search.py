"""Searches and sorts, and maxima and minima of types that no primitive reduces."""

import numpy as np

from korch.primitive.torch_calls.node import Node, Row, ordered


def _top(node: Node) -> str | None:
    count = node.numbers(1)
    if count is None or not node.rank:
        return None
    axis, largest = node.axis(), bool(node.get("largest", 1))
    # ONNX requires that equal elements keep their order, so the sort is stable.
    return (
        f"tuple(part.narrow({axis}, 0, {count[0]}) for part in torch.sort({node.inputs[0]}, "
        f"dim={axis}, descending={largest}, stable=True))"
    )


def _hardmax(node: Node) -> str:
    x, axis = node.inputs[0], node.axis(-1 if node.version >= 13 else 1)
    if node.version >= 13 or not node.rank:
        return f"torch.zeros_like({x}).scatter_({axis}, torch.argmax({x}, {axis}, True), 1.0),"
    rows = int(np.prod(node.shape()[:axis]))
    return (
        f"x = {x}.reshape({rows}, -1)\n"
        f"torch.zeros_like(x).scatter_(1, torch.argmax(x, 1, True), 1.0)"
        f".reshape({list(node.shape())}),"
    )


def _reduce(function: str) -> Row:
    """Return the row of a maximum or minimum of elements that no primitive reduces, namely bool."""

    def text(node: Node) -> str | None:
        axes = node.get("axes", None) if node.given(1) == "" else node.numbers(1)
        if node.given(1) and axes is None:
            return None
        if not axes and node.get("noop_with_empty_axes", 0):
            return f"{node.inputs[0]},"
        where = [int(a) % max(1, node.rank) for a in axes or range(node.rank)]
        if not all(node.shape()[a] for a in where):
            return None
        return f"torch.{function}({node.inputs[0]}, {where}, {bool(node.get('keepdims', 1))}),"

    return ordered(text)


ROWS: dict[str, Row] = {
    "Hardmax": _hardmax,
    "ReduceMax": _reduce("amax"),
    "ReduceMin": _reduce("amin"),
    "TopK": ordered(_top),
}
