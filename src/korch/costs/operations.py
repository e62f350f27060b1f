"""Group -> the approximate number of operations of a generated kernel.

A value that is neither an output nor the result of a reduction is recomputed at each use (see
`korch.tile.lower.lower`): a sigmoid before a window of 25 taps is computed 25 times. So the uses of each value are
counted, backwards from the outputs.
"""

import math

import numpy as np

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops.elementwise import TRANSCENDENTAL_OPS
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.ranges.served import Served

TRANSCENDENTAL = 6
"""The number of operations for which a transcendental function counts."""


def operations(body: PrimitiveGraph) -> float:
    """Return the number of operations on single elements."""
    outputs = {value for _, value in body.outputs}
    asked: dict[int, float] = {}  # per value, how many elements its readers use
    total = 0.0
    for primitive in reversed(body.primitives):
        size = body.types[primitive.output].size
        is_reduction = primitive.row.category is Category.REDUCE
        points = asked.get(primitive.output, 0.0)
        if is_reduction:
            points = float(size) * _taps(body, primitive)
        elif primitive.output in outputs:
            points += size
        if is_reduction or primitive.row.category is Category.ELEMENTWISE:
            total += points * (TRANSCENDENTAL if primitive.op in TRANSCENDENTAL_OPS else 1)
        for value in dict.fromkeys(primitive.inputs):
            elements = body.types[value].size
            needed = points
            if primitive.op == "concat":
                needed *= elements / max(1, size)
            elif primitive.op == "broadcast":
                needed = min(points, elements)
            asked[value] = asked.get(value, 0.0) + needed
    return total


def _taps(body: PrimitiveGraph, reduction: Primitive) -> float:
    """Return how many elements are reduced to one result."""
    if isinstance(reduction.attributes, PoolAttributes):
        return math.prod(reduction.attributes.kernel)
    before = body.types[reduction.inputs[0]].size
    return before / max(1, body.types[reduction.output].size)


def has_windows(group: Group) -> bool:
    """Return whether a group reduces over windows."""
    return any(isinstance(p.attributes, PoolAttributes) for p in group.body.primitives)


def gathered_indices(group: Group) -> dict[int, Array]:
    """Return, by position, data for inputs with matrix indices per row; all matrices are chosen about equally often."""
    body, found = group.body, dict[int, Array]()
    for primitive in body.primitives:
        if primitive.op != GATHERED:
            continue
        index = primitive.inputs[2]
        while index not in group.position:
            index = body.primitives[body.producers[index][0]].inputs[0]
        type_, count = body.types[index], body.types[primitive.inputs[1]].shape[0]
        numbers = np.random.default_rng(0).permutation(np.arange(type_.size) % count)
        found[group.position[index]] = numbers.reshape(type_.shape).astype(type_.dtype.numpy)
    return found


def iterations(group: Group, served: Served | None) -> dict[int, Array]:
    """Return, by position, data for the input with the number of a loop's iterations: as many as a size needs."""
    found = dict[int, Array]()
    for primitive in group.body.primitives:
        loop = primitive.attributes
        if isinstance(loop, LoopAttributes) and loop.is_counted:
            trips = loop.trips
            if served is not None and served.trips is not None:
                trips = served.trips.at(served.sizes)
            found[group.position[primitive.inputs[-1]]] = np.array([trips], np.int64)
    return found
