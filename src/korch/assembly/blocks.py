"""Blocks of a model -> a plan for each, in each layout of what it reads and writes.

A block is searched once, whatever the number of its instances, but for several interfaces: the
layouts in which it is given its inputs and hands on its outputs. Candidates and measurements are
the same for all of them; only the program is solved again. `assemble.py` chooses among them. Those
that it chooses are then searched to the end, the one first from which the model may gain most.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from korch.assembly.trace import Story
from korch.candidate.candidate import Candidate, Group
from korch.candidate.enumerate import EnumerationReport, enumerate_groups
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices
from korch.candidate.shape import Compose, GroupShape, shapes_of
from korch.deadline import Deadline
from korch.errors import InfeasibleError
from korch.explanation.baselines import baseline_plans, has_layouts
from korch.explanation.counterfactual import Groupings, regroup
from korch.explanation.savings import Savings, rule_savings
from korch.measure.meter import AnyMeter
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.partition.block import Block, Partition
from korch.partition.join import Joined, held_values
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import ValueType
from korch.program.problem import Status
from korch.search.estimate import Experience
from korch.search.instance import PLAIN, Answers, Interface, check_every_primitive_runs, collect_candidates
from korch.search.lazy import CONFIRM_SHARE, CONFIRMATIONS, LazyLoop, Orchestration, Round, confirm
from korch.search.recall import Solved, keep_solved, recall_solved

logger = logging.getLogger("korch.orchestrate")

SURVEY_MEASUREMENTS = 120
"""So many candidates of a block are measured at most before its first interface has a plan."""

FURTHER_MEASUREMENTS = 16
"""So many more for each further interface."""

END_MEASUREMENTS = 100
"""So many more when an interface is searched to the end; twice as many if the block is repeated."""

SURVEY_SECONDS = 12.0
"""Longest survey of one interface of a block, but that a plan is always found."""

END_SECONDS = 24.0
"""Longest search of one interface to its end; twice as long if the block is repeated."""

BASELINE_SECONDS = 3.0
"""Longest solve for a plan that is only there to be beaten."""

Tell = Callable[[int, Round], None]
"""Called with a block's position and a round of its search."""

MOST_GROUPS = 6000
"""A segment with more is searched with smaller groups; the report says that the limit bound."""

FEWEST_PRIMITIVES = 6
"""The smallest such limit."""


KINDS = {"any": ("last", "blocked"), "last": ("last",), "plain": ()}
"""By the option `layouts`: the kinds beside the plain one, channels-last and in blocks of them."""


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


def prepare(
    partition: Partition,
    block: Block,
    meter: AnyMeter,
    options: Options,
    held: Collection[int] | None = None,
    answers: Answers | None = None,
    deadline: Deadline | None = None,
) -> Task:
    """Return a block's candidates.

    Args:
        partition: the model.
        block: the block.
        meter: who makes kernels, and for which machine.
        options: how to search.
        held: as for `collect_candidates`.
        answers: as for `collect_candidates`.
        deadline: when to stop looking for more candidates.

    Raises:
        InfeasibleError: a primitive is in no candidate.
    """
    graph = block.graph
    lanes = meter.target.lanes
    # Bounds alone can't tell which layout is worth a change.
    is_plain = partition.is_whole or not options.measure
    kinds = KINDS[options.ablation.layouts]
    interfaces = (PLAIN,) if is_plain else interfaces_of(partition, block, lanes, kinds)
    shapes = shapes_of(meter.providers)
    groups, enumeration = _groups(graph, options, shapes, may_be_fewer=not partition.is_whole, deadline=deadline)
    candidates, refusals = collect_candidates(
        graph, groups, meter.providers, meter.target, interfaces, held, answers, deadline
    )
    candidates = tuple(c for c in candidates if has_layouts(c, options.ablation.layouts))
    check_every_primitive_runs(graph, candidates, refusals)
    return Task(block, candidates, enumeration, interfaces)


def prepare_all(
    partition: Partition, joined: Joined, meter: AnyMeter, options: Options, deadline: Deadline | None = None
) -> list[Task]:
    """Return the candidates of all blocks, fewer of them if the deadline passes.

    Raises:
        InfeasibleError: a primitive is in no candidate.
    """
    answers: Answers = {}  # blocks have many groups in common
    return [
        prepare(partition, block, meter, options, held, answers, deadline)
        for block, held in zip(partition.blocks, held_values(partition, joined), strict=True)
    ]


def _groups(
    graph: PrimitiveGraph,
    options: Options,
    shapes: Sequence[GroupShape | Compose],
    *,
    may_be_fewer: bool,
    deadline: Deadline | None,
) -> tuple[tuple[Group, ...], EnumerationReport]:
    """Return a block's groups, smaller ones if there are too many."""
    size = options.search.max_primitives
    while may_be_fewer and size > FEWEST_PRIMITIVES:
        limited = replace(options, search=replace(options.search, max_primitives=size))
        groups, enumeration = enumerate_groups(graph, limited, MOST_GROUPS, deadline, shapes)
        if enumeration.groups <= MOST_GROUPS:
            return groups, enumeration
        size //= 2
    return enumerate_groups(
        graph, replace(options, search=replace(options.search, max_primitives=size)), deadline=deadline, shapes=shapes
    )


def interfaces_of(partition: Partition, block: Block, lanes: int, kinds: Sequence[str]) -> tuple[Interface, ...]:
    """Return the interfaces in which a block is searched.

    Plain; all values in one other kind of layout; and for blocks that read the model's inputs or
    write its outputs, which are plain, these on the other side only.
    """
    graph = block.graph
    inputs = [value for _, value in graph.inputs]
    outputs = [value for _, value in graph.outputs if value not in graph.given]
    ends = {value for _, value in (*partition.source.inputs, *partition.source.outputs)}
    is_end = any(
        partition.instances[i].segment.values[value] in ends
        for i in block.instances
        for _, value in (*partition.instances[i].segment.graph.inputs, *partition.instances[i].segment.graph.outputs)
    )
    found = [PLAIN]
    for kind in kinds:
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
    meter: AnyMeter
    options: Options
    deadline: Deadline
    tell: Tell
    story: Story
    found: dict[tuple[int, int], Orchestration] = field(default_factory=dict)
    experience: Experience = field(default_factory=Experience)
    loops: dict[tuple[int, int], LazyLoop] = field(default_factory=dict)

    def is_kept(self) -> bool:
        """Whether an earlier run has surveyed all interfaces."""
        return all(
            recall_solved(self.meter.database, task.candidates, self.options, self._tag(b, j, "survey")) is not None
            for b, task in enumerate(self.tasks)
            for j in range(len(task.interfaces))
        )

    def survey(self, *, is_hurried: bool = False) -> None:
        """Find a good plan for each interface of each block.

        Args:
            is_hurried: leave out what is not needed.

        Raises:
            InfeasibleError: a block has no plan.
        """
        sizes = [len(task.block.graph.primitives) * len(task.interfaces) * task.count for task in self.tasks]
        for b, task in enumerate(self.tasks):
            until_s = self._share(sizes[b:])
            # The plain interface is seldom the best where there are others; what is measured for
            # those tells which of its kernels to measure.
            for j in (*range(1, len(task.interfaces)), 0):
                if (is_hurried or self._is_over()) and self._ended(b, j):
                    continue
                try:
                    if not self.options.measure:
                        self.found[b, j] = self._loop(b, j, until_s).run()
                        continue
                    self.found[b, j] = self._recalled(b, j, "survey") or self._run(
                        b, j, "survey", until_s, SURVEY_SECONDS, rounds=1
                    )
                except InfeasibleError:
                    if j == 0:
                        raise
                    logger.info("block %d has no plan for its interface %d", b, j)
            self._forget(b)
            self.story.surveyed(b, {j: one for (block, j), one in self.found.items() if block == b})

    def _forget(self, b: int) -> None:
        """Drop the programs of a block's interfaces but for the best: they take much memory."""
        own = [(one.certificate.objective_ns or 0, key) for key, one in self.found.items() if key[0] == b]
        for key in [key for key in self.loops if key[0] == b and key != min(own)[1]]:
            del self.loops[key]

    def _ended(self, b: int, j: int) -> bool:
        """Whether an interface needs no survey though there is no time; keep what is known."""
        loop = self.loops.get((b, j))
        if loop is not None and loop.best is not None:
            self.found[b, j] = loop.end()
        return j != 0 or any(block == b for block, _ in self.found)

    def finish(self, weights: dict[tuple[int, int], int]) -> None:
        """Search some interfaces of blocks to the end.

        Args:
            weights: how often the plan has each block in each interface.
        """
        if not self.options.measure:
            return
        gains = {
            (b, j): count * (self.found[b, j].certificate.objective_ns or 0)
            - count * self.found[b, j].certificate.bound_ns
            for (b, j), count in weights.items()
        }
        order = sorted(gains, key=lambda key: (-gains[key], key))
        for place, (b, j) in enumerate(order):
            if self._is_over():
                self.found[b, j] = replace(self.found[b, j], stopped_by_budget=True)
                continue
            twice = 2 if self.tasks[b].count > 1 else 1
            self.found[b, j] = self._recalled(b, j, "end") or self._run(
                b,
                j,
                "end",
                self._share([gains[key] for key in order[place:]]),
                twice * END_SECONDS,
                measurements=twice * END_MEASUREMENTS,
            )

    def confirm(self, keys: Iterable[tuple[int, int]], steps: Sequence[Candidate], deadline: Deadline) -> bool:
        """Time the kernels of a plan once more, those first that take most of it, and revise.

        Args:
            keys: the blocks and interfaces of which the model's plan consists.
            steps: the model's plan.
            deadline: until when.

        Returns:
            Whether anything was timed.

        Raises:
            InfeasibleError: the candidates of a block that still work do not make up a plan.
        """
        if not self.options.measure:
            return False
        counts = Counter(step.key for step in steps)
        order = sorted(steps, key=lambda step: -counts[step.key] * self.meter.cost_ns(step)[0])
        if not confirm(self.meter, order, deadline):
            return False
        for key in keys:
            self.found[key] = self.loop(*key).revise(self.found[key])
            self._keep(*key, "end", Solved(self.found[key], {}))
        return True

    def tighten(self) -> None:
        """Raise the bounds of interfaces by those of others of the same block.

        A plan for one interface, with changes of layout before and behind it, is a plan for
        another: so it can't cost less than that one's bound without what the changes take.
        """
        for b, task in enumerate(self.tasks):
            known = {j: self.found[b, j] for j in range(len(task.interfaces)) if (b, j) in self.found}
            for j, own in known.items():
                bounds_ns = [own.certificate.bound_ns]
                for other, found in known.items():
                    change_ns = self._change_ns(task, task.interfaces[other], task.interfaces[j])
                    if other != j and change_ns is not None:
                        bounds_ns.append(found.certificate.bound_ns - change_ns)
                self.found[b, j] = with_bound(own, max(bounds_ns))

    def _change_ns(self, task: Task, given: Interface, wanted: Interface) -> int | None:
        """Return what it takes to run a plan for `wanted` where `given` is asked for.

        None if a change was not measured, or the budget is spent before it is.
        """
        graph = task.block.graph
        inputs = {value for _, value in graph.inputs}
        total_ns = 0
        for value in inputs | {value for _, value in graph.outputs}:
            plain = Layout.plain(graph.types[value].rank)
            before, after = (i.layouts.get(value, plain) for i in (given, wanted))
            if before == after:
                continue
            if value not in inputs:
                before, after = after, before
            changes = [
                c
                for c in task.candidates
                if c.group.is_layout_change
                and c.group.inputs == (value,)
                and (c.offer.inputs, c.offer.outputs) == ((before,), (after,))
            ]
            if not self.deadline.is_over:
                self.meter.measure(changes, self.deadline)
            times_ns = [record.time_ns for c in changes if isinstance(record := self.meter.known(c), Measured)]
            if not times_ns:
                return None
            total_ns += min(times_ns)
        return total_ns

    def baselines(self, b: int) -> dict[str, tuple[Candidate, ...]]:
        """Return a block's plans to hold the optimum against, all with the plain interface.

        There are none if there was no time to survey that, or there is none now.
        """
        is_asked = self.options.measure and self.options.ablation.baselines
        if not is_asked or (b, 0) not in self.found or self._is_over():
            return {}
        task = self.tasks[b]
        tag = self._tag(b, 0, "baselines")
        kept = recall_solved(self.meter.database, task.candidates, self.options, tag)
        if kept is None:
            usable = [c for c in task.candidates if not isinstance(self.meter.known(c), Failed)]
            plans = baseline_plans(task.block.graph, usable, self.meter.cost_ns, self.options, BASELINE_SECONDS)
            kept = Solved(self.found[b, 0], plans)
            self._keep(b, 0, "baselines", kept)
        return dict(kept.plans)

    def savings(self, b: int, j: int) -> Savings:
        """Return what each rule saves in a block's plan; of some only, if the budget is spent."""
        task = self.tasks[b]
        return rule_savings(
            task.block.graph,
            task.candidates,
            self.found[b, j].steps,
            self.meter,
            self.options,
            task.interfaces[j],
            self.deadline,
        )

    def groupings(self, b: int, j: int, steps: Sequence[Candidate], deadline: Deadline) -> Groupings:
        """Return other groupings of the kernels of a block's plan."""
        task = self.tasks[b]
        return regroup(
            task.block.graph, task.candidates, steps, self.meter.cost_ns, self.options, task.interfaces[j], deadline
        )

    def _recalled(self, b: int, j: int, what: str) -> Orchestration | None:
        tag = self._tag(b, j, what)
        memory, candidates = self.meter.database, self.tasks[b].candidates
        kept = recall_solved(memory, candidates, self.options, tag)
        if kept is None:
            return None
        if kept.found.rounds:
            self.story.heard((b, j), kept.found.rounds[-1])
        self.story.searched((b, j), what, self.story.seconds, kept.found, is_recalled=True)
        return kept.found

    def _run(
        self,
        b: int,
        j: int,
        what: str,
        until_s: float | None,
        most_seconds: float,
        rounds: int | None = None,
        measurements: int = FURTHER_MEASUREMENTS,
    ) -> Orchestration:
        """Search an interface of a block, and keep what is found unless the budget ended it."""
        limit_s, began_s = time.monotonic() + most_seconds, self.story.seconds
        loop = self._loop(b, j, limit_s if until_s is None else min(until_s, limit_s), measurements)
        loop.estimate()
        found = loop.prove(rounds)
        is_budget = (until_s is not None and until_s <= limit_s) or self._is_over()
        found = replace(found, stopped_by_budget=found.stopped_by_budget and is_budget)
        self._keep(b, j, what, Solved(found, {}))
        self.story.searched((b, j), what, began_s, found, is_recalled=False)
        return found

    def loop(self, b: int, j: int) -> LazyLoop:
        """Return the search of an interface of a block; what it has found, it keeps."""
        if (b, j) not in self.loops:
            task = self.tasks[b]
            others = (loop.solver.problem for (block, _), loop in self.loops.items() if block == b)
            self.loops[b, j] = LazyLoop(
                task.block.graph,
                task.candidates,
                self.meter,
                self.options,
                self.deadline,
                partial(self._heard, b, j),
                interface=task.interfaces[j],
                experience=self.experience,
                problem=next(others, None),
            )
        return self.loops[b, j]

    def take(self, found: Mapping[str, Measured | Failed], is_corrected: bool) -> None:
        """Tell all searches what was measured, by key, and whether bounds have changed."""
        for loop in self.loops.values():
            loop.take(found, is_corrected)

    def estimate_ns(self, candidate: Candidate) -> int:
        """Return what a candidate is thought to take, or what it was measured to."""
        cost_ns, is_measured = self.meter.cost_ns(candidate)
        if is_measured:
            return cost_ns
        factors = self.experience.factors()
        guess_ns = self.meter.guess_ns(candidate)
        return max(cost_ns, self.experience.estimate_ns(candidate, guess_ns, factors))

    def _loop(self, b: int, j: int, until_s: float | None, measurements: int = FURTHER_MEASUREMENTS) -> LazyLoop:
        loop = self.loop(b, j)
        known = loop.refresh()
        most = max(SURVEY_MEASUREMENTS, known + measurements)
        loop.resume(self.deadline.until(until_s), most)
        return loop

    def _heard(self, b: int, j: int, entry: Round) -> None:
        self.tell(b, entry)
        self.story.heard((b, j), entry)

    def _tag(self, b: int, j: int, what: str) -> str:
        return f"{what} {self.tasks[b].interfaces[j]}"

    def _keep(self, b: int, j: int, what: str, solved: Solved) -> None:
        keep_solved(self.meter.database, self.tasks[b].candidates, self.options, solved, self._tag(b, j, what))

    def _is_over(self) -> bool:
        """Whether the budget is spent: then only what a plan needs is still searched."""
        return self.deadline.is_over

    def _share(self, weights: Sequence[int]) -> float | None:
        """Return when the first of several searches must end, by their weights."""
        left_s = self.deadline.left_s
        if left_s is None:
            return None
        return time.monotonic() + max(0.0, left_s) * weights[0] / max(1, sum(weights))


def with_bound(found: Orchestration, bound_ns: int) -> Orchestration:
    """Return a result with a bound that holds, too."""
    certificate = found.certificate
    objective_ns = certificate.objective_ns or 0
    bound_ns = min(max(bound_ns, certificate.bound_ns), objective_ns)
    status = Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE
    return replace(found, certificate=replace(certificate, bound_ns=bound_ns, status=status))


def search_whole(
    task: Task, meter: AnyMeter, options: Options, deadline: Deadline, tell: Callable[[Round], None]
) -> Solved:
    """Search a model that is one segment; what was searched before is recalled."""
    tag = "" if options.ablation.baselines else "alone"
    database = meter.database
    kept = recall_solved(database, task.candidates, options, tag) if options.measure else None
    if kept is not None:
        return kept
    graph: PrimitiveGraph = task.block.graph
    loop = LazyLoop(graph, task.candidates, meter, options, deadline.less(CONFIRM_SHARE), tell)
    found = loop.run()
    for _ in range(CONFIRMATIONS if options.measure else 0):
        if not confirm(meter, found.steps, deadline):
            break
        loop.revise(found)
        found = loop.prove()
    plans = {"optimal": found.steps}
    if not options.measure:
        return Solved(found, plans)
    if options.ablation.baselines and not deadline.is_over:
        plans |= baseline_plans(graph, loop.usable, loop.cost_ns, options)
    if second := loop.runner_up():
        plans["second"] = second
    solved = Solved(found, plans)
    keep_solved(database, task.candidates, options, solved, tag)
    return solved
