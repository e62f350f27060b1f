"""A plan for the largest size of a range -> kernels that compute only the elements that a smaller size needs.

Kernels without a tile program, and kernels whose elements are all needed, are not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from korch.candidate.candidate import Candidate, Refusal
from korch.primitive.graph import PrimitiveGraph
from korch.provider.faults import Fault
from korch.provider.provider import Kernel
from korch.ranges.endings import Ending, ended_in, endings_of, read
from korch.ranges.filled import ends
from korch.ranges.needed import Need, live_body, needs
from korch.ranges.plan import RangePlan
from korch.runtime.bind import PlanStep
from korch.target import Target
from korch.tile.ir.index import Expr
from korch.tile.ir.program import Pass, TileProgram

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
    groups = [step.candidate.group for step in steps]
    options = [list(endings_of(graph, group.primitives, group.inputs, found)) for group in groups]
    while True:
        endings = [next(iter(own), None) for own in options]
        needed = needs(graph, primitives, plan, read(found, _ended_by_all(steps, endings), target.lanes))
        pairs = zip(steps, endings, strict=True)
        kernels = [trimmer.kernel(step.candidate, step.kernel, ending, needed) for step, ending in pairs]
        for own, kernel in zip(options, kernels, strict=True):
            if kernel is None:
                own.pop(0)  # then more is needed of other results
        made = [kernel for kernel in kernels if kernel is not None]
        if len(made) == len(steps):
            return tuple(replace(step, kernel=kernel) for step, kernel in zip(steps, made, strict=True))


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
    made = (trimmer.kernel(candidate, kernel, ending, found) for ending in (*candidate.served.endings, None))
    return next((own for own in made if own is not None), kernel)


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
        self._made: dict[object, Kernel | None] = {}

    def kernel(
        self, candidate: Candidate, kernel: Kernel, ending: Ending | None, found: Mapping[int, Need]
    ) -> Kernel | None:
        """Return a kernel that computes only the needed elements, with reductions that end early; None if they can't.

        It is the whole kernel if there is no ending and everything is needed.
        """
        if kernel.program is None or kernel.has_state or kernel.libraries:
            return kernel if ending is None else None
        group = candidate.group
        outputs = [found.get(value) for value in group.outputs]
        key = candidate.key, group.primitives, ending, tuple(map(str, outputs))
        if key not in self._made:
            self._made[key] = self._of_needed(candidate, outputs, ending)
        made = self._made[key]
        if made is None:
            return kernel if ending is None else None
        return replace(made, marked="", size_input=self._plan.sizes_input)

    def _of_needed(self, candidate: Candidate, outputs: Sequence[Need | None], ending: Ending | None) -> Kernel | None:
        """Return a kernel whose loops end at the needed elements; None if no loop does, or not every reduction."""
        group = candidate.group
        ended = ended_in(group.body, ending, self._target.lanes) if ending is not None else {}
        body = live_body(group.body, outputs, ended)
        if body is group.body:
            return None
        made = self._build(replace(candidate, group=replace(group, body=body)))
        if isinstance(made, Fault):
            logger.warning("a kernel of %s is not trimmed: %s", candidate.provider, made, extra={"fault": True})
        if isinstance(made, Refusal) or not made.counts or made.program is None:
            return None
        extents = {extent for axes in ended.values() for extent in axes.values()}
        names = {name for name, count in made.counts if not extents.isdisjoint(count.extents)}
        is_ended = sum(map(len, ended.values())) <= _count_ended(made.program, names)
        return made if is_ended else None


def _count_ended(program: TileProgram, names: Set[str]) -> int:
    """Return how many reductions of a program end at some parameters."""
    found = 0
    for stage in program.stages:
        for loops, step in stage.leaves:
            around = [loop.axis for loop in loops]
            reduced = [axis for axis in (*around, *step.axes) if axis.is_reduced or axis in around]
            ends = (axis.ragged[1] for axis in reduced if axis.ragged is not None)
            if any(isinstance(end, Expr) and not end.variables.isdisjoint(names) for end in ends):
                found += len(step.sinks) if isinstance(step, Pass) else 1
    return found
