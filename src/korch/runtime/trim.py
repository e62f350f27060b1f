"""A plan for the largest size of a range -> kernels that compute only the elements that a smaller size needs.

Kernels without a tile program, and kernels whose elements are all needed, are not changed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from korch.candidate.candidate import Candidate, Refusal
from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.provider.faults import Fault
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.ranges.endings import Ending, endings_of, read
from korch.ranges.filled import ends
from korch.ranges.live import Count
from korch.ranges.needed import Need, live_body, needs
from korch.ranges.plan import RangePlan
from korch.runtime.bind import PlanStep
from korch.target import Target
from korch.tile.ir.growth import TextLimitError, UnprintableError
from korch.tile.ir.program import Level, TileProgram
from korch.tile.trim.coordinates import Needed
from korch.tile.trim.ends import KEYS, ended

logger = logging.getLogger("korch.runtime")


Build = Callable[[Candidate], Kernel | Refusal]
"""Builds the kernel of a candidate, whose group may have extents of which only the first elements are needed."""


def trim_steps(
    graph: PrimitiveGraph, steps: Sequence[PlanStep[Kernel]], plan: RangePlan, target: Target, build: Build
) -> tuple[PlanStep[Kernel], ...]:
    """Return the steps of a plan, with kernels that read the current size and skip unneeded work.

    Args:
        graph: the plan's graph.
        steps: the kernels in the order in which they run.
        plan: how the plan serves sizes.
        target: the machine.
        build: builds kernels.
    """
    primitives = [p for step in steps for p in step.candidate.group.primitives]
    found, trimmer = ends(graph, primitives, plan), _Trimmer(plan, target, build)
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


def sized(kernel: Kernel, candidate: Candidate, plan: RangePlan, target: Target, build: Build) -> Kernel:
    """Return a kernel that skips the parts of a candidate's results that are probably not needed, and their inputs.

    Args:
        kernel: the complete kernel.
        candidate: the candidate of the kernel, with `served`.
        plan: how the plan serves sizes.
        target: the machine.
        build: builds kernels.
    """
    if candidate.served is None:
        return kernel
    found = dict(zip(candidate.group.outputs, candidate.served.needs, strict=True))
    trimmer = _Trimmer(plan, target, build)
    return trimmer.kernel(candidate, kernel, trimmer.ending(candidate, kernel, candidate.served.endings), found)


def _ended_by_all(steps: Sequence[PlanStep[Kernel]], endings: Sequence[Ending | None]) -> set[tuple[int, int]]:
    """Return the reductions that end early in every kernel that contains them."""
    own = [ending.reductions if ending is not None else frozenset() for ending in endings]
    some = {reduction for reductions in own for reduction in reductions}
    for step, reductions in zip(steps, own, strict=True):
        some -= {(p, axis) for p, axis in some - reductions if p in step.candidate.group.primitives}
    return some


class _Trimmer:
    def __init__(self, plan: RangePlan, target: Target, build: Build) -> None:
        self._plan, self._target, self._build = plan, target, build

    def ending(self, candidate: Candidate, kernel: Kernel, options: Sequence[Ending]) -> Ending | None:
        """Return the first option by which reductions of a kernel can end early; None if there is none."""
        for ending in options:
            if self.kernel(candidate, kernel, ending, {}) is not kernel:
                return ending
        return None

    def kernel(self, candidate: Candidate, kernel: Kernel, ending: Ending | None, found: Mapping[int, Need]) -> Kernel:
        """Return a kernel that computes only the needed elements, with reductions that end early."""
        if kernel.program is None or kernel.has_state or kernel.libraries:
            return kernel
        made = self._of_needed(candidate, found)
        if ending is not None:
            made = self._ended(candidate, made or kernel, ending) or self._ended(candidate, kernel, ending)
        return kernel if made is None else replace(made, marked="", size_input=self._plan.sizes_input)

    def _of_needed(self, candidate: Candidate, found: Mapping[int, Need]) -> Kernel | None:
        """Return a kernel whose loops end at the needed elements; None if no loop does."""
        group = candidate.group
        body = live_body(group.body, [found.get(value) for value in group.outputs])
        if body is group.body:
            return None
        made = self._build(replace(candidate, group=replace(group, body=body)))
        if isinstance(made, Fault):
            logger.warning("a kernel of %s is not trimmed: %s", candidate.provider, made, extra={"fault": True})
        return None if isinstance(made, Refusal) or not made.counts else made

    def _ended(self, candidate: Candidate, kernel: Kernel, ending: Ending) -> Kernel | None:
        """Return a kernel in which reductions end early; None if they can't."""
        program = kernel.program
        known = _read_by(candidate, program, ending) if program is not None else {}
        smaller = ended(program, known, self._target.lanes) if program is not None and known else None
        if smaller is None:
            return None
        count = Count((ending.extent,), self._target.lanes)
        try:
            return kernel_of(
                smaller, candidate.group, candidate.offer, self._target, counts={**dict(kernel.counts), KEYS: count}
            )
        except (TextLimitError, UnprintableError):
            return None
        except InvalidGraphError as error:
            logger.warning("a kernel of %s is not trimmed: %s", candidate.provider, error, extra={"fault": True})
            return None


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
