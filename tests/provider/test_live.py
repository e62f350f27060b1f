"""Kernels for a range compute what a size needs with the same results as the whole kernel, and omit tasks."""

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.compiler import Builder
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.ops.winograd import WinogradAttributes, transform_weights
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel
from korch.provider.winograd import WinogradProvider
from korch.ranges.form import extent
from korch.ranges.needed import live_body
from korch.system.alignment import aligned_bytes
from korch.target import Target
from korch.testing.kernels import load_kernels
from tests.provider.linear_groups import Graph

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


def square(size: int, op: str) -> Group:
    return image(size, op, 1, size)


def image(rows: int, op: str, images: int = 9, columns: int = 9) -> Group:
    """A convolution of images, or of windows in Winograd's space, with a residual."""
    g = Graph()
    x, weights = g.tensor(images, 16, rows, columns), g.rng.standard_normal((16, 16, 3, 3))
    if op == "winograd":
        u = g.constant(transform_weights(weights, 4).astype(np.float32))
        y = g.add("winograd", [x, u], WinogradAttributes(4, (1, 1), (1, 1)))
    else:
        attributes = ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1))
        y = g.add("conv", [x, g.constant(weights.astype(np.float32))], attributes)
    return g.group(g.with_tensor("add", y, g.tensor(*g.type(y).shape)))


def depthwise(size: int, stride: int) -> Group:
    g = Graph()
    attributes = ConvAttributes((stride, stride), (1, 1), (1, 1), (1, 1), 16)
    return g.group(g.add("conv", [g.tensor(1, 16, size, size), g.weights(16, 1, 3, 3)], attributes))


def part_of(group: Group, axes: tuple[int, ...]) -> Group:
    """Return a group of whose results only the first elements along axes are needed: as many as the sizes."""
    needs = {axis: frozenset((extent(d),)) for d, axis in enumerate(axes)}
    return replace(group, body=live_body(group.body, [needs]))


def kernels(
    group: Group, axes: tuple[int, ...], target: Target, provider: object
) -> list[tuple[Kernel, Kernel, list[int], Offer]]:
    """Return the kernels of a group's offers, with those for a part of the results, and the strides of the axes."""
    offers = provider.offer(group, target)
    assert not isinstance(offers, Refusal)
    (type_,) = group.output_types
    found = []
    for offer in offers:
        layout = offer.outputs[0]
        kernel, smaller = (provider.build(own, offer, target) for own in (group, part_of(group, axes)))
        if kernel.program is not None and all(layout.block(axis) == 1 for axis in axes):
            assert smaller.counts
            physical = layout.physical_shape(type_.shape)
            strides = [math.prod(physical[layout.order.index(axis) + 1 :]) for axis in axes]
            found.append((kernel, smaller, strides, offer))
    return found


@pytest.mark.parametrize(
    ("group", "axes", "provider"),
    [
        (product(ROWS, 40, 96), (1,), GemmProvider()),
        (product(36, 16, 32), (1,), GemmProvider()),
        (product(ROWS, 3072, 64), (1,), GemmProvider()),
        (product(256, 768, 256), (1,), GemmProvider()),
        (of_heads(ROWS), (2,), GemmProvider()),
        (normalized(1, ROWS, 48), (1,), GeneratedProvider()),
        (normalized(1, 4, ROWS, 40), (2,), GeneratedProvider()),
        (attention(ROWS), (2,), AttentionProvider()),
        (image(13, "winograd"), (0,), WinogradProvider()),
        (image(33, "winograd"), (2,), WinogradProvider()),
        (image(13, "conv"), (0,), ConvProvider()),
        (image(33, "conv"), (2,), ConvProvider()),
        (image(33, "winograd"), (0, 3), WinogradProvider()),
        (square(33, "winograd"), (2, 3), WinogradProvider()),
        (square(33, "conv"), (2, 3), ConvProvider()),
        (depthwise(30, 1), (2, 3), ConvProvider()),
        (depthwise(31, 2), (2, 3), ConvProvider()),
    ],
)
def test_what_is_needed_is_computed(group, axes, provider, target: Target, builder: Builder, rng) -> None:
    found = kernels(group, axes, target, provider)
    assert found
    library = load_kernels([kernel for pair in found for kernel in pair[:2]], builder)
    (type_,) = group.output_types
    lengths = [type_.shape[axis] for axis in axes]
    for kernel, smaller, strides, offer in found:
        numbers = [rng.random(type_.shape, np.float32) for type_ in group.input_types]
        packed = [layout.pack(a).reshape(-1).view(np.uint8) for layout, a in zip(offer.inputs, numbers, strict=True)]
        (elements,) = (type_.size for type_ in group.output_types)
        memory = [aligned_bytes(size) for size in (*(a.size for a in packed), 4 * elements)]
        for place, array in zip(memory, packed, strict=False):
            place[:] = array
        places = [np.arange(elements) // stride % n for stride, n in zip(strides, lengths, strict=True)]

        def is_needed(sizes: list[int], places=places) -> np.ndarray:
            return np.all([place < n for place, n in zip(places, sizes, strict=True)], axis=0)

        def run(which: Kernel, sizes: list[int], memory=memory) -> np.ndarray:
            memory[-1][:] = 0xFF
            size = np.array(sizes, np.int64)
            room = [aligned_bytes(which.workspace_bytes)] * bool(which.workspace_bytes)
            for buffer in room:
                buffer[:] = 0xFF
            buffers = [*memory, *room, size]
            pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
            assert library.function(f"{which.symbol}_run")(None, pointers) == 0
            return memory[-1].view(np.float32).copy()

        wanted = run(kernel, [0] * len(axes))
        ends = [sorted({1, n // 4, n // 2, n - 1, n}) for n in lengths]
        for sizes in zip(*ends[:1], *(own[::-1] for own in ends[1:]), strict=True):
            result, own = run(smaller, [*sizes]), is_needed([*sizes])
            assert np.allclose(result[own], wanted[own], rtol=1e-4, atol=1e-5), (offer.variant, sizes)
        for d, n in enumerate(lengths):
            sizes = [*lengths[:d], 1, *lengths[d + 1 :]]
            assert np.isnan(run(smaller, sizes)[places[d] >= n // 2]).any(), offer.variant  # tasks are left out
