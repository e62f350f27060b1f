"""Steps -> streams: which kernels may run concurrently, and which steps each of them has to wait for."""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.cuda.runtime.record import BufferRecord, StepProgram

STREAMS = 4
"""The most branches of a graph that run concurrently."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The stream of a step, and the steps of other streams that it waits for."""

    stream: int
    waits: tuple[int, ...]


def dependencies(steps: Sequence[StepProgram]) -> tuple[tuple[int, ...], ...]:
    """Return the steps that each step must follow: it reads what they wrote, or reuses their memory.

    Steps that are implied transitively are omitted.
    """
    found: list[tuple[int, ...]] = []
    behind: list[set[int]] = []
    for number, step in enumerate(steps):
        direct: list[int] = []
        implied: set[int] = set()
        for before in range(number - 1, -1, -1):
            if before not in implied and _conflict(steps[before], step):
                direct.append(before)
                implied |= behind[before] | {before}
        found.append(tuple(sorted(direct)))
        behind.append(implied)
    return tuple(found)


def schedule(steps: Sequence[StepProgram]) -> tuple[Turn, ...]:
    """Return a stream for each step: that of a predecessor, if the predecessor is the last step in its stream."""
    turns: list[Turn] = []
    last = [-1] * STREAMS
    for after in dependencies(steps):
        free = [s for s in range(STREAMS) if last[s] in after]
        idle = [s for s in range(STREAMS) if last[s] < 0]
        stream = (free or idle or [min(range(STREAMS), key=lambda s: last[s])])[0]
        waits = tuple(b for b in after if turns[b].stream != stream)
        turns.append(Turn(stream, waits))
        last[stream] = len(turns) - 1
    return tuple(turns)


def in_order(steps: Sequence[StepProgram]) -> tuple[Turn, ...]:
    """Return turns on one stream."""
    return tuple(Turn(0, ()) for _ in steps)


def early_launches(steps: Sequence[StepProgram], turns: Sequence[Turn]) -> tuple[tuple[bool, ...], ...]:
    """Return for each launch of each step whether it may begin before the launch in front of it has ended.

    It may if it waits for nothing else: on its stream, the launch follows another one, with no call, engine or wait for
    other streams between.
    """
    found = []
    follows = [False] * STREAMS
    for step, turn in zip(steps, turns, strict=True):
        first = follows[turn.stream] and not turn.waits
        found.append(tuple(first or n > 0 for n in range(len(step.launches))))
        follows[turn.stream] = bool(step.launches) or (first and not step.call and not step.engine)
    return tuple(found)


def _conflict(first: StepProgram, second: StepProgram) -> bool:
    """Return whether one of two steps writes memory that the other reads or writes."""
    return any(
        _overlap(a, b)
        for i, a in enumerate(first.buffers)
        for j, b in enumerate(second.buffers)
        if i >= first.inputs or j >= second.inputs
    )


def _overlap(a: BufferRecord, b: BufferRecord) -> bool:
    if a.memory != b.memory or a.memory in ("constant", "table"):
        return False
    if a.memory != "arena":
        return a.at == b.at
    return a.at < b.at + b.size_bytes and b.at < a.at + a.size_bytes
