"""Attention -> the axes of its two products: heads that share keys and values are rows of one product."""

from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.ranges.live import blocks, count_of
from korch.schedule.contraction import Contraction, Fusion, Layouts, NotFusedError, follow
from korch.tile.ir.index import ZERO, Expr, add, scale, var
from korch.tile.ir.passes import expressions_of
from korch.tile.ir.program import Apply
from korch.tile.lower.emit import Emitter, Index


@dataclass(frozen=True, eq=False)
class Attention:
    """The parts of an attention in a graph."""

    first: Primitive  # the product of the queries and the keys
    second: Primitive  # the product of the weights and the values
    weighed: int  # the value to which the softmax is applied
    is_guarded: bool  # whether weights that are NaN become 0
    inside: frozenset[int]  # the values that the softmax computes

    @property
    def operands(self) -> tuple[int, int, int]:
        """The graph values of the queries, the keys and the values."""
        q, k = self.first.inputs
        return q, k, self.second.inputs[1]


def contractions_of(group: Group, found: Attention, layouts: Layouts) -> tuple[Contraction, Contraction]:
    """Return the two products' axes; heads that share keys and values are rows.

    Raises:
        NotFusedError: the keys or the values are computed in a way that is not fused.
    """
    types = group.body.types
    *batch, m, n = types[found.first.output].shape
    terms, columns = types[found.first.inputs[0]].shape[-1], types[found.second.output].shape[-1]
    heads, inner, index = [], [], []
    for number, size in enumerate(batch):
        share = _share(group, found, layouts, number)
        heads.append((f"b{number}", blocks(size, share)))
        inner.append((f"u{number}", share))
        index.append(add(scale(_variable(heads[-1]), share), _variable(inner[-1])))
    row, key, term, column = (("x0", m), ("x1", n), ("x2", terms), ("x3", columns))

    def side(value: int, *rest: tuple[str, int]) -> Index:
        shape = types[value].shape[:-2]
        own = (ZERO if size == 1 else e for size, e in zip(shape, index, strict=True))
        return (*own, *map(_variable, rest))

    def axes(*given: tuple[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple(axis for axis in given if axis[1] != 1)

    q, k, v = found.operands
    rows = (row, *inner) if count_of(m) else (*inner, row)  # the needed rows are the first ones
    shared = (axes(*heads), axes(*rows))
    scores = (side(q, row, term), side(k, term, key), side(found.first.output, row, key))
    mixed = (side(v, key, column), side(found.second.output, row, column))
    return (
        Contraction(*shared, axes(key), axes(term), *scores),
        Contraction(*shared, axes(column), axes(key), (), *mixed),
    )


def _variable(axis: tuple[str, int]) -> Expr:
    return ZERO if axis[1] == 1 else var(axis[0])


def _share(group: Group, found: Attention, layouts: Layouts, axis: int) -> int:
    """Return how many adjacent heads along an axis read the same keys and values."""
    size = group.body.types[found.first.output].shape[axis]
    fusion = Fusion(group, layouts, found.first, found.second)
    shares = (share for share in range(size, 1, -1) if size % share == 0)
    values = found.operands[1:]
    return next((s for s in shares if all(_is_shared(fusion, value, axis, size, s) for value in values)), 1)


def _is_shared(fusion: Fusion, value: int, axis: int, size: int, share: int) -> bool:
    shape = fusion.body.types[value].shape
    ranges: dict[str, tuple[int, int]] = {f"a{k}": (0, max(n - 1, 0)) for k, n in enumerate(shape)}
    index = [_variable((f"a{k}", n)) for k, n in enumerate(shape)]
    if shape[axis] == size:
        index[axis] = add(scale(var("outer"), share), var("inner"))
        ranges |= {"outer": (0, size // share - 1), "inner": (0, share - 1)}
    emitter = fusion.emitter(ranges)
    emitter.value(value, tuple(index))
    return not any("inner" in expr.variables for op in emitter.ops for expr in expressions_of(op))


def emit_score(emitter: Emitter, found: Attention, scores: Contraction, result: str) -> str:
    """Emit the input of the softmax as float32; return its name.

    Raises:
        NotFusedError: it is not computed element by element.
    """
    if follow(emitter, found.first, scores.out, result).get(found.weighed) != scores.out:
        raise NotFusedError("a value is not computed from the product in its order")
    name = emitter.value(found.weighed, scores.out)
    if emitter.body.types[found.weighed].dtype is DType.F32:
        return name
    emitter.ops.append(Apply("wide", DType.F32, "cast", (name,)))
    return "wide"
