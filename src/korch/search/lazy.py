"""Candidates -> plan, measuring only what matters.

Every candidate first has an admissible lower bound. Solve; measure the candidates that the solution
uses; solve again, until all that it uses is measured. Costs only rise from bounds to measurements,
so the last solution is the optimum over *all* candidates, measured or not. At any moment there is a
lower bound for the cost of every plan, and, once all of one solution is measured, a best plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from korch.candidate.candidate import Candidate
from korch.deadline import Deadline
from korch.errors import InfeasibleError
from korch.measure.meter import NEVER
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.program.problem import Certificate, Plan, Problem, Status
from korch.program.solve import Solver
from korch.search.estimate import Experience, hope_ns
from korch.search.instance import PLAIN, Interface, make_problem

logger = logging.getLogger("korch.orchestrate")

FREE_MEASUREMENTS = 300
"""So many candidates may be measured whatever `max_measured` says: it takes a minute at most."""

ROUND_KERNELS = 48
"""Candidates that are measured in one round, beyond those that the solution uses."""

BATCH = 24
"""Candidates that are measured before it is asked again whether time is left."""

RELAX_SECONDS = 10.0
LEAST_PROOF_SECONDS = 1.0
"""Where no time is left. A relaxation that is cut short proves less, but what it says is true."""

ESTIMATE_ROUNDS = 5
"""Most rounds in which estimates lead."""

LEAST_HOPE = 0.0005
"""In these, candidates are measured too which are expected to gain this share of the plan."""

NOTICEABLE = 0.002
"""A round that brings plan and bound nearer by a smaller share counts as quiet."""

ROUND_SECONDS = 4.0
"""Longest solve of a round: its solution only says what to measure next, and its bound is true
whenever it is stopped."""

FIRST_SECONDS = 10.0
"""A solve for the first plan may take so long even if no time is left: on a busy machine a shorter
one gives a plan of many small kernels, which take longer to compile."""

LAST_SECONDS = 0.5
"""The same when there is a plan."""

ROUND_GAP = 0.002
"""Gap at which a round's solve ends: a tenth of what measurements are worth."""

COMBINE_SECONDS = 3.0
"""Longest solve over what is measured, which is a small part of the candidates."""

ESTIMATE_GAP = 0.01
"""The same where costs are estimates."""

CONFIRMATIONS = 6
"""Most times that the kernels of a plan are timed once more, and another plan is looked for."""

CONFIRM_SHARE = 0.06
"""The part of a budget that is left for it."""

RUNNER_UP = 1.1
"""A second-best plan that costs at most this much more may be the best as a whole."""


Priced = tuple[int, tuple[int, ...]]
"""A plan: its nanoseconds, and the numbers of its candidates."""


class Meter(Protocol):
    """Costs of candidates."""

    def bound_ns(self, candidate: Candidate) -> int:
        """Return an admissible lower bound."""
        ...

    def guess_ns(self, candidate: Candidate) -> int:
        """Return about what a candidate takes."""
        ...

    def known(self, candidate: Candidate) -> Measured | Failed | None:
        """Return what the database says of a candidate."""
        ...

    def compile_s(self, candidates: Sequence[Candidate]) -> float:
        """Return the predicted seconds to compile those of the candidates that are not compiled."""
        ...

    def expect_compiling(self, seconds: float) -> None:
        """Hear the predicted seconds to compile the kernels of a first plan."""
        ...

    def measure(
        self, candidates: Sequence[Candidate], deadline: Deadline = NEVER
    ) -> Sequence[Measured | Failed | None]:
        """Build and time candidates; None for those for which there was no time."""
        ...

    def confirm(
        self, candidates: Sequence[Candidate], deadline: Deadline = NEVER
    ) -> Sequence[Measured | Failed | None]:
        """Time candidates a second time that were timed once; the longer time counts."""
        ...

    def correct(self, candidate: Candidate, record: Measured | Failed) -> None:
        """Lower the bounds so that they hold for what was measured of a candidate."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """One turn of the loop.

    Attributes:
        bound_ns: no plan costs less.
        incumbent_ns: the best plan whose kernels are all measured; None if there is none yet.
        measured: candidates measured so far, in this run or before.
        seconds: since the start.
    """

    bound_ns: int
    incumbent_ns: int | None
    measured: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Orchestration:
    """The result: the chosen candidates in order, what is proven of them, and how it came about."""

    steps: tuple[Candidate, ...]
    certificate: Certificate
    costs_ns: tuple[int, ...]
    rounds: tuple[Round, ...]
    measured: int
    distinct_measured: int
    failed: int
    stopped_by_budget: bool


@dataclass(frozen=True, slots=True)
class Look:
    """What estimates say should be measured.

    Attributes:
        kernels: the best plan.
        unknown: those of it that are not measured.
        hopes: other candidates, with nanoseconds that measuring them is expected to gain, the most
            hopeful first.
    """

    kernels: tuple[int, ...]
    unknown: tuple[int, ...]
    hopes: tuple[tuple[float, int], ...]


def measure_some(
    meter: Meter, candidates: Sequence[Candidate], deadline: Deadline, needed: int = 0
) -> tuple[dict[str, Measured | Failed], bool]:
    """Measure candidates; raise bounds' rates where they don't hold.

    Args:
        meter: measures.
        candidates: what is measured before the deadline, in this order.
        deadline: when there is no time left.
        needed: how many of them, the first ones, make up the first plan: it is compiled in any
            case, so that time must be left for it.

    Returns:
        What was found, by key, and whether bounds have changed.
    """
    found: dict[str, Measured | Failed] = {}
    if needed:
        meter.expect_compiling(meter.compile_s(candidates[:needed]))
    for start in range(0, len(candidates), BATCH):
        unbuilt = candidates[start:needed]
        if deadline.before(meter.compile_s(unbuilt) if unbuilt else 0.0).is_over:
            break
        batch = candidates[start : start + BATCH]
        records = zip(batch, meter.measure(batch, deadline), strict=True)
        found |= {c.key: record for c, record in records if record is not None}
    wrong = [
        c for c in candidates if isinstance(record := found.get(c.key), Measured) and record.time_ns < meter.bound_ns(c)
    ]
    if wrong:  # the machine is faster than it was when it was calibrated
        logger.info("%d kernels are faster than their bounds; the bounds are corrected", len(wrong))
    for candidate in wrong:
        meter.correct(candidate, found[candidate.key])
    return found, bool(wrong)


def confirm(meter: Meter, candidates: Sequence[Candidate], deadline: Deadline) -> bool:
    """Time a plan's kernels once more that were timed once, as far as there is time.

    Returns:
        Whether there were any: then the plan may no longer be the best.
    """
    todo = {c.key: c for c in candidates if isinstance(record := meter.known(c), Measured) and not record.is_confirmed}
    order, timed = list(todo.values()), 0
    while timed < len(order) and not deadline.is_over:
        meter.confirm(order[timed : timed + BATCH], deadline)
        timed += BATCH
    return timed > 0


class LazyLoop:
    """The loop's state: which candidates are measured, and the best plan so far."""

    def __init__(
        self,
        graph: PrimitiveGraph,
        candidates: Sequence[Candidate],
        meter: Meter,
        options: Options,
        deadline: Deadline | None = None,
        progress: Callable[[Round], None] | None = None,
        free_measurements: int = FREE_MEASUREMENTS,
        most_measured: int | None = None,
        interface: Interface = PLAIN,
        experience: Experience | None = None,
        problem: Problem | None = None,
    ) -> None:
        """Write the program.

        Args:
            graph: the graph.
            candidates: its candidates.
            meter: costs.
            options: how to search.
            deadline: when to stop.
            progress: told of each round.
            free_measurements: so many candidates may be measured in any case.
            most_measured: so many may be measured, whatever else says.
            interface: the layouts of inputs and outputs.
            experience: what is known of kernels' times.
            problem: the instance in another interface, if there is one: it saves to write it anew.
        """
        self.graph = graph
        self.candidates = tuple(candidates)
        self.meter = meter
        self.options = options
        self.deadline = self.last_deadline = deadline or Deadline()
        self.progress = progress
        self.free_measurements = free_measurements
        self.most_measured = most_measured
        self.start_s = time.monotonic()
        self._bounds: dict[str, int] = {}
        self._guesses: dict[str, int] = {}
        self._relaxed: tuple[list[int], int, dict[int, int]] | None = None
        self._keys = frozenset(c.key for c in self.candidates)
        self.experience = Experience() if experience is None else experience
        self.records: dict[str, Measured | Failed] = {}
        self.refresh()
        self.rounds: list[Round] = []
        self.best: Priced | None = None
        self.second: Priced | None = None
        self.bound_ns = 0
        self._combined: frozenset[int] = frozenset()
        like = problem or make_problem(graph, self.candidates, self.cost_ns, interface)
        required, given = interface.ports(graph)
        self.solver = Solver(
            replace(like, required=required, given=given),
            workers=options.search.solver_workers,
            seed=options.search.seed,
            describe=self._describe,
            like=problem,
        )

    def run(self) -> Orchestration:
        """Solve and measure until the plan is proven, or the budget is spent.

        Raises:
            InfeasibleError: no plan exists.
        """
        if not self.options.measure:
            return self._unmeasured_plan()
        self.estimate()
        return self.prove()

    def _unmeasured_plan(self) -> Orchestration:
        """Return the plan with the least sum of bounds."""
        plan = self._solve(*self._costs(), ROUND_SECONDS, 0, 0.0)
        self.bound_ns = plan.certificate.bound_ns
        self.best = (plan.certificate.objective_ns or 0, tuple(plan.kernels))
        self._report()
        return self._result(stopped=False)

    def prove(self, most_rounds: int | None = None) -> Orchestration:
        """Measure what bounds say may be better, until nothing may, or rounds or time are spent.

        Raises:
            InfeasibleError: no plan exists.
        """
        stopped, quiet, count = False, 0, 0
        seconds, gap = ROUND_SECONDS, ROUND_GAP
        while not self._is_close() and count != most_rounds:
            count += 1
            if not self._time_left():
                return self.end()
            before = (self.bound_ns, self.best)
            plan = self._solve(*self._costs(), seconds, self.bound_ns, gap)
            self.bound_ns = max(self.bound_ns, plan.certificate.bound_ns)
            unknown = self._unmeasured(plan.kernels)
            has_room = self._room() > 0
            if unknown and has_room and self._time_left():
                others = self._promising(self._costs()[0])
                self._measure([*unknown, *others][: self._room()], is_optional=True)
            self._try_incumbent(plan.kernels)
            self._report()
            stopped = not self._time_left()
            quiet = 0 if self._has_moved(before) else quiet + 1
            if stopped or quiet >= self.options.search.patience or (unknown and not has_room):
                break
            if not unknown:
                # All of the solution is measured, so only a better proof is left to be had.
                if plan.certificate.status is Status.OPTIMAL or seconds > ROUND_SECONDS:
                    break
                seconds, gap = self.options.search.solver_seconds, 0.0
        self.combine_measured()
        return self._result(stopped)

    def estimate(self) -> None:
        """Find a good plan: solve with estimates for what is not measured, until all of it is.

        It proves nothing, but it finds in a few rounds what the bounds alone find late.
        """
        for _ in range(ESTIMATE_ROUNDS):
            if self.best is None and not self._time_left():
                break
            look = self.look(FIRST_SECONDS) if self.best is None else self.look()
            has_time = look.unknown and self._time_left()
            most = max(0, min(ROUND_KERNELS, self._room() - len(look.unknown)))
            hopeful = [k for _, k in look.hopes[:most]] if has_time else []
            self._measure(look.unknown, is_optional=self.best is not None)
            self.accept(look.kernels)
            self._measure(hopeful, is_optional=True)
            self._report()
            if self.best is not None and (not look.unknown or not self._time_left()):
                break
        self.combine_measured()
        self._find_any()

    def _find_any(self) -> None:
        """Find a plan if there is none: a kernel of every solution so far has failed."""
        while self.best is None:
            plan = self._solve(self._estimates(), None, ROUND_SECONDS, 0, ESTIMATE_GAP)
            self._measure(plan.kernels, is_optional=False)
            self.accept(plan.kernels)

    def look(self, seconds: float = ROUND_SECONDS / 2, gap: float = ESTIMATE_GAP) -> Look:
        """Return the best plan by estimates, and what else is worth measuring.

        Args:
            seconds: longest time for the plan.
            gap: by which it may be worse than the best.
        """
        estimates = self._estimates()
        plan = self._solve(estimates, None, seconds, 0, gap)
        unknown = self._unmeasured(plan.kernels)
        slack_ns = self._outlook(estimates)[1]
        least_ns = LEAST_HOPE * (plan.certificate.objective_ns or 0)
        own = {self.candidates[k].key for k in unknown}
        hopes: dict[str, tuple[float, int]] = {}
        for k, slack in slack_ns.items():
            key = self.candidates[k].key
            if key in self.records or key in own:
                continue
            gain_ns = hope_ns(estimates[k], slack)
            if gain_ns > max(least_ns, hopes.get(key, (0.0, 0))[0]):
                hopes[key] = (gain_ns, k)
        order = sorted(hopes.values(), key=lambda hope: (-hope[0], hope[1]))
        return Look(tuple(plan.kernels), tuple(unknown), tuple(order))

    def outlook_ns(self) -> int:
        """Return about what the best plan costs by estimates."""
        return self._outlook(self._estimates())[0]

    def _outlook(self, estimates: list[int]) -> tuple[int, dict[int, int]]:
        """Return what the relaxation says of estimates; a second time without solving it again."""
        if self._relaxed is None or self._relaxed[0] != estimates:
            self._relaxed = (estimates, *self._relax(estimates))
        return self._relaxed[1:]

    def combine_measured(self) -> None:
        """Look for the best plan of what is measured: no solve has seen the last measurements."""
        measured = frozenset(k for k, c in enumerate(self.candidates) if self._is_measured(c))
        if self.best is None or self._is_close() or measured == self._combined or not measured.issuperset(self.best[1]):
            return
        self._combined, before, left = measured, self.best, self._seconds_left()
        seconds = COMBINE_SECONDS if left is None else max(LAST_SECONDS, min(COMBINE_SECONDS, left))
        plan = self.solver.solve(
            self._costs()[0],
            None,
            seconds=seconds,
            hint=self.best[1],
            gap=ROUND_GAP,
            excluded=[k for k in range(len(self.candidates)) if k not in measured],
        )
        if plan.kernels:
            self._try_incumbent(plan.kernels)
        if self.best != before:
            self._report()

    def _estimates(self) -> list[int]:
        for candidate in self.candidates:
            record = self.records.get(candidate.key)
            if isinstance(record, Measured):
                self.experience.learn(candidate, record.time_ns, self._guess_ns(candidate))
        factors = self.experience.factors()
        return [
            cost if is_measured else max(cost, self.experience.estimate_ns(c, self._guess_ns(c), factors))
            for c, cost, is_measured in zip(self.candidates, *self._costs(), strict=True)
        ]

    def _guess_ns(self, candidate: Candidate) -> int:
        if candidate.key not in self._guesses:
            self._guesses[candidate.key] = self.meter.guess_ns(candidate)
        return self._guesses[candidate.key]

    def _has_moved(self, before: tuple[int, Priced | None]) -> bool:
        """Whether a round brought plan and bound noticeably nearer to each other."""
        if self.best is None or before[1] is None:
            return True
        gain_ns = before[1][0] - self.best[0] + self.bound_ns - before[0]
        return gain_ns > NOTICEABLE * self.best[0]

    def _promising(self, costs_ns: list[int]) -> list[int]:
        """Return unmeasured candidates that the relaxation can't tell from those of an optimum.

        A plan with a candidate costs at least the relaxation's bound plus the candidate's slack;
        beyond the best plan's cost it need never be measured. Measuring the nearest ones together
        with the plan's saves most of the rounds.
        """
        bound_ns, slack_ns = self._relax(costs_ns)
        room_ns = self.best[0] - bound_ns if self.best is not None else 0
        near = sorted((slack, k) for k, slack in slack_ns.items() if slack <= room_ns)
        found: dict[str, int] = {}
        for _, k in near:
            key = self.candidates[k].key
            if key not in self.records and len(found) < ROUND_KERNELS:
                found.setdefault(key, k)
        return list(found.values())

    def _relax(self, costs_ns: list[int], least_s: float = 1.0) -> tuple[int, dict[int, int]]:
        left = self._seconds_left()
        seconds = RELAX_SECONDS if left is None else max(least_s, min(RELAX_SECONDS, left))
        return self.solver.relax(costs_ns, excluded=self._failed(), seconds=seconds)

    def _room(self) -> int:
        """Return how many candidates may still be measured."""
        if self.most_measured is not None:
            return max(0, self.most_measured - len(self.records))
        most = max(self.free_measurements, int(self.options.search.max_measured * len(self._keys)))
        return max(0, most - len(self.records))

    def _is_close(self) -> bool:
        """Whether the best plan is proven to be as good as was asked for."""
        if self.best is None:
            return False
        return self.best[0] - self.bound_ns <= self.options.gap * self.best[0]

    def _unmeasured(self, kernels: Sequence[int]) -> list[int]:
        return [k for k in kernels if self.candidates[k].key not in self.records]

    def _costs(self) -> tuple[list[int], list[bool]]:
        found = [self.cost_ns(c) for c in self.candidates]
        return [cost for cost, _ in found], [measured for _, measured in found]

    def _failed(self) -> list[int]:
        return [k for k, c in enumerate(self.candidates) if self._is_failed(c)]

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        """Return a candidate's measured time, or its bound."""
        record = self.records.get(candidate.key)
        bound_ns = self.cost_bound_ns(candidate)
        if not isinstance(record, Measured):
            return bound_ns, False
        # A time below the bound says that the bound is off for it: it counts as the bound, or
        # costs would not only rise and the last solution would prove nothing.
        return max(record.time_ns, bound_ns), True

    def cost_bound_ns(self, candidate: Candidate) -> int:
        """Return a candidate's lower bound."""
        if candidate.key not in self._bounds:
            self._bounds[candidate.key] = self.meter.bound_ns(candidate)
        return self._bounds[candidate.key]

    @property
    def usable(self) -> tuple[Candidate, ...]:
        """The candidates that have not failed."""
        return tuple(c for c in self.candidates if not self._is_failed(c))

    def _solve(
        self, costs_ns: list[int], is_measured: list[bool] | None, seconds: float, bound_ns: int, gap: float
    ) -> Plan:
        left = self._seconds_left()
        if left is not None:
            least_s = FIRST_SECONDS if self.best is None else LAST_SECONDS
            seconds = max(min(least_s, seconds), min(seconds, left))
        plan = self.solver.solve(
            costs_ns,
            is_measured,
            seconds=seconds,
            hint=self.best[1] if self.best else None,
            lower_bound_ns=bound_ns,
            excluded=self._failed(),
            gap=gap,
        )
        status = plan.certificate.status
        if status is Status.INFEASIBLE:
            raise InfeasibleError(
                "the candidates that work do not make up a plan",
                hint="Run `korch doctor`; `korch --verbose optimize` says why candidates failed",
            )
        if status is Status.UNKNOWN:
            raise InfeasibleError(
                f"the solver found no plan within {seconds:.0f} s",
                hint="Raise SearchLimits.solver_seconds, or lower SearchLimits.max_primitives",
            )
        logger.info(
            "solved: %s, %s ns, bound %s ns, %.1f s",
            status.value,
            plan.certificate.objective_ns,
            plan.certificate.bound_ns,
            plan.certificate.seconds,
        )
        return plan

    def _measure(self, kernels: Sequence[int], *, is_optional: bool) -> None:
        unique = {self.candidates[k].key: self.candidates[k] for k in kernels}
        todo = [c for key, c in unique.items() if key not in self.records]
        deadline, needed = (self.deadline, 0) if is_optional else (self.last_deadline, len(todo))
        self.take(*measure_some(self.meter, todo, deadline, needed))

    def take(self, found: Mapping[str, Measured | Failed], is_corrected: bool) -> None:
        """Take over what was measured, by key, of which some may be the loop's candidates."""
        self.records |= {key: found[key] for key in found if key in self._keys}
        if is_corrected:
            self._forget_bounds()

    def _forget_bounds(self) -> None:
        """Ask for bounds anew, and believe nothing that followed from the old ones."""
        self._bounds.clear()
        self._guesses.clear()
        self.bound_ns = 0
        self.best, self.second = self._repriced(self.best), self._repriced(self.second)

    def accept(self, kernels: Sequence[int]) -> None:
        """Keep a plan if it is the best measured one, or the first one that can be built.

        Kernels of the first one that are not measured by now can't be: there is no time.
        """
        self._try_incumbent(kernels)
        is_failed = any(self._is_failed(self.candidates[k]) for k in kernels)
        if self.best is None and not is_failed:
            self.best = self._estimate_ns(kernels), tuple(kernels)

    def try_plan(self, kernels: Sequence[int]) -> None:
        """Accept a plan, and report."""
        self.accept(kernels)
        self._report()

    def refresh(self) -> int:
        """Take over what the meter knows by now; return of how many candidates that is."""
        for candidate in {c.key: c for c in self.candidates}.values():
            record = self.meter.known(candidate)
            if record is not None:
                self.records[candidate.key] = record
        return len(self.records)

    def resume(self, deadline: Deadline, most_measured: int | None) -> None:
        """Begin another search with other limits; what was found is kept.

        Another search may have corrected the bounds.
        """
        self.deadline, self.most_measured = deadline, most_measured
        self._forget_bounds()
        self.start_s, self.rounds = time.monotonic(), []
        if self.best is not None and not deadline.is_over and self._unmeasured(self.best[1]):
            self.best = None

    def revise(self, found: Orchestration) -> Orchestration:
        """Return the best plan now that some of a result's kernels were timed once more.

        Costs have only risen, so that what was proven holds, but another plan may be better.

        Args:
            found: what this loop, or that of an earlier run, has found.

        Raises:
            InfeasibleError: the candidates that still work do not make up a plan.
        """
        self.refresh()
        if self.best is None:
            number = {id(candidate): k for k, candidate in enumerate(self.candidates)}
            self.best = 0, tuple(number[id(step)] for step in found.steps)
        self.best, self.second = self._repriced(self.best), self._repriced(self.second)
        self._combined = frozenset()
        self.combine_measured()
        self._find_any()
        self.bound_ns = max(self.bound_ns, found.certificate.bound_ns)
        return self._result(found.stopped_by_budget)

    def _repriced(self, plan: Priced | None) -> Priced | None:
        """Return a plan with what its kernels cost by now; None if one has failed since."""
        if plan is None or any(self._is_failed(self.candidates[k]) for k in plan[1]):
            return None
        return self._estimate_ns(plan[1]), plan[1]

    def _estimate_ns(self, kernels: Sequence[int]) -> int:
        """Return the cost of a plan: the measured times, and estimates of the others."""
        chosen = [self.candidates[k] for k in kernels]
        return sum(max(self.cost_ns(c)[0], 0 if self._is_measured(c) else self._guess_ns(c)) for c in chosen)

    def end(self) -> Orchestration:
        """Return the best plan, with what the relaxation proves: no more is measured.

        Raises:
            InfeasibleError: there is no plan.
        """
        self._forget_bounds()
        self.combine_measured()
        self.bound_ns = self._relax(self._costs()[0], LEAST_PROOF_SECONDS)[0]
        self._report()
        return self._result(stopped=True)

    def _is_measured(self, candidate: Candidate) -> bool:
        return isinstance(self.records.get(candidate.key), Measured)

    def _is_failed(self, candidate: Candidate) -> bool:
        return isinstance(self.records.get(candidate.key), Failed)

    def _try_incumbent(self, kernels: Sequence[int]) -> None:
        """Keep a plan if all of it is measured and it is the best so far."""
        chosen = [self.candidates[k] for k in kernels]
        if not all(map(self._is_measured, chosen)):
            return
        total_ns = sum(self.cost_ns(c)[0] for c in chosen)
        plan = (total_ns, tuple(kernels))
        if self.best is None or total_ns < self.best[0]:
            self.best, plan = plan, self.best or plan
        is_other = set(plan[1]) != set(self.best[1])
        if is_other and (self.second is None or plan[0] < self.second[0]):
            self.second = plan

    def runner_up(self) -> tuple[Candidate, ...]:
        """Return the second-best measured plan, if the best is not proven and it is near."""
        if self.best is None or self.second is None or self._is_close():
            return ()
        is_near = self.second[0] <= RUNNER_UP * self.best[0]
        return tuple(self.candidates[k] for k in self.second[1]) if is_near else ()

    def _seconds_left(self) -> float | None:
        return self.deadline.left_s

    def _time_left(self) -> bool:
        left = self._seconds_left()
        return left is None or left > 0

    def _describe(self, value: int) -> str:
        makers = self.graph.producers[value]
        origin = self.graph.origins[makers[0]] if makers and self.graph.origins else ""
        return f"%{value} ({origin})" if origin else f"%{value}"

    def _report(self) -> None:
        entry = Round(
            self.bound_ns,
            self.best[0] if self.best else None,
            self._distinct_measured(),
            time.monotonic() - self.start_s,
        )
        self.rounds.append(entry)
        if self.progress is not None:
            self.progress(entry)

    def _distinct_measured(self) -> int:
        return sum(isinstance(record, Measured) for record in self.records.values())

    def _result(self, stopped: bool) -> Orchestration:
        if self.best is None:
            raise InfeasibleError("no plan was found")
        objective_ns, kernels = self.best
        bound_ns = min(self.bound_ns, objective_ns)
        measured = sum(map(self._is_measured, self.candidates))
        certificate = Certificate(
            status=Status.OPTIMAL if bound_ns == objective_ns else Status.FEASIBLE,
            objective_ns=objective_ns,
            bound_ns=bound_ns,
            kernels=len(self.candidates),
            measured=measured,
            is_measured=all(self._is_measured(self.candidates[k]) for k in kernels),
            seconds=time.monotonic() - self.start_s,
        )
        steps = tuple(self.candidates[k] for k in kernels)
        return Orchestration(
            steps=steps,
            certificate=certificate,
            costs_ns=tuple(self.cost_ns(c)[0] for c in steps),
            rounds=tuple(self.rounds),
            measured=measured,
            distinct_measured=self._distinct_measured(),
            failed=sum(map(self._is_failed, self.candidates)),
            stopped_by_budget=stopped,
        )
