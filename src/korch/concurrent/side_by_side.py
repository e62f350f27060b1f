"""A plan -> the same plan with concurrent kernels, or with kernels on fewer threads, where that is faster.

1. Each kernel that is short enough is measured on parts of the threads (`concurrent.lanes`).
2. From these times *sets* are proposed: pairs of kernels that do not depend on each other, and sets
   that fill the other threads while the longest of them runs. Each set partitions the threads into
   *lanes*; kernels of one lane run one after another. A set of one kernel leaves threads idle.
3. The program of `concurrent.plan` chooses the sets that save most together, with estimates for those
   that are not measured. The chosen sets are measured, and the choice is repeated until all chosen sets
   are measured. `verify_concurrent` checks the result.

The lower bound of the given plan holds for plans whose kernels run one after another on all threads.
Kernels that only pay off as a part of a set are not considered.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from korch.candidate.candidate import Candidate
from korch.concurrent.lanes import KernelLanes, lane_sizes, measure_in_batches
from korch.concurrent.plan import (
    ConcurrentKernel,
    concurrent_order,
    concurrent_problem,
    first_choice,
    verify_concurrent,
    waits_for,
)
from korch.deadline import Deadline
from korch.measure.record import Failed, Record
from korch.primitive.graph import PrimitiveGraph
from korch.program.solve import Solver
from korch.search.ledger import Ledger

logger = logging.getLogger("korch.orchestrate")


@dataclass(frozen=True, slots=True)
class _Set(ConcurrentKernel):
    """Kernels of the plan that may run concurrently, and the estimate of their time."""

    estimate_ns: int


def side_by_side(
    graph: PrimitiveGraph, steps: Sequence[Candidate], ledger: Ledger, deadline: Deadline
) -> tuple[Candidate, ...] | None:
    """Return a plan with concurrent kernels; None if none is faster.

    Args:
        graph: the graph of the whole model.
        steps: the plan's kernels in order, all measured.
        ledger: answers questions; its meter is of a CPU.
        deadline: when to stop measuring.
    """
    if ledger.meter.target.threads < 2 or ledger.is_over(deadline):
        return None
    search = _Search(graph, steps, ledger, deadline)
    return search.choose()


def described(steps: Sequence[Candidate]) -> tuple[int, int]:
    """Return the number of sets of concurrent kernels in a plan, and of the kernels in them."""
    sets = [c.offer.lanes for c in steps if c.offer.lanes]
    return len(sets), sum(len(lane.parts) for lanes in sets for lane in lanes)


class _Search:
    """The plan, the times of its kernels on parts of the threads, and the sets."""

    def __init__(self, graph: PrimitiveGraph, steps: Sequence[Candidate], ledger: Ledger, deadline: Deadline) -> None:
        self.graph = graph
        self.steps = tuple(steps)
        self.ledger, self.limits, self.target = ledger, ledger.limits, ledger.meter.target
        self.deadline = deadline
        self.costs_ns = [ledger.cost_ns(step)[0] for step in steps]
        self.waits_for = waits_for(graph, steps)
        self.kernels = KernelLanes(graph, steps, ledger)
        self.sets: list[tuple[_Set, Candidate]] = []

    @cached_property
    def lanes_ns(self) -> dict[int, dict[int, int]]:
        """The estimated time of each kernel on each number of threads that it may have."""
        return self.kernels.estimates_ns()

    def choose(self) -> tuple[Candidate, ...] | None:
        """Return the plan with the sets that make it fastest, all of them measured."""
        self.kernels.measure(self.deadline)
        for i, kernels in self.kernels.fastest.items():
            for size, kernel in kernels.items():
                self.sets.append((_Set(((i,),), (size,), self.kernels.time_ns(kernel)), kernel.candidate))
        for each in dict.fromkeys(self._proposals()):
            candidate = self.kernels.propose(each.lanes, each.threads)
            if candidate is not None:
                self.sets.append((each, candidate))
        self.ledger.look_up([candidate for _, candidate in self.sets])
        solver = Solver(concurrent_problem(self.waits_for, [each.places for each, _ in self.sets]), limits=self.limits)
        chosen: list[int] = []
        for turn in range(self.limits.concurrent_rounds + 1):
            is_last = turn == self.limits.concurrent_rounds or self.ledger.is_over(self.deadline)
            chosen = self._solve(solver, chosen, only_measured=is_last)
            unknown = [self.sets[s][1] for s in chosen if self._record(s) is None]
            if not unknown:
                break
            measure_in_batches(self.ledger, unknown, self.deadline)
        return self._plan(chosen) if chosen else None

    def _record(self, s: int) -> Record | None:
        return self.ledger.known(self.sets[s][1])

    def _set_ns(self, s: int) -> int:
        """Return the time of a set, or its estimate; no less than its parts if it failed."""
        each, _ = self.sets[s]
        record = self._record(s)
        if isinstance(record, Failed):
            return sum(self.costs_ns[i] for i in each.places)
        return each.estimate_ns if record is None else record.time_ns

    def _solve(self, solver: Solver, hint: Sequence[int], only_measured: bool) -> list[int]:
        """Return the sets that save most together.

        The gap is a share of what could be saved, not of the plan's cost. The solver may take long to find sets that
        do not wait for each other, so it begins with the better of two plans: the last one, and a greedy one.
        """
        count, total_ns = len(self.steps), sum(self.costs_ns)
        costs_ns = [*self.costs_ns, *(self._set_ns(s) for s in range(len(self.sets)))]
        gains_ns = {
            s: gain_ns
            for s, (each, _) in enumerate(self.sets)
            if (gain_ns := sum(self.costs_ns[i] for i in each.places) - costs_ns[count + s]) > 0
            and not (only_measured and self._record(s) is None)
        }
        excluded = [count + s for s in range(len(self.sets)) if s not in gains_ns]
        first = self._first(gains_ns, hint)
        taken = {i for s in first for i in self.sets[s][0].places}
        before = [*(i for i in range(count) if i not in taken), *(count + s for s in first)]
        seconds = self.limits.concurrent_last_seconds
        least_ns = self.ledger.relax(solver, costs_ns, excluded=excluded, seconds=seconds)[0]
        plan = self.ledger.solve(
            solver,
            costs_ns,
            seconds=self._solve_seconds(),
            hint=before,
            excluded=excluded,
            gap=self.limits.concurrent_gap * (total_ns - least_ns) / max(1, total_ns),
        )
        found = plan.certificate
        logger.info("concurrent: %s of %d ns, at least %d", found.objective_ns, total_ns, found.bound_ns)
        return sorted(k - count for k in plan.kernels if k >= count)

    def _first(self, gains_ns: Mapping[int, int], hint: Sequence[int]) -> list[int]:
        """Return the better of two choices: the last one, and a greedy one by greatest gain."""
        turns = sorted(gains_ns, key=lambda s: -gains_ns[s])
        greedy = [turns[n] for n in first_choice(self.waits_for, [self.sets[s][0].places for s in turns])]
        kept = [s for s in hint if s in gains_ns]
        return max(kept, greedy, key=lambda sets: sum(gains_ns[s] for s in sets))

    def _solve_seconds(self) -> float:
        """Return how long a choice may take; most of the time is reserved for measuring sets."""
        left_s, limits = self.ledger.left_s(self.deadline), self.limits
        share_s = limits.concurrent_solve_seconds if left_s is None else limits.concurrent_solve_share * left_s
        return min(limits.concurrent_solve_seconds, max(limits.concurrent_last_seconds, share_s))

    def _plan(self, sets: Sequence[int]) -> tuple[Candidate, ...]:
        """Return the plan with sets instead of their parts, verified."""
        gone = {i for s in sets for i in self.sets[s][0].places}
        threads = self.target.threads
        kernels: list[tuple[ConcurrentKernel, Candidate]] = [
            (ConcurrentKernel(((i,),), (threads,)), step) for i, step in enumerate(self.steps) if i not in gone
        ]
        kernels += ((ConcurrentKernel(self.sets[s][0].lanes, self.sets[s][0].threads), self.sets[s][1]) for s in sets)
        order = concurrent_order(self.waits_for, [kernel.places for kernel, _ in kernels])
        verify_concurrent(self.waits_for, [kernels[n][0] for n in order], threads)
        return tuple(kernels[n][1] for n in order)

    def _proposals(self) -> Iterator[_Set]:
        """Yield sets of positive estimated gain, each around its longest kernel."""
        for first in sorted(self.lanes_ns):
            if self.ledger.is_over(self.deadline):
                return
            free = [i for i in self.lanes_ns if i != first and self._is_free(i, [first])]
            shorter = [i for i in free if self._rank(i) < self._rank(first)]
            pairs = [self._pair(first, i) for i in shorter]
            yield from sorted(filter(None, pairs), key=self._preference)[: self.limits.concurrent_pairs]
            free.sort(key=lambda i: (-self.lanes_ns[i][1], abs(i - first)))
            filled = [self._filled(first, free, threads) for threads in self._divisions(first)]
            yield from sorted(filter(None, filled), key=self._preference)[: self.limits.concurrent_filled]

    def _rank(self, i: int) -> tuple[int, int]:
        return self.lanes_ns[i][1], i

    def _pair(self, first: int, second: int) -> _Set | None:
        """Return the set of two kernels, each with the threads that make the longer one shortest."""
        threads = self.target.threads
        ways = [(self._best(first, size), self._best(second, threads - size)) for size in lane_sizes(threads)]
        (_, own), (_, other) = min(ways, key=lambda way: max(way[0][0], way[1][0]))
        return self._set([[first], [second]], (own, other))

    def _best(self, i: int, most: int) -> tuple[int, int]:
        """Return a kernel's least time on at most some number of threads, and the number that gives it."""
        return min((ns, size) for size, ns in self.lanes_ns[i].items() if size <= most)

    def _divisions(self, first: int) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of threads of lanes: a kernel has the first lane; the other lanes have equal numbers."""
        threads = self.target.threads
        allowed = lane_sizes(threads)
        for own in self.lanes_ns[first]:
            left = threads - own
            others = {left, left // 2, own, 1}
            yield from ((own, *[n] * (left // n)) for n in sorted(others) if n in allowed)

    def _filled(self, first: int, free: Sequence[int], threads: Sequence[int]) -> _Set | None:
        """Return the set that keeps the remaining threads busy until a kernel ends."""
        lanes: list[list[int]] = [[first], *([] for _ in threads[1:])]
        loads_ns = [self.lanes_ns[first][threads[0]], *[0] * (len(lanes) - 1)]
        others = range(1, len(lanes))
        for i in free:
            lane = min(others, key=loads_ns.__getitem__, default=0)
            time_ns = self.lanes_ns[i].get(threads[lane])
            fits = time_ns is not None and loads_ns[lane] + time_ns <= loads_ns[0]
            if lane and fits and self._is_free(i, [k for own in lanes for k in own]):
                lanes[lane].append(i)
                loads_ns[lane] += time_ns or 0
        used = [lane for lane in lanes if lane]
        return self._set(used, threads[: len(used)]) if sum(map(len, used)) > 2 else None

    def _is_free(self, i: int, others: Sequence[int]) -> bool:
        """Return whether a kernel and others do not depend on each other."""
        return all(not (self.waits_for[i] >> k & 1 or self.waits_for[k] >> i & 1) for k in others)

    def _set(self, lanes: Sequence[Sequence[int]], threads: Sequence[int]) -> _Set | None:
        """Return a set of lanes, None if it saves too little by estimate."""
        longest_ns = max(sum(self.lanes_ns[i][size] for i in lane) for lane, size in zip(lanes, threads, strict=True))
        each = _Set(tuple(map(tuple, lanes)), tuple(threads), longest_ns + self.limits.concurrent_start_ns)
        return each if self._worth(each) < -self.limits.concurrent_gain_ns else None

    def _preference(self, each: _Set) -> tuple[int, int]:
        """Return a sort key of sets: by gain, then sets of kernels that are near each other in the plan first."""
        return self._worth(each) // 256, max(each.places) - min(each.places)

    def _worth(self, each: _Set) -> int:
        instead_ns = sum(min(self.costs_ns[i], *self.kernels.times_ns(i).values()) for i in each.places)
        return each.estimate_ns - instead_ns
