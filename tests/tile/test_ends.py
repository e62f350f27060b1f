"""Programs whose reductions end at a size compute the same as whole programs, and read nothing beyond the size."""

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
from korch.ranges.filled import ends
from korch.ranges.form import Factor, extent
from korch.ranges.needed import in_whole_vectors, live_body
from korch.ranges.plan import RangePlan
from korch.schedule.attention import AttentionBlocking, Attentions, Packing
from korch.schedule.split_attention import program_of
from korch.system.alignment import aligned_bytes, round_up
from korch.target import Target
from korch.testing.kernels import load_kernels
from korch.tile.lower.staging import Machine
from tests.provider.linear_groups import Graph
from tests.support.matrix_units import matrix_units


def masked(g: Graph, value: int, axis: int, number: float) -> int:
    """Put a number behind the valid elements along an axis."""
    shape = g.type(value).shape
    line = g.tensor(*(n if i == axis else 1 for i, n in enumerate(shape)), name=f"mask{value}")
    wide = g.add("broadcast", [line], BroadcastAttributes(shape))
    condition = g.add("less", [g.number(value, 0.0), wide])
    return g.add("where", [condition, value, g.number(value, number)])


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


def ended(group: Group, axes: Mapping[int, int], step: int) -> Group:
    """Return a group whose reductions end with the size, rounded up to a multiple of a step."""
    shapes = [type_.shape for type_ in group.input_types]
    forms = tuple(
        tuple((Factor(n, extent(0) if axes.get(k) == axis else None),) for axis, n in enumerate(shape))
        for k, shape in enumerate(shapes)
    )
    found = in_whole_vectors(ends(group.body, RangePlan((max(map(max, shapes)),), forms, ())), step)
    assert found
    return replace(group, body=live_body(group.body, [{} for _ in group.outputs], found))


Case = tuple[Group, Offer, Kernel, dict[int, int]]
"""What is computed, in which layouts, by which kernel; by input the axis along which it ends."""


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
    assert library.function(f"{kernel.symbol}_run")(None, pointers) == 0
    return offer.outputs[0].unpack(memory[len(inputs)].view(np.float32), type_.shape)


def differences(cases: Sequence[Case], target: Target, builder: Builder) -> list[str]:
    """Return which kernels do not compute what they should, and at which sizes."""
    library, wrong = load_kernels([kernel for _, _, kernel, _ in cases], builder), []
    for case in cases:
        group, offer, kernel, axes = case
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
    axes = {k: type_.shape.index(keys) for k, type_ in enumerate(group.input_types) if keys in type_.shape}
    live = ended(group, axes, target.lanes)
    schedule = Attentions(live, match_group(live), live.plain_layouts, Machine.of(target))
    found = []
    for blocking in blockings:
        offer = Offer(*group.plain_layouts, str(blocking))
        kernel = kernel_of(program_of(schedule, blocking), group, offer, target)
        assert kernel.counts, (blocking, keys)
        found.append((group, offer, kernel, axes))
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
    built = [(offer, provider.build(ended(group, axes, target.lanes), offer, target)) for offer in offers]
    return [(group, offer, kernel, axes) for offer, kernel in built if isinstance(kernel, Kernel) and kernel.counts]


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
    (group, offer, kernel, axes), *_ = offered(weighted(45), {0: 3, 1: 2}, GemmProvider(), target)
    for wrong in (ended(group, axes, 1), group):
        built = GemmProvider().build(wrong, offer, target)
        assert isinstance(built, Kernel) and built.source != kernel.source
    whole = GemmProvider().build(group, offer, target)
    assert differences([(group, offer, whole, axes)], target, builder)
