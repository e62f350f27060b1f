"""Blocks of a model -> a plan for each, in each layout of what it reads and writes.

A block is searched once, whatever the number of its instances, but for several interfaces: the
layouts in which it is given its inputs and hands on its outputs. Candidates and measurements are
the same for all of them; only the program is solved again. `assemble.py` chooses among them. Those
that it chooses are then searched to the end, the one first from which the model may gain most.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import EnumerationReport, enumerate_groups
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices
from korch.errors import InfeasibleError
from korch.measure.meter import CandidateMeter
from korch.options import Options
from korch.orchestrate.baselines import baseline_plans
from korch.orchestrate.instance import (
    PLAIN,
    Interface,
    check_every_primitive_runs,
    collect_candidates,
)
from korch.orchestrate.lazy import LazyLoop, Orchestration, Round
from korch.orchestrate.recall import Solved, keep_solved, recall_solved
from korch.partition.block import Block, Partition
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import ValueType

logger = logging.getLogger("korch.orchestrate")

BLOCK_FREE = 150
"""So many candidates of a block may be measured whatever `max_measured` says."""

FURTHER_FREE = 24
"""So many more than are known already may be measured in each search."""

Tell = Callable[[int, Round], None]
"""Called with a block's position and a round of its search."""


@dataclass(frozen=True)
class Task:
    """A block with what may run it.

    Attributes:
        block: the block.
        candidates: the kernels that may run its parts.
        enumeration: how its groups were found.
        interfaces: the layouts in which it may read and write; the plain ones first.
    """

    block: Block
    candidates: tuple[Candidate, ...]
    enumeration: EnumerationReport
    interfaces: tuple[Interface, ...]

    @property
    def count(self) -> int:
        """How often the block is in the model."""
        return len(self.block.instances)


def prepare(partition: Partition, block: Block, meter: CandidateMeter, options: Options) -> Task:
    """Return a block's candidates.

    Raises:
        InfeasibleError: a primitive is in no candidate.
    """
    graph = block.graph
    lanes = meter.target.lanes
    interfaces = (PLAIN,) if partition.is_whole else interfaces_of(partition, block, lanes)
    groups, enumeration = enumerate_groups(graph, options)
    candidates, refusals = collect_candidates(
        graph, groups, meter.providers, meter.target, interfaces
    )
    check_every_primitive_runs(graph, candidates, refusals)
    return Task(block, candidates, enumeration, interfaces)


def interfaces_of(partition: Partition, block: Block, lanes: int) -> tuple[Interface, ...]:
    """Return the interfaces in which a block is searched.

    Plain; all values channels-last; all values in blocks of channels; and for blocks that read the
    model's inputs or write its outputs, which are plain, these two on the other side only.
    """
    graph = block.graph
    inputs = [value for _, value in graph.inputs]
    outputs = [value for _, value in graph.outputs if value not in graph.given]
    ends = {value for _, value in (*partition.source.inputs, *partition.source.outputs)}
    is_end = any(
        partition.instances[i].segment.values[value] in ends
        for i in block.instances
        for _, value in (*partition.instances[i].segment.graph.inputs,
                         *partition.instances[i].segment.graph.outputs)
    )  # fmt: skip
    found = [PLAIN]
    for kind in ("last", "blocked"):
        sides = [(inputs, outputs), ([], outputs), (inputs, [])] if is_end else [(inputs, outputs)]
        for before, after in sides:
            layouts = {
                value: layout
                for value in (*before, *after)
                if not (layout := _realize(kind, graph.types[value], lanes)).is_plain
            }
            found.append(Interface(layouts))
    distinct = {str(interface): interface for interface in found}
    return tuple(distinct.values())


def _realize(kind: str, type_: ValueType, lanes: int) -> Layout:
    """Return the layout of a kind for a type; the plain one if it has none."""
    if type_.rank < 2:
        return Layout.plain(type_.rank)
    wanted = channels_last(type_.rank) if kind == "last" else channels_blocked(type_.rank, lanes)
    is_known = wanted in layout_choices(type_, lanes)
    return wanted if is_known else Layout.plain(type_.rank)


@dataclass
class BlockSearch:
    """The searches of all blocks: what each has found so far for each of its interfaces."""

    tasks: Sequence[Task]
    meter: CandidateMeter
    options: Options
    deadline_s: float | None
    tell: Tell
    found: dict[tuple[int, int], Orchestration] = field(default_factory=dict)

    def survey(self) -> None:
        """Find a good plan for each interface of each block.

        Raises:
            InfeasibleError: a block has no plan.
        """
        sizes = [
            len(task.block.graph.primitives) * len(task.interfaces) * task.count
            for task in self.tasks
        ]
        for b, task in enumerate(self.tasks):
            until_s = self._share(sizes[b:])
            for j in range(len(task.interfaces)):
                try:
                    self._survey_one(b, j, until_s)
                except InfeasibleError:
                    if j == 0:
                        raise
                    logger.info("block %d has no plan for its interface %d", b, j)

    def _survey_one(self, b: int, j: int, until_s: float | None) -> None:
        task = self.tasks[b]
        kept = recall_solved(
            self.meter.database, task.candidates, self.options, self._tag(b, j, "survey")
        )
        if kept is not None:
            self.found[b, j] = kept.found
            return
        loop = self._loop(b, j, until_s)
        loop.estimate()
        self.found[b, j] = loop.prove(1)
        self._keep(b, j, "survey", Solved(self.found[b, j], {}))

    def finish(self, weights: dict[tuple[int, int], int]) -> None:
        """Search some interfaces of blocks to the end.

        Args:
            weights: how often the plan has each block in each interface.
        """
        gains = {
            (b, j): count * (self.found[b, j].certificate.objective_ns or 0)
            - count * self.found[b, j].certificate.bound_ns
            for (b, j), count in weights.items()
        }
        order = sorted(gains, key=lambda key: (-gains[key], key))
        for place, (b, j) in enumerate(order):
            task = self.tasks[b]
            tag = self._tag(b, j, "end")
            kept = recall_solved(self.meter.database, task.candidates, self.options, tag)
            if kept is None:
                until_s = self._share([gains[key] for key in order[place:]])
                kept = Solved(self._loop(b, j, until_s).run(), {})
                self._keep(b, j, "end", kept)
            self.found[b, j] = kept.found

    def baselines(self, b: int) -> dict[str, tuple[Candidate, ...]]:
        """Return a block's plans to hold the optimum against, all with the plain interface."""
        task = self.tasks[b]
        tag = self._tag(b, 0, "baselines")
        kept = recall_solved(self.meter.database, task.candidates, self.options, tag)
        if kept is None:
            loop = self._loop(b, 0, None)
            plans = baseline_plans(task.block.graph, loop.usable, loop.cost_ns, self.options)
            kept = Solved(self.found[b, 0], plans)
            self._keep(b, 0, "baselines", kept)
        return dict(kept.plans)

    def _loop(self, b: int, j: int, until_s: float | None) -> LazyLoop:
        task = self.tasks[b]
        distinct = {candidate.key: candidate for candidate in task.candidates}.values()
        known = sum(self.meter.known(candidate) is not None for candidate in distinct)
        free = max(BLOCK_FREE, known + FURTHER_FREE)
        return LazyLoop(
            task.block.graph, task.candidates, self.meter, self.options, until_s,
            lambda entry: self.tell(b, entry), free, task.interfaces[j],
        )  # fmt: skip

    def _tag(self, b: int, j: int, what: str) -> str:
        return f"{what} {self.tasks[b].interfaces[j]}"

    def _keep(self, b: int, j: int, what: str, solved: Solved) -> None:
        keep_solved(
            self.meter.database, self.tasks[b].candidates, self.options, solved,
            self._tag(b, j, what),
        )  # fmt: skip

    def _share(self, weights: Sequence[int]) -> float | None:
        """Return when the first of several searches must end, by their weights."""
        if self.deadline_s is None:
            return None
        now_s = time.monotonic()
        left_s = max(0.0, self.deadline_s - now_s)
        return now_s + left_s * weights[0] / max(1, sum(weights))


def search_whole(
    task: Task, meter: CandidateMeter, options: Options, deadline_s: float | None,
    tell: Callable[[Round], None],
) -> Solved:  # fmt: skip
    """Search a model that is one segment; what was searched before is recalled."""
    kept = recall_solved(meter.database, task.candidates, options)
    if kept is not None:
        return kept
    graph: PrimitiveGraph = task.block.graph
    loop = LazyLoop(graph, task.candidates, meter, options, deadline_s, tell)
    found = loop.run()
    plans = {"optimal": found.steps}
    plans |= baseline_plans(graph, loop.usable, loop.cost_ns, options)
    if second := loop.runner_up():
        plans["second"] = second
    solved = Solved(found, plans)
    keep_solved(meter.database, task.candidates, options, solved)
    return solved
