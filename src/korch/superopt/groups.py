"""Primitive graph -> groups that the superoptimizer searches: products together with their normalization.

A group is grown backwards from an output, or from a value that a primitive other than an elementwise one reads. It
grows over primitives that nothing else reads; a second group also grows over reductions and elementwise steps that
others read, which are then computed again.
A group has at least two products, a product and a reduction, or two reductions; other providers make smaller groups.
"""

from collections.abc import Iterator

from korch.candidate.candidate import Group, make_group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.types import DType
from korch.primitive.walks import reached

PRODUCTS, PRIMITIVES = 3, 30  # most products, and most primitives, in a group

INSIDE = (Category.ELEMENTWISE, Category.BROADCAST, Category.REDUCE)


def superopt_groups(graph: PrimitiveGraph, primitives: int = PRIMITIVES) -> Iterator[Group]:
    """Yield the groups of a graph that have at most `primitives` primitives."""
    known: set[tuple[int, ...]] = set()
    for p, primitive in enumerate(graph.primitives):
        if not _is_end(graph, primitive) or not _fits(graph, primitive):
            continue
        for copies in (False, True):
            found = _cone(graph, p, copies, primitives)
            if found and found not in known:
                known.add(found)
                yield make_group(graph, found, (primitive.output,))


def _is_end(graph: PrimitiveGraph, primitive: Primitive) -> bool:
    """Return whether a primitive's value is an output, or is read by a primitive that is not elementwise."""
    is_inside = primitive.row.category in (*INSIDE, Category.LINEAR) and _fits(graph, primitive)
    if not is_inside or primitive.op == "broadcast":
        return False
    value = primitive.output
    readers = graph.reading(value)
    if value in {v for _, v in graph.outputs}:
        return True
    return any(reader.row.category is not Category.ELEMENTWISE for reader in readers)


def _fits(graph: PrimitiveGraph, primitive: Primitive) -> bool:
    """Return whether a primitive is a function of elements over named axes."""
    types = [graph.types[v] for v in (primitive.output, *primitive.inputs)]
    if any(type_.dtype is not DType.F32 or type_.size == 0 for type_ in types):
        return False
    match primitive.attributes:
        case ReshapeAttributes():
            shapes = [[n for n in type_.shape if n != 1] for type_ in types]
            return shapes[0] == shapes[1]
        case TransposeAttributes():
            return True
    return primitive.op in ("matmul", "reduce_sum", "reduce_max") or primitive.row.category in INSIDE[:2]


def _cone(graph: PrimitiveGraph, end: int, copies: bool, primitives: int) -> tuple[int, ...] | None:
    """Return the primitives of the group that ends with one; None if the group is too large or too small."""
    chosen: dict[int, int] = {graph.primitives[end].output: end}
    waiting = [*graph.primitives[end].inputs]
    while waiting:
        value = waiting.pop(0)
        if value in chosen or value in graph.constants or not graph.producers[value]:
            continue
        p = graph.producers[value][0]
        primitive = graph.primitives[p]
        if not _fits(graph, primitive) or not (_is_private(graph, value, chosen) or _is_copied(primitive, copies)):
            continue
        chosen[value] = p
        waiting += primitive.inputs
    found = tuple(sorted(chosen.values()))
    rows = [graph.primitives[p] for p in found]
    products = sum(row.row.category is Category.LINEAR for row in rows)
    reductions = sum(row.row.category is Category.REDUCE for row in rows)
    is_small = products <= PRODUCTS and len(found) <= primitives
    is_rich = products >= 2 or reductions >= (1 if products else 2)
    is_convex = not _reads_itself(graph, found, chosen)
    return found if is_small and is_rich and is_convex else None


def _is_copied(primitive: Primitive, copies: bool) -> bool:
    """Return whether a primitive may be computed again although others read it; a broadcast always may."""
    return primitive.op == "broadcast" or (copies and primitive.row.category is not Category.LINEAR)


def _is_private(graph: PrimitiveGraph, value: int, chosen: dict[int, int]) -> bool:
    """Return whether only primitives of a group read a value, in the model as it was written."""
    outputs = {v for _, v in graph.outputs}
    readers = [p for p in graph.consumers[value] if graph.producers[graph.primitives[p].output][0] == p]
    return value not in outputs and all(chosen.get(graph.primitives[p].output) == p for p in readers)


def _reads_itself(graph: PrimitiveGraph, found: tuple[int, ...], chosen: dict[int, int]) -> bool:
    """Return whether an input of a group is computed from a value that the group computes."""
    inputs = {v for p in found for v in graph.primitives[p].inputs if v not in chosen}

    def operands(value: int) -> list[int]:
        return [v for p in graph.producers[value][:1] for v in graph.primitives[p].inputs]

    return not chosen.keys().isdisjoint(reached(inputs, operands))
