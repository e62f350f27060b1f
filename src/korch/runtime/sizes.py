"""Plans -> numbers that say which shapes of the inputs each plan takes, and how: `sizes.bin`, for `korch_fit.c`.

All are integers of 64 bits; others stand for a float64 of the same bits. They are:

- the place of the forms, and the number of dimensions; the most rows of a state, how many rows are new if no input says
  it, and whether rows may be run in parts (0 without states); and for each state, its number of groups of rows and the
  bytes of a row;
- plans: for each, its number, what of the inputs it has, what else it reads, and what of the outputs it has;
- forms of inputs: for each, its length, whether its rows follow others, the most new rows of a part, the place of its
  plans in it, the sizes of the inputs, the least size and the number of sizes of each dimension, and the places in the
  order of all sizes at which another plan begins, with the place of this plan. Of a model with states, the first form
  that allows a part runs it;
- a checksum of all numbers before.

A list is preceded by its length. With states, the one dimension is the number of all rows after a part, and that of new
rows follows it. Functions of C with similar names read what the functions here return.
"""

import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import ArtifactError, UnsupportedError
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.ranges.form import Dimension, Extent, Factor, Hidden
from korch.ranges.plan import RangePlan
from korch.ranges.state import PAST, ROWS, TOTAL
from korch.runtime.choice import PlanChoice
from korch.runtime.ranged import Ranges
from korch.runtime.record import PlanRecord, TensorRecord
from korch.runtime.rows import StatefulModel, StateTensor
from korch.runtime.stateful import States

Numbers = list[int]
Form = Sequence[tuple[Factor, ...]]

KINDS = ("mask", "order", "end", "number", "places", "table", "sizes")
MODES = ("edge", "reflect", "wrap", "ends")

WHOLE, NEW, ALL, KEPT, APPENDED = range(5)
"""What a plan has of a tensor: all of it; new rows; all rows; of a state: all of it, or the first rows."""


@dataclass(frozen=True, slots=True)
class _Form:
    """Inputs, and the plans among which their sizes choose."""

    axes: Numbers  # the sizes of the inputs
    dimensions: Sequence[Dimension]
    served: Sequence[RangePlan]
    first: int  # the number of the first of these plans
    follows: bool = False  # whether the rows follow others
    most: int = 1  # the most new rows of a part

    def numbers(self, places: Sequence[int]) -> Numbers:
        """Return the numbers of the form; `places` has the place of each plan."""
        order = sorted(range(len(self.served)), key=lambda i: math.prod(self.served[i].sizes))
        runs = PlanChoice(self.dimensions, [self.served[i] for i in order]).runs()
        ends = (n for d in self.dimensions for n in (d.low, d.high - d.low + 1))
        rest = [*ends, *_list([[place, places[self.first + order[k]]] for place, k in runs])]
        start = 4 + len(self.axes)
        return [start + len(rest), int(self.follows), self.most, start, *self.axes, *rest]


def sizes_of_plans(plans: Sequence[PlanRecord], ranges: Ranges | None = None) -> bytes:
    """Return the numbers of plans for a range; without a range, of plans that take the shapes of their own inputs."""
    served = list(ranges.plans) if ranges else [_fixed(plan) for plan in plans]
    dimensions = ranges.dimensions if ranges else ()
    if ranges:
        largest = max(served, key=lambda plan: math.prod(plan.sizes))
        forms = [_Form(_axes(largest.inputs, dimensions), dimensions, served, 0)]
    else:
        forms = [_Form(_axes(own.inputs, ()), (), [own], i) for i, own in enumerate(served)]
    rows = [
        _plan(plan, own, *([[i, WHOLE, 0, 0] for i in range(len(some))] for some in (plan.inputs, plan.outputs)))
        for plan, own in zip(plans, served, strict=True)
    ]
    return _written([len(dimensions), 0, 0, 0, *_list([])], rows, forms)


def sizes_of_states(plans: Sequence[PlanRecord], states: States) -> bytes:
    """Return the numbers of the plans of a model with states.

    Raises:
        UnsupportedError: no plan runs first rows, or a tensor has rows that programs in C can't give or take.
        ArtifactError: a plan returns a state in another type than that in which sessions keep it.
    """
    model, steps, memory = states.model, states.steps, states.model.memory()
    if all(own.rows for own in steps):
        raise UnsupportedError(
            "no plan runs first rows, and programs in C can't assign them",
            expected="ranges of new rows and of earlier rows from 0, as in --shape past=0..1023 --shape rows=1..128",
        )
    kept = [(output, DType.of(array.dtype)) for (_, output), (array, _) in zip(model.places, memory, strict=True)]
    if any(plan.outputs[output].type.dtype is not dtype for plan in plans for output, dtype in kept):
        raise ArtifactError("a plan returns a state in another type than sessions keep it in", hint="Build it again")
    sizes = [[math.prod(a.shape[:axis]), a.nbytes // math.prod(a.shape[: axis + 1])] for a, axis in memory]
    given = [(i, tensor) for i, tensor in enumerate(model.inputs) if i not in dict(model.places)]
    ends = {ROWS: [1, 1, 1, model.capacity], TOTAL: [0, 1, 1, model.capacity]}
    parts = {is_first: list(_parts_of(model, memory, is_first=is_first)) for is_first in (False, True)}
    axes = _list([[i, *_list([ends.get(a) or [-1, 1, int(a), int(a)] for a in t.axes])] for i, t in given])
    forms: list[_Form] = []
    rows: list[Numbers] = []
    for own in steps:
        dimensions, served = own.ranges.dimensions, own.ranges.plans
        forms.append(_Form(axes, dimensions, served, len(rows), own.rows > 0, own.rows or dimensions[0].high))
        rows += [_plan(plans[len(rows) + i], one, *parts[not own.rows]) for i, one in enumerate(served)]
    head = [1, model.capacity, model.rows, int(model.is_causal), *_list(sizes)]
    return _written(head, rows, sorted(forms, key=lambda form: -form.most))


def _parts_of(model: StatefulModel, memory: Sequence[tuple[Array, int]], *, is_first: bool) -> Iterator[list[Numbers]]:
    """Yield, for inputs and outputs, which tensor of the user or which state each is, and what the plan has of it."""
    for end, tensors in enumerate((model.inputs, model.outputs)):
        state = {pair[end]: k for k, pair in enumerate(model.places)}
        found: list[Numbers] = []
        for i in range(max(len(tensors), 1 + max(state))):
            if i not in state:
                number = sum(k not in state for k in range(i))
                found.append([number, *_part(tensors[i], is_output=end == 1)])
            elif end == 1 and is_first:
                array, axis = memory[state[i]]
                found.append([state[i], APPENDED, axis, array.nbytes // math.prod(array.shape[: axis + 1])])
            else:
                found.append([state[i], KEPT, 0, 0])
        yield found


def _part(tensor: StateTensor, *, is_output: bool) -> Numbers:
    """Return what a plan has of a tensor that is no state, along which axis, and the bytes of a row."""
    roles = [(i, role) for i, role in enumerate(tensor.axes) if role in (PAST, ROWS, TOTAL)]
    if not roles:
        return [WHOLE, 0, 0]
    (axis, role), *more = roles
    if more or role == PAST or (role == TOTAL and is_output):
        kind = "output" if is_output else "input"
        what = f"the {kind} {tensor.name!r} has {' and '.join(role for _, role in roles)} rows"
        raise UnsupportedError(what, expected=f"{'new rows' if is_output else 'new rows or all rows'}, in C")
    size = math.prod(int(n) for n in tensor.axes[axis + 1 :]) * DType(tensor.dtype).size_bytes
    return [NEW if role == ROWS else ALL, axis, size]


def _written(head: Numbers, plans: Sequence[Numbers], forms: Sequence[_Form]) -> bytes:
    """Return all numbers; `plans` are without their own number."""
    found, places = [0, *head], []
    for i, own in enumerate(plans):
        places.append(len(found))
        found += [i, *own]
    found[0] = len(found)
    numbers = np.array([*found, *_list([form.numbers(places) for form in forms])], np.int64).tobytes()
    return numbers + _checksum(numbers)


def _checksum(numbers: bytes) -> bytes:
    """Return a checksum like FNV-1a, but of numbers instead of bytes."""
    found = 1469598103934665603
    for (number,) in struct.iter_unpack("=Q", numbers):
        found = (found ^ number) * 1099511628211 % 2**64
    return struct.pack("=Q", found)


def _fixed(plan: PlanRecord) -> RangePlan:
    inputs = tuple(tuple((Factor(n),) for n in tensor.type.shape) for tensor in plan.inputs)
    return RangePlan((), inputs, (), is_exact=True)


def _axes(inputs: Sequence[Sequence[tuple[Factor, ...]]], dimensions: Sequence[Dimension]) -> Numbers:
    return _list([[i, *_list([_axis(factors, dimensions) for factors in form])] for i, form in enumerate(inputs)])


def _plan(plan: PlanRecord, served: RangePlan, inputs: Sequence[Numbers], outputs: Sequence[Numbers]) -> Numbers:
    """Return the numbers of a plan; `inputs` and `outputs` say what it has of which tensor or state."""

    def tensors(records: Sequence[TensorRecord], forms: Sequence[Form], parts: Sequence[Numbers]) -> Iterator[Numbers]:
        for tensor, form, part in zip(records, forms, parts, strict=False):  # hidden inputs come last
            yield [*_spans(tensor, () if served.is_exact or part[1] == KEPT else form), *part]

    return [
        *_list(list(tensors(plan.inputs, served.inputs, inputs))),
        *(n for hidden in served.hidden for n in _hidden(hidden)),
        *(n for own in tensors(plan.outputs, served.outputs or [()] * len(plan.outputs), outputs) for n in own),
    ]


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
    return [unit, _room(axes), *_valid(axes)]


def _room(factors: Sequence[Factor]) -> int:
    """Return the bytes that `read_valid` needs to read factors: each is read behind the elements that it makes."""
    found = count = 1
    for factor in factors:
        count *= factor.size
        begins = itertools.accumulate((math.prod(f.size for f in part) for part in factor.parts), initial=0)
        parts = (begin + _room(part) for begin, part in zip(begins, factor.parts, strict=False))
        found = max(found, count + factor.size, *(count + size for size in parts))
    return found


def _hidden(hidden: Hidden) -> Numbers:
    found = [KINDS.index(hidden.kind)]
    if hidden.kind in ("mask", "order"):
        factors = [factor for axis in hidden.axes.values() for factor in axis]
        return [*found, _room(factors), *_valid(factors)]
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
