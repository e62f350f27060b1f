"""Kernels of a plan -> the time of each on parts of the threads, in its fastest variant for that number of threads.

A kernel is measured on one thread and, if there are more than two, on half of them; times for other numbers of threads
are interpolated. For each number of threads, the plan's variant is measured, as its provider builds it for that number,
and a few other variants with the same layouts: those with the least measured or estimated time on all threads. If the
plan's variant is not offered on fewer threads, other variants replace it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from typing import cast

from korch.candidate.candidate import Candidate, Refusal
from korch.deadline import Deadline
from korch.measure.cpu import CpuMeter
from korch.measure.record import Measured
from korch.primitive.graph import PrimitiveGraph
from korch.search.ledger import Ledger
from korch.search.price import estimates_ns

logger = logging.getLogger("korch.orchestrate")

SETS_SHARE = 0.3
"""The share of the remaining time that is reserved for sets of kernels, which are measured after single kernels."""


@dataclass(frozen=True, slots=True)
class LaneKernel:
    """A kernel of the plan on a part of the threads, while the others are idle.

    Attributes:
        place: its position in the plan.
        threads: the number of its threads.
        part: the kernel in one of its variants.
        candidate: the candidate that runs this variant on these threads.
    """

    place: int
    threads: int
    part: Candidate
    candidate: Candidate


def lane_sizes(threads: int) -> tuple[int, ...]:
    """Return the numbers of threads that lanes may have: a few, and for each the number of remaining threads."""
    quarter = (threads + 2) // 4
    some = {1, quarter, threads // 2}
    return tuple(sorted({n for s in some for n in (s, threads - s) if 0 < n < threads}))


def measured_sizes(threads: int) -> tuple[int, ...]:
    """Return the numbers of threads on which kernels are measured."""
    return tuple(n for n in sorted({1, max(2, threads // 2)}) if n < threads)


def lane_ns(times_ns: Mapping[int, int], size: int) -> int:
    """Return the estimated time of a kernel on a part of the threads.

    Args:
        times_ns: its measured times, by number of threads.
        size: the number of threads, within the range of the measured numbers.
    """
    if size in times_ns:
        return times_ns[size]
    for few, many in pairwise(sorted(times_ns)):
        if few < size < many:
            few_ns, many_ns = max(1, times_ns[few]), max(1, times_ns[many])
            part = log(size / few) / log(many / few)
            return round(exp((1 - part) * log(few_ns) + part * log(many_ns)))
    raise ValueError(f"{size} threads are not between {sorted(times_ns)}")


class KernelLanes:
    """The kernels of a plan on parts of the threads.

    Attributes:
        fastest: by place and number of threads, the fastest variant of each kernel that was measured.
    """

    def __init__(self, graph: PrimitiveGraph, steps: Sequence[Candidate], ledger: Ledger) -> None:
        """Begin without times.

        Args:
            graph: the graph of the whole model.
            steps: the plan's kernels in order, all measured.
            ledger: answers questions; its meter is of a CPU.
        """
        self.graph, self.steps, self.ledger = graph, tuple(steps), ledger
        self.target = ledger.meter.target
        self.costs_ns = [ledger.cost_ns(step)[0] for step in steps]
        self.fastest: dict[int, dict[int, LaneKernel]] = {}

    def measure(self, deadline: Deadline) -> None:
        """Measure the short kernels, those with the greatest sum of costs first; other variants after the plan's."""
        tries = self._tries()
        end = deadline.less(SETS_SHARE)
        self._measure([own[0] for own in tries], end)
        self._measure([each for own in tries for each in own[1:]], end)
        doubtful = [best for own in tries if (best := self._best(own)) not in (None, own[0])]
        self.ledger.confirm([best.candidate for best in doubtful if best], deadline)
        gains_ns: list[int] = []
        for own in tries:
            best = self._best(own)
            if best is None:
                continue
            self.fastest.setdefault(best.place, {})[best.threads] = best
            if best is not own[0]:
                gains_ns.append((self._time_ns(own[0]) or self.time_ns(best)) - self.time_ns(best))
        logger.info(
            "concurrent: %d of %d lanes measured; other variants of %d are faster, by %d ns",
            *(sum(map(len, self.fastest.values())), len(tries), len(gains_ns), sum(gains_ns)),
        )

    def time_ns(self, kernel: LaneKernel) -> int:
        """Return the time of a measured kernel."""
        return self.ledger.cost_ns(kernel.candidate)[0]

    def times_ns(self, place: int) -> dict[int, int]:
        """Return the measured times of a kernel by the number of threads."""
        return {size: self.time_ns(each) for size, each in self.fastest[place].items()}

    def estimates_ns(self) -> dict[int, dict[int, int]]:
        """Return the estimated time of each kernel on each number of threads that it may have.

        A kernel that fails on half of the threads may have only one thread.
        """
        found: dict[int, dict[int, int]] = {}
        threads = self.target.threads
        for i in self.fastest:
            times_ns = self.times_ns(i)
            if 1 not in times_ns:
                continue
            all_ns = {**times_ns, threads: self.costs_ns[i]} if len(times_ns) > 1 else times_ns
            sizes = lane_sizes(threads) if len(times_ns) > 1 else (1,)
            found[i] = {size: lane_ns(all_ns, size) for size in sizes}
        return found

    def propose(self, lanes: Sequence[Sequence[int]], threads: Sequence[int]) -> Candidate | None:
        """Return the candidate that runs kernels of the plan, given by place, concurrently; None if there is none."""
        parts = [[self._part(i, size) for i in lane] for lane, size in zip(lanes, threads, strict=True)]
        return self._propose(parts, threads)

    def _part(self, place: int, size: int) -> Candidate:
        """Return a kernel in the variant that is used for the nearest number of threads."""
        known = {n: each.part for n, each in self.fastest.get(place, {}).items()}
        known[self.target.threads] = self.steps[place]
        return known[min(known, key=lambda n: abs(log(n / size)))]

    def _propose(self, parts: Sequence[Sequence[Candidate]], threads: Sequence[int]) -> Candidate | None:
        concurrent = cast(CpuMeter, self.ledger.meter).concurrent
        made: Candidate | Refusal = concurrent.propose(self.graph, parts, self.target, threads)
        if isinstance(made, Refusal):
            logger.debug("kernels don't run side by side: %s", made.reason)
            return None
        return made

    def _tries(self) -> list[list[LaneKernel]]:
        """Return the variants to measure for each kernel and number of threads, at least one for each."""
        provider = cast(CpuMeter, self.ledger.meter).concurrent
        most_ns, most = self.ledger.limits.concurrent_kernel_ns, 1 + self.ledger.limits.concurrent_variants
        offered = {
            (i, size): provider.variants(step, replace(self.target, threads=size))
            for i, step in enumerate(self.steps)
            for size in (measured_sizes(self.target.threads) if self.costs_ns[i] <= most_ns else ())
        }
        ranks = self._ranks([part for parts in offered.values() for part in parts])
        found = []
        for (i, size), parts in offered.items():
            is_own = bool(parts) and parts[0].offer.variant == self.steps[i].offer.variant
            others = [part for part in parts[is_own:] if not self.ledger.has_failed(part)]
            chosen = (*parts[:is_own], *sorted(others, key=lambda part: ranks[part.key]))[:most]
            proposed = [(part, self._propose([[part]], [size])) for part in chosen]
            own = [LaneKernel(i, size, part, made) for part, made in proposed if made is not None]
            found += [own] if own else []
        return found

    def _ranks(self, parts: Sequence[Candidate]) -> dict[str, int]:
        """Return the measured or estimated time of variants on all threads, by key."""
        distinct = list({part.key: part for part in parts}.values())
        self.ledger.look_up(distinct)
        return {part.key: ns for part, ns in zip(distinct, estimates_ns(self.ledger, distinct), strict=True)}

    def _time_ns(self, kernel: LaneKernel) -> int | None:
        record = self.ledger.known(kernel.candidate)
        return record.time_ns if isinstance(record, Measured) else None

    def _best(self, own: Sequence[LaneKernel]) -> LaneKernel | None:
        """Return the fastest variant; if several are equally fast, the plan's."""
        times_ns = [(time_ns, k) for k, each in enumerate(own) if (time_ns := self._time_ns(each)) is not None]
        return own[min(times_ns)[1]] if times_ns else None

    def _measure(self, kernels: Sequence[LaneKernel], deadline: Deadline) -> None:
        """Measure kernels, equal ones once, those with the greatest total time on all threads first."""
        sums_ns: dict[str, int] = {}
        for each in kernels:
            sums_ns[each.candidate.key] = sums_ns.get(each.candidate.key, 0) + self.costs_ns[each.place]
        distinct = {each.candidate.key: each.candidate for each in kernels}
        self.ledger.look_up(list(distinct.values()))
        todo = [distinct[key] for key in sorted(sums_ns, key=lambda key: -sums_ns[key])]
        measure_in_batches(self.ledger, todo, deadline)


def measure_in_batches(ledger: Ledger, candidates: Sequence[Candidate], deadline: Deadline) -> None:
    """Measure candidates until a deadline."""
    for start in range(0, len(candidates), ledger.limits.batch):
        if ledger.is_over(deadline):
            return
        ledger.measure(candidates[start : start + ledger.limits.batch], deadline)
