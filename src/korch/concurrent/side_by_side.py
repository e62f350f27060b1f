"""A plan -> the same plan with kernels side by side, or on fewer threads, where that is faster.

1. Each kernel that is short enough is measured on one thread and, where there are more than two, on
   half of them. Other *shares* of the threads are thought to take what lies between.
2. From these times *sets* are proposed: pairs of kernels that do not wait for each other, and sets
   that fill the other threads while the longest of them runs on its own. A set of one is a kernel
   that leaves threads idle, or starts none.
3. The sets that save most together are chosen, by estimates for those that are not measured; what
   was chosen is measured, and the choice made again, until all of it is.

What was proven of the plan before holds for plans whose kernels run one after the other on all
threads, and kernels that only a set would make worth choosing are not looked for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import exp, log
from typing import Any

from ortools.sat.python import cp_model

from korch.candidate.candidate import Candidate, Refusal
from korch.candidate.layout import Layout
from korch.deadline import Deadline
from korch.errors import InvalidGraphError
from korch.measure.cpu import CpuMeter
from korch.measure.record import Failed, Measured, Record
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.provider.shares import SharesProvider, parse_lanes

logger = logging.getLogger("korch.orchestrate")

SIDE_BY_SIDE = "side by side"
"""The name of the plan."""

MOST_NS = 500_000
"""Longer kernels lose too little to the start of threads and to uneven parts."""

START_NS = 500
"""What a set is thought to take beyond its longest lane: the start and the end of a region."""

LEAST_GAIN_NS = 200
"""Sets that are thought to save less are not proposed."""

PARTNERS = 6
"""Pairs that are proposed per kernel."""

FILLED = 1
"""Sets that fill the threads beside a kernel, each in another way, that are proposed."""

ROUNDS = 5
"""Most choices whose sets are measured before the last one, which is among what is measured."""

BATCH = 24
"""Kernels that are measured before it is asked again whether time is left."""

SOLVE_SECONDS = 8.0
LAST_SECONDS = 1.0
GAP = 0.01
"""Longest choice, also when no time is left, and the share of the saving by which it may be worse
than the best."""


@dataclass(frozen=True, slots=True)
class _Set:
    """Places of the plan's kernels by lane, their threads, and what that is thought to take."""

    lanes: tuple[tuple[int, ...], ...]
    threads: tuple[int, ...]
    estimate_ns: int

    @property
    def places(self) -> tuple[int, ...]:
        """The places, lane after lane."""
        return tuple(i for lane in self.lanes for i in lane)


def side_by_side(
    graph: PrimitiveGraph, steps: Sequence[Candidate], meter: CpuMeter, options: Options, deadline: Deadline
) -> tuple[Candidate, ...] | None:
    """Return a plan with kernels side by side; None if none is thought to be faster.

    Args:
        graph: the graph of the whole model.
        steps: the plan's kernels in order, all measured.
        meter: costs.
        options: how to solve.
        deadline: when to stop measuring.
    """
    if meter.target.threads < 2 or deadline.is_over:
        return None
    search = _Search(graph, steps, meter, options, deadline)
    search.measure_shares()
    return search.choose()


def described(steps: Sequence[Candidate]) -> dict[str, Any]:
    """Return how many kernels of a plan run others on a share each, and how many others."""
    lanes = [parse_lanes(c.offer.variant) for c in steps if c.provider == SharesProvider.name]
    known = [found for found in lanes if not isinstance(found, Refusal)]
    parts = sum(len(lane.parts) for found in known for lane in found)
    return {"kernels": len(known), "parts": parts}


def shares_of(threads: int) -> tuple[int, ...]:
    """Return the shares of some threads that lanes may have: few, and with each its rest."""
    quarter = (threads + 2) // 4
    some = {1, quarter, threads // 2}
    return tuple(sorted({n for s in some for n in (s, threads - s) if 0 < n < threads}))


def measured_shares(threads: int) -> tuple[int, ...]:
    """Return the shares of some threads on which kernels are measured."""
    return tuple(n for n in sorted({1, max(2, threads // 2)}) if n < threads)


def share_ns(times_ns: Mapping[int, int], share: int) -> int:
    """Return what a kernel is thought to take on a share of the threads.

    Args:
        times_ns: by numbers of threads, what it takes on them.
        share: threads, no fewer than the fewest of these, no more than the most.
    """
    if share in times_ns:
        return times_ns[share]
    for few, many in pairwise(sorted(times_ns)):
        if few < share < many:
            few_ns, many_ns = max(1, times_ns[few]), max(1, times_ns[many])
            part = log(share / few) / log(many / few)
            return round(exp((1 - part) * log(few_ns) + part * log(many_ns)))
    raise ValueError(f"{share} threads are not between {sorted(times_ns)}")


class _Search:
    """The plan, the shares of its kernels, and the sets."""

    def __init__(
        self, graph: PrimitiveGraph, steps: Sequence[Candidate], meter: CpuMeter, options: Options, deadline: Deadline
    ) -> None:
        self.graph = graph
        self.steps = tuple(steps)
        self.meter = meter
        self.options = options
        self.deadline = deadline
        self.costs_ns = [meter.cost_ns(step)[0] for step in steps]
        self.waits_for = waits_for(graph, steps)
        self.measured_ns: dict[int, dict[int, int]] = {}
        self.sets: list[tuple[_Set, Candidate]] = []

    def measure_shares(self) -> None:
        """Measure the short kernels on shares, those with the greatest sum of costs first."""
        sums_ns: dict[str, int] = {}
        alone: list[tuple[_Set, Candidate]] = []
        for i, cost_ns in enumerate(self.costs_ns):
            for share in measured_shares(self.meter.target.threads) if cost_ns <= MOST_NS else ():
                each = _Set(((i,),), (share,), 0)
                candidate = self._candidate(each)
                if candidate is not None:
                    alone.append((each, candidate))
                    sums_ns[candidate.key] = sums_ns.get(candidate.key, 0) + cost_ns
        of_key = {candidate.key: candidate for _, candidate in alone}
        self._measure([of_key[key] for key in sorted(sums_ns, key=lambda key: -sums_ns[key])])
        for each, candidate in alone:
            record = self.meter.known(candidate)
            if isinstance(record, Measured):
                self.measured_ns.setdefault(each.places[0], {})[each.threads[0]] = record.time_ns
                self.sets.append((replace(each, estimate_ns=record.time_ns), candidate))

    @cached_property
    def shares_ns(self) -> dict[int, dict[int, int]]:
        """What each kernel is thought to take on each share that it may have.

        One that fails on half of the threads may have one only.
        """
        found: dict[int, dict[int, int]] = {}
        threads = self.meter.target.threads
        for i, times_ns in self.measured_ns.items():
            if 1 not in times_ns:
                continue
            all_ns = {**times_ns, threads: self.costs_ns[i]} if len(times_ns) > 1 else times_ns
            shares = shares_of(threads) if len(times_ns) > 1 else (1,)
            found[i] = {share: share_ns(all_ns, share) for share in shares}
        return found

    def choose(self) -> tuple[Candidate, ...] | None:
        """Return the plan with the sets that make it fastest, all of them measured."""
        for each in dict.fromkeys(self._proposals()):
            candidate = self._candidate(each)
            if candidate is not None:
                self.sets.append((each, candidate))
        chosen: list[int] = []
        for turn in range(ROUNDS + 1):
            is_last = turn == ROUNDS or self.deadline.is_over
            chosen = self._solve(chosen, only_measured=is_last)
            unknown = [self.sets[s][1] for s in chosen if self._record(s) is None]
            if not unknown:
                break
            self._measure(unknown)
        return self._plan(chosen) if chosen else None

    def _record(self, s: int) -> Record | None:
        return self.meter.known(self.sets[s][1])

    def _saving_ns(self, s: int) -> int:
        """Return what a set saves, by its estimate if it is not measured; 0 if it failed."""
        each, _ = self.sets[s]
        record = self._record(s)
        if isinstance(record, Failed):
            return 0
        time_ns = each.estimate_ns if record is None else record.time_ns
        return sum(self.costs_ns[i] for i in each.places) - time_ns

    def _solve(self, hint: Sequence[int], only_measured: bool) -> list[int]:
        """Return the sets that save most together.

        A kernel is in one set at most, and each has a *stage*: later than those of the kernels that
        it waits for, and one for all of a set. Such stages exist if and only if no two sets wait
        for each other.
        """
        model = cp_model.CpModel()
        count = len(self.steps)
        stages = [model.new_int_var(0, count, f"stage[{i}]") for i in range(count)]
        for i, before in enumerate(self.waits_for):
            for k in reversed(range(i)):
                if before >> k & 1:
                    model.add(stages[i] >= stages[k] + 1)
                    before &= ~self.waits_for[k]  # what k waits for is before it anyway
        usable = [
            s
            for s in range(len(self.sets))
            if self._saving_ns(s) > 0 and not (only_measured and self._record(s) is None)
        ]
        use = {s: model.new_bool_var(f"use[{s}]") for s in usable}
        of_kernel: dict[int, list[int]] = {}
        for s in usable:
            first, *others = self.sets[s][0].places
            for i in (first, *others):
                of_kernel.setdefault(i, []).append(s)
            for i in others:
                model.add(stages[i] == stages[first]).only_enforce_if(use[s])
            model.add_hint(use[s], s in hint)
        for stage, (places, _) in enumerate(self._order([s for s in hint if s in use])):
            for i in places:
                model.add_hint(stages[i], stage)
        for sets in of_kernel.values():
            model.add_at_most_one(use[s] for s in sets)
        model.maximize(cp_model.LinearExpr.weighted_sum(list(use.values()), [self._saving_ns(s) for s in usable]))
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self.options.search.solver_workers
        solver.parameters.random_seed = self.options.search.seed
        solver.parameters.max_time_in_seconds = self._solve_seconds()
        solver.parameters.relative_gap_limit = GAP
        status = solver.solve(model)
        logger.info(
            "side by side: %s, %.0f ns saved, at most %.0f",
            solver.status_name(status),
            solver.objective_value,
            solver.best_objective_bound,
        )
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return []
        return [s for s in usable if solver.value(use[s])]

    def _solve_seconds(self) -> float:
        """Return how long a choice may take: what was measured is chosen from even at the end."""
        left_s = self.deadline.left_s
        return SOLVE_SECONDS if left_s is None else min(SOLVE_SECONDS, max(LAST_SECONDS, left_s))

    def _plan(self, sets: Sequence[int]) -> tuple[Candidate, ...]:
        """Return the plan with sets instead of their parts."""
        return tuple(candidate for _, candidate in self._order(sets))

    def _order(self, sets: Sequence[int]) -> list[tuple[tuple[int, ...], Candidate]]:
        """Return the kernels of a plan with sets, and the places of each, nearest to the plan.

        Of what is ready, that runs first which came first: a set comes where its last part did, and
        what waited for another part at once after it.
        """
        gone = {i for s in sets for i in self.sets[s][0].places}
        waiting: list[tuple[tuple[int, ...], Candidate]] = [
            *(((i,), step) for i, step in enumerate(self.steps) if i not in gone),
            *((self.sets[s][0].places, self.sets[s][1]) for s in sets),
        ]
        waiting.sort(key=lambda item: max(item[0]))
        chosen: list[tuple[tuple[int, ...], Candidate]] = []
        done = 0
        while waiting:
            place = next((n for n, (own, _) in enumerate(waiting) if self._is_ready(own, done)), None)
            if place is None:
                raise InvalidGraphError("the sets that were chosen wait for each other")
            own, candidate = waiting.pop(place)
            chosen.append((own, candidate))
            done |= sum(1 << i for i in own)
        return chosen

    def _is_ready(self, places: Sequence[int], done: int) -> bool:
        return all(not self.waits_for[i] & ~done for i in places)

    def _candidate(self, each: _Set) -> Candidate | None:
        lanes = [[self.steps[i] for i in lane] for lane in each.lanes]
        made = self.meter.shares.propose(self.graph, lanes, self.meter.target, each.threads)
        if isinstance(made, Refusal):
            logger.debug("%s don't run side by side: %s", each.lanes, made.reason)
            return None
        return made

    def _measure(self, candidates: Sequence[Candidate]) -> None:
        for start in range(0, len(candidates), BATCH):
            if self.deadline.is_over:
                return
            self.meter.measure(candidates[start : start + BATCH], self.deadline)

    def _proposals(self) -> Iterator[_Set]:
        """Yield sets that are thought to gain, each around its longest kernel."""
        for first in sorted(self.shares_ns):
            if self.deadline.is_over:
                return
            free = [i for i in self.shares_ns if i != first and self._is_free(i, [first])]
            shorter = [i for i in free if self._rank(i) < self._rank(first)]
            pairs = [self._pair(first, i) for i in shorter]
            yield from sorted(filter(None, pairs), key=self._preference)[:PARTNERS]
            free.sort(key=lambda i: (-self.shares_ns[i][1], abs(i - first)))
            filled = [self._filled(first, free, threads) for threads in self._divisions(first)]
            yield from sorted(filter(None, filled), key=self._preference)[:FILLED]

    def _rank(self, i: int) -> tuple[int, int]:
        return self.shares_ns[i][1], i

    def _pair(self, first: int, second: int) -> _Set | None:
        """Return the set of two kernels, each with the share that makes the longer one shortest."""
        threads = self.meter.target.threads
        ways = [(self._best(first, share), self._best(second, threads - share)) for share in shares_of(threads)]
        (_, own), (_, other) = min(ways, key=lambda way: max(way[0][0], way[1][0]))
        return self._set([[first], [second]], (own, other))

    def _best(self, i: int, most: int) -> tuple[int, int]:
        """Return what a kernel takes on the best share of at most some threads, and the share."""
        return min((ns, share) for share, ns in self.shares_ns[i].items() if share <= most)

    def _divisions(self, first: int) -> Iterator[tuple[int, ...]]:
        """Yield the shares of lanes of which a kernel has the first: the others are alike."""
        threads = self.meter.target.threads
        allowed = shares_of(threads)
        for own in self.shares_ns[first]:
            left = threads - own
            others = {left, left // 2, own, 1}
            yield from ((own, *[n] * (left // n)) for n in sorted(others) if n in allowed)

    def _filled(self, first: int, free: Sequence[int], threads: Sequence[int]) -> _Set | None:
        """Return the set that fills the threads beside a kernel, until it ends."""
        lanes: list[list[int]] = [[first], *([] for _ in threads[1:])]
        loads_ns = [self.shares_ns[first][threads[0]], *[0] * (len(lanes) - 1)]
        others = range(1, len(lanes))
        for i in free:
            lane = min(others, key=loads_ns.__getitem__, default=0)
            time_ns = self.shares_ns[i].get(threads[lane])
            fits = time_ns is not None and loads_ns[lane] + time_ns <= loads_ns[0]
            if lane and fits and self._is_free(i, [k for own in lanes for k in own]):
                lanes[lane].append(i)
                loads_ns[lane] += time_ns or 0
        used = [lane for lane in lanes if lane]
        return self._set(used, threads[: len(used)]) if sum(map(len, used)) > 2 else None

    def _is_free(self, i: int, others: Sequence[int]) -> bool:
        """Whether a kernel and others do not wait for each other."""
        return all(not (self.waits_for[i] >> k & 1 or self.waits_for[k] >> i & 1) for k in others)

    def _set(self, lanes: Sequence[Sequence[int]], threads: Sequence[int]) -> _Set | None:
        """Return a set if it is thought to gain over all threads, and over each part alone."""
        longest_ns = max(
            sum(self.shares_ns[i][share] for i in lane) for lane, share in zip(lanes, threads, strict=True)
        )
        each = _Set(tuple(map(tuple, lanes)), tuple(threads), longest_ns + START_NS)
        return each if self._worth(each) < -LEAST_GAIN_NS else None

    def _preference(self, each: _Set) -> tuple[int, int]:
        """Return what sorts sets by their gain, and those of near kernels before others."""
        return self._worth(each) // 256, max(each.places) - min(each.places)

    def _worth(self, each: _Set) -> int:
        instead_ns = sum(min(self.costs_ns[i], *self.measured_ns[i].values()) for i in each.places)
        return each.estimate_ns - instead_ns


def waits_for(graph: PrimitiveGraph, steps: Sequence[Candidate]) -> list[int]:
    """Return, per kernel of a plan in order, the places of those that run before it, as bits."""

    def port(value: int, layout: Layout) -> tuple[int, Layout]:
        return value, layout.normalized(graph.types[value].shape)

    writer: dict[tuple[int, Layout], int] = {}
    found: list[int] = []
    for i, step in enumerate(steps):
        before = 0
        for value, layout in step.input_ports:
            place = writer.get(port(value, layout))
            if place is not None:
                before |= found[place] | 1 << place
        found.append(before)
        writer |= dict.fromkeys((port(value, layout) for value, layout in step.output_ports), i)
    return found
