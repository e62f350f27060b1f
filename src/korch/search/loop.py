"""Candidates -> plan, measuring only candidates that may be in the best plan.

Every candidate first has an admissible lower bound. The loop solves, measures the candidates that the
solution uses, and solves again, until every candidate of the solution is measured. Costs only rise when
bounds are replaced by measurements, so the last solution is the optimum over *all* candidates, measured or
not. At any moment there is a lower bound for the cost of every plan, and, once one solution is fully
measured, a best plan.

The only state of the loop is the set of plans that it has tried. The costs of candidates and the solver's
answers are in the ledger (`price`), and what to measure is computed from both (`propose`).
"""

import time
from collections.abc import Callable, Sequence

from korch.binary_program.problem import Certificate, Plan, Problem, Status
from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.options import Options
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.search.measure import measure_some
from korch.search.price import Prices, calibrated, estimates_ns, price
from korch.search.propose import Exploration, expected_improvements, near_optimal, of_each_kind, unmeasured
from korch.search.questions import ROUND_GAP, Questions
from korch.search.result import Orchestration, Round, expected
from korch.search.tried import PricedPlan, best_two, distinct_measured
from korch.system.deadline import Deadline

LEAST_PROOF_SECONDS = 1.0  # time of the last relaxation, if no time remains
ESTIMATE_ROUNDS = 5  # rounds in which estimates choose the candidates to measure
LEAST_IMPROVEMENT = 0.0005  # share of a plan's cost that measuring a candidate must be expected to gain in these rounds
NOTICEABLE = 0.002  # share of a plan's cost that a round must gain to count for `patience`
ROUND_SECONDS = 4.0  # time of one solve of a round
ESTIMATE_GAP = 0.01  # gap at which a solve by estimates ends
CALIBRATED_GAP = 0.02  # gap to the calibrated bound at which no more candidates are measured for it
RUNNER_UP = 1.1  # the second plan is validated too if it costs at most this many times the best


class Search:
    """The search of one instance: a graph's candidates in one interface.

    Attributes:
        questions: the program, and the questions about it.
        tried: the plans that were tried, in order.
        rounds: the rounds since the search was begun or resumed.
        expected_ns: the cost of the best plan according to the last estimates; None before they were made.
    """

    def __init__(
        self,
        instance: Instance,
        ledger: Ledger,
        options: Options,
        deadline: Deadline | None = None,
        progress: Callable[[Round], None] | None = None,
        like: Problem | None = None,
    ) -> None:
        """Build the program.

        `like`: the problem of the same instance in another interface, if that exists already.
        """
        self.candidates = tuple(instance.candidates)
        self.ledger, self.options = ledger, options
        self.limits = ledger.limits
        self.last_deadline = deadline or Deadline()
        self.progress = progress
        self.most_measured: int | None = None
        self.tried: dict[tuple[int, ...], None] = {}
        self.rounds: list[Round] = []
        self.expected_ns: int | None = None
        self.start_s = time.monotonic()
        self.questions = Questions(instance, ledger, self.last_deadline, like)
        self._keys = frozenset(c.key for c in self.candidates)
        self._proven = (0, 0)  # a bound, and the number of bound corrections at which it was proven
        self._combined: frozenset[int] = frozenset()

    # State that is computed from the ledger.

    @property
    def best(self) -> PricedPlan | None:
        """The best plan so far."""
        return self._best_two()[0]

    def _best_two(self) -> tuple[PricedPlan | None, PricedPlan | None]:
        return best_two(self.ledger, self.candidates, self.tried, is_measuring=self.options.measure)

    @property
    def bound_ns(self) -> int:
        """The proven lower bound of all plans' costs; 0 if candidates' costs have fallen since it was proven."""
        bound_ns, corrections = self._proven
        return bound_ns if corrections == self.ledger.corrections else 0

    @bound_ns.setter
    def bound_ns(self, bound_ns: int) -> None:
        self._proven = bound_ns, self.ledger.corrections

    @property
    def known(self) -> int:
        """How many different candidates are measured or have failed."""
        return len(self._keys & self.ledger.records.keys())

    def runner_up(self) -> tuple[Candidate, ...]:
        """Return the second-best measured plan if its cost is close and the best plan is not proven; otherwise ()."""
        best, second = self._best_two()
        if best is None or second is None or self._is_close(best):
            return ()
        is_near = second.cost_ns <= RUNNER_UP * best.cost_ns
        return tuple(self.candidates[k] for k in second.kernels) if is_near else ()

    def _is_close(self, best: PricedPlan | None) -> bool:
        """Return whether a plan is proven to be within the requested gap of the optimum."""
        return best is not None and best.is_close(self.bound_ns, self.options.search.gap)

    def _has_gained(self, bound_ns: int, before: PricedPlan | None) -> bool:
        """Return whether the gap between plan and bound has shrunk noticeably."""
        best = self.best
        if best is None or before is None:
            return True
        gained_ns = before.cost_ns - best.cost_ns + self.bound_ns - bound_ns
        return gained_ns > NOTICEABLE * best.cost_ns

    def _room(self) -> int:
        """Return how many candidates may still be measured."""
        most = self.most_measured
        if most is None:
            most = max(self.limits.free_measurements, int(self.options.search.max_measured * len(self._keys)))
        return max(0, most - self.known)

    def _has_time(self) -> bool:
        return not self.ledger.is_over(self.questions.deadline)

    # The loop.

    def run(self) -> Orchestration:
        """Solve and measure until the plan is proven, or the budget is spent.

        Raises:
            InfeasibleError: no plan exists.
        """
        if self.options.measure:
            self.estimate()
            self.approach()
            return self.prove()
        is_refused = True
        while is_refused:
            prices = price(self.ledger, self.candidates)
            plan = self._solve(prices.costs_ns, prices.is_measured, ROUND_SECONDS, 0.0)
            chosen = [self.candidates[k] for k in plan.kernels]
            self.ledger.build(chosen)
            is_refused = any(map(self.ledger.has_failed, chosen))
        self.tried = {plan.kernels: None}
        self.bound_ns = plan.certificate.bound_ns
        self._report()
        return self._result(stopped=False)

    def estimate(self) -> None:
        """Find a good plan: solve with estimates for unmeasured candidates, until the solution is fully measured.

        This proves nothing, but it needs only a few rounds, whereas the bounds alone need many.
        """
        limits = self.limits
        for _ in range(ESTIMATE_ROUNDS):
            has_plan = self.best is not None
            if not has_plan and not self._has_time():
                break
            found = self.explore()
            has_time = found.unknown and self._has_time()
            most = max(0, min(limits.round_candidates, self._room() - len(found.unknown)))
            improvements = of_each_kind(self.ledger, self.candidates, (k for _, k in found.improvements))
            others = improvements[:most] if has_time else []
            self._measure(found.unknown, is_needed=not has_plan)
            self.tried[found.kernels] = None
            self._measure(others)
            self._report()
            if self.best is not None and (not found.unknown or not self._has_time()):
                break
        self.combine_measured()
        self._find_any()

    def approach(self) -> None:
        """Measure candidates that may be in a better plan according to calibrated bounds, until none is much better.

        These bounds are far closer to times than the hard ones are, so that few candidates are left.
        """
        while (best := self.best) is not None and self._has_time() and self._room() > 0:
            prices = calibrated(self.ledger, self.candidates)
            if prices is None:
                return
            plan = self._solve(prices.costs_ns, prices.is_measured, ROUND_SECONDS, ROUND_GAP)
            unknown = unmeasured(self.ledger, self.candidates, plan.kernels)
            self.tried[plan.kernels] = None
            if not unknown or best.is_close(plan.certificate.bound_ns, CALIBRATED_GAP):
                return
            self._measure([*unknown, *self._near_optimal(prices)][: self._room()])
            self._report()

    def calibrated_ns(self) -> int | None:
        """Return a lower bound of all plans' costs by calibrated bounds of unmeasured candidates; None without them."""
        prices = calibrated(self.ledger, self.candidates)
        if prices is None:
            return None
        plan = self._solve(prices.costs_ns, prices.is_measured, ROUND_SECONDS, ROUND_GAP)
        return max(self.bound_ns, plan.certificate.bound_ns)

    def prove(self, most_rounds: int | None = None) -> Orchestration:
        """Measure candidates that may be in a better plan according to their bounds.

        It ends when no better plan is possible, or after `most_rounds` rounds, or when the time is used up.

        Raises:
            InfeasibleError: no plan exists.
        """
        stopped, quiet, count = False, 0, 0
        seconds, gap = ROUND_SECONDS, ROUND_GAP
        while not self._is_close(best := self.best) and count != most_rounds:
            count += 1
            if not self._has_time():
                return self.end()
            bound_ns, prices = self.bound_ns, price(self.ledger, self.candidates)
            plan = self._solve(prices.costs_ns, prices.is_measured, seconds, gap, bound_ns)
            self.bound_ns = max(bound_ns, plan.certificate.bound_ns)
            unknown = unmeasured(self.ledger, self.candidates, plan.kernels)
            has_room = self._room() > 0
            if unknown and has_room and self._has_time():
                self._measure([*unknown, *self._near_optimal(prices)][: self._room()])
            self.tried[plan.kernels] = None
            self._report()
            stopped = not self._has_time()
            quiet = 0 if self._has_gained(bound_ns, best) else quiet + 1
            if stopped or quiet >= self.options.search.patience or (unknown and not has_room):
                break
            if not unknown:
                # The solution is fully measured, so only the bound can still improve.
                if plan.certificate.status is Status.OPTIMAL or seconds > ROUND_SECONDS:
                    break
                seconds, gap = self.options.search.solver_seconds, 0.0
        self.combine_measured()
        return self._result(stopped)

    def combine_measured(self) -> None:
        """Look for the best plan of measured candidates only: the last measurements came after the last solve."""
        prices, best = price(self.ledger, self.candidates), self.best
        measured = frozenset(k for k, is_measured in enumerate(prices.is_measured) if is_measured)
        if best is None or self._is_close(best) or measured == self._combined or not measured.issuperset(best.kernels):
            return
        self._combined = measured
        plan = self.questions.solve_some(prices, measured, best.kernels)
        if plan.kernels:
            self.tried[plan.kernels] = None
        if self.best != best:
            self._report()

    def explore(self, seconds: float | None = None, gap: float | None = None) -> Exploration:
        """Return the best plan according to estimates, and other candidates that are worth measuring.

        Args:
            seconds: time limit of the solve; half of `ROUND_SECONDS` if not given.
            gap: the relative gap at which the solve may stop; `ESTIMATE_GAP` if not given.
        """
        estimates = estimates_ns(self.ledger, self.candidates)
        plan = self._solve(
            estimates, None, ROUND_SECONDS / 2 if seconds is None else seconds, ESTIMATE_GAP if gap is None else gap
        )
        self.expected_ns = plan.certificate.objective_ns
        unknown = unmeasured(self.ledger, self.candidates, plan.kernels)
        least_ns = LEAST_IMPROVEMENT * (plan.certificate.objective_ns or 0)
        own = {self.candidates[k].key for k in unknown}
        slack_ns = self.questions.relax_estimates(estimates)[1]
        others = expected_improvements(self.ledger, self.candidates, estimates, slack_ns, least_ns, own)
        return Exploration(plan.kernels, unknown, others)

    def estimated_ns(self) -> int:
        """Return the relaxation's bound for estimated costs: about the cost of the best plan."""
        return self.questions.relax_estimates(estimates_ns(self.ledger, self.candidates))[0]

    def try_plan(self, kernels: tuple[int, ...]) -> None:
        """Try a plan, and report the round."""
        self.tried[kernels] = None
        self._report()

    def resume(self, deadline: Deadline, most_measured: int | None) -> None:
        """Continue the search with other limits. Tried plans are kept; the bound is reset.

        If the best plan has unmeasured kernels and there is time now, all tried plans are dropped.
        """
        self.questions.deadline, self.most_measured = deadline, most_measured
        self.start_s, self.rounds, self.bound_ns = time.monotonic(), [], 0
        best = self.best
        if best is not None and unmeasured(self.ledger, self.candidates, best.kernels) and self._has_time():
            self.tried.clear()

    def revise(self, found: Orchestration) -> Orchestration:
        """Return the best plan now that kernels were measured again, or that their bounds were corrected.

        If costs have only risen, the proven bound still holds, but another plan may now be better.

        `found`: the result of this search, or of the search in an earlier run.

        Raises:
            InfeasibleError: the candidates that still work do not make up a plan.
        """
        if self.best is None:
            number = {id(candidate): k for k, candidate in enumerate(self.candidates)}
            self.tried[tuple(number[id(step)] for step in found.steps)] = None
        self._combined = frozenset()
        self.combine_measured()
        self._find_any()
        proven_ns = found.certificate.bound_ns
        if found.corrections != self.ledger.corrections:
            proven_ns, _ = self.questions.relax(price(self.ledger, self.candidates).costs_ns, LEAST_PROOF_SECONDS)
        self.bound_ns = max(self.bound_ns, proven_ns)
        return self._result(found.stopped_by_budget)

    def end(self) -> Orchestration:
        """Return the best plan with the relaxation's bound; nothing more is measured.

        Raises:
            InfeasibleError: there is no plan.
        """
        self.combine_measured()
        costs_ns = price(self.ledger, self.candidates).costs_ns
        self.bound_ns = self.questions.relax(costs_ns, LEAST_PROOF_SECONDS)[0]
        self._report()
        return self._result(stopped=True)

    def _find_any(self) -> None:
        """Find a plan if there is none because every solution so far had a kernel that failed."""
        while self.best is None:
            estimates = estimates_ns(self.ledger, self.candidates)
            plan = self._solve(estimates, None, ROUND_SECONDS, ESTIMATE_GAP)
            self._measure(plan.kernels, is_needed=True)
            self.tried[plan.kernels] = None

    def _solve(
        self, costs_ns: list[int], is_measured: list[bool] | None, seconds: float, gap: float, bound_ns: int = 0
    ) -> Plan:
        """Return the best plan for the given costs; the best plan so far is the solver's hint."""
        best = self.best
        hint = best.kernels if best else None
        return self.questions.solve(costs_ns, is_measured, seconds, gap, hint=hint, bound_ns=bound_ns)

    def _near_optimal(self, prices: Prices) -> list[int]:
        bound_ns, slack_ns = self.questions.relax(prices.costs_ns)
        best = self.best
        return near_optimal(self.ledger, self.candidates, slack_ns, best.cost_ns - bound_ns if best else 0)

    def _measure(self, kernels: Sequence[int], *, is_needed: bool = False) -> None:
        """Measure candidates; those of a first plan (`is_needed`) get the deadline of the whole search."""
        unique = {self.candidates[k].key: self.candidates[k] for k in kernels}
        todo = [c for key, c in unique.items() if key not in self.ledger.records]
        deadline, needed = (self.last_deadline, len(todo)) if is_needed else (self.questions.deadline, 0)
        measure_some(self.ledger, todo, deadline, needed)

    def _report(self) -> None:
        best, seconds = self.best, time.monotonic() - self.start_s
        measured = distinct_measured(self.ledger, self.candidates)
        best_ns = best.cost_ns if best else None
        expected_ns = best_ns if self._is_close(best) else expected(best_ns, self.bound_ns, self.expected_ns)
        entry = Round(self.bound_ns, best_ns, measured, seconds, expected_ns)
        self.rounds.append(entry)
        if self.progress is not None:
            self.progress(entry)

    def _result(self, stopped: bool) -> Orchestration:
        best = self.best
        if best is None:
            raise InfeasibleError("no plan was found")
        kernels = best.kernels
        prices, seconds = price(self.ledger, self.candidates), time.monotonic() - self.start_s
        certificate = Certificate.of(best.cost_ns, self.bound_ns, prices.is_measured, kernels, seconds)
        return Orchestration(
            steps=tuple(self.candidates[k] for k in kernels),
            certificate=certificate,
            costs_ns=tuple(prices.costs_ns[k] for k in kernels),
            rounds=tuple(self.rounds),
            distinct_measured=distinct_measured(self.ledger, self.candidates),
            failed=len(prices.failed),
            stopped_by_budget=stopped,
            corrections=self.ledger.corrections,
        )
