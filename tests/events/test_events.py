"""Events between tasks: derived from footprints, printed, checked, and sufficient for every order."""

import random
from dataclasses import replace

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.events.check import check_graph, check_queues
from korch.events.derive import derive_events
from korch.events.graph import AffineMap, Edge, EventStage, EventTensor, TableMap, TaskGraph, Touched, affine_or_table
from korch.events.queues import QueuedTask, make_queues
from korch.events.spans import NOTHING, run, runs, union
from korch.events.text import format_tasks
from korch.events.touched import touched_by
from korch.tile.check.accesses import accesses
from korch.tile.check.points import Points
from korch.tile.ir.bind import bind
from korch.tile.lower.buffers import places_in_memory
from tests.events.fewer_waits import with_fewer_waits
from tests.support.parse_tiles import parse_program
from tests.support.run_tasks import run_tasks
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


@pytest.mark.parametrize("seed", range(200))
def test_maps_give_the_ranges_that_they_are_made_from(seed):
    rng = random.Random(seed)
    n, events = rng.randint(1, 9), rng.randint(1, 9)
    if seed % 2:
        made = AffineMap(rng.randint(-2, 3), rng.randint(-4, 6), rng.randint(-4, 9), rng.randint(1, 4))
        ranges = [made.range(i, events) for i in range(n)]
    else:
        ranges = [tuple(sorted((rng.randint(0, events), rng.randint(0, events)))) for _ in range(n)]
    found = affine_or_table(ranges, events)
    assert [found.range(i, events) for i in range(n)] == ranges


@pytest.mark.parametrize(
    ("ranges", "events", "expected"),
    [
        ([(0, 2), (0, 3), (1, 4), (2, 4)], 4, AffineMap(1, -1, 2)),  # a window with a row before and after
        ([(0, 1), (0, 1), (1, 2), (1, 2)], 2, AffineMap(1, 0, 2, 2)),  # two tasks for one
        ([(0, 2), (2, 4)], 4, AffineMap(2, 0, 2)),
        ([(0, 1)] * 5, 1, AffineMap(0, 0, 1)),  # a join
        ([(0, 1), (2, 3), (1, 2)], 3, TableMap(((0, 1), (2, 3), (1, 2)))),
    ],
)
def test_regular_maps_are_affine(ranges, events, expected):
    found = affine_or_table(ranges, events)
    assert type(found) is type(expected)
    assert [found.range(i, events) for i in range(len(ranges))] == ranges
    assert isinstance(found, TableMap) or (found.step, found.divisor) == (expected.step, expected.divisor)


ROW = 8


def rows(memory, first, end):
    return {memory: run(ROW * max(first, 0), ROW * end)}


def windows():
    """A row of the second stage is computed from three, and the third stage overwrites what the first wrote."""
    first = [Touched(rows("input", i, i + 1), rows("arena", i, i + 1)) for i in range(4)]
    second = [Touched(rows("arena", i - 1, min(i + 2, 4)), rows("arena", 10 + i, 11 + i)) for i in range(4)]
    third = [Touched(rows("arena", 10 + 2 * i, 12 + 2 * i), rows("arena", 2 * i, 2 * i + 2)) for i in range(2)]
    fourth = [Touched(rows("arena", 0, 4), rows("output", 0, 1))]
    return ("k_1", "k_2", "k_3", "k_4"), (first, second, third, fourth)


WINDOWS = """\
stage k_1 tasks 4
stage k_2 tasks 4
stage k_3 tasks 2
stage k_4 tasks 1
event counts 2 3 3 2
  from 0 i -> [i - 1, i + 2)
  to 1 i -> [i, i + 1)
event counts 3 3
  from 1 i -> [i - 2, i + 1)
  to 2 i -> [i, i + 1)
event counts 2
  from 2 i -> [0, 1)
  to 3 i -> [0, 1)
"""


def test_events_of_windows_and_of_memory_that_is_used_again():
    names, footprints = windows()
    graph = derive_events(names, footprints)
    assert format_tasks(graph) == WINDOWS
    check_graph(graph)


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
    return tuple(f"k_{i}" for i in range(len(stages))), [_without_races(own) for own in stages]


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


@pytest.mark.parametrize("seed", range(40))
def test_any_order_that_events_allow_gives_the_results_of_the_plan(seed):
    names, footprints = random_footprints(np.random.default_rng(seed))
    graph = derive_events(names, footprints)
    check_graph(graph)
    expected = simulate(footprints, graph.tasks)
    for turn in range(5):
        order = []
        run_tasks(graph, order.append, seed=turn)
        assert sorted(order) == list(graph.tasks)
        assert np.array_equal(simulate(footprints, order), expected)
        queues = make_queues(graph, [order[q::3] for q in range(3)])
        check_queues(queues, footprints)


def alone(graph):
    """Return queues of one task each, so that only events order tasks."""
    return make_queues(graph, [[task] for task in graph.tasks])


def test_a_count_off_by_one_is_refused():
    names, footprints = windows()
    graph = derive_events(names, footprints)
    mutants = 0
    for t, tensor in enumerate(graph.events):
        for event in range(len(tensor.counts)):
            for more in (-1, 1):
                counts = [count + more * (i == event) for i, count in enumerate(tensor.counts)]
                mutant = replace(tensor, counts=tuple(counts))
                events = (*graph.events[:t], mutant, *graph.events[t + 1 :])
                with pytest.raises(InvalidGraphError, match=rf"event {event} waits for \d notifications, but"):
                    check_graph(replace(graph, events=events))
                mutants += 1
                if more > 0:
                    with pytest.raises(InvalidGraphError, match="never have their counts"):
                        run_tasks(replace(graph, events=events), lambda task: None)
    assert mutants == 14


@pytest.mark.parametrize("seed", range(20))
def test_a_missing_notification_is_refused(seed):
    """One task no longer notifies one event, whose count is one less."""
    names, footprints = windows() if seed == 0 else random_footprints(np.random.default_rng(seed))
    graph = derive_events(names, footprints)
    check_queues(alone(graph), footprints)
    for t, tensor in enumerate(graph.events):
        for e, edge in enumerate(tensor.producers):
            ranges = [edge.map.range(i, len(tensor.counts)) for i in range(graph.stages[edge.stage].tasks)]
            for i, (first, end) in enumerate(ranges):
                if end - first != 1:
                    continue
                table = TableMap(tuple((0, 0) if j == i else own for j, own in enumerate(ranges)))
                counts = tuple(count - (event == first) for event, count in enumerate(tensor.counts))
                edges = (*tensor.producers[:e], replace(edge, map=table), *tensor.producers[e + 1 :])
                mutant = replace(tensor, counts=counts, producers=edges)
                changed = replace(graph, events=(*graph.events[:t], mutant, *graph.events[t + 1 :]))
                check_graph(changed)
                with pytest.raises(InvalidGraphError, match="nothing orders task"):
                    check_queues(alone(changed), footprints)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_a_wait_that_is_missing_or_too_short_is_refused(seed):
    names, footprints = windows() if seed == 0 else random_footprints(np.random.default_rng(seed))
    graph = derive_events(names, footprints)
    order = list(graph.tasks)
    queues = make_queues(graph, [order[q::2] for q in range(2)])
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
    names, footprints = windows()
    graph = derive_events(names, footprints)
    order = list(graph.tasks)
    with pytest.raises(InvalidGraphError, match="queue 0: it waits for what the queue runs later"):
        make_queues(graph, [order[::-1], []])
    with pytest.raises(InvalidGraphError, match="not each task is in one queue"):
        make_queues(graph, [order[1:], []])
    turned = [[(1, 0), (0, 2), (0, 3), (1, 1), (2, 0)], [(1, 3), (0, 0), (0, 1), (1, 2), (2, 1), (3, 0)]]
    with pytest.raises(InvalidGraphError, match="its task 0 waits forever for 3 tasks of queue 1"):
        make_queues(graph, turned)


def test_tasks_in_the_wrong_order_of_one_queue_are_refused():
    _, footprints = windows()
    queue = [QueuedTask((s, i)) for s in (0, 2, 1, 3) for i in range(len(footprints[s]))]
    with pytest.raises(InvalidGraphError, match="task 0 of stage 2 runs before task 0 of the earlier stage 1"):
        check_queues((tuple(queue),), footprints)


def test_maps_that_do_not_fit_are_refused():
    first, second, to_second = EventStage("a", 2), EventStage("b", 1), Edge(1, AffineMap(0, 0, 1))
    graph = TaskGraph((first, second), (EventTensor((2,), (Edge(0, TableMap(((0, 1),))),), (to_second,)),))
    with pytest.raises(InvalidGraphError, match="event tensor 0: a table does not fit stage 0"):
        check_graph(graph)
    graph = TaskGraph((first,), (EventTensor((2,), (Edge(0, AffineMap(0, 0, 1)),), (to_second,)),))
    with pytest.raises(InvalidGraphError, match="event tensor 0: there is no stage 1"):
        check_graph(graph)
