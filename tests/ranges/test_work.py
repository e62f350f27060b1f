"""The work of kernels for a range falls with the size: it is compared with that of kernels for the size alone.

No clock is used. Operations and bytes are counted at the points at which the interpreter of tile programs computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Offer, Refusal, make_group
from korch.equivalence.rules.winograd import CONV3X3_IS_WINOGRAD
from korch.equivalence.saturate import saturate
from korch.primitive.graph import PrimitiveGraph
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.for_sizes import kernel_for_sizes
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import AnyProvider, Kernel
from korch.provider.winograd import WinogradProvider
from korch.ranges.binding import dimensions_of
from korch.ranges.form import Sizes
from korch.ranges.masked import Masked
from korch.target import Target
from korch.tile.check.points import Points
from korch.tile.ir.bind import bind
from korch.tile.ir.program import Accumulate, Apply, At, Contract, Level, Load, Pass, Select, Store, TileProgram
from tests.ranges.range_models import Shapes, as_served, masked_model, model_of, models_in, primitives, shapes_of

MOST = 1.15
"""The work for a range at a size, at most, as a multiple of the work of an exact plan's kernel."""

TARGET = Target(isa="avx2", lanes=8, threads=2)

PROVIDERS: tuple[AnyProvider, ...] = (
    GemmProvider(),
    ConvProvider(),
    WinogradProvider(),
    AttentionProvider(),
    GeneratedProvider(),
)

RANGES: dict[str, Shapes] = {
    "n": {"n": (range(8, 73, 8),)},
    "b": {"b": (range(1, 9),)},
    "h": {"h": (range(16, 65, 8),)},
    "hw": {"h": (range(8, 33, 8),), "w": (range(8, 33, 8),)},
    "bn": {"b": (range(1, 5),), "n": (range(8, 41, 8),)},
}

CASES = """
relu n: float[2, 3, n, 16] x
  { y = Relu(x) }
transpose h: float[1, 16, h, 24] x
  { y = Transpose <perm = [0, 2, 3, 1]> (x) }
transpose hw: float[1, 16, h, w] x
  { y = Transpose <perm = [0, 2, 3, 1]> (x) }
heads n: float[1, n, 32] x
  <int64[4] k = {0, 0, 2, 16}>{ r = Reshape(x, k) y = Transpose <perm = [0, 2, 1, 3]> (r) }
merge bn: float[b, n, 16] x
  <int64[2] k = {-1, 16}>{ r = Reshape(x, k) y = Relu(r) }
flatten hw: float[1, 8, h, w] x
  <int64[3] k = {0, 0, -1}>{ r = Reshape(x, k) y = Relu(r) }
softmax of rows n: float[4, n, 32] x
  { y = Softmax <axis = -1> (x) }
softmax n: float[2, 16, n] x
  { y = Softmax <axis = -1> (x) }
layer norm n: float[2, n, 32] x
  { m = ReduceMean <axes = [2]> (x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean <axes = [2]> (q) s = Sqrt(v) y =
  Div(d, s) }
layer norm bn: float[b, n, 32] x
  { m = ReduceMean <axes = [2]> (x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean <axes = [2]> (q) s = Sqrt(v) y =
  Div(d, s) }
product n: float[n, 32] x | m 32 48
  { y = MatMul(x, m) }
product of batches n: float[2, n, 32] x | m 32 48
  { y = MatMul(x, m) }
product b: float[b, 64] x | m 64 32
  { y = MatMul(x, m) }
product bn: float[b, n, 32] x | m 32 48
  { p = MatMul(x, m) y = Relu(p) }
product of rows bn: float[b, n, 32] x | m 32 48
  <int64[2] k = {-1, 32}>{ r = Reshape(x, k) p = MatMul(r, m) e = Relu(p) s = Shape <start = 0, end = 2> (x)
  c = Constant <value_ints: ints = [48]> () t = Concat <axis = 0> (s, c) y = Reshape(e, t) }
product of merged rows bn: float[b, n, 32] x | m 32 48
  <int64[2] k = {-1, 32}>{ r = Reshape(x, k) p = MatMul(r, m) y = Relu(p) }
product of heads n: float[1, n, 32] x | m 32 32
  <int64[4] k = {0, 0, 2, 16}>{ p = MatMul(x, m) r = Reshape(p, k) y = Transpose <perm = [0, 2, 1, 3]> (r) }
transposed product n: float[1, 32, n] x | m 24 32
  { y = MatMul(m, x) }
columns n: float[2, 16, 32] x, float[2, 32, n] z
  { y = MatMul(x, z) }
terms n: float[2, 16, n] x, float[2, n, 32] z
  { y = MatMul(x, z) }
attention n: float[1, 2, n, 16] q, float[1, 2, 16, n] k, float[1, 2, n, 16] v
  { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }
attention bn: float[b, 2, n, 16] q, float[b, 2, 16, n] k, float[b, 2, n, 16] v
  { s = MatMul(q, k) p = Softmax(s) y = MatMul(p, v) }
conv 1x1 b: float[b, 16, 8, 8] x | m 16 16 1 1
  { y = Conv(x, m) }
conv 1x1 h: float[1, 16, h, 16] x | m 16 16 1 1
  { y = Conv(x, m) }
conv 3x3 b: float[b, 16, 8, 8] x | m 16 16 3 3
  { y = Conv <pads = [1, 1, 1, 1]> (x, m) }
conv 3x3 h: float[1, 16, h, 16] x | m 16 16 3 3
  { y = Conv <pads = [1, 1, 1, 1]> (x, m) }
conv 3x3 hw: float[1, 16, h, w] x | m 16 16 3 3
  { y = Conv <pads = [1, 1, 1, 1]> (x, m) }
conv 3x3 with stride h: float[1, 16, h, 16] x | m 16 16 3 3
  { y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, m) }
depthwise h: float[1, 16, h, 16] x | m 16 1 3 3
  { y = Conv <pads = [1, 1, 1, 1], group = 16> (x, m) }
depthwise b: float[b, 16, 8, 8] x | m 16 1 3 3
  { y = Conv <pads = [1, 1, 1, 1], group = 16> (x, m) }
few channels b: float[b, 3, 16, 16] x | m 16 3 3 3
  { y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, m) }
max pool b: float[b, 8, 16, 16] x
  { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
max pool h: float[1, 8, h, 16] x
  { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
average pool h: float[1, 8, h, 16] x
  { y = AveragePool <kernel_shape = [3, 3], strides = [1, 1]> (x) }
conv 1x1 hw: float[1, 16, h, w] x | m 16 16 1 1
  { y = Conv(x, m) }
conv 3x3 with stride hw: float[1, 16, h, w] x | m 16 16 3 3
  { y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, m) }
few channels hw: float[1, 3, h, w] x | m 16 3 3 3
  { y = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (x, m) }
depthwise hw: float[1, 16, h, w] x | m 16 1 3 3
  { y = Conv <pads = [1, 1, 1, 1], group = 16> (x, m) }
max pool hw: float[1, 8, h, w] x
  { y = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (x) }
mean hw: float[1, 8, h, w] x
  { y = ReduceMean <axes = [2, 3]> (x) }
batch norm hw: float[1, 8, h, w] x | s 8 1 1
  { p = Mul(x, s) y = Relu(p) }
mean h: float[1, 8, h, 16] x
  { y = ReduceMean <axes = [2, 3]> (x) }
"""

MODELS = models_in(CASES)

OFFENDERS = {"softmax n: generated": "elements beyond the size are masked in each pass, not left out"}
"""Kernels that do more work than they should, by case and provider, with the reason."""


@dataclass(frozen=True)
class Work:
    """Operations on elements, and bytes outside of tiles that stages read or write."""

    operations: int
    moved: int

    def ratio(self, other: Work) -> float:
        """Return the larger of the two quotients."""
        return max(self.operations / max(1, other.operations), self.moved / max(1, other.moved))


def work_of(program: TileProgram, values: Mapping[str, int]) -> Work:
    """Count the points at which the interpreter computes, and the elements that each stage reads or writes."""
    program = bind(program, values)
    sizes = {b.name: (b.dtype.size_bytes, b.size) for b in program.buffers if b.level is not Level.TILE}
    operations = moved = 0
    for stage in program.stages:
        touched = {name: np.zeros(size, np.bool_) for name, (_, size) in sizes.items()}
        for loops, step in stage.leaves:
            points = Points(stage.grid, (*(loop.axis for loop in loops), *step.axes), np.arange(stage.tasks))
            points.live = points.live & points.holds(step.where)
            count = int(points.spread(points.live).sum())
            operations += 2 * count if isinstance(step, Contract) else 0
            for access in step.ops + step.sinks if isinstance(step, Pass) else (step.a, step.b):
                operations += count * isinstance(access, Apply | Select | Accumulate)
                if isinstance(access, Load | Store | Accumulate | At) and access.buffer in sizes:
                    holds = points.holds(access.guards) if isinstance(access, Load) else True
                    at = points.spread(points.at(access.index))[points.spread(points.live & holds)]
                    touched[access.buffer][at] = True
        moved += sum(sizes[name][0] * int(own.sum()) for name, own in touched.items())
    return Work(operations, moved)


def kernels_of(
    graph: PrimitiveGraph, provider: AnyProvider, whole: Masked | None = None
) -> Iterator[tuple[Offer, Kernel]]:
    """Yield the kernels by which a provider computes a whole graph, or that of a range, with their offers."""
    numbers: Sequence[int] = range(len(graph.primitives))
    if provider.name == "winograd":
        graph, _ = saturate(graph, strict=False, rules=(CONV3X3_IS_WINOGRAD,))
        numbers = [i for i, primitive in enumerate(graph.primitives) if primitive.op != "conv"]
        if all(graph.primitives[i].op != "winograd" for i in numbers):
            return
    group = make_group(graph, numbers, [value for _, value in graph.outputs])
    offers = provider.offer(group, TARGET)
    for offer in () if isinstance(offers, Refusal) else offers:
        candidate = Candidate(group, provider.name, offer)
        if whole is not None:
            (candidate,) = as_served(whole, graph, [candidate], TARGET.lanes)
        kernel = kernel_for_sizes(candidate, partial(built, provider))
        if not isinstance(kernel, Refusal) and kernel.program is not None:
            yield offer, kernel


def sizes_of(shapes: Shapes) -> list[Sizes]:
    """Return the first and the last sizes, and some between them, in steps."""
    ends = [(d.low, d.high - d.low) for d in dimensions_of(shapes)]
    shares = [(0, 0), (1, 1), (0.5, 0.5), (0.2, 0.9), (0.7, 0.3)]
    return [tuple(low + round(s * n) for s, (low, n) in zip(own, ends, strict=False)) for own in shares]


def built(by: AnyProvider, candidate: Candidate) -> Kernel | Refusal:
    return by.build(candidate.group, candidate.offer, TARGET)


@cache
def excess(name: str) -> dict[tuple[str, str], float]:
    """Return the largest ratio of the work for a range to the work for a size, by provider and form of the kernel."""
    source, shapes, found = model_of(*MODELS[name]), shapes_of(name, RANGES), dict[tuple[str, str], float]()
    whole = masked_model(source, shapes)
    for by in PROVIDERS:
        exact = {s: list(kernels_of(primitives(source, shapes, s), by)) for s in sizes_of(shapes)}
        for offer, kernel in kernels_of(whole.graph, by, whole):
            assert kernel.program is not None
            for sizes, others in exact.items():
                own = work_of(kernel.program, {n: count.at(sizes) for n, count in kernel.counts})
                offers = [(o, k.program) for o, k in others]
                same = [p for o, p in offers if (o.outputs, o.variant) == (offer.outputs, offer.variant)]
                ratios = [own.ratio(work_of(p, {})) for p in same or [p for _, p in offers] if p is not None]
                form = by.name, f"{offer.outputs[0]} {offer.variant}".strip()
                found[form] = max(found.get(form, 0.0), min(ratios, default=0.0))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_work_of_a_kernel_falls_with_the_size(name: str) -> None:
    found = excess(name)
    assert found
    for (provider, form), ratio in found.items():
        if f"{name}: {provider}" not in OFFENDERS:
            assert ratio <= MOST, (provider, form)


@pytest.mark.parametrize("offender", OFFENDERS)
def test_an_offender_is_one(offender: str) -> None:
    name, _, provider = offender.partition(": ")
    assert any(ratio > MOST for (own, _), ratio in excess(name).items() if own == provider)
