"""Composes groups for attention: two matrix products with a softmax between them.

One kernel for such a group keeps the scores in a core's cache. Each group around the second product is
extended backwards by the softmax, by the elementwise steps before it (a scale, a mask), and by a group
around the first product.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group, make_group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.pattern import find, op
from korch.primitive.types import DType

MOST_STEPS = 6
"""The most elementwise primitives between the first product and the softmax."""

MOST_WAYS = 4
"""The most choices of alternatives considered for computing the scores from a product."""

MOST_ENDS = 3
"""The number of groups around the second product that are extended, the largest first."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """The primitives of a softmax over the last axis, and its input."""

    x: int  # the input value
    primitives: tuple[Primitive, ...]  # the primitives of the softmax
    # whether NaN results are replaced by 0: PyTorch exports it so, for rows that are masked completely
    is_guarded: bool = False


def attention_groups(graph: PrimitiveGraph, groups: Iterable[Group]) -> Iterator[Group]:
    """Yield the attention groups that can be composed from groups around single matrix products."""
    number = {id(primitive): p for p, primitive in enumerate(graph.primitives)}
    around: dict[int, list[Group]] = {}
    for group in groups:
        linear = [p for p in group.primitives if _is_linear(graph.primitives[p])]
        if len(linear) == 1 and graph.primitives[linear[0]].op == "matmul":
            around.setdefault(linear[0], []).append(group)
    for second, ends in around.items():
        product = graph.primitives[second]
        softmax = find_softmax(graph, product.inputs[0])
        if softmax is None:
            continue
        middle = {number[id(primitive)] for primitive in softmax.primitives}
        ways = [
            (steps, first)
            for steps, first in itertools.islice(_from_product(graph, softmax.x), MOST_WAYS)
            if first in around
        ]
        usable = [group for group in ends if product.inputs[0] in group.inputs]
        usable.sort(key=lambda group: (-len(group.primitives), group.primitives))
        for end, (steps, first) in itertools.product(usable[:MOST_ENDS], ways):
            for begin in _begins(graph, around[first], first):
                together = {*end.primitives, *middle, *steps, *begin.primitives}
                sources = [_arranged(graph, graph.primitives[p].inputs[1], number) for p in (first, second)]
                for own in dict.fromkeys((frozenset(together), frozenset(together).union(*sources))):
                    outputs = [graph.primitives[p].output for p in own]
                    if len(set(outputs)) == len(outputs):  # only one alternative computes each value
                        yield make_group(graph, own, end.outputs)


def _is_linear(primitive: Primitive) -> bool:
    return primitive.row.category is Category.LINEAR


def _begins(graph: PrimitiveGraph, groups: list[Group], first: int) -> list[Group]:
    """Return the smallest and the largest group whose only output is the product's."""
    output = graph.primitives[first].output
    found = sorted((g for g in groups if g.outputs == (output,)), key=lambda g: len(g.primitives))
    return found if len(found) < 2 else [found[0], found[-1]]


def _from_product(graph: PrimitiveGraph, value: int, depth: int = 0) -> Iterator[tuple[frozenset[int], int]]:
    """Yield sets of elementwise steps that compute a value from a matrix product, each with the product."""
    for p in graph.producers[value]:
        primitive = graph.primitives[p]
        if primitive.op == "matmul":
            yield frozenset(), p
        elif primitive.row.category is Category.ELEMENTWISE and depth < MOST_STEPS:
            for side in dict.fromkeys(primitive.inputs):
                beside = next(filter(None, (_broadcasts(graph, v) for v in primitive.inputs if v != side)), frozenset())
                for steps, first in _from_product(graph, side, depth + 1):
                    yield steps | beside | {p}, first


def _broadcasts(graph: PrimitiveGraph, value: int) -> frozenset[int]:
    """Return the broadcast that computes a value, or a comparison of broadcasts, such as a mask; else an empty set."""
    for p in graph.producers[value]:
        primitive = graph.primitives[p]
        if primitive.op == "broadcast":
            return frozenset({p})
        if primitive.op == "less":
            inner = [_broadcasts(graph, v) for v in primitive.inputs if v not in graph.constants]
            return frozenset({p}).union(*inner)
    return frozenset()


_DEQUANTIZED = op("mul", op("cast", "q"), op("broadcast", "scale"))


def _arranged(graph: PrimitiveGraph, value: int, number: Mapping[int, int]) -> frozenset[int]:
    """Return the primitives that arrange, repeat, widen and dequantize stored keys or values.

    `number`: the number of each primitive by its id.
    """
    for match in find(graph, _DEQUANTIZED, value):
        if graph.types[match.values["q"]].dtype is DType.I8:
            return frozenset(number[id(primitive)] for primitive in match.used)
    for p in graph.producers[value]:
        primitive = graph.primitives[p]
        is_move = primitive.row.category in (Category.LAYOUT, Category.BROADCAST) and len(primitive.inputs) == 1
        if is_move or graph.is_widening(primitive):
            return _arranged(graph, primitive.inputs[0], number) | {p}
    return frozenset()


_TOP = op("broadcast", op("reduce_max", "x", name="top"))
_POWER = op("exp", op("sub", "x", _TOP), name="power")
_SOFTMAX = op("div", _POWER, op("broadcast", op("reduce_sum", "power", name="total")))
"""e^(x - m) / s, with m the maximum of x and s the sum of e^(x - m)."""

_GUARDED = op("where", op("isnan", "y"), 0.0, replace(_SOFTMAX, name="y"))


def _rounds(body: PrimitiveGraph, cast: Primitive) -> bool:
    """Return whether a cast converts float32 to 16-bit floats or the reverse, or rounds float32 to TF32."""
    if cast.op == "round_tf32":
        return True
    before, after = (body.types[value].dtype for value in (cast.inputs[0], cast.output))
    return body.is_widening(cast) or (before is DType.F32 and after in (DType.F16, DType.BF16))


def find_softmax(body: PrimitiveGraph, value: int) -> Softmax | None:
    """Return the softmax over the last axis that computes a value, perhaps rounded to 16 bits or TF32; else None."""
    casts = [cast for name in ("cast", "round_tf32") for cast in body.producing(value, name) if _rounds(body, cast)]
    if casts:
        found = find_softmax(body, casts[0].inputs[0])
        return found and replace(found, primitives=(*found.primitives, casts[0]))
    for pattern in (_GUARDED, _SOFTMAX):
        for match in find(body, pattern, value):
            x, last = match.values["x"], body.types[match.values["x"]].rank - 1
            ends = [match.primitives[name].attributes for name in ("top", "total")]
            if all(isinstance(end, ReduceAttributes) and end.axes == (last,) for end in ends):
                return Softmax(x, match.used, pattern is _GUARDED)
    return None
