"""Seeded random primitive graphs, for property tests of the stages after fission.

Values stay moderate, because functions that grow fast when they are composed are not used; so outputs
can be compared with tolerances. Every value without readers is an output, so there is no dead code.
Graphs are float32 unless other element types are requested. Then a graph has values of several types,
with casts between them. A float is cast to an integer, or a 16-bit float compared, only if it is an input
of the graph, so that a rounding error can't change the result.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import (
    ConcatAttributes,
    PadAttributes,
    ReshapeAttributes,
    SliceAttributes,
    TakeAttributes,
    TransposeAttributes,
)
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.testing.samples import random_inputs

__all__ = ["random_graph", "random_inputs"]

SIZES = (1, 2, 3, 4, 5, 8, 17)
LARGEST_ELEMENTS = 1 << 12
_UNARY = ("neg", "abs", "tanh", "sigmoid", "erf", "sin", "cos")
_BINARY = ("add", "sub", "mul", "max", "min")
_UNARY_INTEGER = ("neg", "abs", "bitwise_not", "sign")
_BINARY_INTEGER = (*_BINARY, "div", "bitwise_and", "bitwise_xor")
_BINARY_BOOL = ("and", "or", "xor")


def random_graph(
    rng: np.random.Generator,
    primitives: int = 12,
    linear: bool = False,
    dtypes: Sequence[DType] = (DType.F32,),
    sizes: Sequence[int] = SIZES,
) -> PrimitiveGraph:
    """Return a random graph.

    Args:
        rng: the source of all choices.
        primitives: the number of primitives; the last move may add a few more.
        linear: whether matrix products and convolutions may occur.
        dtypes: the element types of its values; conditions are always `bool`.
        sizes: the extents of axes to choose from.
    """
    grower = _Grower(rng, dtypes, sizes)
    moves = [*_MOVES, *([_Grower.matmul, _Grower.conv] if linear else [])]
    moves += [_Grower.cast] * 3 if len(dtypes) > 1 else []
    attempts = 0
    while grower.count < primitives and attempts < 50 * primitives:
        moves[int(rng.integers(len(moves)))](grower)
        attempts += 1
    return grower.finish()


class _Grower:
    """A graph that grows by random moves; a move that is not applicable does nothing."""

    def __init__(self, rng: np.random.Generator, dtypes: Sequence[DType], sizes: Sequence[int]) -> None:
        self.rng, self.builder = rng, GraphBuilder()
        self.dtypes, self.sizes = tuple(dtypes), tuple(sizes)
        rank = int(rng.integers(1, 5))
        shape = tuple(int(rng.choice(sizes)) for _ in range(rank))
        while math.prod(shape) > LARGEST_ELEMENTS:
            shape = shape[1:]
        count = max(int(rng.integers(1, 4)), len(self.dtypes))
        self.values = [
            self.builder.input(f"in{i}", ValueType(shape, self.dtypes[i % len(self.dtypes)])) for i in range(count)
        ]
        self.given = frozenset(self.values)
        self.count = 0
        self.read: set[int] = set()

    def pick(self) -> tuple[int, tuple[int, ...]]:
        """Return a random value and its shape; recent values are chosen more often."""
        recent = self.values[-4:] if self.rng.random() < 0.6 else self.values
        value = recent[int(self.rng.integers(len(recent)))]
        return value, self.builder.type(value).shape

    def emit(self, op: str, *inputs: int, attributes: object = None, keep: bool = True) -> int:
        """Add a primitive; with `keep` later primitives may read its value, unless it is constant or too large."""
        before = sum(1 for _ in self.builder.primitives())
        value = self.builder.add(op, inputs, attributes)  # type: ignore[arg-type]
        self.count += sum(1 for _ in self.builder.primitives()) - before
        self.read.update(inputs)
        fits = self.builder.type(value).size <= LARGEST_ELEMENTS
        if keep and fits and value not in self.values and not self.builder.constant_of(value):
            self.values.append(value)
        return value

    def finish(self) -> PrimitiveGraph:
        """Declare all values without readers, and sometimes another value, as outputs."""
        inner = [v for v in self.values if v in self.read and self.rng.random() < 0.05]
        sinks = [v for v in self.values if v not in self.read]
        for i, value in enumerate(sinks + inner or self.values[-1:]):
            self.builder.output(f"out{i}", value)
        return self.builder.freeze()

    def dtype(self, value: int) -> DType:
        """Return the element type of a value."""
        return self.builder.type(value).dtype

    def unary(self) -> None:
        value, _ = self.pick()
        dtype = self.dtype(value)
        names = ("not",) if dtype is DType.BOOL else _UNARY if dtype.is_float else _UNARY_INTEGER
        self.emit(str(self.rng.choice(names)), value)

    def partner(self, value: int, known: bool = False) -> int:
        """Return a second operand with the type of a value: another value, a broadcast constant, or a constant.

        Args:
            value: the first operand.
            known: whether only inputs and constants are allowed.
        """
        shape, dtype = self.builder.type(value).shape, self.dtype(value)
        same = [v for v in self.values if self.builder.type(v) == self.builder.type(value)]
        same = [v for v in same if v in self.given] if known else same
        kind = self.rng.random()
        if same and kind < 0.6:
            return same[int(self.rng.integers(len(same)))]
        if kind < 0.8:
            number = self.number(np.asarray(self.rng.normal(), np.float32), dtype)
            return self.builder.constant(np.broadcast_to(number, shape))
        small = tuple(n if self.rng.random() < 0.5 else 1 for n in shape)
        array = self.number(self.rng.standard_normal(small), dtype)
        constant = self.builder.constant(array)
        if small == shape:
            return constant
        return self.emit("broadcast", constant, attributes=BroadcastAttributes(shape), keep=False)

    @staticmethod
    def number(drawn: Array, dtype: DType) -> Array:
        """Convert normally distributed numbers to a type: integers are rounded after scaling by 3, bools are signs."""
        if dtype is DType.BOOL:
            return np.asarray(drawn > 0)
        if not dtype.is_float:
            drawn = np.abs(np.rint(3 * drawn)) if dtype.value[0] == "u" else np.rint(3 * drawn)
        return np.asarray(drawn).astype(dtype.numpy)

    def binary(self) -> None:
        value, _ = self.pick()
        dtype, other = self.dtype(value), self.partner(value)
        pair = (value, other) if self.rng.random() < 0.5 else (other, value)
        names = _BINARY if dtype.is_float else _BINARY_INTEGER
        self.emit(str(self.rng.choice(_BINARY_BOOL if dtype is DType.BOOL else names)), *pair)

    def choose(self) -> None:
        value, _ = self.pick()
        dtype = self.dtype(value)
        is_rounded = dtype in (DType.F16, DType.BF16)  # rounding makes near numbers equal, so comparisons may differ
        if dtype is DType.BOOL or (is_rounded and value not in self.given):
            return
        other = self.partner(value, known=is_rounded)
        condition = self.emit("less", value, other, keep=False)
        if self.rng.random() < 0.2:
            self.emit("cast", condition, attributes=CastAttributes(dtype.value))
        else:
            self.emit("where", condition, value, self.partner(value))

    def cast(self) -> None:
        value, _ = self.pick()
        to = self.dtypes[int(self.rng.integers(len(self.dtypes)))]
        loses = self.dtype(value).is_float and not to.is_float
        if loses and (value not in self.given or to.value.startswith("u")):
            return  # the cast of a negative float to an unsigned integer is undefined
        if to is not self.dtype(value):
            self.emit("cast", value, attributes=CastAttributes(to.value))

    def broadcast(self) -> None:
        value, shape = self.pick()
        ones = [axis for axis, n in enumerate(shape) if n == 1]
        wide = list(shape)
        for axis in ones:
            wide[axis] = int(self.rng.choice(self.sizes))
        lead = [int(self.rng.choice(self.sizes))] if len(shape) < 4 and self.rng.random() < 0.3 else []
        target = (*lead, *wide)
        if target != shape and math.prod(target) <= LARGEST_ELEMENTS:
            self.emit("broadcast", value, attributes=BroadcastAttributes(target))

    def reduce(self) -> None:
        value, shape = self.pick()
        axes = tuple(axis for axis in range(len(shape)) if self.rng.random() < 0.5)
        if axes and self.dtype(value) is not DType.BOOL:
            name = str(self.rng.choice(("sum", "sum", "max", "min")))
            self.emit(f"reduce_{name}", value, attributes=ReduceAttributes(axes))

    def normalize(self) -> None:
        """Add a softmax along the last axis: reductions whose results are broadcast back."""
        value, shape = self.pick()
        if not shape or not self.dtype(value).is_float:
            return
        axes = ReduceAttributes((len(shape) - 1,))
        back = BroadcastAttributes(shape)
        top = self.emit("reduce_max", value, attributes=axes, keep=False)
        top = self.emit("broadcast", top, attributes=back, keep=False) if shape[-1] > 1 else top
        power = self.emit("exp", self.emit("sub", value, top, keep=False), keep=False)
        total = self.emit("reduce_sum", power, attributes=axes, keep=False)
        if shape[-1] > 1:
            total = self.emit("broadcast", total, attributes=back, keep=False)
        self.emit("div", power, total)

    def pool(self) -> None:
        value, shape = self.pick()
        if len(shape) < 2 or shape[-1] < 3 or self.dtype(value) is DType.BOOL:
            return
        stride, pad = int(self.rng.integers(1, 3)), int(self.rng.integers(0, 2))
        window = PoolAttributes((3,), (stride,), (pad,), (pad,), (1,))
        self.emit(f"pool_{self.rng.choice(('sum', 'max'))}", value, attributes=window)

    def transpose(self) -> None:
        value, shape = self.pick()
        perm = tuple(int(axis) for axis in self.rng.permutation(len(shape)))
        if perm != tuple(range(len(shape))):
            self.emit("transpose", value, attributes=TransposeAttributes(perm))

    def reshape(self) -> None:
        value, shape = self.pick()
        if len(shape) < 2:
            target: tuple[int, ...] = (1, *shape)
        else:
            at = int(self.rng.integers(len(shape) - 1))
            target = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
        self.emit("reshape", value, attributes=ReshapeAttributes(target))

    def slice(self) -> None:
        value, shape = self.pick()
        start, size, step = [], [], []
        for n in shape:
            first = int(self.rng.integers(n))
            stride = int(self.rng.choice((1, 1, 2, -1)))
            most = (n - 1 - first) // stride + 1 if stride > 0 else first // -stride + 1
            start.append(first)
            size.append(int(self.rng.integers(1, most + 1)))
            step.append(stride)
        if tuple(size) != shape:
            attributes = SliceAttributes(tuple(start), tuple(size), tuple(step))
            self.emit("slice", value, attributes=attributes)

    def pad(self) -> None:
        value, shape = self.pick()
        before = tuple(int(n) for n in self.rng.integers(0, 3, len(shape)))
        after = tuple(int(n) for n in self.rng.integers(0, 3, len(shape)))
        mode = str(self.rng.choice(("constant", "reflect", "edge", "wrap")))
        fill = float(self.rng.choice((0.0, 1.5))) if mode == "constant" else 0.0
        fill = fill if self.dtype(value).is_float else float(int(fill))
        if any((*before, *after)):
            self.emit("pad", value, attributes=PadAttributes(before, after, mode, fill))

    def concat(self) -> None:
        value, shape = self.pick()
        if shape:
            axis = int(self.rng.integers(len(shape)))
            self.emit("concat", value, self.partner(value), attributes=ConcatAttributes(axis))

    def take(self) -> None:
        value, shape = self.pick()
        if shape:
            axis = int(self.rng.integers(len(shape)))
            count = int(self.rng.integers(1, 2 * shape[axis] + 1))
            indices = tuple(int(i) for i in self.rng.integers(0, shape[axis], count))
            self.emit("take", value, attributes=TakeAttributes(axis, indices))

    def weights(self, shape: tuple[int, ...], dtype: DType) -> int:
        """Return constant weights, scaled so that products keep the magnitude of their operand."""
        scale = 1 / math.sqrt(max(1, math.prod(shape[-2:])))
        return self.builder.constant((self.rng.normal(size=shape) * scale).astype(dtype.numpy))

    def matmul(self) -> None:
        value, shape = self.pick()
        dtype = self.dtype(value)
        if len(shape) >= 2 and dtype.is_float:
            columns = int(self.rng.choice(self.sizes))
            lead = (1,) * (len(shape) - 2)
            self.emit("matmul", value, self.weights((*lead, shape[-1], columns), dtype))

    def conv(self) -> None:
        value, shape = self.pick()
        dtype = self.dtype(value)
        if len(shape) < 3 or not dtype.is_float:
            return
        spatial, channels = len(shape) - 2, int(self.rng.choice((1, 2, 3, 8)))
        kernel = int(self.rng.choice((1, 3)))
        pad, stride = (kernel // 2,) * spatial, (int(self.rng.integers(1, 3)),) * spatial
        attributes = ConvAttributes(stride, pad, pad, (1,) * spatial)
        filters = self.weights((channels, shape[1], *(kernel,) * spatial), dtype)
        self.emit("conv", value, filters, attributes=attributes)


_MOVES: tuple[Callable[[_Grower], None], ...] = (
    _Grower.unary,
    _Grower.unary,
    _Grower.unary,
    _Grower.binary,
    _Grower.binary,
    _Grower.binary,
    _Grower.binary,
    _Grower.choose,
    _Grower.broadcast,
    _Grower.reduce,
    _Grower.reduce,
    _Grower.normalize,
    _Grower.pool,
    _Grower.transpose,
    _Grower.reshape,
    _Grower.slice,
    _Grower.pad,
    _Grower.concat,
    _Grower.take,
)
