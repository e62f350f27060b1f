"""Combines launches into one persistent kernel, in which each program runs a queue of tasks.

Its parameters are three tables in device memory:

    plan       for each program where its queue begins, and where the last queue ends; then the entries of all queues:
               kernel, row of addresses, first and end program of the kernel, events to wait for, events to notify
    addresses  for each launch the addresses of its buffers
    state      for each program how often it has run; then a counter for each event

Counters are never reset: in its n-th run, a task waits until a counter has reached n times the event's count. So a
replayed graph needs no additional kernel that resets them. Waiting is an atomic load with acquire semantics,
notifying an atomic addition with release semantics. All programs must be resident at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.cuda.compile import Cubin
from korch.cuda.kernel import Launch
from korch.primitive.types import DType
from korch.system.content_name import content_name
from korch.tile.triton.text import STORED

ENTRY = 8
"""The number of integers in an entry of a queue."""

REGISTERS = 1 << 16
"""Registers of a multiprocessor."""

RESERVED_SHARED_BYTES = 1 << 10
"""Shared memory per resident program that the system reserves."""

MOST_RESIDENT_WARPS = 64


@dataclass(frozen=True, slots=True)
class PersistentTask:
    """An entry of a queue.

    Attributes:
        kernel: the number of the function to run.
        row: the position in `addresses` at which the addresses of its buffers begin.
        begin: the first program of the launch.
        end: one past the last program of the launch.
        waits: the events to wait for, each with its count per run.
        notifies: the events to notify.
    """

    kernel: int
    row: int
    begin: int
    end: int
    waits: tuple[tuple[int, int], ...]
    notifies: tuple[int, ...]


def print_persistent(launches: Sequence[Launch], warps: int) -> Launch:
    """Return the persistent kernel that runs programs of the launches, which must be of different functions.

    Its grid and arguments depend on the plan, so here the grid is 0 and there are no arguments.
    """
    sources = "\n\n".join(launch.source.rstrip() + "\n" for launch in launches)
    cases = []
    for number, launch in enumerate(launches):
        names = [f"p{i}" for i in range(len(launch.signature))]
        cases.append(f"        {'elif' if number else 'if'} kernel == {number}:")
        cases += [
            f"            {name} = f.pointer(row, {i}, {STORED[dtype]})"
            for i, (name, dtype) in enumerate(zip(names, launch.signature, strict=True))
        ]
        cases += [
            "            while pid < end:",
            f"                {launch.symbol}_task({', '.join(['pid', *names])})",
            "                pid += 1",
        ]
    text = f"{sources}\n\n" + _QUEUE.replace("CASES", "\n".join(cases)).replace("ENTRY", str(ENTRY))
    symbol = content_name("p", f"{text} {warps}")
    return Launch(symbol, text.replace("PERSISTENT", symbol), (DType.I32, DType.I64, DType.I32), (), 0, 0, warps)


_QUEUE = """@triton.jit
def PERSISTENT(plan, addresses, state):
    program = tl.program_id(0)
    events = state + tl.num_programs(0)
    run = tl.load(state + program) + 1
    at = tl.load(plan + program)
    last = tl.load(plan + program + 1)
    while at < last:
        kernel = tl.load(plan + at)
        row = addresses + tl.load(plan + at + 1)
        pid = tl.load(plan + at + 2)
        end = tl.load(plan + at + 3)
        f.wait(plan, events, run, tl.load(plan + at + 4), tl.load(plan + at + 5))
CASES
        f.notify(plan, events, tl.load(plan + at + 6), tl.load(plan + at + 7))
        at += ENTRY
    tl.store(state + program, run)
"""


def plan_table(queues: Sequence[Sequence[PersistentTask]]) -> tuple[int, ...]:
    """Return the table `plan` for the queues of all programs."""
    begins = [len(queues) + 1]
    for queue in queues:
        begins.append(begins[-1] + ENTRY * len(queue))
    entries: list[int] = []
    lists: list[int] = []
    for task in (task for queue in queues for task in queue):
        entries += [task.kernel, task.row, task.begin, task.end]
        for numbers in ([n for wait in task.waits for n in wait], task.notifies):
            entries.append(begins[-1] + len(lists))
            lists += numbers
            entries.append(begins[-1] + len(lists))
    return (*begins, *entries, *lists)


def read_plan_table(table: Sequence[int], programs: int) -> list[list[PersistentTask]]:
    """Return the queues that a table `plan` encodes."""

    def task(at: int) -> PersistentTask:
        kernel, row, begin, end, *ends = table[at : at + ENTRY]
        waits = table[ends[0] : ends[1]]
        pairs = tuple(zip(waits[::2], waits[1::2], strict=True))
        return PersistentTask(kernel, row, begin, end, pairs, tuple(table[ends[2] : ends[3]]))

    return [[task(at) for at in range(table[q], table[q + 1], ENTRY)] for q in range(programs)]


def resident_programs(cubin: Cubin, warps: int, shared_bytes: int) -> int:
    """Return how many programs of a kernel a multiprocessor can run at the same time.

    Args:
        cubin: the kernel.
        warps: the warps of a program.
        shared_bytes: the most shared memory of a program on the device.
    """
    by_registers = REGISTERS // (-(-cubin.registers // 8) * 8 * 32 * warps)
    own = cubin.shared_bytes + RESERVED_SHARED_BYTES
    by_shared = (shared_bytes + RESERVED_SHARED_BYTES) // own
    return min(by_registers, by_shared, MOST_RESIDENT_WARPS // warps)
