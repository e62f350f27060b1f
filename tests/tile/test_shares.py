"""Threads share the needed coordinates of a trimmed stage evenly, even if each task has many coordinates."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.measure.compiler import Builder
from korch.primitive.types import DType
from korch.provider.gemm import GemmProvider
from korch.ranges.form import extent
from korch.ranges.live import blocks
from korch.ranges.live import live as live_of
from korch.ranges.needed import live_body
from korch.system.alignment import aligned_bytes
from korch.target import Target
from korch.testing.kernels import load_kernels
from korch.tile.analysis.shares import PRODUCT_ROWS, Shares, shares_of
from korch.tile.ir.index import add, remainder, scale, var
from korch.tile.ir.parameters import LIVE, parametric
from korch.tile.ir.program import Axis, Buffer, Inside, Level, Load, Pass, Stage, Store, TileProgram
from tests.provider.linear_groups import Graph

ROWS, TERMS, COLUMNS = 300, 64, 48
COUNTED = live_of(30, (extent(0),))


def product() -> Group:
    g = Graph()
    return g.group(g.add("exp", [g.add("matmul", [g.tensor(ROWS, TERMS), g.weights(TERMS, COLUMNS)])]))


def rows_of(where: tuple[Inside, ...] = (), source: int = 4) -> Stage:
    """A stage that copies rows of 4 numbers, 8 rows a task."""
    place = add(scale(var("g"), 32), scale(var("i"), 4), var("j"))
    read = add(scale(var("g"), 8 * source), scale(var("i"), source), var("j"))
    copy = Pass(
        (Axis("i", 8, ragged=("g", COUNTED)), Axis("j", 4)),
        "j",
        (Load("x", DType.F32, "i0", read),),
        (Store("o0", place, "x"),),
        where=where,
    )
    return Stage((Axis("one", 1), Axis("g", blocks(COUNTED, 8))), (copy,))


def live(stage: Stage) -> tuple[Stage, TileProgram]:
    buffers = (Buffer("i0", Level.INPUT, DType.F32, 120), Buffer("o0", Level.OUTPUT, DType.F32, 120))
    program, _ = parametric(TileProgram(buffers, (stage,)))
    return program.stages[0], program


def test_an_axis_that_ends_with_the_coordinates_is_not_shared() -> None:
    """Otherwise a thread would compute as many columns as it has rows."""
    (copy,) = rows_of().steps
    square = replace(copy, axes=(copy.axes[0], Axis("j", 30, ragged=("one", COUNTED))))
    stage, program = live(replace(rows_of(), steps=(square,)))
    assert shares_of(stage, program.parameter_ranges) is None


def test_what_a_coordinate_moves_buffers_on() -> None:
    stage, program = live(rows_of())
    assert shares_of(stage, program.parameter_ranges) == Shares(LIVE, 8, 1, {"i0": 4, "o0": 4}, "g")
    whole = replace(stage, grid=(Axis("one", 1), Axis("g", 4)))
    assert shares_of(whole, program.parameter_ranges) is None  # of all sizes
    several = replace(stage, grid=(Axis("one", 2), *stage.grid[1:]))
    assert shares_of(several, program.parameter_ranges) is None


def test_a_guard_of_the_task_leaves_tasks_whole() -> None:
    stage, program = live(rows_of(where=(Inside(var("g"), 0, 3),)))
    assert shares_of(stage, program.parameter_ranges) is None


def test_a_buffer_that_moves_in_two_ways_leaves_tasks_whole() -> None:
    stage, program = live(rows_of())
    (step,) = stage.steps
    other = Load("y", DType.F32, "i0", add(scale(var("g"), 16), scale(var("i"), 2)))
    changed = replace(stage, steps=(replace(step, ops=(*step.ops, other)),))
    assert shares_of(changed, program.parameter_ranges) is None


def test_a_buffer_that_begins_again_within_tasks_leaves_tasks_whole() -> None:
    stage, program = live(rows_of())
    (step,) = stage.steps
    again = Load("y", DType.F32, "i1", remainder(var("i"), 4, {"i": (0, 7)}))
    changed = replace(stage, steps=(replace(step, ops=(*step.ops, again)),))
    assert shares_of(changed, program.parameter_ranges) is None
    guarded = replace(stage, steps=(replace(step, where=(Inside(remainder(var("i"), 4, {"i": (0, 7)}), 0, 3),)),))
    assert shares_of(guarded, program.parameter_ranges) is None


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_computes_all_rows_once(threads: int, target: Target, builder: Builder, rng) -> None:
    group = product()
    offers = GemmProvider().offer(group, target)
    assert not isinstance(offers, Refusal)
    found = 0
    for offer in offers:
        body = live_body(group.body, [{0: frozenset((extent(0),))}])
        kernel = GemmProvider().build(replace(group, body=body), offer, target)
        if shares_of(kernel.program.stages[-1], kernel.program.parameter_ranges) is None:
            continue
        found += 1
        assert LIVE in kernel.source
        library = load_kernels([kernel], builder)
        values = [rng.standard_normal(type_.shape, np.float32) for type_ in group.input_types]
        packed = [layout.pack(a).reshape(-1).view(np.uint8) for layout, a in zip(offer.inputs, values, strict=True)]
        for n in (1, PRODUCT_ROWS, 17, 197, ROWS):
            memory = [aligned_bytes(size) for size in (*(a.size for a in packed), 4 * ROWS * COLUMNS)]
            for place, array in zip(memory, packed, strict=False):
                place[:] = array
            memory[-1][:] = 0xFF
            room = [aligned_bytes(kernel.workspace_bytes)] * bool(kernel.workspace_bytes)
            buffers = [*memory, *room, np.array([n], np.int64)]
            pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
            run = library.function(f"{kernel.symbol}_task")
            for me in range(threads):
                first, last = (min(n, -(-n // threads) * k) for k in (me, me + 1))
                run(0, pointers, ctypes.c_long(first), ctypes.c_long(last), ctypes.c_long(0))
            result = memory[-1].view(np.float32).reshape(ROWS, COLUMNS)
            wanted = np.exp(values[0][:n].astype(np.float64) @ values[1])
            assert np.allclose(result[:n], wanted, rtol=1e-4, atol=1e-6)
            assert np.isnan(result[n:]).all()
    assert found
