"""Small groups for tests of the oneDNN provider."""

from collections.abc import Callable, Sequence

import numpy as np

from korch.candidate.candidate import Group, make_group
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import PadAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes, ConvTransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes
from korch.primitive.types import ValueType

Chain = Callable[["Graph", int], int]


class Graph(GraphBuilder):
    """A builder with short words for tests."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def tensor(self, *shape: int, name: str = "") -> int:
        return self.input(name or f"x{len(self._inputs)}", ValueType.parse(f"f32{list(shape)}"))

    def weights(self, *shape: int) -> int:
        return self.constant(self.rng.standard_normal(shape).astype(np.float32))

    def full(self, value: int, number: float) -> int:
        shape = self.type(value).shape
        return self.constant(np.broadcast_to(np.float32(number), shape))

    def with_number(self, op: str, value: int, number: float, left: bool = True) -> int:
        other = self.full(value, number)
        return self.add(op, [value, other] if left else [other, value])

    def with_tensor(self, op: str, value: int, other: int, left: bool = True) -> int:
        shape = self.type(value).shape
        if self.type(other).shape != shape:
            other = self.add("broadcast", [other], BroadcastAttributes(shape))
        return self.add(op, [value, other] if left else [other, value])

    def group(self, *outputs: int) -> Group:
        for i, value in enumerate(outputs):
            self.output(f"o{i}", value)
        graph = self.freeze()
        return make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])


def conv_group(
    x: Sequence[int],
    w: Sequence[int],
    *,
    stride: int = 1,
    pads: Sequence[int] = (),
    dilation: int = 1,
    groups: int = 1,
    chain: Chain | None = None,
    constant: bool = True,
    transposed: bool = False,
    output_padding: int = 0,
    bias: bool = False,
    pad: PadAttributes | None = None,
) -> Group:
    """Return a convolution (or its transpose) with what `chain` adds after it."""
    g = Graph()
    value = g.tensor(*x)
    spatial = len(x) - 2
    begin, end = (tuple(pads[:spatial]), tuple(pads[spatial:])) if pads else ((0,) * spatial,) * 2
    kernel = g.weights(*w) if constant else g.tensor(*w)
    steps = ((stride,) * spatial, begin, end, (dilation,) * spatial)
    if pad is not None:
        value = g.add("pad", [value], pad)
    if transposed:
        attributes = ConvTransposeAttributes(*steps, (output_padding,) * spatial, groups)
        y = g.add("conv_transpose", [value, kernel], attributes)
    else:
        y = g.add("conv", [value, kernel], ConvAttributes(*steps, groups))
    if bias:
        y = g.with_tensor("add", y, g.weights(1, g.type(y).shape[1], *(1,) * spatial))
    return g.group(chain(g, y) if chain is not None else y)


def matmul_group(
    a: Sequence[int],
    b: Sequence[int],
    *,
    swap_a: bool = False,
    swap_b: bool = False,
    constant: bool = False,
    chain: Chain | None = None,
) -> Group:
    """Return a matrix product; operands are given as they lie before they are transposed."""
    g = Graph()
    left, right = g.tensor(*a), g.weights(*b) if constant else g.tensor(*b)
    perm = (*range(len(a) - 2), len(a) - 1, len(a) - 2)
    if swap_a:
        left = g.add("transpose", [left], TransposeAttributes(perm))
    if swap_b and constant:
        return _transposed_constant(a, b, perm, chain)
    if swap_b:
        right = g.add("transpose", [right], TransposeAttributes(perm))
    y = g.add("matmul", [left, right])
    return g.group(chain(g, y) if chain is not None else y)


def _transposed_constant(a: Sequence[int], b: Sequence[int], perm: Sequence[int], chain: Chain | None) -> Group:
    """The builder computes a transposed constant at once: mark an input as constant instead."""
    group = matmul_group(a, b, swap_b=True, chain=chain)
    return Group(group.primitives, group.inputs, group.outputs, frozenset({1}), group.body)


def pool_group(
    op: str,
    x: Sequence[int],
    kernel: Sequence[int],
    *,
    stride: int = 2,
    pads: Sequence[int] = (),
    dilation: int = 1,
    chain: Chain | None = None,
) -> Group:
    """Return a pooling with what `chain` adds after it."""
    g = Graph()
    n = len(kernel)
    begin, end = (tuple(pads[:n]), tuple(pads[n:])) if pads else ((0,) * n,) * 2
    attributes = PoolAttributes(tuple(kernel), (stride,) * n, begin, end, (dilation,) * n)
    y = g.add(op, [g.tensor(*x)], attributes)
    return g.group(chain(g, y) if chain is not None else y)
