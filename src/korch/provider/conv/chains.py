"""Composes groups with several convolutions, which keep intermediate tensors in a cache.

A depthwise convolution does little work per byte that it reads and writes. Fused with the pointwise
convolution before or after it (or both, in an inverted bottleneck), it causes no memory traffic. So each
group around a convolution is extended backwards: by the elementwise primitives that compute its image, and
by the convolution that these start from. Intermediate values are not outputs of the group: if other
primitives read them, another kernel computes them again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cache, partial

from korch.candidate.candidate import Group, make_group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.contraction import is_of_bytes

LONGEST = 3
"""The most convolutions in a chain: expand, depthwise, project."""

MOST_STEPS = 8
"""The most elementwise primitives in a row between two convolutions."""

MOST_WAYS = 4
"""The most choices of alternatives considered for computing an image from a convolution."""


def chain_groups(graph: PrimitiveGraph, groups: Iterable[Group]) -> Iterator[Group]:
    """Yield groups around chains of convolutions, extended from groups around one convolution each."""
    around = ((group, _anchor(graph, group)) for group in groups)
    frontier = [(group, anchor) for group, anchor in around if anchor is not None and _is_finished(graph, group)]
    ways = cache(partial(_ways, graph))  # many groups have the same anchor
    for _ in range(LONGEST - 1):
        grown: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[Group, int]] = {}
        for group, anchor in frontier:
            for before, first in ways(anchor):
                key = tuple(sorted({*group.primitives, *before})), group.outputs
                if key not in grown:  # the same chain is reached in many ways
                    grown[key] = make_group(graph, *key), first
        yield from (group for group, _ in grown.values())
        frontier = list(grown.values())


def _anchor(graph: PrimitiveGraph, group: Group) -> int | None:
    """Return the number of a group's only convolution, if its image is an input of the group; else None."""
    anchors = [p for p in group.primitives if graph.primitives[p].row.category is Category.LINEAR]
    if len(anchors) != 1 or _kind(graph, graph.primitives[anchors[0]]) is None:
        return None
    return anchors[0] if graph.primitives[anchors[0]].inputs[0] in group.inputs else None


def _kind(graph: PrimitiveGraph, primitive: Primitive) -> str | None:
    """Return "depthwise" or "dense" for a supported 2D convolution, None for all other primitives."""
    attributes = primitive.attributes
    if not isinstance(attributes, ConvAttributes) or primitive.op != "conv":
        return None
    channels = graph.types[primitive.inputs[0]].shape[1]
    if graph.types[primitive.output].rank != 4 or primitive.inputs[1] not in graph.constants:
        return None
    if is_of_bytes(graph, primitive):
        return None
    if attributes.groups == channels == graph.types[primitive.output].shape[1] > 1:
        return "depthwise"
    return "dense" if attributes.groups == 1 else None


def _is_finished(graph: PrimitiveGraph, group: Group) -> bool:
    """Return whether the group's outputs are read by something other than elementwise steps that could be fused.

    Such steps cost nothing inside the kernel, so a group without them is never better.
    """
    if set(group.outputs) & {value for _, value in graph.outputs}:
        return True
    known = {graph.primitives[p].output for p in group.primitives}
    shape = graph.types[group.outputs[0]].shape
    readers = [graph.primitives[p] for value in group.outputs for p in graph.consumers[value]]
    for primitive in readers:
        is_step = primitive.row.category is Category.ELEMENTWISE
        if not is_step or graph.types[primitive.output].shape != shape:
            return True
        known.add(primitive.output)
    others = {value for primitive in readers for value in primitive.inputs} - known
    return not all(_is_parameter(graph, value) for value in others)


def _is_parameter(graph: PrimitiveGraph, value: int) -> bool:
    """Return whether a value is constant, or follows from the size of a range."""
    return value in graph.constants or any(
        _is_spread(graph, p)
        or (p.row.category is Category.ELEMENTWISE and all(_is_parameter(graph, v) for v in p.inputs))
        for p in graph.producing(value)
    )


def _is_spread(graph: PrimitiveGraph, primitive: Primitive) -> bool:
    """Return whether a primitive repeats a constant, or a mask of rows and columns for all channels."""
    (*_, value) = primitive.inputs
    is_mask = not graph.producers[value] and graph.types[value].shape[:2] == (1, 1)
    return primitive.op == "broadcast" and (value in graph.constants or is_mask)


def _ways(graph: PrimitiveGraph, number: int) -> list[tuple[tuple[int, ...], int]]:
    """Return the sets of primitives from another convolution to a convolution's image, each with that convolution."""
    found = []
    anchor = graph.primitives[number]
    for primitives in itertools.islice(_from_conv(graph, anchor.inputs[0]), MOST_WAYS):
        before = [p for p in primitives if graph.primitives[p].row.category is Category.LINEAR]
        kinds = [_kind(graph, graph.primitives[p]) for p in before]
        # Two dense convolutions do enough work for the bytes that they read and write.
        if len(before) == 1 and {kinds[0], _kind(graph, anchor)} == {"dense", "depthwise"}:
            found.append((tuple(sorted(primitives)), before[0]))
    return found


def _from_conv(graph: PrimitiveGraph, value: int, depth: int = 0) -> Iterator[frozenset[int]]:
    """Yield sets of primitives that compute a value from convolutions and parameters."""
    if value in graph.constants:
        yield frozenset()
        return
    for p in graph.producers[value]:
        primitive = graph.primitives[p]
        if _kind(graph, primitive) is not None or _is_spread(graph, primitive):
            yield frozenset((p,))
        elif primitive.row.category is Category.ELEMENTWISE and depth < MOST_STEPS:
            sides = [list(itertools.islice(_from_conv(graph, v, depth + 1), MOST_WAYS)) for v in primitive.inputs]
            for choice in itertools.product(*sides):
                together = frozenset((p,)).union(*choice)
                outputs = [graph.primitives[q].output for q in together]
                if len(set(outputs)) == len(outputs):  # only one alternative computes each value
                    yield together
