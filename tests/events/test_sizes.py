"""Tasks of kernels whose grids depend on sizes: properties of all sizes hold for each single size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.events.check import check_graph, check_queues
from korch.events.derive import derive_events
from korch.events.extent import RunExtent
from korch.events.graph import Moving, Rows, SharedExtent, Touched, conflicts
from korch.events.kernels import TaskStage, placed, segments_of, unit_of
from korch.events.queues import QueuedTask, make_queues
from korch.events.schedule import TaskSegment, schedule_segment
from korch.events.shared import StageCoordinates, coordinates_of, row_tasks
from korch.events.spans import Spans, run, runs, union
from korch.events.text import format_tasks, parse_tasks
from korch.ranges.form import Sizes
from korch.runtime import build as building
from korch.runtime.program import bind_steps
from korch.tile.bind import bind
from korch.tile.index import add, scale, var
from korch.tile.memory import places_in_memory
from korch.tile.points import Points
from korch.tile.program import Stage, TileProgram
from korch.tile.region import Access, accesses
from korch.tile.shares import PART, Shares
from korch.tile.trim import PLAIN
from tests.events.fewer_waits import with_fewer_waits
from tests.events.test_events import alone, simulate
from tests.runtime.ranged_plans import batched_encoder, encoder, planned
from tests.support.run_tasks import run_tasks


@pytest.mark.parametrize(
    ("text", "expected", "sizes", "value"),
    [
        ("min(512, (1 * n[0] + 0) // 1)", "min(512, n[0])", (77,), 77),
        ("12 * ((1 * (min(512, n[0])) + 31) // 32 + 0)", "12 * ((min(512, n[0]) + 31) // 32)", (65,), 36),
        ("n[0] * min(21, max(n[1], 3))", "n[0] * min(21, max(n[1], 3))", (4, 2), 12),
    ],
)
def test_extents_are_reduced_and_computed(text: str, expected: str, sizes: Sizes, value: int) -> None:
    extent = RunExtent.of(text)
    assert extent.text == expected and RunExtent.of(expected) == extent
    assert extent.at(sizes) == value
    assert eval(extent.cpp.replace("/", "//"), {"smaller": min, "larger": max, "n": sizes}) == value


@pytest.mark.parametrize(
    "text", ["", "n", "n[0] - 1", "7 // n[0]", "n[0] // 0", "abs(n[0])", "min(1)", "m[0]", "1.5", "True"]
)
def test_texts_that_are_no_extents_are_refused(text: str) -> None:
    with pytest.raises(InvalidGraphError, match="is no extent"):
        RunExtent.of(text)


def test_parts_of_a_stage_are_those_of_the_run() -> None:
    graph = parse_tasks("stage k tasks 3 share 16 of min(512, n[0])\n")
    assert format_tasks(graph) == "stage k tasks 3 share 16 of min(512, n[0])\n"
    (stage,) = graph.stages
    assert [stage.part(i, (1,)) for i in range(3)] == [(0, 1), (1, 1), (1, 1)]
    assert [stage.part(i, (100,)) for i in range(3)] == [(0, 48), (48, 80), (80, 100)]
    assert [stage.part(i, (900,)) for i in range(3)] == [(0, 176), (176, 352), (352, 512)]
    with pytest.raises(InvalidGraphError, match="line 1 can't be read: 'n' is no extent"):
        parse_tasks("stage k tasks 3 share 16 of n\n")


ROW, MOST, TASKS = 8, 40, 3


def row_stage(shared: SharedExtent, *moving: tuple[int, bool, int, int], fixed: Touched | None = None) -> list[Touched]:
    """Return the tasks of a stage from where rows begin, whether they are written, their bytes, and the step."""
    own = tuple(Moving("arena", is_write, run(at, at + size), step) for at, is_write, size, step in moving)
    rows = Rows(shared, "", MOST, own, fixed or Touched())
    return row_tasks(rows, StageCoordinates(shared, MOST, None, ""), TASKS)


LENGTH = SharedExtent(RunExtent.of("min(40, n[0])"), 4)


def chain() -> list[list[Touched]]:
    """Return stages of which each reads rows of the one before, and the fourth overwrites those of the first."""
    return [
        row_stage(LENGTH, (0, True, ROW, ROW)),
        row_stage(LENGTH, (0, False, ROW, ROW), (400, True, ROW, ROW)),
        row_stage(LENGTH, (400, False, ROW, ROW), (800, True, ROW // 2, ROW)),
        row_stage(LENGTH, (800, False, ROW, ROW), (0, True, ROW, ROW), fixed=Touched({"arena": run(2000, 2100)})),
    ]


def test_rows_of_a_chain_wait_for_the_same_rows_only() -> None:
    footprints = chain()
    graph = derive_events(["a", "b", "c", "d"], footprints, [LENGTH] * 4)
    for tensor in graph.events:
        assert all(before == [(b[0][0], after[0][1])] for before, after in _pairs(graph, tensor) for b in [before])
    assert sorted(len(graph.notified(t)) for t in graph.events) == [3, 3, 3]
    assert parse_tasks(format_tasks(graph)) == graph
    check_queues(alone(graph), footprints)


def _pairs(graph, tensor):
    return list(zip(graph.notified(tensor), graph.waiting(tensor), strict=True))


@pytest.mark.parametrize(
    "other",
    [
        row_stage(SharedExtent(LENGTH.extent, 8), (0, False, ROW, ROW)),
        row_stage(SharedExtent(RunExtent.of("min(40, n[1])"), 4), (0, False, ROW, ROW)),
        row_stage(LENGTH, (4, False, ROW, ROW)),
        row_stage(LENGTH, (0, False, ROW + 1, ROW)),
        row_stage(LENGTH, (0, False, ROW, 2 * ROW)),
        row_stage(LENGTH, (0, False, ROW, ROW), fixed=Touched({"arena": run(9, 10)})),
    ],
    ids=["unit", "extent", "place", "size", "step", "fixed"],
)
def test_other_rows_need_more_order(other: list[Touched]) -> None:
    """All of these may touch what other tasks have written at some size."""
    first = row_stage(LENGTH, (0, True, ROW, ROW))
    assert any(i != j for i, j in conflicts(first, other).tolist())


def test_mutated_events_of_rows_are_found() -> None:
    footprints = chain()
    graph = derive_events(["a", "b", "c", "d"], footprints, [LENGTH] * 4)
    mutants = 0
    for t, tensor in enumerate(graph.events):
        for event, count in enumerate(tensor.counts):
            for more in (-1, 1):
                counts = (*tensor.counts[:event], count + more, *tensor.counts[event + 1 :])
                with pytest.raises(InvalidGraphError, match=rf"event {event} waits for \d notifications, but"):
                    check_graph(replace(graph, events=(*graph.events[:t], replace(tensor, counts=counts))))
                mutants += 1
        with pytest.raises(InvalidGraphError, match="nothing orders task"):
            check_queues(alone(replace(graph, events=(*graph.events[:t], *graph.events[t + 1 :]))), footprints)
    assert mutants == 18
    order = list(graph.tasks)
    assert not _missed(make_queues(graph, [order[q::2] for q in range(2)]), footprints)


def _missed(queues, footprints) -> list[QueuedTask]:
    """Return the tasks of which a wait can be left out, or be for one task less, without the check noticing it."""
    found = []
    for entry, changed in with_fewer_waits(queues):
        try:
            check_queues(changed, footprints)
        except InvalidGraphError:
            continue
        found.append(entry)
    return found


def test_any_order_that_events_allow_gives_the_results_at_each_size() -> None:
    footprints = chain()
    graph = derive_events(["a", "b", "c", "d"], footprints, [LENGTH] * 4)
    for size in range(1, MOST + 1):
        at_size = [
            [_of_rows(own, graph.stages[s].part(i, (size,))) for i, own in enumerate(footprints[s])] for s in range(4)
        ]
        small = [[_eighth(own) for own in stage] for stage in at_size]
        expected = simulate(small, graph.tasks)
        for seed in range(3):
            order: list[tuple[int, int]] = []
            run_tasks(graph, order.append, seed=seed)
            assert np.array_equal(simulate(small, order), expected)


def _of_rows(own: Touched, part: tuple[int, int]) -> Touched:
    """Return what a task touches for some rows."""
    assert own.rows is not None
    sides: tuple[dict[str, Spans], dict[str, Spans]] = ({"arena": run(0, 0)}, {"arena": run(0, 0)})
    for each in own.rows.moving:
        found = [each.first.shifted(each.step * row) for row in range(*part)]
        sides[each.is_write]["arena"] = union([sides[each.is_write]["arena"], *found])
    return Touched(*sides)


def _eighth(own: Touched) -> Touched:
    """Return the same for rows of one byte, at an eighth of the place."""
    return Touched(
        *({"arena": runs(s["arena"].begins // ROW, -(-s["arena"].ends // ROW))} for s in (own.reads, own.writes))
    )


@pytest.fixture(scope="module", params=[(encoder, 2), (encoder, 3), (batched_encoder, 3)], ids=["2", "3", "batched"])
def ranged(request, tmp_path_factory):
    make, threads = request.param
    made = make()
    with planned(made, tmp_path_factory.mktemp("kernels"), threads, (1, 2)) as (meter, plans):
        yield made, meter.target, plans


def segments(graph, steps, target) -> Iterator[TaskSegment]:
    for uses in segments_of(building.uses_of(bind_steps(graph, steps, target.threads), steps)):
        yield schedule_segment(uses, target, 2)


def test_at_each_size_tasks_touch_and_order_what_they_do_for_all_sizes(ranged) -> None:
    made, target, plans = ranged
    compared = 0
    for steps in plans:
        for segment in segments(made.whole.graph, steps, target):
            unit = unit_of(stage.use for stage in segment.stages)
            for sizes in made.sizes:
                exact = [touched_at(stage, sizes, unit, target.threads) for stage in segment.stages]
                for stage, own in zip(segment.stages, exact, strict=True):
                    for known, found in zip(stage.footprints, own, strict=True):
                        assert _is_within(found, known)
                for later in range(len(exact)):
                    for earlier in range(later):
                        pairs = conflicts(exact[earlier], exact[later]).tolist()
                        footprints = (segment.stages[s].footprints for s in (earlier, later))
                        known_pairs = conflicts(*footprints).tolist()
                        assert all(pair in known_pairs for pair in pairs)
                        compared += len(pairs)
    assert compared > 1000


def _is_within(found: Touched, known: Touched) -> bool:
    sides = ((found.reads, known.reads), (found.writes, known.writes))
    return all(not s or union([s, more[m]]).size == more[m].size for own, more in sides for m, s in own.items())


def touched_at(stage: TaskStage, sizes: Sizes, unit: int, threads: int) -> list[Touched]:
    """Return what each task of a stage touches at some sizes, from an enumeration of its points."""
    kernel, number = stage.use.kernel, stage.parts[0].stage
    program = kernel.program
    assert program is not None
    if number < 0:
        return list(stage.footprints)
    counts = dict(kernel.counts)
    values = {
        p.name: RunExtent.of(f"min({p.high}, {counts[p.name].text('n', PLAIN)})").at(sizes) for p in program.parameters
    }
    own = coordinates_of(kernel, number, unit)
    at_size = bind(program, values)
    if own is None:
        parts = [np.arange(part.begin, part.end) for part in stage.parts]
        return [_enumerated(stage, at_size, at_size.stages[number], part, None) for part in parts]
    count = own.shared.extent.at(sizes)
    ranges = [own.shared.part(count, task, threads) for task in range(threads)]
    assert [r[0] for r in ranges] == [0, *(r[1] for r in ranges[:-1])] and ranges[-1][1] == count
    if own.shares is None:
        assert count == at_size.stages[number].tasks
        return [_enumerated(stage, at_size, at_size.stages[number], np.arange(*r), None) for r in ranges]
    assert all(begin % unit == 0 or begin == end for begin, end in ranges) or unit % own.shared.unit
    highs = {p.name: p.high for p in program.parameters if p.name in (own.shares.parameter, PART)}
    whole = bind(program, {**values, **highs})
    found = []
    for range_ in ranges:
        rows = np.arange(*range_)
        if PART in values:
            rows = rows // values[PART] * highs[PART] + rows % values[PART]
        tasks = np.arange(whole.stages[number].tasks)
        found.append(_enumerated(stage, whole, whole.stages[number], tasks, rows, own.shares))
    return found


def _enumerated(
    stage: TaskStage,
    program: TileProgram,
    of: Stage,
    tasks: np.ndarray,
    rows: np.ndarray | None,
    shares: Shares | None = None,
) -> Touched:
    """Return what some grid points touch; if rows are given, for these only."""
    places = places_in_memory(program)[0]
    found: dict[tuple[int, bool], Spans] = {}
    for access in accesses(of):
        if access.buffer not in places or not tasks.size or (rows is not None and not rows.size):
            continue
        place = places[access.buffer]
        elements = _elements(of, access, tasks, rows, shares)
        begins = place.offset_bytes + place.element_bytes * elements
        key = place.position, access.is_write
        found[key] = union([found.get(key, run(0, 0)), runs(begins, begins + place.element_bytes)])
    return placed(stage.use.places, found)


def _elements(
    of: Stage, access: Access, tasks: np.ndarray, rows: np.ndarray | None, shares: Shares | None
) -> np.ndarray:
    points = Points(of.grid, access.axes, tasks)
    mask = points.live & points.holds(access.guards)
    if shares is not None and shares.tasks in access.index.variables:
        (inner,) = (axis for axis in access.axes if axis.ragged is not None and axis.ragged[0] == shares.tasks)
        mask = mask & np.isin(points.at(add(scale(var(shares.tasks), shares.most), var(inner.name))), rows)
    return np.unique(points.spread(points.at(access.index))[points.spread(mask)])


def test_each_wait_of_real_kernels_is_found_to_be_needed(ranged) -> None:
    made, target, plans = ranged
    waits = 0
    for steps in plans:
        for segment in segments(made.whole.graph, steps, target):
            assert any(stage.shared is not None for stage in segment.graph.stages)
            assert parse_tasks(format_tasks(segment.graph)) == segment.graph
            footprints = [stage.footprints for stage in segment.stages]
            assert not _missed(segment.queues, footprints)
            waits += sum(len(entry.waits) for queue in segment.queues for entry in queue)
    assert waits > 10
