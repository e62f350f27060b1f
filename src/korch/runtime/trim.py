"""A plan for the largest size of a range -> kernels that compute only the elements that a smaller size needs.

Kernels without a tile program, and kernels whose elements are all needed, are not changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.ranges.endings import Ending, endings_of, read
from korch.ranges.filled import ends
from korch.ranges.form import Extent
from korch.ranges.needed import Need, needs
from korch.ranges.plan import RangePlan
from korch.runtime.bind import PlanStep
from korch.target import Target
from korch.tile.ir.growth import TextLimitError, UnprintableError
from korch.tile.ir.program import Level, Parameter, TileProgram
from korch.tile.trim.ends import KEYS, ended
from korch.tile.trim.shares import PART, by_rows, shares_of
from korch.tile.trim.trim import LIVE, Count, Needed, trimmed

logger = logging.getLogger("korch.runtime")


def trim_steps(
    graph: PrimitiveGraph, steps: Sequence[PlanStep[Kernel]], plan: RangePlan, target: Target
) -> tuple[PlanStep[Kernel], ...]:
    """Return the steps of a plan, with kernels that read the current size and skip unneeded work.

    Args:
        graph: the plan's graph.
        steps: the kernels in the order in which they run.
        plan: how the plan serves sizes.
        target: the machine.
    """
    primitives = [p for step in steps for p in step.candidate.group.primitives]
    found, trimmer = ends(graph, primitives, plan), _Trimmer(plan, target)
    endings = []
    for step in steps:
        group = step.candidate.group
        options = endings_of(graph, group.primitives, group.inputs, found)
        endings.append(trimmer.ending(step.candidate, step.kernel, options))
    needed = needs(graph, primitives, plan, read(found, _ended_by_all(steps, endings), target.lanes))
    return tuple(
        replace(step, kernel=trimmer.kernel(step.candidate, step.kernel, ending, needed))
        for step, ending in zip(steps, endings, strict=True)
    )


def sized(kernel: Kernel, candidate: Candidate, plan: RangePlan, target: Target) -> Kernel:
    """Return a kernel that skips the parts of a candidate's results that are probably not needed, and their inputs.

    Args:
        kernel: the complete kernel.
        candidate: the candidate of the kernel, with `served`.
        plan: how the plan serves sizes.
        target: the machine.
    """
    if candidate.served is None:
        return kernel
    found = dict(zip(candidate.group.outputs, candidate.served.needs, strict=True))
    trimmer = _Trimmer(plan, target)
    return trimmer.kernel(candidate, kernel, trimmer.ending(candidate, kernel, candidate.served.endings), found)


def _ended_by_all(steps: Sequence[PlanStep[Kernel]], endings: Sequence[Ending | None]) -> set[tuple[int, int]]:
    """Return the reductions that end early in every kernel that contains them."""
    own = [ending.reductions if ending is not None else frozenset() for ending in endings]
    some = {reduction for reductions in own for reduction in reductions}
    for step, reductions in zip(steps, own, strict=True):
        some -= {(p, axis) for p, axis in some - reductions if p in step.candidate.group.primitives}
    return some


class _Trimmer:
    def __init__(self, plan: RangePlan, target: Target) -> None:
        self._plan, self._target = plan, target

    def ending(self, candidate: Candidate, kernel: Kernel, options: Sequence[Ending]) -> Ending | None:
        """Return the first option by which reductions of a kernel can end early; None if there is none."""
        for ending in options:
            if self.kernel(candidate, kernel, ending, {}) is not kernel:
                return ending
        return None

    def kernel(self, candidate: Candidate, kernel: Kernel, ending: Ending | None, found: Mapping[int, Need]) -> Kernel:
        """Return a kernel that computes only the needed elements, with reductions that end early."""
        for smaller in self._smaller(candidate, kernel, ending, found):
            try:
                made = kernel_of(
                    smaller.program, candidate.group, candidate.offer, self._target, counts=dict(smaller.counts)
                )
            except (TextLimitError, UnprintableError):
                continue
            except InvalidGraphError as error:
                logger.warning("a kernel of %s is not trimmed: %s", candidate.provider, error, extra={"fault": True})
                continue
            return replace(made, marked="", size_input=self._plan.sizes_input)
        return kernel

    def _smaller(
        self, candidate: Candidate, kernel: Kernel, ending: Ending | None, found: Mapping[int, Need]
    ) -> Iterator[_Smaller]:
        """Yield smaller programs; those that skip most come first."""
        program, need = kernel.program, found.get(_leading(candidate, found), {})
        if program is None or kernel.has_state or kernel.libraries:
            return
        if ending is None and (in_two := self._rows_in_two(candidate, program, found)) is not None:
            yield in_two
        rows = [own for axis in need if (own := self._rows(candidate, program, found, axis)) is not None]
        wholes = [_Smaller(program, (), ending.extent.dimension)] if ending is not None else []
        for own in [*rows, *wholes]:
            if ending is None:
                yield from self._with_columns(candidate, own, found)
                yield own
            else:
                yield from self._with_ending(candidate, own, ending)
        if not rows and ending is None:
            for dimension in {dimension for extents in need.values() for dimension in _dimensions(extents)}:
                yield from self._with_columns(candidate, _Smaller(program, (), dimension), found)

    def _rows(
        self, candidate: Candidate, program: TileProgram, found: Mapping[int, Need], axis: int
    ) -> _Smaller | None:
        """Return a program that computes only the needed elements along an axis of its outputs."""
        dimensions = _dimensions(found[_leading(candidate, found)][axis])
        dimension = min(dimensions, default=-1)
        if len(dimensions) != 1:
            return None
        best, most = None, (0, 0)
        needed, extents = _needed(candidate, program, found, axis)
        for rows in _rows_of_one(candidate, found, axis):
            repeated = [extent.repeated(rows) for extent in extents]
            finer = {name: Needed(n.stride // rows, n.extent * rows) for name, n in needed.items()}
            if not finer or None in repeated or any(n.stride % rows for n in needed.values()):
                continue
            smaller = trimmed(program, finer, self._target.threads)
            if smaller is not None and (trims := _trims(program, smaller)) > most:
                count = _count([extent for extent in repeated if extent is not None])
                best, most = _Smaller(smaller, ((LIVE, count),), dimension, axis), trims
        return best

    def _rows_in_two(self, candidate: Candidate, program: TileProgram, found: Mapping[int, Need]) -> _Smaller | None:
        """Return a program that computes only the needed rows, which are numbered by an outer and an inner axis."""
        buffers = [buffer.name for buffer in program.buffers if buffer.level is Level.OUTPUT]
        group, needed, counted = candidate.group, dict[str, Needed](), set[_TwoAxes]()
        for name, value, type_, layout in zip(
            buffers, group.outputs, group.output_types, candidate.offer.outputs, strict=True
        ):
            two = _two_axes(found.get(value, {}), type_.shape)
            if two is None or not layout.is_plain:
                return None
            needed[name] = Needed(math.prod(type_.shape[two.axis + 2 :]), two.outer * two.inner)
            counted.add(replace(two, axis=0))
        if len(counted) != 1:
            return None
        smaller = trimmed(program, needed, self._target.threads)
        if smaller is None:
            return None
        (two,) = counted
        smaller = replace(smaller, parameters=(*smaller.parameters, Parameter(PART, 1, two.inner)))
        for before, stage in zip(program.stages, smaller.stages, strict=True):
            shares = shares_of(stage, smaller.parameter_ranges)
            if stage != before and (shares is None or by_rows(stage, shares) is None):
                return None
        inner, outer = _count(two.inner_extents), _count(two.outer_extents)
        counts = ((LIVE, replace(inner, rows=(outer, two.inner))), (PART, inner))
        return _Smaller(smaller, counts, outer.dimension)

    def _with_ending(self, candidate: Candidate, own: _Smaller, ending: Ending) -> Iterator[_Smaller]:
        known = _read_by(candidate, own.program, ending)
        smaller = ended(own.program, known, self._target.lanes) if known else None
        if smaller is not None:
            count = replace(_count((ending.extent,)), step=self._target.lanes)
            yield replace(own, program=smaller, counts=(*own.counts, (KEYS, count)))

    def _with_columns(self, candidate: Candidate, own: _Smaller, found: Mapping[int, Need]) -> Iterator[_Smaller]:
        """Yield a program that also skips unneeded elements along another axis of its outputs."""
        for axis, extents in found[_leading(candidate, found)].items():
            if axis == own.axis or _dimensions(extents) != {own.dimension}:
                continue
            needed, joint = _needed(candidate, own.program, found, axis)
            smaller = ended(own.program, needed, self._target.lanes) if needed else None
            if smaller is not None:
                count = replace(_count(joint), step=self._target.lanes)
                yield replace(own, program=smaller, counts=(*own.counts, (KEYS, count)))


@dataclass(frozen=True)
class _Smaller:
    """A program that skips elements, and how its parameters depend on the size of a dimension.

    Attributes:
        program: the program.
        counts: the formula of each parameter.
        dimension: the dimension.
        axis: the axis of the first output that is read along which elements are skipped, or -1.
    """

    program: TileProgram
    counts: tuple[tuple[str, Count], ...]
    dimension: int
    axis: int = -1


def _leading(candidate: Candidate, found: Mapping[int, Need]) -> int:
    """Return the first result of a candidate that is read; it need not be the first output."""
    outputs = candidate.group.outputs
    return next((value for value in outputs if value in found), outputs[0])


@dataclass(frozen=True, slots=True)
class _TwoAxes:
    """Two adjacent axes along which only the first elements are needed.

    Attributes:
        axis: the outer axis.
        outer: the length of the outer axis.
        inner: the length of the inner axis.
        outer_extents: the number of needed elements along the outer axis is the maximum of these.
        inner_extents: the same for the inner axis.
    """

    axis: int
    outer: int
    inner: int
    outer_extents: frozenset[Extent]
    inner_extents: frozenset[Extent]


def _two_axes(need: Need, shape: tuple[int, ...]) -> _TwoAxes | None:
    """Return the first axis longer than 1 and the next one, if both need only their first elements.

    The numbers of needed elements must depend on different dimensions.
    """
    axis = next((axis for axis, size in enumerate(shape) if size > 1), 0)
    outer, inner = need.get(axis, frozenset()), need.get(axis + 1, frozenset())
    dimensions = [_dimensions(extents) for extents in (outer, inner)]
    if any(len(own) != 1 for own in dimensions) or dimensions[0] == dimensions[1]:
        return None
    return _TwoAxes(axis, shape[axis], shape[axis + 1], outer, inner)


def _count(extents: Collection[Extent]) -> Count:
    (dimension,) = _dimensions(extents) or {0}
    return Count(tuple(sorted((e.times, e.plus, e.over, e.step) for e in extents)), dimension=dimension)


def _read_by(candidate: Candidate, program: TileProgram, ending: Ending) -> dict[str, Needed]:
    """Return, by input buffer, the places of the elements along reduced axes; nothing if they are not known."""
    buffers = [buffer.name for buffer in program.buffers if buffer.level is Level.INPUT]
    found = {}
    for k, axis in ending.axes:
        place = _place(candidate.offer.inputs[k], candidate.group.input_types[k].shape, axis)
        if place is None:
            return {}
        found[buffers[k]] = place
    return found


def _place(layout: Layout, shape: tuple[int, ...], axis: int) -> Needed | None:
    """Return the stride and the extent of an axis in a buffer; None if the layout has blocks along the axis."""
    if layout.block(axis) != 1:
        return None
    physical = layout.physical_shape(shape)
    return Needed(math.prod(physical[layout.order.index(axis) + 1 :]), shape[axis])


def _needed(
    candidate: Candidate, program: TileProgram, found: Mapping[int, Need], axis: int
) -> tuple[dict[str, Needed], frozenset[Extent]]:
    """Return, by output buffer, the places of the needed elements along an axis, and their largest number.

    The result is empty if the places are not known.
    """
    buffers = [buffer.name for buffer in program.buffers if buffer.level is Level.OUTPUT]
    group, offer, needed = candidate.group, candidate.offer, dict[str, Needed]()
    leading = _leading(candidate, found)
    joint, length = found[leading][axis], group.output_types[group.outputs.index(leading)].shape[axis]
    for name, value, type_, layout in zip(buffers, group.outputs, group.output_types, offer.outputs, strict=True):
        own = _as_long(type_.shape, length)
        if value in found:
            own = _alike(found[value], found[leading][axis], [a for a in own if a in found[value]])
        own = [axis] if axis in own else own
        place = _place(layout, type_.shape, own[0]) if own else None
        if place is None:
            return {}, frozenset()
        needed[name] = place
        joint |= found[value][own[0]] if value in found else frozenset()
    return needed, joint


def _alike(need: Need, extents: frozenset[Extent], axes: Sequence[int]) -> list[int]:
    """Return the axes with the same needed numbers of elements; if none, those that depend on the same dimension."""
    same = [axis for axis in axes if need[axis] == extents]
    return same or [axis for axis in axes if _dimensions(need[axis]) == _dimensions(extents)]


def _dimensions(extents: Iterable[Extent]) -> set[int]:
    """Return the dimensions on which the numbers of elements depend."""
    return {extent.dimension for extent in extents if extent.times}


def _rows_of_one(candidate: Candidate, found: Mapping[int, Need], axis: int) -> list[int]:
    """Return the numbers of rows into which each coordinate along an axis may be divided, largest first.

    The rows of a coordinate run along the axes between this axis and the last one of the first output that is read.
    With several rows for each coordinate, a task may end within a coordinate.
    """
    group = candidate.group
    shape = group.output_types[group.outputs.index(_leading(candidate, found))].shape
    return [*dict.fromkeys(math.prod(shape[axis + 1 : end]) for end in range(max(axis + 1, len(shape) - 1), axis, -1))]


def _trims(program: TileProgram, smaller: TileProgram) -> tuple[int, int]:
    """Return the number of stages in which a trimmed program skips elements, and of loops in tasks that end early."""
    stages = sum(a != b for a, b in zip(program.stages, smaller.stages, strict=True))
    leaves = [leaf for stage in smaller.stages for leaf in stage.leaves]
    axes = [axis for loops, step in leaves for axis in (*(loop.axis for loop in loops), *step.axes)]
    return stages, sum(axis.ragged is not None and not isinstance(axis.ragged[1], int) for axis in axes)


def _as_long(shape: tuple[int, ...], length: int) -> list[int]:
    """Return the axes of a given length; for a value that nothing reads, any of them may be cut."""
    return [axis for axis, size in enumerate(shape) if size == length]
