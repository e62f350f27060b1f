"""Blocks of a model -> a plan for each block and each interface.

A block is searched once for all of its instances, but for several interfaces, that is, layouts of its inputs
and outputs. Candidates and measurements are shared by all interfaces of a block; only the program is solved
again. `assemble.py` chooses among the interfaces. The chosen ones are then refined, in descending order of
the possible gain for the model. A model of one segment has one interface, and its search runs to the end
at once.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from korch.binary_program.problem import Status
from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.errors import InfeasibleError
from korch.measure.record import Measured
from korch.options import Options
from korch.report.alternatives.counterfactual import Groupings, counterfactual_groupings
from korch.report.alternatives.savings import Savings, rule_savings
from korch.search.baselines import baseline_plans
from korch.search.instance import Instance, Interface
from korch.search.ledger import Ledger
from korch.search.loop import Search
from korch.search.measure import confirm
from korch.search.recall import Solved, keep_solved, recall_solved
from korch.search.result import Orchestration, PlanName, Round
from korch.segments.block_task import BlockTask
from korch.segments.trace import SearchTrace
from korch.system.deadline import Deadline

BLOCK_MEASUREMENTS = 120  # candidates of a block measured before its first interface has a plan
INTERFACE_MEASUREMENTS = 16  # more candidates measured for each further interface
REFINE_MEASUREMENTS = 100  # more candidates when an interface is refined; twice as many for a repeated block
BLOCK_SECONDS = 12.0  # time of the first search of one interface of a block
REFINE_SECONDS = 24.0  # time of the refinement of one interface; twice as long for a repeated block
BASELINE_SECONDS = 3.0  # time of the solve for one baseline of a block
WHOLE_BASELINE_SECONDS = 10.0  # time of the solve for one baseline of a model that is one block

logger = logging.getLogger("korch.orchestrate")

OnRound = Callable[[int, Round, Round], None]
"""Called with a block's position, a round of its search, and the state of the search of the whole model."""


def unheard(b: int, entry: Round, whole: Round) -> None:
    """Report no round."""


class SearchPhase(Enum):
    """The phase to which a search of a block in one interface belongs; results are cached by phase."""

    FIRST = "first"
    REFINE = "refine"
    BASELINES = "baselines"


class BlockInterface:
    """A block in one of its interfaces.

    Attributes:
        key: the positions of block and interface.
        task: the block with its candidates.
        search: the search with its program; None if the program is not built.
        found: the best plan with its certificate; None if no plan is known.
    """

    def __init__(self, b: int, j: int, task: BlockTask) -> None:
        self.key = (b, j)
        self.task = task
        self.search: Search | None = None
        self.found: Orchestration | None = None

    @property
    def interface(self) -> Interface:
        """The layouts of the block's inputs and outputs."""
        return self.task.interfaces[self.key[1]]

    @property
    def instance(self) -> Instance:
        """The instance that is searched."""
        return Instance(self.task.block.graph, self.task.candidates, self.interface, self.task.errors)

    @property
    def objective_ns(self) -> int:
        """The cost of the best plan, 0 if no plan is known."""
        return (self.found.certificate.objective_ns or 0) if self.found else 0

    @property
    def result(self) -> Orchestration:
        """The value of `found`; only for an interface that has a plan."""
        assert self.found is not None
        return self.found


class BlockSearch:
    """The searches of all blocks.

    Attributes:
        blocks: the interfaces of each block.
    """

    def __init__(
        self,
        tasks: Sequence[BlockTask],
        ledger: Ledger,
        options: Options,
        deadline: Deadline,
        on_round: OnRound,
        trace: SearchTrace,
    ) -> None:
        self.blocks = [
            [BlockInterface(b, j, task) for j in range(len(task.interfaces))] for b, task in enumerate(tasks)
        ]
        self.ledger, self.options, self.limits = ledger, options, ledger.limits
        self.deadline, self.on_round, self.trace = deadline, on_round, trace
        self.is_whole = len(tasks) == tasks[0].count == 1

    @property
    def planned(self) -> list[BlockInterface]:
        """The interfaces that have a plan."""
        return [one for block in self.blocks for one in block if one.found is not None]

    def is_kept(self) -> bool:
        """Return whether the first plans of all interfaces are cached from an earlier run."""
        return all(self._kept(one, SearchPhase.FIRST) is not None for block in self.blocks for one in block)

    def find_whole(self) -> None:
        """Find the best plan of a model that is one segment.

        Raises:
            InfeasibleError: it has no plan.
        """
        one = self.blocks[0][0]
        kept = self._recalled(one, SearchPhase.REFINE) if self.options.measure else None
        if kept is None:
            began_s, kept = self.trace.seconds, self.open(one).run()
            self.trace.record_search(one.key, SearchPhase.REFINE.value, began_s, kept, is_recalled=False)
        one.found = kept
        self.trace.record_block(0, {0: one.found})

    def calibrate(self, used: Collection[BlockInterface], deadline: Deadline) -> dict[tuple[int, int], int] | None:
        """Return the calibrated bounds of all interfaces that have a plan.

        Those of the used interfaces are solved for. A plan for another interface, with changes of layout, is a plan for
        a used one of the same block.

        Returns:
            None without records, if a plan is not measured, or if no time is left to build a program for it.
        """
        found: dict[tuple[int, int], int] = {}
        for one in sorted(used, key=lambda one: one.key):
            kept_ns = one.result.certificate.calibrated_ns
            if kept_ns is None:
                is_late = one.search is None and self.ledger.is_over(deadline)
                if is_late or not (self.options.measure and one.result.certificate.is_measured):
                    return None
                kept_ns = self.open(one).calibrated_ns()
            if kept_ns is None:
                return None
            found[one.key] = min(kept_ns, one.objective_ns)
            one.found = replace(one.result, certificate=replace(one.result.certificate, calibrated_ns=kept_ns))
        for one in self.planned:
            if one not in used:
                changes = [(found[u.key], self._change_ns(one, u)) for u in used if u.key[0] == one.key[0]]
                bounds_ns = (ns - change_ns for ns, change_ns in changes if change_ns is not None)
                found[one.key] = max([one.result.certificate.bound_ns, *bounds_ns])
        return found

    def runner_up(self) -> tuple[Candidate, ...]:
        """Return the second-best plan of a model that is one segment, and cache it with the best plan.

        The result is () if the model has several segments, or if its second-best plan is much worse than the best.
        """
        one = self.blocks[0][0]
        if not (self.is_whole and self.options.measure):
            return ()
        if one.search is None:
            kept = self._kept(one, SearchPhase.REFINE)
            return kept.plans.get(PlanName.SECOND, ()) if kept else ()
        second = one.search.runner_up()
        self._keep(one, SearchPhase.REFINE, Solved(one.result, {PlanName.SECOND: second} if second else {}))
        return second

    def find_first(self, *, is_hurried: bool = False) -> None:
        """Find a good plan for each interface of each block.

        `is_hurried`: skip the interfaces that are not needed.

        Raises:
            InfeasibleError: a block has no plan.
        """
        tasks = [block[0].task for block in self.blocks]
        sizes = [len(task.block.graph.primitives) * len(task.interfaces) * task.count for task in tasks]
        for b, block in enumerate(self.blocks):
            until_s = self._share(sizes[b:])
            # If a block has several interfaces, the plain one is seldom the best. It is searched last, when
            # the others' measurements help to decide which of its kernels to measure.
            for one in (*block[1:], block[0]):
                if (is_hurried or self._is_over()) and self._is_dispensable(one):
                    continue
                try:
                    self._find_first(one, until_s)
                except InfeasibleError:
                    if one is block[0]:
                        raise
                    logger.info("block %d has no plan for its interface %d", *one.key)
            _drop_programs(block)
            self.trace.record_block(b, {one.key[1]: one.found for one in block if one.found is not None})
        self._renew()

    def _find_first(self, one: BlockInterface, until_s: float | None) -> None:
        if not self.options.measure:
            one.found = self._resumed(one, until_s, INTERFACE_MEASUREMENTS).run()
            return
        one.found = self._recalled(one, SearchPhase.FIRST) or self._run(
            one, SearchPhase.FIRST, until_s, BLOCK_SECONDS, rounds=1
        )

    def _is_dispensable(self, one: BlockInterface) -> bool:
        """Return whether an interface needs no first search; if it has a plan, store it in `found`."""
        b, j = one.key
        if one.search is not None and one.search.best is not None:
            one.found = one.search.end()
        return j != 0 or any(other.found is not None for other in self.blocks[b])

    def refine(self, counts: Mapping[BlockInterface, int]) -> None:
        """Search some interfaces of blocks until their plans are proven, or until the deadline."""
        if not self.options.measure:
            return
        gains = {one: n * (one.objective_ns - one.result.certificate.bound_ns) for one, n in counts.items()}
        order = sorted(gains, key=lambda one: (-gains[one], one.key))
        for place, one in enumerate(order):
            if self._is_over():
                one.found = replace(one.result, stopped_by_budget=True)
                continue
            twice = 2 if one.task.count > 1 else 1
            one.found = self._recalled(one, SearchPhase.REFINE) or self._run(
                one,
                SearchPhase.REFINE,
                self._share([gains[other] for other in order[place:]]),
                twice * REFINE_SECONDS,
                measurements=twice * REFINE_MEASUREMENTS,
            )
        self._renew()

    def confirm(self, used: Collection[BlockInterface], steps: Sequence[Candidate], deadline: Deadline) -> bool:
        """Measure the kernels of a plan again, those with the largest total time first, and revise the plans.

        Returns:
            Whether anything was measured.

        Raises:
            InfeasibleError: the candidates of a block that still work do not form a plan.
        """
        if not self.options.measure:
            return False
        counts = Counter(step.key for step in steps)
        order = sorted(steps, key=lambda step: -counts[step.key] * self.ledger.cost_ns(step)[0])
        if not confirm(self.ledger, order, deadline):
            return False
        for one in used:
            search = self.open(one)
            revised = search.revise(one.result)
            one.found = search.prove() if self.is_whole else revised
            self._keep(one, SearchPhase.REFINE, Solved(one.found, {}))
        self._renew()
        return True

    def _renew(self) -> None:
        """Prove bounds again that were proven before costs fell: blocks share kernels, and the rates of the machine."""
        for one in self.planned:
            if one.result.corrections != self.ledger.corrections:
                search = one.search
                one.found, one.search = self.open(one).revise(one.result), search  # programs take much memory

    def tighten(self) -> None:
        """Raise the bounds of interfaces by the bounds of other interfaces of the same block.

        A plan for one interface, with changes of layout before and after it, is a plan for another
        interface. So it can't cost less than the other interface's bound minus the time of the changes.
        """
        for block in self.blocks:
            planned = [one for one in block if one.found is not None]
            for one in planned:
                bounds_ns = [one.result.certificate.bound_ns]
                for other in planned:
                    change_ns = None if other is one else self._change_ns(other, one)
                    if change_ns is not None:
                        bounds_ns.append(other.result.certificate.bound_ns - change_ns)
                one.found = with_bound(one.result, max(bounds_ns))

    def _change_ns(self, given: BlockInterface, wanted: BlockInterface) -> int | None:
        """Return the time of the layout changes that turn a plan for `wanted` into a plan for `given`.

        None if a change has no measured time; changes are measured unless the budget is spent.
        """
        task, graph = given.task, given.task.block.graph
        inputs = {value for _, value in graph.inputs}
        total_ns = 0
        for value in inputs | {value for _, value in graph.outputs}:
            plain = Layout.plain(graph.types[value].rank)
            before, after = (one.interface.layouts.get(value, plain) for one in (given, wanted))
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
            if not self._is_over():
                self.ledger.measure(changes, self.deadline)
            times_ns = [record.time_ns for c in changes if isinstance(record := self.ledger.known(c), Measured)]
            if not times_ns:
                return None
            total_ns += min(times_ns)
        return total_ns

    def baselines(self, one: BlockInterface) -> dict[str, tuple[Candidate, ...]]:
        """Return the baseline plans of a block in an interface that has a plan; none if the budget is spent."""
        if not self.options.measure or not self.options.ablation.baselines or self._is_over():
            return {}
        kept = self._kept(one, SearchPhase.BASELINES)
        if kept is None:
            exact = (c for c in one.task.candidates if one.task.errors.of.keys().isdisjoint(c.group.primitives))
            usable = [c for c in exact if not self.ledger.has_failed(c)]
            seconds = WHOLE_BASELINE_SECONDS if self.is_whole else BASELINE_SECONDS
            instance = one.instance.of(usable)
            plans = baseline_plans(instance, self.ledger, seconds, one.result.steps, self.deadline)
            kept = Solved(one.result, plans)
            if not self._is_over():
                self._keep(one, SearchPhase.BASELINES, kept)
        return dict(kept.plans)

    def savings(self, one: BlockInterface) -> Savings:
        """Return the time that each rule saves in a block's plan; for some rules only, if the budget is spent."""
        return rule_savings(one.instance, one.result.steps, self.ledger, self.options, self.deadline)

    def groupings(self, one: BlockInterface, steps: Sequence[Candidate], deadline: Deadline) -> Groupings:
        """Return alternative groupings of the kernels of a block's plan."""
        return counterfactual_groupings(one.instance, steps, self.ledger.cost_ns, self.options, deadline)

    def _recalled(self, one: BlockInterface, phase: SearchPhase) -> Orchestration | None:
        kept = self._kept(one, phase)
        if kept is None:
            return None
        if kept.found.rounds:
            self.trace.record_round(one.key, kept.found.rounds[-1])
        self.trace.record_search(one.key, phase.value, self.trace.seconds, kept.found, is_recalled=True)
        return kept.found

    def _run(
        self,
        one: BlockInterface,
        phase: SearchPhase,
        until_s: float | None,
        most_seconds: float,
        rounds: int | None = None,
        measurements: int | None = None,
    ) -> Orchestration:
        """Search an interface of a block, and cache the result unless the time budget ended the search."""
        limit_s, began_s = time.monotonic() + most_seconds, self.trace.seconds
        until = limit_s if until_s is None else min(until_s, limit_s)
        search = self._resumed(one, until, measurements or INTERFACE_MEASUREMENTS)
        search.estimate()
        search.approach()
        found = search.prove(rounds)
        is_budget = (until_s is not None and until_s <= limit_s) or self._is_over()
        found = replace(found, stopped_by_budget=found.stopped_by_budget and is_budget)
        self._keep(one, phase, Solved(found, {}))
        self.trace.record_search(one.key, phase.value, began_s, found, is_recalled=False)
        return found

    def open(self, one: BlockInterface) -> Search:
        """Return the search of an interface of a block, created at the first call."""
        if one.search is None:
            b = one.key[0]

            def on_round(entry: Round) -> None:
                self.trace.record_round(one.key, entry)
                self.on_round(b, entry, entry if self.is_whole else self.trace.rounds[-1])

            written = (other.search.questions.solver.problem for other in self.blocks[b] if other.search is not None)
            like = next(written, None)
            one.search = Search(one.instance, self.ledger, self.options, self.deadline, on_round, like)
        return one.search

    def _resumed(self, one: BlockInterface, until_s: float | None, measurements: int) -> Search:
        search = self.open(one)
        most = max(BLOCK_MEASUREMENTS, search.known + measurements)
        search.resume(self.deadline.until(until_s), most)
        return search

    def _kept(self, one: BlockInterface, phase: SearchPhase) -> Solved | None:
        return recall_solved(self.ledger, one.task.candidates, self.options, _tag(one, phase))

    def _keep(self, one: BlockInterface, phase: SearchPhase, solved: Solved) -> None:
        keep_solved(self.ledger, one.task.candidates, self.options, solved, _tag(one, phase))

    def _is_over(self) -> bool:
        """Return whether the budget is spent; then only searches that a plan needs still run."""
        return self.ledger.is_over(self.deadline)

    def _share(self, weights: Sequence[int]) -> float | None:
        """Return when the first of several searches must end if the time left is divided by their weights."""
        left_s = self.ledger.left_s(self.deadline)
        if left_s is None:
            return None
        return time.monotonic() + max(0.0, left_s) * weights[0] / max(1, sum(weights))


def _tag(one: BlockInterface, phase: SearchPhase) -> str:
    return f"{phase.value} {one.interface}{one.task.errors}"


def _drop_programs(block: Sequence[BlockInterface]) -> None:
    """Drop the programs of all interfaces of a block except the best one's: they take much memory."""
    best = min((one for one in block if one.found is not None), key=lambda one: (one.objective_ns, one.key))
    for one in block:
        if one is not best:
            one.search = None


def with_bound(found: Orchestration, bound_ns: int) -> Orchestration:
    """Return a result whose certificate has the higher of its own bound and `bound_ns`, at most its cost."""
    certificate = found.certificate
    objective_ns = certificate.objective_ns or 0
    bound_ns = min(max(bound_ns, certificate.bound_ns), objective_ns)
    status = Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE
    return replace(found, certificate=replace(certificate, bound_ns=bound_ns, status=status))
