"""Concurrent plans: the program that chooses sets, the order of kernels, and the verifier.

The input is a plan: kernels in order, and the kernels that each depends on. Some kernels are replaced
by *sets*, whose kernels run at the same time on parts of the threads. The choice of sets is an ordinary
instance of a plan problem (`korch.program.problem`): each kernel of the given plan stands for a value,
which must be written exactly once, by the kernel itself or by a set that contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.program.problem import Computation, Port, PricedKernel, Problem


@dataclass(frozen=True, slots=True)
class ConcurrentKernel:
    """Kernels that run at the same time, as positions ("places") in the given plan.

    Attributes:
        lanes: the kernels of each lane, which run one after another.
        threads: the number of threads of each lane.
    """

    lanes: tuple[tuple[int, ...], ...]
    threads: tuple[int, ...]

    @property
    def places(self) -> tuple[int, ...]:
        """The places, lane after lane."""
        return tuple(i for lane in self.lanes for i in lane)


def waits_for(graph: PrimitiveGraph, steps: Sequence[Candidate]) -> list[int]:
    """Return, per kernel of a plan in order, the places of the kernels that it depends on, also indirectly, as bits."""

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


def concurrent_problem(before: Sequence[int], sets: Sequence[Sequence[int]]) -> Problem:
    """Return the instance of a choice of sets, without costs.

    Args:
        before: per kernel of the given plan, the places that it depends on, as bits.
        sets: the places of each set.

    Returns:
        An instance whose first kernels are those of the given plan, and the others the sets.
    """
    direct = [_direct(before, i) for i in range(len(before))]

    def kernel(places: Sequence[int]) -> PricedKernel:
        own = frozenset(places)
        reads = dict.fromkeys(k for i in places for k in direct[i] if k not in own)
        return PricedKernel(own, tuple(_port(k) for k in reads), tuple(_port(i) for i in places), 0)

    return Problem(
        steps=tuple(Computation(i, tuple(needs)) for i, needs in enumerate(direct)),
        kernels=tuple(kernel(places) for places in (*((i,) for i in range(len(before))), *sets)),
        required=tuple(_port(i) for i in range(len(before))),
    )


def _port(i: int) -> Port:
    return Port(i, "")


def _direct(before: Sequence[int], i: int) -> list[int]:
    """Return the places that a kernel depends on directly, not only through another kernel."""
    found, left = [], before[i]
    for k in reversed(range(i)):
        if left >> k & 1:
            found.append(k)
            left &= ~before[k]
    return found


def first_choice(before: Sequence[int], sets: Sequence[Sequence[int]]) -> list[int]:
    """Return a greedy choice of sets: each set, in order, that is compatible with those taken before it.

    Args:
        before: per kernel of the given plan, the places that it depends on, as bits.
        sets: the places of each set, the best set first.

    Returns:
        The numbers of the sets.
    """
    waits, chosen, taken = list(before), [], 0
    for s, places in enumerate(sets):
        own, needs = sum(1 << i for i in places), _bits(places, waits)
        if own & (taken | needs):  # one of its kernels is in another set, or depends on the set itself
            continue
        chosen.append(s)
        taken |= own
        for k, bits in enumerate(waits):
            if own >> k & 1 or bits & own:
                waits[k] |= needs if own >> k & 1 else needs | own
    return chosen


def concurrent_order(before: Sequence[int], kernels: Sequence[Sequence[int]]) -> list[int]:
    """Return the kernels and sets of a plan in an order that is close to the given plan.

    Among those that are ready, the one whose last place is first in the given plan runs first.

    Args:
        before: per kernel of the given plan, the places that it depends on, as bits.
        kernels: the places of each kernel or set.

    Raises:
        InvalidGraphError: sets depend on each other.
    """
    needs = [_bits(places, before) & ~sum(1 << i for i in places) for places in kernels]
    waiting = sorted(range(len(kernels)), key=lambda n: max(kernels[n]))
    order: list[int] = []
    done = 0
    while waiting:
        ready = next((n for n in waiting if not needs[n] & ~done), None)
        if ready is None:
            raise InvalidGraphError("the chosen sets of concurrent kernels depend on each other")
        waiting.remove(ready)
        order.append(ready)
        done |= sum(1 << i for i in kernels[ready])
    return order


def _bits(places: Sequence[int], before: Sequence[int]) -> int:
    found = 0
    for i in places:
        found |= before[i]
    return found


def verify_concurrent(before: Sequence[int], kernels: Sequence[ConcurrentKernel], threads: int) -> None:
    """Check a concurrent plan, in the order in which it runs.

    Args:
        before: per kernel of the given plan, the places that it depends on, as bits.
        kernels: the kernels of the concurrent plan.
        threads: the number of threads of the machine.

    Raises:
        InvalidGraphError: a kernel of the given plan does not run exactly once; lanes have no
            threads, or more than there are; or a kernel does not run after those it depends on.
    """
    done = 0
    for n, kernel in enumerate(kernels):
        _lanes_fit(kernel, threads, n)
        own = 0
        for lane in kernel.lanes:
            at = done
            for i in lane:
                if (done | own) >> i & 1:
                    raise InvalidGraphError(f"kernel {i} runs twice", where=f"concurrent kernel {n}")
                if missing := before[i] & ~at:
                    k = missing.bit_length() - 1
                    raise InvalidGraphError(
                        f"kernel {i} needs kernel {k}, which has not run before it in its lane or in an earlier set",
                        where=f"concurrent kernel {n}",
                    )
                at |= 1 << i
                own |= 1 << i
        done |= own
    if done != (1 << len(before)) - 1:
        left = [i for i in range(len(before)) if not done >> i & 1]
        raise InvalidGraphError(f"kernels {left[:8]} of the plan do not run")


def _lanes_fit(kernel: ConcurrentKernel, threads: int, n: int) -> None:
    """Check that each lane has kernels and threads, and that there are enough threads."""
    if not kernel.lanes or not all(kernel.lanes) or len(kernel.lanes) != len(kernel.threads):
        raise InvalidGraphError("a lane has no kernels, or no number of threads", where=f"concurrent kernel {n}")
    if min(kernel.threads) < 1 or sum(kernel.threads) > threads:
        raise InvalidGraphError(f"the lanes have {kernel.threads} threads of {threads}", where=f"concurrent kernel {n}")
