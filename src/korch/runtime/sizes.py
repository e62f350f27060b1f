"""Plans -> numbers that say which shapes of the inputs each plan takes, and how: `sizes.bin`, for `korch_fit.c`.

All are integers of 64 bits; others stand for a float64 of the same bits. They are: the number of dimensions and of
plans; and for each plan, the smallest first: its length, its number, whether it takes its own sizes only, these sizes,
the sizes of the inputs, costs, other sizes for which it is chosen because kernels were measured there
(`korch.runtime.choice`), the spans of the inputs, what else it reads, and the spans of the outputs. A list is preceded
by its length. Functions of C with similar names read what the functions here return.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from korch.ranges.cost import Cost
from korch.ranges.form import Dimension, Extent, Factor, Hidden, Sizes
from korch.ranges.plan import RangePlan
from korch.runtime.choice import PlanChoice
from korch.runtime.ranged import Ranges
from korch.runtime.record import PlanRecord, TensorRecord

Numbers = list[int]

KINDS = ("mask", "order", "end", "number", "places", "table", "sizes")
MODES = ("edge", "reflect", "wrap", "ends")


def sizes_of_plans(plans: Sequence[PlanRecord], ranges: Ranges | None = None) -> bytes:
    """Return the numbers of plans for a range; without a range, of plans that take the shapes of their own inputs."""
    served = list(ranges.plans) if ranges else [_fixed(plan) for plan in plans]
    dimensions = ranges.dimensions if ranges else ()
    order = sorted(range(len(plans)), key=lambda i: math.prod(served[i].sizes))
    chosen = _measured(served, dimensions)
    rows = [_plan(i, plans[i], served[i], dimensions, chosen.get(i, [])) for i in order]
    found = [len(dimensions), *_list(rows)]
    return np.array(found, np.int64).tobytes()


def _fixed(plan: PlanRecord) -> RangePlan:
    inputs = tuple(tuple((Factor(n),) for n in tensor.type.shape) for tensor in plan.inputs)
    return RangePlan((), inputs, (), is_exact=True)


def _measured(served: Sequence[RangePlan], dimensions: Sequence[Dimension]) -> dict[int, list[Sizes]]:
    """Return the sizes at which kernels were measured, by the number of the plan that is chosen there."""
    choice, found = PlanChoice(dimensions, served), dict[int, list[Sizes]]()
    for sizes in dict.fromkeys(at.sizes for plan in served for at in plan.measured):
        if all(d.low <= n <= d.high for d, n in zip(dimensions, sizes, strict=True)):
            found.setdefault(choice.number(sizes), []).append(sizes)
    return found


def _plan(
    number: int, plan: PlanRecord, served: RangePlan, dimensions: Sequence[Dimension], chosen: Sequence[Sizes]
) -> Numbers:
    inputs = [_list([_axis(factors, dimensions) for factors in form]) for form in served.inputs]
    given = list(zip(plan.inputs, served.inputs, strict=False))  # hidden inputs come last
    outputs = served.outputs or [()] * len(plan.outputs)
    rest = [
        *_list(inputs),
        *_list([_cost(cost) for cost in served.costs]),
        *_list(chosen),
        *_list([_spans(tensor, () if served.is_exact else form) for tensor, form in given]),
        *(n for hidden in served.hidden for n in _hidden(hidden)),
        *(n for tensor, form in zip(plan.outputs, outputs, strict=True) for n in _spans(tensor, form)),
    ]
    own = [number, int(served.is_exact), *served.sizes]
    return [1 + len(own) + len(rest), *own, *rest]


def _list(parts: Sequence[Sequence[int]]) -> Numbers:
    return [len(parts), *(n for part in parts for n in part)]


def _bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


def _axis(factors: tuple[Factor, ...], dimensions: Sequence[Dimension]) -> Numbers:
    extent = factors[0].extent if factors else None
    if extent is None:
        size = math.prod(factor.size for factor in factors)
        return [-1, 1, size, size]
    own = dimensions[extent.dimension]
    return [extent.dimension, own.step, own.low, own.high]


def _extent(extent: Extent | None, size: int = 0) -> Numbers:
    own = extent or Extent(0, 0, size)
    return [own.dimension, own.times, own.plus, own.over, own.step]


def _valid(factors: Sequence[Factor]) -> Numbers:
    parts = [[f.size, len(f.parts), *(_extent(f.extent, f.size) if not f.parts else _parts(f.parts))] for f in factors]
    return _list(parts)


def _parts(parts: Sequence[Sequence[Factor]]) -> Numbers:
    return [n for part in parts for n in _valid(part)]


def _spans(tensor: TensorRecord, form: Sequence[tuple[Factor, ...]]) -> Numbers:
    """Return a tensor's first axes up to the last free one, each as a factor with one part."""
    count = max((i + 1 for i, axis in enumerate(form) if any(factor.is_free for factor in axis)), default=0)
    axes = [Factor(math.prod(f.size for f in axis), parts=(axis,)) for axis in form[:count]]
    unit = math.prod(tensor.type.shape[count:]) * tensor.type.dtype.size_bytes
    return [unit, math.prod(axis.size for axis in axes), *_valid(axes)]


def _cost(cost: Cost) -> Numbers:
    times = [sample.time_ns for sample in cost.samples]
    low, high = (min(times) / 2, 2 * max(times)) if times else (-math.inf, math.inf)
    terms = [[[*term.exponents, _bits(term.coefficient)] for term in side] for side in (cost.above, cost.below)]
    return [cost.step, _bits(low), _bits(high), *cost.scales, *(n for side in terms for n in _list(side))]


def _hidden(hidden: Hidden) -> Numbers:
    found = [KINDS.index(hidden.kind)]
    if hidden.kind in ("mask", "order"):
        factors = [factor for axis in hidden.axes.values() for factor in axis]
        return [*found, math.prod(factor.size for factor in factors), *_valid(factors)]
    if hidden.kind == "end":
        return [*found, hidden.offset, *_extent(hidden.factors[0].extent, hidden.factors[0].size)]
    if hidden.kind == "number":
        extents = [_extent(factor.extent, factor.size) for factor in hidden.factors]
        return [*found, _bits(hidden.coefficient), _bits(hidden.power), *_list(extents)]
    if places := hidden.places:
        extents = [_extent(extent, 1) for extent in (places.start, places.size, places.out)]
        own = [MODES.index(places.mode), places.step, int(places.out is not None)]
        return [*found, *own, *(n for extent in extents for n in extent)]
    if table := hidden.table:
        rows = [[*row, *(row[-1:] or (0.0,)) * (math.prod(hidden.shape) - len(row))] for row in table.rows]
        return [*found, table.dimension, table.low, len(rows), *(_bits(x) for row in rows for x in row)]
    return found
