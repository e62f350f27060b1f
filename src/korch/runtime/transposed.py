"""Constants of which one is the transpose of the other: in some layouts both have the same bytes."""

from korch.candidate.layout import Layout
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.tied import is_transpose

Port = tuple[int, Layout]


def transposed_port(graph: PrimitiveGraph, port: Port, other: int) -> Port | None:
    """Return a constant in the layout in which it has the bytes of its transpose.

    Args:
        graph: the graph.
        port: the transpose in its layout.
        other: the constant.

    Returns:
        None if the constants are not a matrix and its transpose, or if there is no such layout.
    """
    (value, layout), types = port, graph.types
    axes, own = ([a for a, n in enumerate(types[v].shape) if n != 1] for v in (value, other))
    places = dict(zip(axes, reversed(own), strict=False))
    if layout.is_split or any(axis not in places for axis, _ in layout.blocks) or not is_transpose(graph, value, other):
        return None
    ones = [axis for axis, n in enumerate(types[other].shape) if n == 1]
    order = (*ones, *(places[axis] for axis in layout.order if axis in places))
    return other, Layout(order, tuple((places[a], n) for a, n in layout.blocks)).normalized(types[other].shape)
