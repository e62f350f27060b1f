"""Buffers with live ranges -> offsets in one arena.

Two buffers may share memory unless some step needs both. Finding the smallest arena is dynamic
storage allocation, which is NP-hard. Several greedy orders are tried first. The largest number of live
bytes at any step is a lower bound, which often proves a greedy placement optimal. If it does not, and the
instance is small, CP-SAT solves it as a packing of rectangles (time x memory).

All sizes and offsets are multiples of `ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from korch.binary_program.cp_sat import CpSatModel
from korch.errors import InvalidGraphError
from korch.system.alignment import ALIGNMENT, align_up

SOLVER_BUFFERS = 150
"""Largest number of buffers for which the solver is used."""


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
    """Memory that is needed from one step to another."""

    size_bytes: int  # its size
    first: int  # the step that writes it first
    last: int  # the last step that reads or writes it, at least `first`


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The place of each buffer in an arena."""

    offsets: tuple[int, ...]  # per buffer, in bytes from the arena's start
    size_bytes: int  # the arena's size
    lower_bound_bytes: int  # the lower bound of the size of any arena

    @property
    def is_optimal(self) -> bool:
        """Whether it is proven that no smaller arena exists."""
        return self.size_bytes == self.lower_bound_bytes

    def with_more(self, size_bytes: int) -> ArenaPlan:
        """Return the plan with additional memory after the buffers."""
        return ArenaPlan(self.offsets, self.size_bytes + size_bytes, self.lower_bound_bytes + size_bytes)


def live_bytes(buffers: Sequence[ArenaBuffer]) -> int:
    """Return the largest number of live bytes at any step, with each buffer rounded up to the alignment."""
    events: dict[int, int] = {}
    for buffer in buffers:
        size_bytes = align_up(buffer.size_bytes)
        events[buffer.first] = events.get(buffer.first, 0) + size_bytes
        events[buffer.last + 1] = events.get(buffer.last + 1, 0) - size_bytes
    peak = current = 0
    for step in sorted(events):
        current += events[step]
        peak = max(peak, current)
    return peak


def plan_arena(buffers: Sequence[ArenaBuffer], *, seconds: float = 1.0) -> ArenaPlan:
    """Place buffers so that the arena is as small as can be found.

    `seconds`: longest time for the solver; 0 disables it.

    Returns:
        The offsets, the size, and a proven lower bound for it.
    """
    bound = live_bytes(buffers)
    best = _greedy(buffers)
    if _size_bytes(buffers, best) > bound and len(buffers) <= SOLVER_BUFFERS and seconds > 0:
        best, bound = _solve(buffers, best, bound, seconds)
    plan = ArenaPlan(tuple(best), _size_bytes(buffers, best), bound)
    check_arena(buffers, plan)
    return plan


def check_arena(buffers: Sequence[ArenaBuffer], plan: ArenaPlan) -> None:
    """Check that an arena plan is valid.

    Raises:
        InvalidGraphError: a buffer is unaligned or outside the arena, or two buffers that are live together overlap.
    """
    placed = list(zip(buffers, plan.offsets, strict=True))
    for i, (buffer, offset) in enumerate(placed):
        if offset < 0 or offset % ALIGNMENT or offset + buffer.size_bytes > plan.size_bytes:
            raise InvalidGraphError(
                f"buffer {i} of {buffer.size_bytes} bytes lies at offset {offset}",
                where="arena",
                expected=f"a multiple of {ALIGNMENT} and an end within {plan.size_bytes} bytes",
            )
    live: list[int] = []
    for i in sorted(range(len(placed)), key=lambda i: buffers[i].first):
        live = [j for j in live if buffers[j].last >= buffers[i].first]
        start, end = plan.offsets[i], plan.offsets[i] + buffers[i].size_bytes
        for j in live:
            if start < plan.offsets[j] + buffers[j].size_bytes and plan.offsets[j] < end:
                raise InvalidGraphError(
                    f"buffers {min(i, j)} and {max(i, j)} overlap in memory, "
                    f"and both are live at step {buffers[i].first}",
                    where="arena",
                )
        live.append(i)


def _size_bytes(buffers: Sequence[ArenaBuffer], offsets: Sequence[int]) -> int:
    ends = (o + align_up(b.size_bytes) for b, o in zip(buffers, offsets, strict=True))
    return max(ends, default=0)


_ORDERS: tuple[Callable[[ArenaBuffer], tuple[int, ...]], ...] = (
    lambda b: (-b.size_bytes, b.first),
    lambda b: (-b.size_bytes * (b.last - b.first + 1), b.first),
    lambda b: (b.first - b.last, -b.size_bytes),
    lambda b: (b.first, -b.size_bytes),
    lambda b: (b.first, -b.last),
    lambda b: (-b.last, -b.size_bytes),
)


def _greedy(buffers: Sequence[ArenaBuffer]) -> list[int]:
    """Return the best placement over several orders."""
    neighbours = _neighbours(buffers)
    return min(
        (
            _place(buffers, neighbours, sorted(range(len(buffers)), key=lambda i: key(buffers[i])), is_best_fit)
            for key in _ORDERS
            for is_best_fit in (True, False)
        ),
        key=lambda offsets: _size_bytes(buffers, offsets),
    )


def _neighbours(buffers: Sequence[ArenaBuffer]) -> list[list[int]]:
    """Return, for each buffer, the buffers that are live at the same time."""
    found: list[list[int]] = [[] for _ in buffers]
    live: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        live = [j for j in live if buffers[j].last >= buffers[i].first]
        for j in live:
            found[i].append(j)
            found[j].append(i)
        live.append(i)
    return found


def _place(
    buffers: Sequence[ArenaBuffer], neighbours: Sequence[Sequence[int]], order: Sequence[int], is_best_fit: bool
) -> list[int]:
    """Place buffers in this order, each into the smallest gap that fits (without best fit: into the lowest)."""
    offsets = [-1] * len(buffers)
    for i in order:
        size = align_up(buffers[i].size_bytes)
        taken = sorted(
            (offsets[j], offsets[j] + align_up(buffers[j].size_bytes)) for j in neighbours[i] if offsets[j] >= 0
        )
        best_gap = -1
        end = 0
        for start, stop in taken:
            gap = start - end
            if gap >= size and (best_gap < 0 or gap < best_gap):
                offsets[i], best_gap = end, gap
                if not is_best_fit:
                    break
            end = max(end, stop)
        if best_gap < 0:
            offsets[i] = end
    return offsets


def _solve(buffers: Sequence[ArenaBuffer], hint: Sequence[int], bound: int, seconds: float) -> tuple[list[int], int]:
    """Return the placement and the lower bound that CP-SAT finds; neither is worse than the given ones."""
    model = CpSatModel()
    limit = _size_bytes(buffers, hint) // ALIGNMENT
    size = model.variable(bound // ALIGNMENT, limit)
    starts, rectangles = [], []
    for buffer, offset in zip(buffers, hint, strict=True):
        height = align_up(buffer.size_bytes) // ALIGNMENT
        start = model.variable(0, limit - height)
        model.add((size, start), (1, -1), height)
        model.hint(start, offset // ALIGNMENT)
        starts.append(start)
        if height:
            rectangles.append((buffer.first, buffer.last - buffer.first + 1, start, height))
    model.apart(rectangles)
    model.minimize((size,), (1,))
    result = model.solve(seconds, {"num_workers": 2})
    if not result.values:
        return list(hint), bound
    found = [result.values[start] * ALIGNMENT for start in starts]
    proven = max(bound, round(result.bound) * ALIGNMENT)
    return found, min(proven, _size_bytes(buffers, found))
