"""Waits of tasks: derived from footprints, checked, and sufficient for every order."""

import random

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.events.check import check_queues
from korch.events.derive import derive_waits
from korch.events.graph import Touched
from korch.events.queues import QueuedTask, make_queues
from korch.events.spans import NOTHING, run, runs, union
from korch.events.touched import touched_by
from korch.tile.check.accesses import accesses
from korch.tile.check.points import Points
from korch.tile.ir.bind import bind
from korch.tile.lower.buffers import places_in_memory
from tests.events.fewer_waits import with_fewer_waits
from tests.support.parse_tiles import parse_program
from tests.tile.test_programs import PROGRAMS
from tests.tile.tile_groups import FAMILIES, lowered, offers_of


def bytes_of(spans):
    return {byte for begin, end in zip(spans.begins, spans.ends, strict=True) for byte in range(begin, end)}


def random_spans(rng, most=6):
    begins = rng.integers(0, 60, rng.integers(0, most))
    return runs(begins, begins + rng.integers(0, 9, len(begins)))


@pytest.mark.parametrize("seed", range(50))
def test_spans_are_sets_of_bytes(seed):
    rng = np.random.default_rng(seed)
    a, b = random_spans(rng), random_spans(rng)
    both = bytes_of(a) & bytes_of(b)
    byte = a.common_byte(b)
    assert (byte is None) == (not both)
    assert byte is None or byte in both
    assert bytes_of(union([a, b, NOTHING])) == bytes_of(a) | bytes_of(b)
    assert bytes_of(a.shifted(5)) == {byte + 5 for byte in bytes_of(a)}
    assert np.all(a.begins[1:] > a.ends[:-1])


def test_many_runs_are_joined_to_fewer_that_have_all_bytes():
    rng = np.random.default_rng(0)
    begins = np.cumsum(rng.integers(2, 50, 20_000))
    found = runs(begins, begins + 1)
    assert 1 < found.begins.size <= 8192
    assert all(found.common_byte(run(begin, begin + 1)) == begin for begin in begins[::97])


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_touched_bytes_of_programs(text):
    program = parse_program(text)
    for size in (1, 6, 21):
        check_touched(bind(program, {parameter.name: size for parameter in program.parameters}))


@pytest.mark.parametrize("family", FAMILIES)
def test_touched_bytes_of_lowered_programs(family, target):
    for group in list(FAMILIES[family]())[::2]:
        for offer in offers_of(group, target)[:1]:
            check_touched(lowered(group, offer, target))


def check_touched(program):
    """Compare the bytes that ranges of tasks touch with an enumeration of all points."""
    places, _ = places_in_memory(program)
    for stage in program.stages:
        half = stage.tasks // 3
        ranges = [(0, half), (half, stage.tasks)]
        found = touched_by(program, stage, [np.arange(*range_) for range_ in ranges], places)
        for range_, touched in zip(ranges, found, strict=True):
            expected = {}
            for access in accesses(stage):
                if access.buffer not in places or range_[0] == range_[1]:
                    continue
                place, layout = places[access.buffer], program.buffer(access.buffer).layout
                points = Points(stage.grid, access.axes, np.arange(*range_))
                at = points.spread(points.at(access.index))[points.spread(points.live & points.holds(access.guards))]
                elements = set(at.tolist()) if not layout else set(range(program.buffer(access.buffer).size))
                size, offset = place.element_bytes, place.offset_bytes
                own = {offset + size * element + byte for element in elements for byte in range(size)}
                expected.setdefault((place.position, access.is_write), set()).update(own)
            assert {key: bytes_of(spans) for key, spans in touched.items() if spans} == {
                key: own for key, own in expected.items() if own
            }


ROW = 8


def rows(memory, first, end):
    return {memory: run(ROW * max(first, 0), ROW * end)}


def windows():
    """A row of the second stage is computed from three, and the third stage overwrites what the first wrote."""
    first = [Touched(rows("input", i, i + 1), rows("arena", i, i + 1)) for i in range(4)]
    second = [Touched(rows("arena", i - 1, min(i + 2, 4)), rows("arena", 10 + i, 11 + i)) for i in range(4)]
    third = [Touched(rows("arena", 10 + 2 * i, 12 + 2 * i), rows("arena", 2 * i, 2 * i + 2)) for i in range(2)]
    fourth = [Touched(rows("arena", 0, 4), rows("output", 0, 1))]
    return first, second, third, fourth


WINDOWS = {
    **{(0, i): () for i in range(4)},
    **{(1, i): tuple((0, j) for j in range(max(0, i - 1), min(4, i + 2))) for i in range(4)},
    (2, 0): ((1, 0), (1, 1), (1, 2)),
    (2, 1): ((1, 1), (1, 2), (1, 3)),
    (3, 0): ((2, 0), (2, 1)),
}


def test_events_of_windows_and_of_memory_that_is_used_again():
    assert derive_waits(windows()) == WINDOWS


def random_footprints(rng):
    """Return stages whose tasks write disjoint parts of memory, and read any."""
    stages = []
    for _ in range(rng.integers(2, 7)):
        base, part, tasks = rng.integers(0, 60), rng.integers(1, 9), rng.integers(1, 5)
        stages.append(
            [
                Touched({"arena": random_spans(rng, 3)}, {"arena": run(base + part * i, base + part * (i + 1))})
                for i in range(tasks)
            ]
        )
    return [_without_races(own) for own in stages]


def _without_races(stage):
    """Return the tasks of a stage without reads of what others of the stage write."""
    result = []
    for task in stage:
        others = set().union(*(bytes_of(other.writes["arena"]) for other in stage if other is not task))
        kept = np.array(sorted(bytes_of(task.reads["arena"]) - others), np.int64)
        result.append(Touched({"arena": runs(kept, kept + 1)}, task.writes))
    return result


def simulate(footprints, order):
    """Return memory after tasks, each of which writes a number that depends on all that it reads."""
    memory = np.arange(200, dtype=np.int64)
    for stage, i in order:
        touched = footprints[stage][i]
        read = sorted(bytes_of(touched.reads["arena"]))
        number = hash((stage, i, *memory[read].tolist())) % (1 << 40)
        for byte in bytes_of(touched.writes["arena"]):
            memory[byte] = number + byte
    return memory


def any_order(waits, rng):
    """Return all tasks in a random order in which none runs before those that it waits for."""
    left, order = dict(waits), []
    while left:
        ready = [task for task, others in left.items() if left.keys().isdisjoint(others)]
        order.append(rng.choice(ready))
        del left[order[-1]]
    return order


@pytest.mark.parametrize("seed", range(40))
def test_any_order_that_events_allow_gives_the_results_of_the_plan(seed):
    footprints = random_footprints(np.random.default_rng(seed))
    waits = derive_waits(footprints)
    expected = simulate(footprints, waits)
    for turn in range(5):
        order = any_order(waits, random.Random(turn))
        assert np.array_equal(simulate(footprints, order), expected)
        queues = make_queues(waits, [order[q::3] for q in range(3)])
        check_queues(queues, footprints)


def alone(waits):
    """Return queues of one task each, so that only waits order tasks."""
    return make_queues(waits, [[task] for task in waits])


@pytest.mark.parametrize("seed", range(20))
def test_a_missing_wait_is_refused(seed):
    footprints = windows() if seed == 0 else random_footprints(np.random.default_rng(seed))
    waits = derive_waits(footprints)
    check_queues(alone(waits), footprints)
    for task, others in waits.items():
        for other in others:
            changed = waits | {task: tuple(o for o in others if o != other)}
            with pytest.raises(InvalidGraphError, match="nothing orders task"):
                check_queues(alone(changed), footprints)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_a_wait_that_is_missing_or_too_short_is_refused(seed):
    footprints = windows() if seed == 0 else random_footprints(np.random.default_rng(seed))
    waits = derive_waits(footprints)
    order = list(waits)
    queues = make_queues(waits, [order[q::2] for q in range(2)])
    check_queues(queues, footprints)
    mutants = 0
    for _, changed in with_fewer_waits(queues):
        with pytest.raises(InvalidGraphError, match="nothing orders task"):
            check_queues(changed, footprints)
        mutants += 1
    assert mutants > 0


def test_tasks_of_a_stage_with_many_short_runs_need_no_order():
    begins = 128 * np.arange(20_000)
    tasks = [Touched({}, {"arena": runs(begins + 64 * i, begins + 64 * i + 64)}) for i in range(2)]
    assert tasks[0].conflict(tasks[1]) is not None  # there are too many runs to be exact
    check_queues(tuple((QueuedTask((0, i)),) for i in range(2)), [tasks])


def test_queues_that_wait_for_each_other_are_refused():
    footprints = windows()
    waits = derive_waits(footprints)
    order = list(waits)
    with pytest.raises(InvalidGraphError, match="queue 0: it waits for what the queue runs later"):
        make_queues(waits, [order[::-1], []])
    with pytest.raises(InvalidGraphError, match="not each task is in one queue"):
        make_queues(waits, [order[1:], []])
    turned = [[(1, 0), (0, 2), (0, 3), (1, 1), (2, 0)], [(1, 3), (0, 0), (0, 1), (1, 2), (2, 1), (3, 0)]]
    with pytest.raises(InvalidGraphError, match="its task 0 waits forever for 3 tasks of queue 1"):
        make_queues(waits, turned)


def test_tasks_in_the_wrong_order_of_one_queue_are_refused():
    footprints = windows()
    queue = [QueuedTask((s, i)) for s in (0, 2, 1, 3) for i in range(len(footprints[s]))]
    with pytest.raises(InvalidGraphError, match="task 0 of stage 2 runs before task 0 of the earlier stage 1"):
        check_queues((tuple(queue),), footprints)
