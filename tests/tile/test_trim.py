"""Trimmed programs compute what a size needs with the same results as the whole program, and omit tasks."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.compiler import Builder
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType
from korch.provider.attention import AttentionProvider
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.system.alignment import aligned_bytes
from korch.target import Target
from korch.testing.kernels import load_kernels
from korch.tile.ir.bind import bind
from korch.tile.ir.index import add, constant, scale, var
from korch.tile.ir.program import Axis, Buffer, Level, Literal, Load, Pass, Stage, Store, TileProgram
from korch.tile.trim.trim import LIVE, ROW_STEP, Count, Needed, trimmed, whole
from tests.provider.onednn_groups import Graph

ROWS = 130


def product(rows: int, terms: int, columns: int) -> Group:
    g = Graph()
    return g.group(g.add("exp", [g.add("matmul", [g.tensor(1, rows, terms), g.weights(1, terms, columns)])]))


def of_heads(rows: int) -> Group:
    """A product whose rows become those of four heads."""
    g = Graph()
    y = g.add("matmul", [g.tensor(1, rows, 24), g.weights(1, 24, 64)])
    split = g.add("reshape", [y], ReshapeAttributes((1, rows, 4, 16)))
    return g.group(g.add("transpose", [split], TransposeAttributes((0, 2, 1, 3))))


def normalized(*shape: int) -> Group:
    g = Graph()
    x = g.tensor(*shape)
    sums = g.add("reduce_sum", [x], ReduceAttributes((len(shape) - 1,)))
    return g.group(g.add("div", [x, g.add("broadcast", [sums], BroadcastAttributes(shape))]))


def attention(rows: int) -> Group:
    g = Graph()
    scores = g.add("matmul", [g.tensor(1, 4, rows, 16), g.tensor(1, 4, 16, 40)])
    wide = BroadcastAttributes((1, 4, rows, 40))
    most = g.add("broadcast", [g.add("reduce_max", [scores], ReduceAttributes((3,)))], wide)
    powers = g.add("exp", [g.add("sub", [scores, most])])
    sums = g.add("broadcast", [g.add("reduce_sum", [powers], ReduceAttributes((3,)))], wide)
    return g.group(g.add("matmul", [g.add("div", [powers, sums]), g.tensor(1, 4, 40, 16)]))


def kernels(group: Group, axis: int, target: Target, provider: object) -> list[tuple[Kernel, Kernel, Needed, Offer]]:
    """Return the kernels of a group's offers with their trimmed ones, as far as they can be trimmed."""
    offers = provider.offer(group, target)
    assert not isinstance(offers, Refusal)
    (type_,) = group.output_types
    found = []
    for offer in offers:
        kernel, layout = provider.build(group, offer, target), offer.outputs[0]
        if kernel.program is None or layout.block(axis) != 1:
            continue
        physical = layout.physical_shape(type_.shape)
        needed = Needed(math.prod(physical[layout.order.index(axis) + 1 :]), type_.shape[axis])
        smaller = trimmed(kernel.program, {"o0": needed}, target.threads)
        if smaller is not None:
            found.append((kernel, kernel_of(smaller, group, offer, target, counts={LIVE: Count()}), needed, offer))
    return found


@pytest.mark.parametrize(
    ("group", "axis", "provider"),
    [
        (product(ROWS, 40, 96), 1, GemmProvider()),
        (product(36, 16, 32), 1, GemmProvider()),
        (product(ROWS, 3072, 64), 1, GemmProvider()),
        (product(256, 768, 256), 1, GemmProvider()),
        (of_heads(ROWS), 2, GemmProvider()),
        (normalized(1, ROWS, 48), 1, GeneratedProvider()),
        (normalized(1, 4, ROWS, 40), 2, GeneratedProvider()),
        (attention(ROWS), 2, AttentionProvider()),
    ],
)
def test_what_is_needed_is_computed(group, axis, provider, target: Target, builder: Builder, rng) -> None:
    found = kernels(group, axis, target, provider)
    assert found
    library = load_kernels([kernel for pair in found for kernel in pair[:2]], builder)
    for kernel, smaller, needed, offer in found:
        numbers = [rng.random(type_.shape, np.float32) for type_ in group.input_types]
        packed = [layout.pack(a).reshape(-1).view(np.uint8) for layout, a in zip(offer.inputs, numbers, strict=True)]
        (elements,) = (type_.size for type_ in group.output_types)
        memory = [aligned_bytes(size) for size in (*(a.size for a in packed), 4 * elements)]
        for place, array in zip(memory, packed, strict=False):
            place[:] = array
        is_needed = np.arange(elements) // needed.stride % needed.extent

        def run(which: Kernel, n: int, memory=memory) -> np.ndarray:
            memory[-1][:] = 0xFF
            size = np.array([n], np.int64)
            room = [aligned_bytes(which.workspace_bytes)] * bool(which.workspace_bytes)
            for buffer in room:
                buffer[:] = 0xFF
            buffers = [*memory, *room, size]
            pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
            assert getattr(library, f"{which.symbol}_run")(None, pointers) == 0
            return memory[-1].view(np.float32).copy()

        wanted = run(kernel, 0)
        for n in (1, 11, 12, 13, needed.extent // 2, needed.extent - 1, needed.extent):
            result = run(smaller, n)
            assert np.allclose(result[is_needed < n], wanted[is_needed < n], rtol=1e-5, atol=1e-6)
        assert np.isnan(run(smaller, 1)[is_needed >= ROW_STEP]).any()  # tasks are left out


def rows_by(size: int, stride: int, extent: int) -> TileProgram:
    """A program that writes ones, `size` elements a task."""
    tasks = stride * extent // size
    store = Store("o0", add(scale(var("g"), size), var("i")), "one")
    one = Pass((Axis("i", size),), "i", (Literal("one", DType.F32, 1.0),), (store,))
    return TileProgram((Buffer("o0", Level.OUTPUT, DType.F32, stride * extent),), (Stage((Axis("g", tasks),), (one,)),))


def test_a_task_may_have_a_part_of_a_coordinate() -> None:
    program = trimmed(rows_by(16, 64, 10), {"o0": Needed(64, 10)}, 2)
    assert program is not None
    assert [bind(program, {LIVE: n}).stages[0].tasks for n in (1, 3, 10)] == [4, 12, 40]
    assert whole(program).stages[0].tasks == 40


def test_a_task_ends_early_where_all_tasks_of_the_largest_size_have_as_many_rows() -> None:
    task, row, column = Axis("task", 4), Axis("row", 8), Axis("column", 4)
    place = add(scale(var("task"), 32), scale(var("row"), 4), var("column"))
    step = Pass((row, column), "column", (Load("x", DType.F32, "i0", place),), (Store("o0", place, "x"),))
    buffers = (Buffer("i0", Level.INPUT, DType.F32, 128), Buffer("o0", Level.OUTPUT, DType.F32, 128))
    found = trimmed(TileProgram(buffers, (Stage((task,), (step,)),)), {"o0": Needed(4, 32)}, 1)
    assert found is not None
    ((_, leaf),) = found.stages[0].leaves
    assert leaf.axes[0].ragged == ("task", var(LIVE))


def copied(row: int, step: int) -> TileProgram:
    """A program that copies `step` numbers of each row of 16 to a workspace, and writes them in blocks of 4 rows."""
    rows, size = 10, step * 10
    buffers = (
        Buffer("i0", Level.INPUT, DType.F32, rows * 16),
        Buffer("w", Level.WORKSPACE, DType.F32, size),
        Buffer("o0", Level.OUTPUT, DType.F32, size),
    )
    element = add(scale(var("r"), step), var("i"))
    read = Pass(
        (Axis("i", step),),
        "i",
        (Load("x", DType.F32, "i0", add(scale(var("r"), 16), var("i"))),),
        (Store("w", element, "x"),),
    )
    block = Axis("j", 4, ragged=("g", rows))
    place = add(scale(var("g"), 4 * step), scale(var("j"), step), var("i"))
    source = add(scale(var("g"), 4 * row), scale(var("j"), row), var("i"))
    written = Pass((block, Axis("i", step)), "i", (Load("y", DType.F32, "w", source),), (Store("o0", place, "y"),))
    return TileProgram(buffers, (Stage((Axis("r", rows),), (read,)), Stage((Axis("g", 3),), (written,))))


def test_what_a_trimmed_stage_reads_of_the_workspace_is_trimmed() -> None:
    needed = {"o0": Needed(8, 10)}
    program = trimmed(copied(8, 8), needed, 2)
    assert program is not None
    assert [[stage.tasks for stage in bind(program, {LIVE: n}).stages] for n in (1, 5, 10)] == [[1, 1], [5, 2], [10, 3]]
    overlapping = trimmed(copied(7, 8), needed, 2)  # rows begin 7 elements apart, and are 8 long
    assert overlapping is not None
    assert [stage.tasks for stage in bind(overlapping, {LIVE: 1}).stages] == [10, 1]


def test_what_can_not_be_trimmed() -> None:
    program, needed = rows_by(16, 16, 10), Needed(16, 10)
    assert trimmed(program, {"o0": needed}, 2) is not None
    assert trimmed(program, {}, 2) is None  # everything is needed
    assert trimmed(program, {"other": needed}, 2) is None
    assert trimmed(rows_by(160, 16, 10), {"o0": needed}, 2) is None  # one task
    again = trimmed(program, {"o0": needed}, 2)
    assert again is not None and trimmed(again, {"o0": needed}, 2) is None
    (stage,) = program.stages
    (step,) = stage.passes
    backwards = replace(step, sinks=(Store("o0", add(scale(var("g"), -16), var("i"), constant(144)), "one"),))
    assert trimmed(replace(program, stages=(Stage(stage.grid, (backwards,)),)), {"o0": needed}, 2) is None
    shared = replace(step, sinks=(Store("o0", add(scale(var("g"), 16), scale(var("i"), 10)), "one"),))
    assert trimmed(replace(program, stages=(Stage(stage.grid, (shared,)),)), {"o0": needed}, 2) is None
