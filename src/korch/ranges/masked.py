"""The primitives of one model at several sizes -> its primitives for all sizes up to the largest.

The inputs of the result are padded with zeros to the largest size. `mask.py` states an invariant of its values, and
the rules of `free.py` preserve it for each primitive, so that the outputs, cut to the model's sizes, are the model's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.errors import UnsupportedError
from korch.primitive.gathers import gather
from korch.primitive.graph import Constant, GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array, Attributes
from korch.primitive.ops import OPS
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.reference import body_of
from korch.ranges.form import (
    Dimension,
    Extent,
    Factor,
    Form,
    Hidden,
    Places,
    Sizes,
    axis_of,
    extent,
    is_free,
    prefix,
    sizes_input,
)
from korch.ranges.free import rule_of
from korch.ranges.lockstep import AmbiguousError, LockOperand, Lockstep, Samples, align, refusal
from korch.ranges.mask import Fill, Masks, Value, plain
from korch.ranges.plan import RangePlan
from korch.ranges.samples import FEW, MANY, sample, sizes_near, sweep
from korch.ranges.site import Site, fit, fixed, tabulated


@dataclass(frozen=True)
class Masked:
    """A model for all sizes up to some."""

    graph: PrimitiveGraph  # its primitives; hidden inputs come last
    plan: RangePlan  # how inputs and outputs of a size correspond to those of the graph
    # sizes besides `plan.timed` for which a separate plan is searched among kernels that were timed
    others: tuple[Sizes, ...] = ()
    # sizes at which plans are compared with the model, the first of them before they are timed
    checked: tuple[Sizes, ...] = ()
    model: PrimitiveGraph | None = None  # the model's primitives at the first of the sizes `checked`

    @property
    def share(self) -> float:
        """The work of a run at the timed or checked sizes, at most, as a fraction of the largest size's work."""
        known = [sizes for sizes in (*self.checked[:1], self.plan.timed, *self.others) if sizes]
        return max((share_of(sizes, self.plan.sizes) for sizes in known), default=1.0)

    @property
    def compared(self) -> list[float]:
        """The work at each of the sizes at which plans are compared, as a fraction of the largest size's work."""
        return [share_of(sizes, self.plan.sizes) for sizes in self.checked]


def share_of(sizes: Sizes, upper: Sizes) -> float:
    """Return the work at some sizes as a fraction of the work at the upper sizes."""
    return math.prod(n / most for n, most in zip(sizes, upper, strict=True))


def masked(
    dimensions: tuple[Dimension, ...],
    largest: Sizes,
    primitives: Callable[[Sizes], PrimitiveGraph],
    compared: Collection[int] = (),
) -> Masked:
    """Return a model's primitives for all sizes up to some.

    `compared`: numbers with which the model may compare sizes.

    Raises:
        UnsupportedError: there is no rule that makes a node correct for all sizes.
    """
    walk, found = _masked(dimensions, largest, primitives)
    lowest = tuple(d.low for d in dimensions)  # it is no sample if it is 1
    graph = primitives(lowest)
    for sizes in (lowest, *sizes_near(dimensions, largest, compared)):
        walk.check_constants(sizes, primitives(sizes))
    for (name, value), form in zip(graph.outputs, found.plan.outputs, strict=True):
        shape = tuple(math.prod(factor.at(lowest) for factor in axis) for axis in form)
        if shape != graph.types[value].shape:
            raise UnsupportedError(
                f"output {name!r} has shape {list(graph.types[value].shape)} at the smallest size, but {list(shape)} "
                "by the rule for the others",
                where=f"option --shape {', '.join(f'{d}={d.range_text}' for d in dimensions)}",
                hint="Begin the range at a larger size",
            )
    return found


def _masked(
    dimensions: tuple[Dimension, ...], largest: Sizes, primitives: Callable[[Sizes], PrimitiveGraph]
) -> tuple[_Walk, Masked]:
    """Mask a model with as few samples as determine what it does: a few, some more, or all sizes."""
    for count in (FEW, MANY):
        walk = _Walk(align(sample(dimensions, largest, primitives, count)))
        try:
            return walk, walk.run()
        except AmbiguousError as error:
            unclear = error
    samples = sweep(dimensions, largest, primitives)
    if samples is None:
        raise unclear
    try:
        walk = _Walk(align(samples))
        return walk, walk.run()
    except UnsupportedError:
        raise unclear from None  # at size 1, axes broadcast, so that other primitives may compute the same


def masked_part(samples: Samples, forms: Sequence[Form], known: list[Extent]) -> Masked:
    """Return the primitives of a part of a model for all sizes, as far as the samples determine them.

    Args:
        samples: the part at several sizes.
        forms: the forms of its inputs. Nothing is known of their elements beyond the valid ones.
        known: extents that may be among the factors of its axes; those that it has are added.

    Raises:
        UnsupportedError: there is no rule that makes a node correct for all sizes.
    """
    return _Walk(align(samples), known).run(forms)


def iterations_in(samples: Samples, attributes: Sequence[Attributes]) -> Samples:
    """Return the iterations of a loop as samples."""
    bodies = tuple(body_of(a.body) for a in attributes if isinstance(a, LoopAttributes))
    return replace(samples, graphs=bodies)


class _Walk:
    """`known`: extents that may be among the factors of an axis; None for those of the dimensions."""

    def __init__(self, lockstep: Lockstep, known: list[Extent] | None = None) -> None:
        self._lockstep, self._samples = lockstep, lockstep.samples
        self._builder = GraphBuilder()
        self._masks = Masks(self._builder)
        self._values: dict[int, Value] = {}
        own = [extent(d, own.step) for d, own in enumerate(self._samples.dimensions)]
        self._known = own if known is None else known

    def run(self, forms: Sequence[Form] | None = None) -> Masked:
        """Return the graph; `forms` as for `masked_part`, or None if the inputs are the model's, padded with zeros."""
        largest = self._samples.largest
        if forms is None:
            inputs = [self._input(name, value) for name, value in largest.inputs]
        else:
            inputs = [self._given(*one, form) for one, form in zip(largest.inputs, forms, strict=True)]
        for step in self._lockstep.steps:
            self._masks.verbs.origin = step.origin
            rule = rule_of(step.op, OPS[step.op].category)
            if rule is None:
                raise refusal(self._samples, step.origin, f"{step.op} has no rule for ranges of sizes")
            operands = [self._operand(operand, step.origin) for operand in step.operands]
            site = Site(self._lockstep, step, operands, self._masks, self._known)
            result = rule(site)
            for operand, value in zip(step.operands, site.operands, strict=True):
                if not operand.constants:
                    self._values[operand.value] = value  # masked for later primitives, too
            self._values[step.output] = result
            self._note(result.form)
        self._masks.input(sizes_input(len(self._samples.dimensions)))
        outputs = [self._output(name, operand) for name, operand in self._lockstep.outputs]
        plan = RangePlan(self._samples.sizes[0], tuple(inputs), tuple(outputs), self._masks.records())
        return Masked(self._builder.freeze(), plan)

    def check_constants(self, sizes: Sizes, graph: PrimitiveGraph) -> None:
        """Raise an error if what the samples say of constants is not true at some other sizes, with their graph."""
        samples = self._samples
        self._check(replace(samples, sizes=(*samples.sizes, sizes), graphs=(*samples.graphs, graph)))

    def _check(self, samples: Samples) -> None:
        """Raise an error if constants of some samples, or of iterations of loops in them, have no form."""
        try:
            lockstep = align(samples)
        except UnsupportedError:
            return  # axes of size 1 broadcast, so that other primitives may compute the same
        other = _Walk(lockstep, self._known)
        steps = [(step.origin, operand) for step in lockstep.steps for operand in step.operands]
        for origin, operand in (*steps, *((f"output {name!r}", operand) for name, operand in lockstep.outputs)):
            if operand.constants:
                other._operand(operand, origin)
        for step in lockstep.steps:
            if step.op == "loop":
                self._check(iterations_in(samples, step.attributes))

    def _note(self, form: Form) -> None:
        for axis in form:
            for factor in axis or ():
                if factor.extent is not None and factor.extent not in self._known:
                    self._known.append(factor.extent)

    def _input(self, name: str, value: int) -> tuple[tuple[Factor, ...], ...]:
        form = []
        for vector in self._lockstep.shapes[value]:
            factors = fit(self._samples, vector, self._known)
            if factors is None:
                raise refusal(self._samples, f"input {name!r}", "an axis follows from no dimension")
            form.append(factors)
        id_ = self._builder.input(name, self._samples.largest.types[value])
        self._values[value] = plain(id_, tuple(form), [Fill(0)] * len(form))
        return tuple(form)

    def _given(self, name: str, value: int, form: Form) -> tuple[tuple[Factor, ...], ...]:
        """Add an input of a part of a model."""
        self._values[value] = plain(self._builder.input(name, self._samples.largest.types[value]), form)
        return tuple(axis or () for axis in form)

    def _output(self, name: str, operand: LockOperand) -> tuple[tuple[Factor, ...], ...]:
        value = self._operand(operand, f"output {name!r}")
        shape = (
            tuple(zip(*(c.type.shape for c in operand.constants), strict=True))
            if operand.constants
            else self._lockstep.shapes[operand.value]
        )
        form = []
        for axis, vector in zip(value.form, shape, strict=True):
            factors = fit(self._samples, vector, self._known) if axis is None else axis
            if factors is None:
                raise refusal(self._samples, f"output {name!r}", "an axis follows from no dimension")
            form.append(factors)
        self._builder.output(name, value.id)
        return tuple(form)

    def _operand(self, operand: LockOperand, origin: str) -> Value:
        if not operand.constants:
            return self._values[operand.value]
        constants = operand.constants
        first, shapes = constants[0], tuple(zip(*(c.type.shape for c in constants), strict=True))
        if all(constant.is_uniform for constant in constants) and first.array.dtype != np.bool_:
            form = tuple(() if set(vector) == {1} else None for vector in shapes)
            if len({constant.array.reshape(-1)[0].tobytes() for constant in constants}) == 1:
                return plain(self._builder.constant(first.array), form)
            return self._number(constants, form, origin)
        if len({constant.digest for constant in constants}) == 1:
            factors = [fit(self._samples, vector, ()) or () for vector in shapes]
            return plain(self._builder.constant(first.array), tuple(factors))
        return self._shifted(constants, shapes, origin) or self._table(constants, shapes, origin)

    def _shifted(self, constants: Sequence[Constant], shapes: Sequence[Sizes], origin: str) -> Value | None:
        """Return integers that are the largest sample's plus a number of each sample; None if they are not."""
        first = constants[0].array
        if not all(map(fixed, shapes)) or first.dtype.kind != "i" or not first.size:
            return None
        more = [constant.array - first for constant in constants]
        if any(len(np.unique(own)) > 1 for own in more):
            return None
        least, form = first.min(), tuple(axis_of([Factor(vector[0])]) for vector in shapes)
        whole = np.broadcast_to(least, first.shape)
        numbers = [Constant.of(np.broadcast_to(least + own.reshape(-1)[0], first.shape)) for own in more]
        number = self._number(numbers, form, origin)
        rest = self._builder.constant(first - whole)
        return plain(self._masks.verbs.add("add", number.id, rest), form)

    def _table(self, constants: Sequence[Constant], shapes: Sequence[Sizes], origin: str) -> Value:
        """Return a constant that has a leading part of the largest sample's elements in each smaller sample."""
        form = [fit(self._samples, vector, self._known) for vector in shapes]
        axes = [axis for axis in form if axis is not None]
        if len(axes) < len(form):
            raise refusal(self._samples, origin, "a constant depends on the size")
        if not any(map(is_free, axes)):
            return self._tabulated(constants, axes, origin)
        factors = [factor for axis in axes for factor in axis]
        whole = constants[0].array.reshape([factor.size for factor in factors])
        parts = [whole[tuple(slice(f.at(sizes)) for f in factors)].reshape(-1) for sizes in self._samples.sizes]
        if all(_is_same(part, c.array.reshape(-1)) for part, c in zip(parts, constants, strict=True)):
            return plain(self._builder.constant(constants[0].array), tuple(axes))
        return self._with_ends(constants, axes, origin)

    def _with_ends(self, constants: Sequence[Constant], axes: Sequence[tuple[Factor, ...]], origin: str) -> Value:
        """Return a constant of which the last elements are those of the largest sample's end, at the size of a run."""
        lines = {axis: prefix(factors) for axis, factors in enumerate(axes) if is_free(factors)}
        lows = [d.low for d in self._samples.dimensions]
        # Which elements are those of the end: as many as half of the smallest size, as this size, or all.
        for share in (2, 1, 0):
            places = {
                axis: Places(extent(0, 0, along.at(lows) // share) if share else along, 1, along, "ends")
                for axis, along in lines.items()
                if along is not None
            }
            if len(places) == len(lines) and self._has_ends(constants, places):
                break
        else:
            return self._tabulated(constants, axes, origin)
        whole = constants[0].array
        id_ = self._builder.constant(whole)
        for axis, own in places.items():
            id_ = gather(self._masks.verbs, id_, self._masks.places(whole.shape[axis], own), axis)
        return plain(id_, tuple(axes))

    def _has_ends(self, constants: Sequence[Constant], places: Mapping[int, Places]) -> bool:
        """Return whether the elements of each sample are those of the largest one at some places along axes."""
        for sizes, constant in zip(self._samples.sizes, constants, strict=True):
            part = constants[0].array
            for axis, own in places.items():
                part = np.take(part, own.array(part.shape[axis], sizes)[: constant.array.shape[axis]], axis)
            if not _is_same(part, constant.array):
                return False
        return True

    def _tabulated(self, constants: Sequence[Constant], axes: Sequence[tuple[Factor, ...]], origin: str) -> Value:
        """Return a constant whose elements are listed for each size: a product of vectors along its axes."""
        unclear = refusal(self._samples, origin, "the elements of a constant depend on the size")
        vectors = [_outer(constant.array) for constant in constants]
        first, verbs = constants[0].type, self._masks.verbs
        along = [axis for axis, factors in enumerate(axes) if math.prod(f.size for f in factors) > 1]
        if any(own is None for own in vectors) or not along:
            raise unclear
        found = []
        for axis in along:
            table = tabulated(self._samples, [own[axis] for own in vectors if own is not None], unclear)
            hidden = Hidden("", "table", axes[axis], first.rank, axis, first.dtype.value, table=table)
            found.append(verbs.broadcast(self._masks.input(hidden), first.shape))
        return plain(functools.reduce(lambda a, b: verbs.add("mul", a, b), found), tuple(axes))

    def _number(self, constants: Sequence[Constant], form: Form, origin: str) -> Value:
        """Return a uniform constant whose number is a function of the sizes."""
        first = constants[0]
        numbers = [constant.scalar for constant in constants]
        found = self._function([float(number) for number in numbers], first.array.dtype)
        rank, dtype = first.type.rank, first.type.dtype.value
        if found is None:
            texts = " or ".join(f"{float(number):g}" for number in numbers[:MANY])
            unclear = refusal(self._samples, origin, f"it computes with {texts}, which no dimension explains")
            table = tabulated(self._samples, [np.array([number]) for number in numbers], unclear)
            number = Hidden("", "table", (Factor(1),), rank, 0, dtype, table=table)
        else:
            factors, coefficient, power = found
            number = Hidden("", "number", factors, rank, 0, dtype, 0, coefficient, power)
        id_ = self._masks.verbs.broadcast(self._masks.input(number), first.type.shape)
        return plain(id_, form)

    def _function(self, numbers: Sequence[float], dtype: np.dtype) -> tuple[tuple[Factor, ...], float, float] | None:
        """Return factors, a coefficient and a power that give a number in all samples; None if there are none."""
        if not all(np.isfinite(numbers)) or not numbers[0]:
            return None
        sizes = self._samples.sizes
        pairs: list[tuple[Extent, ...]] = [(e.then(more),) for more in (0, -1, 1) for e in self._known]
        if dtype.kind in "iu":  # such as the place of the first of eight rows that end at n
            more = [int(numbers[0]) - e.at(sizes[0]) for e in self._known]
            pairs += [(e.then(own),) for e, own in zip(self._known, more, strict=True)]
        pairs += [(a, b) for i, a in enumerate(self._known) for b in self._known[i:]]
        for extents in pairs:
            counts = [float(np.prod([e.at(s) for e in extents])) for s in sizes]
            if any(bool(number) != bool(count) for number, count in zip(numbers, counts, strict=True)):
                continue
            for power in (1.0, -1.0, 0.5, -0.5) if min(counts) >= 0 else (1.0,):
                coefficient = numbers[0] / counts[0] ** power
                rounded = float(np.format_float_positional(coefficient, 6, fractional=False))
                coefficient = rounded if abs(rounded - coefficient) <= 1e-6 * abs(coefficient) else coefficient
                # Integers are compared before they are rounded, so that 0.99 n is not n - 1.
                kept = np.dtype(np.float64) if dtype.kind in "iu" else dtype
                made = [np.asarray(count and coefficient * count**power).astype(kept) for count in counts]
                exact = [np.asarray(number).astype(kept) for number in numbers]
                tolerance = 1e-12 if dtype.kind in "iu" else 2 * np.finfo(np.float32).eps
                if all(abs(float(a) - float(b)) <= tolerance * abs(float(b)) for a, b in zip(made, exact, strict=True)):
                    return tuple(Factor(e.at(sizes[0]), e) for e in extents), coefficient, power
        return None


def _outer(array: Array) -> list[Array] | None:
    """Return vectors along the axes of which an array is the product; None if there are none."""
    longest = max(range(array.ndim), key=lambda axis: array.shape[axis], default=0)
    if array.size == max(array.shape, default=1):
        return [array.reshape(-1) if axis == longest else np.ones(n) for axis, n in enumerate(array.shape)]
    if array.dtype.kind not in "iuf" or not array.size or not np.array_equal(array, np.round(array)):
        return None
    found, rest = [], array.astype(np.int64)
    for _ in range(array.ndim):
        lines = rest.reshape(len(rest), -1)
        own = lines[:, 0] // max(1, np.gcd.reduce(lines[:, 0]))
        if not own[0]:
            return None
        found.append(own)
        rest = rest[0] // own[0]
    found[-1] = found[-1] * rest
    return found if np.array_equal(functools.reduce(np.multiply.outer, found), array) else None


def _is_same(part: Array, other: Array) -> bool:
    return np.array_equal(part, other, equal_nan=part.dtype.kind == "f")
