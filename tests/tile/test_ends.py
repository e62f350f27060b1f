"""Programs whose reductions end at a size compute the same as whole programs, and read nothing beyond the size."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.compiler import Builder
from korch.primitive import reference
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.provider.attention.match import match_group
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.ranges.form import extent
from korch.ranges.live import Count
from korch.schedule.attention import AttentionBlocking, Attentions, Packing
from korch.schedule.split_attention import program_of
from korch.system.alignment import aligned_bytes, round_up
from korch.target import Target
from korch.testing.kernels import load_kernels
from korch.tile.ir.bind import bind
from korch.tile.ir.parse import parse_program
from korch.tile.ir.program import Level, Parameter, TileProgram
from korch.tile.lower.staging import Machine
from korch.tile.trim.coordinates import Needed
from korch.tile.trim.ends import KEYS, ended
from tests.provider.onednn_groups import Graph
from tests.support.matrix_units import matrix_units


def masked(g: Graph, value: int, axis: int, number: float) -> int:
    """Put a number behind the valid elements along an axis."""
    shape = g.type(value).shape
    line = g.tensor(*(n if i == axis else 1 for i, n in enumerate(shape)), name=f"mask{value}")
    wide = g.add("broadcast", [line], BroadcastAttributes(shape))
    condition = g.add("less", [g.full(value, 0.0), wide])
    return g.add("where", [condition, value, g.full(value, number)])


def softmax(g: Graph, x: int) -> int:
    shape = g.type(x).shape
    axis, wide = ReduceAttributes((len(shape) - 1,)), BroadcastAttributes(shape)
    most = g.add("broadcast", [g.add("reduce_max", [x], axis)], wide)
    powers = g.add("exp", [g.add("sub", [x, most])])
    return g.add("div", [powers, g.add("broadcast", [g.add("reduce_sum", [powers], axis)], wide)])


def attention(rows: int, keys: int, is_fused: bool) -> Group:
    """Attention with masked scores, whose values are masked there or before."""
    g = Graph()
    scores = g.add("matmul", [g.tensor(1, 2, rows, 16, name="q"), g.tensor(1, 2, 16, keys, name="k")])
    values = g.tensor(1, 2, keys, 16, name="v")
    mixed = masked(g, values, 2, 0.0) if is_fused else values
    return g.group(g.add("matmul", [softmax(g, masked(g, scores, 3, -math.inf)), mixed]))


def known_of(group: Group, offer: Offer, program: TileProgram, axes: Mapping[int, int]) -> dict[str, Needed]:
    names = [buffer.name for buffer in program.buffers if buffer.level is Level.INPUT]
    found = {}
    for k, axis in axes.items():
        layout, shape = offer.inputs[k], group.input_types[k].shape
        if layout.block(axis) != 1:
            return {}
        physical = layout.physical_shape(shape)
        found[names[k]] = Needed(math.prod(physical[layout.order.index(axis) + 1 :]), shape[axis])
    return found


Case = tuple[Group, Offer, TileProgram, dict[int, int]]
"""What is computed, in which layouts, by which program; by input the axis along which it ends."""


def inputs_of(group: Group, axes: Mapping[int, int], n: int, end: int, behind: float) -> list[np.ndarray]:
    """Return inputs: random up to n, zeros from there to `end`, and a number behind; masks have only ones and zeros."""
    rng, found = np.random.default_rng(0), []
    for k, type_ in enumerate(group.input_types):
        array = rng.standard_normal(type_.shape).astype(np.float32)
        if k in axes:
            line = np.moveaxis(array, axes[k], 0)
            is_mask = array.size == len(line)
            line[:] = 1 if is_mask else line
            line[n:end], line[end:] = 0, 0 if is_mask else behind
        found.append(array)
    return found


def run(case: Case, library: ctypes.CDLL, kernel: Kernel, n: int, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Return the result of a kernel; before, NaN is in all memory that it may write."""
    group, offer, _, _ = case
    memory = []
    for array, layout in zip(inputs, offer.inputs, strict=True):
        packed = layout.pack(array)
        memory.append(aligned_bytes(packed.nbytes))
        memory[-1][:] = packed.reshape(-1).view(np.uint8)
    (type_,) = group.output_types
    memory += [aligned_bytes(size) for size in (4 * type_.size, kernel.workspace_bytes) if size]
    for place in memory[len(inputs) :]:
        place[:] = 0xFF
    buffers = [*memory, np.array([n], np.int64)]
    pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
    assert getattr(library, f"{kernel.symbol}_run")(None, pointers) == 0
    return offer.outputs[0].unpack(memory[len(inputs)].view(np.float32), type_.shape)


def differences(cases: Sequence[Case], target: Target, builder: Builder, count: Count | None = None) -> list[str]:
    """Return which programs do not compute what they should, and at which sizes."""
    counts = {KEYS: count or Count(step=target.lanes)}
    kernels = [kernel_of(program, group, offer, target, counts=counts) for group, offer, program, _ in cases]
    library, wrong = load_kernels(kernels, builder), []
    for case, kernel in zip(cases, kernels, strict=True):
        group, offer, _, axes = case
        first = min(axes)
        extent = group.input_types[first].shape[axes[first]]
        for n in (1, 7, 8, 9, extent // 2, extent - 1, extent):
            end = min(extent, round_up(n, target.lanes))
            given = inputs_of(group, axes, n, end, 0.0)
            wanted = reference.run(group.body, dict(zip((name for name, _ in group.body.inputs), given, strict=True)))
            result = run(case, library, kernel, n, inputs_of(group, axes, n, end, math.nan))
            if not np.allclose(result, wanted["o0"], rtol=1e-4, atol=1e-5):
                wrong.append(f"{offer.variant} of {extent} at {n}")
    return wrong


def attentions(keys: int, is_fused: bool, target: Target, *blockings: AttentionBlocking) -> list[Case]:
    group = attention(13, keys, is_fused)
    schedule = Attentions(group, match_group(group), group.plain_layouts, Machine.of(target))
    axes = {k: type_.shape.index(keys) for k, type_ in enumerate(group.input_types) if keys in type_.shape}
    found = []
    for blocking in blockings:
        offer = Offer(*group.plain_layouts, str(blocking))
        program = program_of(schedule, blocking)
        smaller = ended(program, known_of(group, offer, program, axes), target.lanes)
        assert smaller is not None, (blocking, keys)
        found.append((group, offer, smaller, axes))
    return found


def test_attention_ends_with_its_keys(target: Target, builder: Builder) -> None:
    task, stage, none = Packing.TASK, Packing.STAGE, Packing.NONE
    cases = attentions(
        67,
        True,
        target,
        AttentionBlocking(12, 67, task, chunks=2),
        AttentionBlocking(12, 32, task, chunks=2),
        AttentionBlocking(12, 32, stage),
        AttentionBlocking(12, 32, task, is_split=True),
    )
    cases += attentions(
        72,
        False,
        target,
        AttentionBlocking(12, 72, stage),
        AttentionBlocking(12, 32, none, True),
        AttentionBlocking(12, 72, none),
    )
    assert not differences(cases, target, builder)


def test_attention_on_matrix_units_ends_with_its_keys(target: Target, tmp_path: Path) -> None:
    units, builder = matrix_units(target, tmp_path)
    cases = attentions(67, True, units, AttentionBlocking(13, 67, Packing.SPLIT))
    cases += attentions(72, False, units, AttentionBlocking(13, 72, Packing.SPLIT))
    assert not differences(cases, units, builder)


def offered(group: Group, axes: dict[int, int], provider: object, target: Target) -> list[Case]:
    """Return the ended programs of the offers of a group."""
    offers = provider.offer(group, target)
    assert not isinstance(offers, Refusal)
    found = []
    for offer in offers:
        kernel = provider.build(group, offer, target)
        if isinstance(kernel, Kernel) and kernel.program is not None and known_of(group, offer, kernel.program, axes):
            smaller = ended(kernel.program, known_of(group, offer, kernel.program, axes), target.lanes)
            if smaller is not None:
                found.append((group, offer, smaller, axes))
    return found


def reduced(op: str, shape: Sequence[int], axis: int, number: float) -> Group:
    g = Graph()
    x = masked(g, g.tensor(*shape), axis, number)
    return g.group(g.add(op, [x], ReduceAttributes((axis,))))


def weighted(keys: int) -> Group:
    """Weights of attention times values."""
    g = Graph()
    return g.group(g.add("matmul", [g.tensor(1, 2, 12, keys), g.tensor(1, 2, keys, 16)]))


def sums_of_powers(keys: int) -> Group:
    g = Graph()
    scores = masked(g, g.tensor(1, 2, 24, keys), 3, -math.inf)
    axis = ReduceAttributes((3,))
    most = g.add("broadcast", [g.add("reduce_max", [scores], axis)], BroadcastAttributes((1, 2, 24, keys)))
    return g.group(g.add("reduce_sum", [g.add("exp", [g.add("sub", [scores, most])])], axis))


def test_reductions_end(target: Target, builder: Builder) -> None:
    cases = [
        *offered(reduced("reduce_sum", (2, 45, 24), 1, 0.0), {0: 1, 1: 1}, GeneratedProvider(), target),
        *offered(reduced("reduce_max", (3, 5, 45), 2, -math.inf), {0: 2, 1: 2}, GeneratedProvider(), target),
        *offered(sums_of_powers(45), {0: 3, 1: 3}, GeneratedProvider(), target),
        *offered(weighted(45), {0: 3, 1: 2}, GemmProvider(), target)[:3],
    ]
    assert len(cases) >= 6
    assert not differences(cases, target, builder)


def test_what_ends_too_early_or_not_at_all_is_found(target: Target, builder: Builder) -> None:
    (group, offer, smaller, axes), *_ = offered(weighted(45), {0: 3, 1: 2}, GemmProvider(), target)
    too_short = Count((extent(0, 1, -target.lanes),), target.lanes)
    assert differences([(group, offer, smaller, axes)], target, builder, too_short)
    assert differences([(group, offer, bind(smaller, {KEYS: 45}), axes)], target, builder)


def test_what_can_not_end() -> None:
    """A sum over r of t[i][r], where t is written along j."""
    text = """
buffer i0: input f32[160]
buffer o0: output f32[10]
buffer t0: tile f32[160]
stage
  pass i<10 j<16 vector j
    x0 = f32 load i0[16*i + j]
    store t0[16*i + j] = x0
  pass i<10 | r<16 vector r
    x0 = f32 load t0[16*i + r]
    sum o0[i] = x0
"""
    known = {"i0": Needed(1, 16)}

    def is_ended(before: str = "", after: str = "", known: dict[str, Needed] = known) -> bool:
        assert before in text
        return ended(parse_program(text.replace(before, after)), known, 8) is not None

    assert is_ended()
    assert not is_ended(known={"i0": Needed(1, 15)})  # no axis has this length
    assert not is_ended("load t0[16*i + r]", "load t0[i + 10*r]")  # what is read was written elsewhere
    assert not is_ended("load i0[16*i + j]", "load i0[15*i + j]")  # the coordinate depends on i, too
    at_run_time = replace(parse_program(text), parameters=(Parameter("m", 1, 16),))
    (stage,) = at_run_time.stages
    axis = replace(stage.passes[1].axes[1], size=Parameter("m", 1, 16).value)
    second = replace(stage.passes[1], axes=(stage.passes[1].axes[0], axis))
    stage = replace(stage, steps=(stage.passes[0], second))
    assert ended(replace(at_run_time, stages=(stage,)), known, 8) is None  # an extent is not known
    last = text.replace("sum o0[i]", "store o0[i]").replace("i<10 | r<16", "i<10 r<16")
    assert ended(parse_program(last), known, 8) is None  # the last turn decides
    whole = last.replace("store o0[i]", "store o0[16*i + r]").replace("output f32[10]", "output f32[160]")
    assert ended(parse_program(whole), known, 8) is None  # an output is written along the axis
    assert ended(parse_program(whole), {**known, "o0": Needed(1, 16)}, 8) is not None
    stored = parse_program(
        text.replace("store t0[16*i + j] = x0", "store t0[16*i + j] = x0\n    store o1[16*i + j] = x0").replace(
            "buffer t0", "buffer o1: output f32[160]\nbuffer t0"
        )
    )
    smaller = ended(stored, known, 8)
    assert smaller is not None
    first, second = smaller.stages[0].passes
    assert [a.ragged is not None for a in (*first.axes, *second.axes)] == [False, False, False, True]
