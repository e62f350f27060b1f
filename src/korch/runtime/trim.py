"""A plan for the largest size of a range -> its kernels, which compute what smaller sizes need only.

A kernel that is no tile program, or whose elements are all needed and all read, stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Candidate
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.ranges.filled import ends
from korch.ranges.form import Extent, RangePlan
from korch.ranges.needed import Ends, Need, needs
from korch.runtime.endings import Ending, ending_of, place_of, program_of
from korch.runtime.program import Step
from korch.target import Target
from korch.tile.ends import KEYS, ended
from korch.tile.growth import TextLimitError
from korch.tile.program import Level, TileProgram
from korch.tile.trim import LIVE, Count, Needed, trimmed


def trim_steps(
    graph: PrimitiveGraph, steps: Sequence[Step[Kernel]], plan: RangePlan, target: Target
) -> tuple[Step[Kernel], ...]:
    """Return the steps of a plan with kernels that read the size for which they run.

    Args:
        graph: the plan's graph.
        steps: the kernels in the order in which they run.
        plan: how it serves sizes.
        target: the machine.
    """
    primitives = [p for step in steps for p in step.candidate.group.primitives]
    found = ends(graph, primitives, plan)
    endings = [ending_of(graph, step.candidate, step.kernel, found, plan, target) for step in steps]
    trimmer = _Trimmer(plan, target)
    needed = needs(graph, primitives, plan, _read(found, _ended_by_all(steps, endings), target.lanes))
    return tuple(
        replace(step, kernel=trimmer.kernel(step, ending, needed)) for step, ending in zip(steps, endings, strict=True)
    )


def sized(kernel: Kernel, candidate: Candidate, plan: RangePlan, target: Target) -> Kernel:
    """Return the kernel that leaves out what is likely not needed of a candidate's results.

    Args:
        kernel: the whole kernel.
        candidate: what it is for, with `served`.
        plan: how the plan serves sizes.
        target: the machine.
    """
    if candidate.served is None:
        return kernel
    found = dict(zip(candidate.group.outputs, candidate.served.needs, strict=True))
    return _Trimmer(plan, target).kernel(Step(candidate, kernel), None, found)


def _ended_by_all(steps: Sequence[Step[Kernel]], endings: Sequence[Ending | None]) -> set[tuple[int, int]]:
    """Return the reductions that all kernels end which have them."""
    own = [ending.reductions if ending is not None else frozenset() for ending in endings]
    some = {reduction for reductions in own for reduction in reductions}
    for step, reductions in zip(steps, own, strict=True):
        some -= {(p, axis) for p, axis in some - reductions if p in step.candidate.group.primitives}
    return some


def _read(found: Mapping[int, Ends], ended: Collection[tuple[int, int]], step: int) -> dict[int, Ends]:
    """Return how many elements reductions read that end with a multiple of `step`."""
    read: dict[int, dict[int, Extent]] = {}
    for p, axis in ended:
        read.setdefault(p, {})[axis] = found[p][axis].then(step - 1)
    return dict(read)


class _Trimmer:
    def __init__(self, plan: RangePlan, target: Target) -> None:
        self._plan, self._target = plan, target

    def kernel(self, step: Step[Kernel], ending: Ending | None, found: Mapping[int, Need]) -> Kernel:
        """Return a kernel that computes what is needed of it, with reductions that end."""
        kernel, candidate = step.kernel, step.candidate
        for smaller in self._smaller(step, ending, found):
            try:
                made = kernel_of(
                    smaller.program, candidate.group, candidate.offer, self._target, counts=dict(smaller.counts)
                )
            except (TextLimitError, InvalidGraphError):
                continue
            return replace(made, program=None, size_input=self._plan.size_inputs[smaller.dimension])
        return kernel

    def _smaller(self, step: Step[Kernel], ending: Ending | None, found: Mapping[int, Need]) -> Iterator[_Smaller]:
        """Yield the programs that leave most out first."""
        program, need = program_of(step.kernel), found.get(step.candidate.group.outputs[0], {})
        if program is None:
            return
        rows = [own for axis in need if (own := self._rows(step.candidate, program, found, axis)) is not None]
        wholes = [_Smaller(program, (), ending.extent.dimension)] if ending is not None else []
        for own in [*rows, *wholes]:
            if ending is None:
                yield from self._with_columns(step.candidate, own, found)
                yield own
            elif own.dimension == ending.extent.dimension:
                yield from self._with_ending(own, ending)
        if not rows and ending is None:
            dimensions = {extent.dimension for extents in need.values() for extent in extents if extent.times}
            for dimension in dimensions & self._plan.size_inputs.keys():
                yield from self._with_columns(step.candidate, _Smaller(program, (), dimension), found)

    def _rows(
        self, candidate: Candidate, program: TileProgram, found: Mapping[int, Need], axis: int
    ) -> _Smaller | None:
        """Return a program that computes the needed elements along an axis of its outputs only."""
        extents = found[candidate.group.outputs[0]][axis]
        dimensions = {extent.dimension for extent in extents if extent.times}
        dimension = min(dimensions, default=-1)
        if len(dimensions) > 1 or dimension not in self._plan.size_inputs:
            return None
        needed = _needed(candidate, program, found, axis, extents)
        smaller = trimmed(program, needed, self._target.threads) if needed else None
        if smaller is None:
            return None
        return _Smaller(smaller, ((LIVE, _count(extents)),), dimension, axis)

    def _with_ending(self, own: _Smaller, ending: Ending) -> Iterator[_Smaller]:
        smaller = ended(own.program, ending.known, self._target.lanes)
        if smaller is not None:
            count = replace(_count((ending.extent,)), step=self._target.lanes)
            yield replace(own, program=smaller, counts=(*own.counts, (KEYS, count)))

    def _with_columns(self, candidate: Candidate, own: _Smaller, found: Mapping[int, Need]) -> Iterator[_Smaller]:
        """Yield a program that leaves out what is not needed along another axis of its outputs, too."""
        for axis, extents in found[candidate.group.outputs[0]].items():
            if axis == own.axis or {extent.dimension for extent in extents if extent.times} != {own.dimension}:
                continue
            needed = _needed(candidate, own.program, found, axis, extents)
            smaller = ended(own.program, needed, self._target.lanes) if needed else None
            if smaller is not None:
                count = replace(_count(extents), step=self._target.lanes)
                yield replace(own, program=smaller, counts=(*own.counts, (KEYS, count)))


@dataclass(frozen=True)
class _Smaller:
    """A program that leaves something out, with how its parameters follow from the size of a dimension.

    Attributes:
        program: the program.
        counts: by parameter.
        dimension: the dimension.
        axis: of the first output, along which elements are left out, or -1.
    """

    program: TileProgram
    counts: tuple[tuple[str, Count], ...]
    dimension: int
    axis: int = -1


def _count(extents: Iterable[Extent]) -> Count:
    return Count(tuple(sorted((extent.times, extent.plus, extent.over) for extent in extents)))


def _needed(
    candidate: Candidate, program: TileProgram, found: Mapping[int, Need], axis: int, extents: frozenset[Extent]
) -> dict[str, Needed]:
    """Return, by output buffer, where the needed elements along an axis lie; nothing if that is not known."""
    buffers = [buffer.name for buffer in program.buffers if buffer.level is Level.OUTPUT]
    group, offer, needed = candidate.group, candidate.offer, dict[str, Needed]()
    length = group.output_types[0].shape[axis]
    for name, value, type_, layout in zip(buffers, group.outputs, group.output_types, offer.outputs, strict=True):
        own = [a for a, e in found[value].items() if e == extents] if value in found else _as_long(type_.shape, length)
        own = [axis] if axis in own else own
        place = place_of(layout, type_.shape, own[0]) if own else None
        if place is None:
            return {}
        needed[name] = place
    return needed


def _as_long(shape: tuple[int, ...], length: int) -> list[int]:
    """Return the axes of some length: of a value that nothing reads, any of them may be cut."""
    return [axis for axis, size in enumerate(shape) if size == length]
