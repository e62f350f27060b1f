"""A plan -> the same plan with kernels that run side by side, or on one thread, where that is faster.

1. Each kernel that is short enough is measured on one thread: its *share*.
2. From these times sets are proposed: pairs of kernels that do not wait for each other, and sets
   that fill the other threads while the longest of them runs on its own.
3. The program over the plan's kernels and the sets is solved, with estimates for sets that are not
   measured; those that the solution uses are measured, and it is solved again, until all are.

The sets are candidates like others, so the program needs no rows of its own: it forbids that two
sets wait for each other. What is proven of the plan before holds for plans whose kernels run one
after the other on all threads; kernels that only a set would make worth choosing are not looked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate, Refusal
from korch.deadline import Deadline
from korch.measure.cpu import CpuMeter
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.orchestrate.instance import make_problem
from korch.orchestrate.solve import Solver
from korch.orchestrate.verify import running_order
from korch.primitive.graph import PrimitiveGraph

logger = logging.getLogger("korch.orchestrate")

MOST_NS = 250_000
"""Longer kernels lose too little to the start of threads and to uneven parts."""

START_NS = 500
"""What a set is thought to take beyond the longest lane: the start and the end of a region."""

LEAST_GAIN_NS = 200
PARTNERS = 4
"""Pairs that are proposed per kernel."""

ROUNDS = 5
BATCH = 24
SOLVE_SECONDS = 6.0
GAP = 0.001


@dataclass(frozen=True, slots=True)
class _Set:
    """Places of the plan's kernels by lane, and what running them so is thought to take."""

    lanes: tuple[tuple[int, ...], ...]
    estimate_ns: int


def side_by_side(
    graph: PrimitiveGraph, steps: Sequence[Candidate], meter: CpuMeter, options: Options,
    deadline: Deadline,
) -> tuple[Candidate, ...] | None:  # fmt: skip
    """Return a plan with kernels side by side; None if none is thought to be faster.

    Args:
        graph: the graph of the whole model.
        steps: the plan's kernels in order, all measured.
        meter: costs.
        options: how to solve.
        deadline: when to stop measuring.
    """
    search = _Search(graph, steps, meter, options, deadline)
    search.measure_shares()
    return search.choose()


class _Search:
    """The plan, the shares of its kernels, and the sets."""

    def __init__(self, graph: PrimitiveGraph, steps: Sequence[Candidate], meter: CpuMeter,
                 options: Options, deadline: Deadline) -> None:  # fmt: skip
        self.graph = graph
        self.steps = tuple(steps)
        self.meter = meter
        self.options = options
        self.deadline = deadline
        self.costs_ns = [meter.cost_ns(step)[0] for step in steps]
        self.waits_for = waits_for(graph, steps)
        self.shares_ns: dict[int, int] = {}
        self.sets: list[tuple[_Set, Candidate]] = []

    def measure_shares(self) -> None:
        """Measure the short kernels on one thread, those with the greatest sum of costs first."""
        alone = {i: c for i in range(len(self.steps)) if (c := self._alone(i)) is not None}
        sums_ns: dict[str, int] = {}
        for i, candidate in alone.items():
            sums_ns[candidate.key] = sums_ns.get(candidate.key, 0) + self.costs_ns[i]
        of_key = {candidate.key: candidate for candidate in alone.values()}
        self._measure([of_key[key] for key in sorted(sums_ns, key=lambda key: -sums_ns[key])])
        for i, candidate in alone.items():
            record = self.meter.known(candidate)
            if isinstance(record, Measured):
                self.shares_ns[i] = record.time_ns
                self.sets.append((_Set(((i,),), record.time_ns), candidate))

    def choose(self) -> tuple[Candidate, ...] | None:
        """Return the plan with the sets that make it fastest, all of them measured."""
        for each in dict.fromkeys(self._proposals()):
            candidate = self._candidate(each)
            if candidate is not None:
                self.sets.append((each, candidate))
        candidates = (*self.steps, *(candidate for _, candidate in self.sets))
        problem = make_problem(self.graph, candidates, self.meter.cost_ns)
        solver = Solver(problem, workers=self.options.solver_workers, seed=self.options.seed)
        best: tuple[int, ...] = tuple(range(len(self.steps)))
        for turn in range(ROUNDS + 1):
            is_last = turn == ROUNDS or self.deadline.is_over
            unknown = [k for k in range(len(self.steps), len(candidates))
                       if self.meter.known(candidates[k]) is None]  # fmt: skip
            failed = [k for k, c in enumerate(candidates) if isinstance(self.meter.known(c), Failed)]
            plan = solver.solve(
                [self._cost_ns(k, candidate) for k, candidate in enumerate(candidates)],
                seconds=SOLVE_SECONDS, hint=best, gap=GAP,
                excluded=[*failed, *(unknown if is_last else ())],
            )  # fmt: skip
            new = [candidates[k] for k in plan.kernels if self.meter.known(candidates[k]) is None]
            if plan.kernels and not new:
                best = plan.kernels
                break
            self._measure(new)
        order = sorted(best, key=self._place)
        chosen = tuple(candidates[k] for k in running_order(problem, order))
        return chosen if any(k >= len(self.steps) for k in best) else None

    def _cost_ns(self, k: int, candidate: Candidate) -> int:
        cost_ns, is_measured = self.meter.cost_ns(candidate)
        is_known = is_measured or k < len(self.steps)
        return cost_ns if is_known else self.sets[k - len(self.steps)][0].estimate_ns

    def _place(self, k: int) -> int:
        """Return where in the plan a kernel runs: a set, where the last of its parts would."""
        if k < len(self.steps):
            return k
        return max(i for lane in self.sets[k - len(self.steps)][0].lanes for i in lane)

    def _alone(self, i: int) -> Candidate | None:
        if self.costs_ns[i] > MOST_NS:
            return None
        return self._candidate(_Set(((i,),), 0))

    def _candidate(self, each: _Set) -> Candidate | None:
        lanes = [[self.steps[i] for i in lane] for lane in each.lanes]
        made = self.meter.shares.propose(self.graph, lanes, self.meter.target)
        if isinstance(made, Refusal):
            logger.debug("%s don't run side by side: %s", each.lanes, made.reason)
            return None
        return made

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        for start in range(0, len(candidates), BATCH):
            if self.deadline.is_over:
                return
            self.meter.measure(candidates[start : start + BATCH])

    def _proposals(self) -> Iterator[_Set]:
        """Yield sets that are thought to gain, each around its longest kernel."""
        if self.meter.target.threads < 2:
            return
        for first in sorted(self.shares_ns):
            free = [
                i for i, share_ns in self.shares_ns.items()
                if (share_ns, i) < (self.shares_ns[first], first) and self._is_free(i, [first])
            ]  # fmt: skip
            pairs = [self._set([[first], [i]]) for i in free]
            yield from sorted(filter(None, pairs), key=self._worth)[:PARTNERS]
            filled = self._filled(first, free)
            if filled is not None:
                yield filled

    def _filled(self, first: int, free: Sequence[int]) -> _Set | None:
        """Return the set that fills the threads beside a kernel, until it ends."""
        lanes: list[list[int]] = [[first], *([] for _ in range(1, self.meter.target.threads))]
        loads_ns = [self.shares_ns[first], *[0] * (len(lanes) - 1)]
        for i in sorted(free, key=lambda i: (-self.shares_ns[i], abs(i - first))):
            lane = min(range(len(lanes)), key=loads_ns.__getitem__)
            fits = loads_ns[lane] + self.shares_ns[i] <= loads_ns[0]
            if lane and fits and self._is_free(i, [k for own in lanes for k in own]):
                lanes[lane].append(i)
                loads_ns[lane] += self.shares_ns[i]
        used = [lane for lane in lanes if lane]
        return self._set(used) if sum(map(len, used)) > 2 else None

    def _is_free(self, i: int, others: Sequence[int]) -> bool:
        """Whether a kernel and others do not wait for each other."""
        return all(not (self.waits_for[i] >> k & 1 or self.waits_for[k] >> i & 1) for k in others)

    def _set(self, lanes: Sequence[Sequence[int]]) -> _Set | None:
        """Return a set if it is thought to gain over all threads, and over each part alone."""
        longest_ns = max(sum(self.shares_ns[i] for i in lane) for lane in lanes)
        each = _Set(tuple(map(tuple, lanes)), longest_ns + START_NS)
        return each if self._worth(each) < -LEAST_GAIN_NS else None

    def _worth(self, each: _Set) -> int:
        places = [i for lane in each.lanes for i in lane]
        instead_ns = sum(min(self.costs_ns[i], self.shares_ns[i]) for i in places)
        return each.estimate_ns - instead_ns


def waits_for(graph: PrimitiveGraph, steps: Sequence[Candidate]) -> list[int]:
    """Return, per kernel of a plan in order, the places of those that run before it, as bits."""
    writer: dict[tuple[int, str], int] = {}
    found: list[int] = []
    for i, step in enumerate(steps):
        before = 0
        for value, layout in step.input_ports:
            place = writer.get((value, str(layout.normalized(graph.types[value].shape))))
            if place is not None:
                before |= found[place] | 1 << place
        found.append(before)
        for value, layout in step.output_ports:
            writer[value, str(layout.normalized(graph.types[value].shape))] = i
    return found
