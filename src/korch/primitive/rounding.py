"""Marks products whose data may be rounded to bytes."""

from dataclasses import replace

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.linear import MatmulAttributes

BLOCK = 32
"""The terms with one scale, if the model does not say how many."""


def allow_rounding(graph: PrimitiveGraph) -> PrimitiveGraph:
    """Return a graph in which the data of all products by matrices that follow from constants may be rounded."""
    known, primitives = set(graph.constants), []
    for primitive in graph.primitives:
        if known.issuperset(primitive.inputs):
            known.add(primitive.output)
        at = primitive.attributes
        if isinstance(at, MatmulAttributes) and not at.rounded_block and primitive.inputs[1] in known:
            primitive = replace(primitive, attributes=MatmulAttributes(BLOCK))
        primitives.append(primitive)
    return replace(graph, primitives=tuple(primitives))
