"""Products whose data may be rounded to bytes: adds these forms to a graph as alternatives.

Rounding makes products of integers of few bits exact sums of products of bytes, which CPUs multiply in one instruction.
The data of each block of terms has a scale of its own, the largest magnitude divided by 127.
"""

from dataclasses import replace

import numpy as np

from korch.equivalence.rule import origin_of
from korch.primitive.constant_memo import once_per_array
from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.stored import GROUP, STORED, StoredAttributes, can_round, unpacked
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import Verbs

NAME = "data-rounded-to-bytes"
"""The name of this change of the model, which reports give as the origin of a product."""


def with_rounded_data(graph: PrimitiveGraph, is_allowed: bool) -> PrimitiveGraph:
    """Return a graph in which products by stored weights have forms with rounded data as alternatives.

    `is_allowed`: whether the data of all of them may be rounded, not only where the model allows it.
    """
    builder, is_changed = GraphBuilder.from_graph(graph), False
    for primitive in graph.primitives:
        if not _can_round(graph, primitive, is_allowed):
            continue
        at = primitive.attributes_as(StoredAttributes)
        data, packed, *others = primitive.inputs
        verbs = Verbs(builder, origin_of(NAME))
        attributes = replace(at, is_rounded=True)
        if graph.types[packed].dtype is DType.I8:
            attributes = replace(attributes, zero=at.zero + 128)
        grouped = verbs.constant(in_groups(graph.constants[packed].array, at.bits))
        inputs = [ValueId(data), grouped, *map(ValueId, others)]
        builder.merge(primitive.output, builder.add(STORED, inputs, attributes, origin=verbs.origin))
        is_changed = True
    return builder.freeze() if is_changed else graph


def _can_round(graph: PrimitiveGraph, primitive: Primitive, is_allowed: bool) -> bool:
    if primitive.op != STORED or primitive.inputs[1] not in graph.constants:
        return False
    at, (data, packed, *others) = primitive.attributes_as(StoredAttributes), primitive.inputs
    is_signed = graph.types[packed].dtype is DType.I8
    return (
        (at.may_round or is_allowed)
        and not at.is_rounded
        and can_round(at)
        and at.block < graph.types[data].shape[-1]
        and graph.types[data].dtype is DType.F32
        and not (is_signed and len(others) > 1)
    )


@once_per_array
def in_groups(packed: Array, bits: int) -> Array:
    """Return stored integers as unsigned ones, in the order of terms that products with rounded data have."""
    if bits == 8:
        return np.ascontiguousarray(packed.view(np.uint8) ^ np.uint8(128 if packed.dtype == np.int8 else 0))
    each = 8 // bits
    single = unpacked(packed, StoredAttributes(bits, each)).reshape(-1, each, GROUP, packed.shape[1])
    found = np.zeros((len(single), GROUP, packed.shape[1]), np.uint8)
    for h in range(each):
        found |= single[:, h] << np.uint8(bits * h)
    return np.ascontiguousarray(found.reshape(packed.shape))
