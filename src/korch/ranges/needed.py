"""A masked graph -> the elements of its values that are needed for a size.

Elements of an output beyond the model's size are cut off, and masks replace such elements of other values. So, going
backwards from the outputs, only those elements of many values are needed whose coordinates along some axes are less
than the model's size. Kernels leave out the others (`korch.ranges.live`). A value has the same needed elements in all
plans: those that any of its readers needs. So kernels can be combined freely, and are built once.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.ops.reduce import PoolAttributes, ReduceAttributes, window_extent
from korch.primitive.ops.winograd import WinogradAttributes
from korch.ranges.form import Extent, Form, Hidden, Rows, prefix
from korch.ranges.live import count_of, live, whole_groups
from korch.ranges.plan import RangePlan

Need = Mapping[int, frozenset[Extent | Rows]]
"""By axis, how many of the first coordinates are needed: the largest of some extents. Along other axes all are."""

Ends = Mapping[int, Extent]
"""By axis of a reduction's operand (of a matrix product's first operand), how many coordinates are reduced."""

MOST_CHANGES = 16
"""How often the needed elements of a value may increase before all are: alternatives may depend on each other."""


def needs(
    graph: PrimitiveGraph,
    wanted: Sequence[tuple[int, Need]],
    ends: Mapping[int, Ends] | None = None,
    hidden: Sequence[Hidden] = (),
) -> dict[int, Need]:
    """Return which elements are needed of each value that is read; alternatives need the elements of all of them.

    Args:
        graph: the graph.
        wanted: values whose elements are needed by others than the graph's primitives.
        ends: where reductions end, by the primitive's number.
        hidden: the hidden inputs of the graph, if it is that of a plan.
    """
    found, changes, todo = dict[int, Need](), Counter[int](), list[int]()

    def add(value: int, need: Need) -> None:
        known = found.get(value)
        merged = need if known is None else {a: known[a] | e for a, e in need.items() if a in known}
        if merged != known:
            changes[value] += 1
            found[value] = merged if changes[value] <= MOST_CHANGES else {}
            todo.extend(graph.producers[value])

    for value, need in wanted:
        add(value, need)
    conditions = Conditions(graph, hidden)
    while todo:
        number = todo.pop()
        primitive = graph.primitives[number]
        terms = len(graph.types[primitive.inputs[0]].shape) - 2  # the reduced axis of a product's second operand
        own = ends.get(number, {}).items() if ends else ()
        for k, value in enumerate(primitive.inputs):
            ended = {axis if k == 0 else terms: frozenset((extent,)) for axis, extent in own}
            add(value, {**of_operand(graph, primitive, k, found[primitive.output], conditions), **ended})
    return found


def needs_of_plan(graph: PrimitiveGraph, plan: RangePlan, ends: Mapping[int, Ends]) -> dict[int, Need]:
    """Return which elements a plan's kernels must compute of each value, whatever kernels are chosen.

    `ends`: where reductions end, by the primitive's number.
    """
    wanted = [(value, of_form(form)) for (_, value), form in zip(graph.outputs, plan.outputs, strict=True)]
    return needs(graph, wanted, ends, plan.hidden)


def in_whole_vectors(ends: Mapping[int, Ends], lanes: int) -> dict[int, Ends]:
    """Return ends of reductions that are rounded up to whole vectors."""
    return {p: {axis: extent.rounded(lanes) for axis, extent in own.items()} for p, own in ends.items()}


def of_form(form: Form) -> Need:
    """Return the needed elements of an output; of an axis that merges several, at most two of them count."""
    found: dict[int, frozenset[Extent | Rows]] = {}
    for axis, factors in enumerate(form):
        if not factors or factors[0].extent is None:
            continue
        outer, others = factors[0].extent, factors[1:]
        most, inner = math.prod(factor.size for factor in others), prefix(others)
        if inner is not None:
            found[axis] = frozenset((Rows(outer, inner, most),))
        elif (count := outer.repeated(most)) is not None:
            found[axis] = frozenset((count,))
    return found


def live_body(body: PrimitiveGraph, outputs: Sequence[Need], ends: Mapping[int, Ends] | None = None) -> PrimitiveGraph:
    """Return the graph of a group with the extents of which only some elements are needed; itself if there are none.

    `outputs`: the needed elements of each output. `ends`: where reductions end, by the primitive's number in the graph.
    """
    found = needs(body, [(value, need) for (_, value), need in zip(body.outputs, outputs, strict=True)], ends)
    types = tuple(
        replace(type_, shape=tuple(live(n, found.get(value, {}).get(axis, ())) for axis, n in enumerate(type_.shape)))
        for value, type_ in enumerate(body.types)
    )
    return replace(body, types=types) if any(count_of(n) for type_ in types for n in type_.shape) else body


class Conditions:
    """Finds conditions of masks: those that hold for valid elements only."""

    def __init__(self, graph: PrimitiveGraph, hidden: Sequence[Hidden]) -> None:
        values = dict(graph.inputs)
        self._hidden = {values[h.name]: h for h in hidden if h.kind in ("mask", "end") and h.name in values}
        self._numbers = {values[h.name]: h for h in hidden if h.kind == "number" and h.name in values}
        self._graph = graph

    def trips(self, loop: Primitive) -> Extent | None:
        """Return the number of iterations of a loop, if they are counted."""
        number = self._numbers.get(loop.inputs[-1])
        return number.factors[0].extent if number is not None else None

    def need(self, condition: int) -> Need:
        """Return the coordinates at which a condition may hold, if they are known."""
        makers = [p for p in self._graph.producing(condition, "less") if self._graph.number(p.inputs[0]) == 0]
        if not makers or not self._hidden:
            return {}
        value = makers[0].inputs[1]
        while wide := self._graph.producing(value, "broadcast"):
            value = wide[0].inputs[0]
        hidden = self._hidden.get(value)
        if hidden is None:
            return {}
        lead = len(self._graph.types[condition].shape) - hidden.rank
        ends = ((axis, prefix(factors)) for axis, factors in hidden.axes.items())
        return {lead + axis: frozenset((extent,)) for axis, extent in ends if extent is not None}


def of_operand(graph: PrimitiveGraph, primitive: Primitive, k: int, need: Need, conditions: Conditions) -> Need:
    """Return which elements of an operand are needed for the needed elements of the result."""
    before, after = graph.types[primitive.inputs[k]].shape, graph.types[primitive.output].shape
    match primitive.attributes:
        case _ if primitive.row.category is Category.ELEMENTWISE:
            is_masked = primitive.op == "where" and k == 1
            return {**need, **conditions.need(primitive.inputs[0])} if is_masked else need
        case TransposeAttributes(perm):
            return {perm[axis]: extents for axis, extents in need.items()}
        case ReduceAttributes(axes):
            return {axis: extents for axis, extents in need.items() if axis not in axes}
        case ConcatAttributes(joined):
            return {axis: extents for axis, extents in need.items() if axis != joined}
        case TakeAttributes(taken, indices) as attributes:
            few = _first(max(indices, default=-1) + 1)
            if attributes.repeats and (own := whole_groups(need.get(taken, ()))):
                few = frozenset(e.then(attributes.repeats - 1, attributes.repeats) for e in own)
            return {taken: few, **{axis: extents for axis, extents in need.items() if axis != taken}}
        case PadAttributes():
            return {axis: extents for axis, extents in need.items() if before[axis] == after[axis]}
        case SliceAttributes(start, size, step):
            ends = [max(s, s + (n - 1) * d) + 1 if n else 0 for s, n, d in zip(start, size, step, strict=True)]
            cut = {axis: _first(end) for axis, end in enumerate(ends) if before[axis] != after[axis]}
            return {**need, **cut}
        case ConvAttributes():
            kernel = graph.types[primitive.inputs[1]].shape[2:]
            return _convolved(before, kernel, primitive.attributes, need) if k == 0 else {}
        case WinogradAttributes(_, begin, end):
            conv = ConvAttributes((1, 1), begin, end, (1, 1))
            return _convolved(before, (3, 3), conv, need) if k == 0 else {}
        case LoopAttributes() as loop:
            is_slice = loop.states <= k < loop.states + len(loop.reads_backward)
            trips = conditions.trips(primitive) if loop.is_counted and is_slice else None
            return {} if trips is None else {0: frozenset((trips,))}
        case PoolAttributes(kernel):
            outer = {axis: extents for axis, extents in need.items() if axis < len(before) - len(kernel)}
            return {**outer, **_convolved(before, kernel, primitive.attributes, need)}
    match primitive.op:
        case "reshape":
            return before_reshape(before, after, need)
        case "broadcast":
            lead = len(after) - len(before)
            same = (axis for axis in need if axis >= lead and before[axis - lead] == after[axis])
            return {axis - lead: need[axis] for axis in same}
        case "matmul":
            rank = len(after)
            kept = rank - 2 if k == 0 else rank - 1
            return {axis: extents for axis, extents in need.items() if axis < rank - 2 or axis == kept}
        case "matmul_stored" if k == 0:
            return {axis: extents for axis, extents in need.items() if axis < len(after) - 1}
    return {}


def _convolved(
    before: tuple[int, ...], kernel: tuple[int, ...], moves: ConvAttributes | PoolAttributes, need: Need
) -> Need:
    """Return which elements of the data of windows are needed; with pads at the end, it may have fewer than these."""
    found = {axis: extents for axis, extents in need.items() if axis == 0 and len(kernel) < len(before)}
    for i, size in enumerate(kernel):
        axis, stride = i + len(before) - len(kernel), moves.strides[i]
        more = window_extent(size, moves.dilations[i]) - stride - moves.pads_begin[i]
        if own := whole_groups(need.get(axis, ())):
            found[axis] = frozenset(extent.covering(stride).then(more) for extent in own)
    return found


def _first(count: int) -> frozenset[Extent | Rows]:
    """Return a constant number of coordinates."""
    return frozenset((Extent(0, 0, count),))


def before_reshape(before: tuple[int, ...], after: tuple[int, ...], need: Need) -> Need:
    """Return which elements are needed before a reshape.

    An axis before and one after the reshape correspond if both begin at the same place: then the first coordinates
    of one are the first coordinates of the other. Rows of an axis are those of two axes that it merges.
    """
    found: dict[int, frozenset[Extent | Rows]] = {}
    places = [(math.prod(before[axis + 1 :]), size) for axis, size in enumerate(before)]
    for axis, extents in need.items():
        step = math.prod(after[axis + 1 :])
        for other, (own, size) in enumerate(places):
            if size > 1 and own * size == step * after[axis]:  # both begin at the same place
                found |= _reshaped(extents, step, other, places)
    for axis, size in enumerate(after[:-1]):
        merged = _rows(need.get(axis, frozenset()), need.get(axis + 1, frozenset()), after[axis + 1])
        place = math.prod(after[axis + 2 :]), size * after[axis + 1]
        if merged is not None and place in places:
            found[places.index(place)] = frozenset((merged,))
    return found


def _reshaped(extents: frozenset[Extent | Rows], step: int, other: int, places: Sequence[tuple[int, int]]) -> Need:
    """Return which elements are needed along an axis, or two, that begin at the same place as an axis after a reshape.

    `extents`: what is needed of that axis; `step`: the elements of one of its coordinates; `other`: the axis before the
    reshape; `places`: by axis before it, the number of elements of one coordinate, and of coordinates.
    """
    own, (first, *others) = places[other][0], extents
    if isinstance(first, Rows) and not others:
        if own == step:
            return {other: extents}
        if own == step * first.most and (step, first.most) in places:
            return {other: frozenset((first.outer,)), places.index((step, first.most)): frozenset((first.inner,))}
    moved = [_moved(extent, step, own) for extent in whole_groups(extents)]
    return {other: frozenset(e for e in moved if e is not None)} if moved and None not in moved else {}


def _rows(extents: frozenset[Extent | Rows], others: frozenset[Extent | Rows], most: int) -> Rows | None:
    """Return the rows of two adjacent axes if one extent of each is needed, of different dimensions."""
    pair = [e for own in (extents, others) for e in own if isinstance(e, Extent) and e.times]
    if len(extents) != 1 or len(others) != 1 or len({e.dimension for e in pair}) < 2:
        return None
    return Rows(pair[0], pair[1], most)


def _moved(extent: Extent, step: int, own: int) -> Extent | None:
    """Return how many coordinates of `own` elements each cover the first `extent` coordinates of `step` elements."""
    if own % step == 0:
        return extent.then(own // step - 1, own // step)
    return extent.covering(step // own) if step % own == 0 else None
