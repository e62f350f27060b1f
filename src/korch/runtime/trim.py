"""A plan for the largest size of a range -> its kernels, which compute what smaller sizes need only.

A kernel that is no tile program, or whose elements are all needed, stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from korch.candidate.candidate import Candidate
from korch.primitive.graph import PrimitiveGraph
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.ranges.form import Extent, RangePlan
from korch.ranges.needed import Need, needs
from korch.runtime.program import Step
from korch.target import Target
from korch.tile.growth import TextLimitError
from korch.tile.program import Level, TileProgram
from korch.tile.trim import Count, Needed, trimmed


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
    found = needs(graph, primitives, plan)
    return tuple(replace(step, kernel=_trimmed(step.kernel, step.candidate, found, plan, target)) for step in steps)


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
    return _trimmed(kernel, candidate, found, plan, target)


def _trimmed(kernel: Kernel, candidate: Candidate, found: dict[int, Need], plan: RangePlan, target: Target) -> Kernel:
    program = kernel.program
    if program is None or kernel.has_state or kernel.libraries:
        return kernel
    for axis, extents in found.get(candidate.group.outputs[0], {}).items():
        dimensions = {extent.dimension for extent in extents if extent.times}
        if len(dimensions) > 1:
            continue
        name = plan.size_inputs.get(min(dimensions, default=0), "")
        needed = _needed(candidate, program, found, axis, extents)
        smaller = trimmed(program, needed, target.threads) if name and needed else None
        if smaller is None:
            continue
        count = Count(tuple(sorted((extent.times, extent.plus, extent.over) for extent in extents)))
        try:
            made = kernel_of(smaller, candidate.group, candidate.offer, target, count=count)
        except TextLimitError:
            return kernel
        return replace(made, program=None, size_input=name)
    return kernel


def _needed(
    candidate: Candidate, program: TileProgram, found: dict[int, Need], axis: int, extents: frozenset[Extent]
) -> dict[str, Needed]:
    """Return, by output buffer, where the needed elements along an axis lie; nothing if that is not known."""
    buffers = [buffer.name for buffer in program.buffers if buffer.level is Level.OUTPUT]
    group, offer, needed = candidate.group, candidate.offer, dict[str, Needed]()
    length = group.output_types[0].shape[axis]
    for name, value, type_, layout in zip(buffers, group.outputs, group.output_types, offer.outputs, strict=True):
        own = [a for a, e in found[value].items() if e == extents] if value in found else _as_long(type_.shape, length)
        own = [axis] if axis in own else own
        if not own or layout.block(own[0]) != 1:
            return {}
        physical = layout.physical_shape(type_.shape)
        needed[name] = Needed(math.prod(physical[layout.order.index(own[0]) + 1 :]), type_.shape[own[0]])
    return needed


def _as_long(shape: tuple[int, ...], length: int) -> list[int]:
    """Return the axes of some length: of a value that nothing reads, any of them may be cut."""
    return [axis for axis, size in enumerate(shape) if size == length]
