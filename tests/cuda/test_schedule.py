"""Kernels that may run side by side: never two of which one writes memory that the other one accesses."""

import random

import pytest

from korch.cuda.runtime.build import add_table
from korch.cuda.runtime.record import BufferRecord, LaunchRecord, StepProgram
from korch.cuda.runtime.schedule import STREAMS, Turn, dependencies, early_launches, in_order, schedule


def step(reads, writes):
    buffers = [BufferRecord("arena", at, size) for at, size in (*reads, *writes)]
    return StepProgram(tuple(buffers), len(reads), len(writes))


def test_readers_follow_writers_and_writers_follow_readers():
    steps = [
        step([], [(0, 64)]),
        step([], [(64, 64)]),
        step([(0, 64)], [(128, 64)]),
        step([(64, 64)], [(192, 64)]),
        step([(128, 64), (192, 64)], [(0, 32)]),
    ]
    assert dependencies(steps) == ((), (), (0,), (1,), (2, 3))
    turns = schedule(steps)
    assert turns[0].stream != turns[1].stream
    assert turns[2].stream == turns[0].stream and turns[3].stream == turns[1].stream
    assert turns[4].waits and all(turns[w].stream != turns[4].stream for w in turns[4].waits)


@pytest.mark.parametrize("seed", range(20))
def test_every_conflict_is_ordered(seed):
    rng = random.Random(seed)
    steps = []
    for _ in range(40):
        places = [(64 * rng.randrange(12), 64 * rng.randint(1, 3)) for _ in range(3)]
        steps.append(step(places[:2], places[2:]))
    turns = schedule(steps)
    assert all(0 <= turn.stream < STREAMS for turn in turns)
    before = []  # what is surely done when a step begins: its stream's past, and what it waits for
    past = [set() for _ in range(STREAMS)]
    for number, turn in enumerate(turns):
        known = set(past[turn.stream])
        for wait in turn.waits:
            known |= before[wait] | {wait}
        before.append(known)
        past[turn.stream] = known | {number}
        for other in range(number):
            if _touch(steps[other], steps[number]):
                assert other in known


def test_a_kernel_begins_early_only_behind_a_kernel_of_its_stream():
    launch = LaunchRecord("k", 1, 1, 0, (), ())
    kernel, pair = StepProgram((), 0, 0, (launch,)), StepProgram((), 0, 0, (launch, launch))
    call, engine, nothing = StepProgram((), 0, 0, call="c"), StepProgram((), 0, 0, engine="e"), StepProgram((), 0, 0)
    steps = [kernel, pair, call, pair, nothing, kernel, engine, nothing, kernel]
    flags = [(False,), (True, True), (), (False, True), (), (True,), (), (), (False,)]
    assert list(early_launches(steps, in_order(steps))) == flags
    turns = [Turn(0, ()), Turn(1, ()), Turn(0, ()), Turn(1, (2,)), Turn(1, ()), Turn(0, (1,))]
    expected = [(False,), (False,), (True,), (False,), (True,), (False,)]
    assert list(early_launches([kernel] * 6, turns)) == expected


def _touch(a, b):
    return any(
        x.at < y.at + y.size_bytes and y.at < x.at + x.size_bytes
        for i, x in enumerate(a.buffers)
        for j, y in enumerate(b.buffers)
        if i >= a.inputs or j >= b.inputs
    )


def test_kernels_share_constants_but_no_counters():
    tables: list[tuple[int, ...]] = []
    assert [add_table(tables, table) for table in ((1, 2), (0, 0), (1, 2), (0, 0))] == [0, 1, 0, 2]
    assert tables == [(1, 2), (0, 0), (0, 0)]
