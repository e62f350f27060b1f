"""Examples for the rules on quantized values: graphs that are written as text."""

from collections.abc import Callable

import numpy as np

from korch.equivalence.affine_chains import AxisConstant
from korch.equivalence.quantization import QuantizationGrid, write_dequantized, write_quantized
from korch.equivalence.rule import Writer
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import ConcatAttributes, PadAttributes, ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.text import format_graph
from korch.primitive.types import DType, ValueType


def grid(scale: object = 0.5, zero: object = 0, dtype: DType = DType.U8, axis: int = 0) -> QuantizationGrid:
    """Return a grid; what is a list varies along an axis."""
    parts = (AxisConstant(axis if np.ndim(part) else None, np.asarray(part, np.float64)) for part in (scale, zero))
    return QuantizationGrid(*parts, dtype)


class Example:
    """A graph of float64 while it is written."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.writer = Writer(self.builder, "")
        self.add = self.builder.add
        self.count = 0

    def input(self, *shape: int, dtype: DType = DType.F64) -> int:
        self.count += 1
        return self.builder.input(f"x{self.count}", ValueType(shape, dtype))

    def given(self, shape: tuple[int, ...], on: QuantizationGrid) -> int:
        """Return an input of integers, dequantized."""
        return write_dequantized(self.writer, self.input(*shape, dtype=on.dtype), on, DType.F64)

    def known(self, array: object, on: QuantizationGrid) -> int:
        """Return constant integers, dequantized."""
        q = self.builder.constant(np.asarray(array).astype(on.dtype.numpy))
        return write_dequantized(self.writer, q, on, DType.F64)

    def full(self, number: float, *shape: int) -> int:
        return self.builder.constant(np.full(shape, float(number)))

    def along(self, vector: list[float], axis: int, *shape: int) -> int:
        return self.writer.along(np.asarray(vector), axis, ValueType(shape, DType.F64))

    def quantized(self, x: int, on: QuantizationGrid) -> int:
        return write_quantized(self.writer, x, on)

    def text(self, *outputs: int) -> str:
        for i, value in enumerate(outputs):
            self.builder.output(f"y{i}", value)
        return format_graph(self.builder.freeze())


def write(build: Callable[[Example], int]) -> str:
    """Return the text of the graph that a function writes."""
    example = Example()
    return example.text(build(example))


W = [[1, -2, 3], [4, 5, -6]]
U = [[1, 255, 3], [4, 5, 250]]
IMAGE = [[[[1, -2], [3, 7]]], [[[4, -5], [0, 2]]]]
I8 = grid(0.25, 0, DType.I8)
PADDED = ConvAttributes((1, 1), (1, 0), (0, 1), (1, 1), 1)
GROUPS = ConvAttributes((2, 1), (1, 1), (0, 1), (1, 1), 2)
WINDOW = PoolAttributes((2, 2), (1, 1), (1, 0), (0, 0), (1, 1))


def product(
    data: QuantizationGrid, weights: QuantizationGrid, array: object = W, shape: tuple[int, ...] = (4, 2)
) -> str:
    return write(lambda e: e.add("matmul", (e.given(shape, data), e.known(array, weights))))


def convolution(
    data: QuantizationGrid, weights: QuantizationGrid, attributes: ConvAttributes = PADDED, channels: int = 1
) -> str:
    return write(lambda e: e.add("conv", (e.given((2, channels, 4, 3), data), e.known(IMAGE, weights)), attributes))


def both(left: QuantizationGrid, right: QuantizationGrid) -> str:
    return write(lambda e: e.add("matmul", (e.given((2, 3, 2), left), e.given((2, 2, 4), right))))


def biased(
    bias: list[float], axis: int, scale: list[float] | float = 0.5, offset: int = 0, *, is_bounded: bool = True
) -> str:
    def build(e: Example) -> int:
        a, w = e.input(3, 2, dtype=DType.U8), e.input(2, 3, dtype=DType.I8)
        sums = e.add("matmul", (a, w)) if is_bounded else e.input(3, 3, dtype=DType.I32)
        if offset:
            sums = e.add("add", (sums, e.builder.constant(np.full((3, 3), offset, np.int32))))
        wide = e.writer.verbs.cast(sums, DType.F64)
        scaled = e.add("mul", (wide, e.along(scale, 1, 3, 3) if isinstance(scale, list) else e.full(scale, 3, 3)))
        return e.add("add", (scaled, e.along(bias, axis, 3, 3)))

    return write(build)


def rescaled(op: str, first: list[float] | float, second: list[float] | float, axis: int = 1) -> str:
    def build(e: Example) -> int:
        wide = e.writer.verbs.cast(e.input(3, 3, dtype=DType.I32), DType.F64)
        for name, scale, place in (("mul", first, 1), (op, second, axis)):
            factor = e.along(scale, place, 3, 3) if isinstance(scale, list) else e.full(scale, 3, 3)
            wide = e.add(name, (wide, factor))
        return wide

    return write(build)


def moved(op: str, on: QuantizationGrid, attributes: object, shape: tuple[int, ...] = (2, 3)) -> str:
    return write(lambda e: e.add(op, (e.given(shape, on),), attributes))


def joined(first: QuantizationGrid, second: QuantizationGrid) -> str:
    return write(lambda e: e.add("concat", (e.given((2, 3), first), e.given((2, 2), second)), ConcatAttributes(1)))


def bound(op: str, number: float, on: QuantizationGrid) -> str:
    return write(lambda e: e.add("neg", (e.add(op, (e.given((2, 3), on), e.full(number, 2, 3))),)))


def larger(first: QuantizationGrid, second: QuantizationGrid) -> str:
    return write(lambda e: e.add("max", (e.given((2, 3), first), e.given((2, 3), second))))


def again(first: QuantizationGrid, second: QuantizationGrid) -> str:
    return write(lambda e: e.quantized(e.given((2, 3), first), second))


def signed(first: QuantizationGrid, second: QuantizationGrid) -> str:
    """Numbers that are quantized, of which the integers are dequantized."""
    return write(lambda e: write_dequantized(e.writer, e.quantized(e.input(2, 3), first), second, DType.F64))


def parts(outer: QuantizationGrid, is_dequantized: bool = True) -> str:
    def build(e: Example) -> int:
        first = e.given((2, 3), grid()) if is_dequantized else e.input(2, 3)
        return e.quantized(e.add("concat", (first, e.input(2, 2)), ConcatAttributes(1)), outer)

    return write(build)


def clamped(op: str, number: float, on: QuantizationGrid) -> str:
    return write(lambda e: e.quantized(e.add(op, (e.input(2, 3), e.full(number, 2, 3))), on))


def stored(on: QuantizationGrid, *lead: int, dtype: DType = DType.F64) -> str:
    """A product of floats by constant integers."""

    def build(e: Example) -> int:
        q = e.builder.constant(np.broadcast_to([[1, -2, 3], [5, 127, -128]], (*lead, 2, 3)).astype(on.dtype.numpy))
        w = write_dequantized(e.writer, q, on, dtype)
        return e.add("matmul", (e.input(*lead, 4, 2, dtype=dtype), w))

    return write(build)


def unknown() -> str:
    """A product whose second operand is scaled, but no constant."""
    return write(lambda e: e.add("matmul", (e.input(2, 32), e.add("mul", (e.input(32, 2), e.full(2, 32, 2))))))


def in_blocks(
    block: int = 16,
    rows: int = 2,
    lead: tuple[int, ...] = (),
    factor: int = 1,
    dtype: DType = DType.F64,
    turns: bool = False,
    packs: bool = False,
    zeros: bool = False,
) -> str:
    """A product of floats by constant integers with a scale for each block of each column."""

    def build(e: Example) -> int:
        verbs, blocks = e.writer.verbs, -(-32 // block)
        shape = (*lead, 2, 32) if turns else (*lead, 32, 2)
        few = e.builder.constant(np.array([[[7, -8], [-3, 127]]], np.int8))  # texts have few elements of constants
        q = verbs.reshape(verbs.broadcast(few, (16, 2, 2)), (2, 32) if turns else (32, 2))
        q = e.add("bitwise_and", (q, e.builder.constant(np.full((32, 2), 7, np.int8)))) if packs else q
        q = verbs.cast(verbs.broadcast(q, shape), dtype)
        q = e.add("mul", (q, e.builder.constant(np.full(shape, factor, dtype.numpy)))) if factor > 1 else q
        if zeros:
            points = e.builder.constant(np.array([[2, 5]], dtype.numpy))
            q = e.add("sub", (q, verbs.broadcast(points, shape)))
        scales = np.arange(1, 2 * blocks + 1).reshape((2, blocks, 1) if turns else (blocks, 1, 2)) / 4
        wide = verbs.broadcast(
            e.builder.constant(scales.astype(dtype.numpy)), (2, blocks, block) if turns else (blocks, block, 2)
        )
        whole = (2, blocks * block) if turns else (blocks * block, 2)
        wide = verbs.slice_axis(verbs.reshape(wide, whole), int(turns), 0, 32)
        wide = verbs.broadcast(wide, shape)
        w = e.add("mul", (q, wide))
        w = e.add("transpose", (w,), TransposeAttributes((1, 0))) if turns else w
        return e.add("matmul", (e.input(*lead, rows, 32, dtype=dtype), w))

    return write(build)


def large() -> str:
    def build(e: Example) -> int:
        w = e.writer.verbs.cast(e.builder.constant(np.array([[1], [2]], np.int8)), DType.F64)
        wide = e.add("reshape", (w,), ReshapeAttributes((2, 1, 1)))
        wide = e.add("broadcast", (wide,), BroadcastAttributes((2, 8192, 8193)))
        return e.add("matmul", (e.input(2, 1, 8192), wide))

    return write(build)


APPLIES: dict[str, tuple[str, ...]] = {
    "product-of-dequantized-is-integer": (
        product(grid(), I8),
        product(grid(0.5, 3), grid([0.25, 0.5, 2], [1, 0, -2], DType.I8, axis=1)),
        product(grid(0.5, 3), grid(0.25, 200), U),
        product(grid([0.5, 1, 2, 4], [0, 1, 2, 3]), grid([0.25, 1, 2], 0, DType.I8, axis=1)),
        both(grid(0.5, 7), grid(0.25, -3, DType.I8)),
        convolution(grid(0.5, 9), grid([0.25, 2], 0, DType.I8)),
        convolution(grid(0.5, 9), grid([0.25, 2], [100, 3])),
        convolution(grid(0.5, 9), grid(0.25, [-90, 120]), GROUPS, 2),
    ),
    "bias-joins-integer-sums": (
        biased([1.5, -2, 0], 1),
        biased([1.5, -2, 0], 0),
        biased([1.5, -2, 0.25], 1, [0.5, 1, 0.25], offset=-3),
    ),
    "scales-of-sums-compose": (
        rescaled("div", [0.5, 1, 0.25], 4),
        rescaled("div", 0.5, [4, 2, -1]),
        rescaled("mul", [0.5, 1, 0.25], [4, 2, 1]),
    ),
    "stored-weights-are-computed-once": (product(grid(), I8), convolution(grid(0.5, 9), grid([0.25, 2], 0, DType.I8))),
    "stored-scale-moves-behind-matmul": (stored(grid([0.25, 0.5, 2], 0, DType.I8, axis=1)), stored(grid(0.25), 1)),
    "stored-weights-lie-by-columns": (
        in_blocks(),
        in_blocks(32, factor=1, packs=True),
        in_blocks(rows=4, turns=True),
        in_blocks(8, packs=True, zeros=True),
        in_blocks(24, packs=True),
        in_blocks(lead=(1,)),
    ),
    "move-comes-before-dequantization": (
        moved("transpose", grid([0.5, 2, 1], 3, axis=1), TransposeAttributes((1, 0))),
        moved("reshape", grid([0.5, 2, 1], 3, axis=1), ReshapeAttributes((1, 2, 3))),
        moved("reshape", grid(0.5, 3), ReshapeAttributes((3, 2))),
        moved("broadcast", grid([0.5, 2], [1, 3]), BroadcastAttributes((4, 2, 3)), (2, 1)),
        moved("pad", grid(0.5, 3), PadAttributes((1, 0), (0, 2))),
        moved("pad", grid(0.5, 3), PadAttributes((1, 0), (0, 2), "edge")),
        joined(grid(0.5, 3), grid(0.5, 3)),
    ),
    "largest-comes-before-dequantization": (
        moved("pool_max", grid(0.5, -3, DType.I8), WINDOW, (1, 2, 4, 4)),
        moved("reduce_min", grid(0.5, 3), ReduceAttributes((1,))),
    ),
    "bound-comes-before-dequantization": (
        bound("max", 0, grid(0.5, 7)),
        bound("max", -9, grid(0.5, 7)),
        bound("min", 6, grid(0.5, 7)),
        larger(grid([0.5, 2]), grid([0.5, 2])),
    ),
    "quantization-of-dequantized-is-nothing": (
        again(grid(0.375, 7), grid(0.375, 7)),
        again(grid(0.375, 7, DType.I16), grid(0.375, 7, DType.I16)),
    ),
    "signed-bytes-are-unsigned-ones-less-128": (
        signed(grid(0.375, -128, DType.I8), grid(0.375, -128, DType.I8)),
        signed(grid([0.5, 2], [7, 0], DType.I8), grid([0.5, 2, 1], 127, DType.I8, axis=1)),
    ),
    "quantization-moves-into-concat": (parts(grid(0.25, 4)),),
    "bound-before-quantization-is-its-own": (clamped("max", 0, grid(0.5)), clamped("min", 140, grid(0.5, 4))),
}

REFUSES: dict[str, tuple[tuple[str, str], ...]] = {
    "product-of-dequantized-is-integer": (
        ("the integers have more than 8 bits", product(grid(dtype=DType.I16), I8)),
        ("a sum could exceed 32 bits", product(grid(), I8, np.arange(32_001)[:, None] % 2, (1, 32_001))),
        ("the data's scale varies along the sum", product(grid([0.5, 2], axis=1), I8)),
        ("the weights' scale varies along the sum", product(grid(), grid(0.25, [1, 2], DType.I8))),
        ("a product of scales is no normal number", product(grid(1e-30), grid(1e-30, 0, DType.I8))),
    ),
    "bias-joins-integer-sums": (
        ("the bias and the scale vary along different axes", biased([1.5, -2, 0], 0, [0.5, 1, 0.25])),
        ("the bias is no multiple of the scale", biased([1.5, -2, 0.7], 1)),
        ("the bias is large", biased([1.5, 2.0**23, 0], 1)),
        ("the sum with the bias may not fit 32 bits", biased([1.5, -2, 0], 1, is_bounded=False)),
    ),
    "scales-of-sums-compose": (
        ("the scales vary along different axes", rescaled("div", [0.5, 1, 0.25], [4.0, 2, 1], axis=0)),
        ("a product of scales is no normal number", rescaled("div", 1e-30, 1e30)),
    ),
    "stored-weights-are-computed-once": (("the constant is too large to compute", large()),),
    "stored-scale-moves-behind-matmul": (
        ("the second operand is not stored in bytes", stored(grid(0.5, 0, DType.I16))),
        ("sums that are not scaled yet may overflow", stored(grid(0.5, 0, DType.I8), dtype=DType.F16)),
        ("the scale varies along the sum", stored(grid([0.5, 2], 0, DType.I8))),
        ("the zero point is not 0", stored(grid(0.5, 3, DType.I8))),
        ("there are several matrices", stored(grid(0.5, 0, DType.I8), 2)),
    ),
    "stored-weights-lie-by-columns": (
        ("sums that are not scaled yet may overflow", in_blocks(dtype=DType.F16)),
        ("there are several matrices", in_blocks(lead=(2,))),
        ("the second operand is not stored", unknown()),
        ("the scale of its bytes moves behind the product", stored(grid([0.25, 0.5, 2], 0, DType.I8, axis=1))),
        ("the integers have more than 8 bits", in_blocks(factor=300)),
        ("the scales have no blocks of whole bytes", in_blocks(block=4)),
    ),
    "move-comes-before-dequantization": (
        ("the parts have different scales", joined(grid(0.5), grid(0.25))),
        ("the axis of the scale does not stay", moved("reshape", grid([0.5, 2]), ReshapeAttributes((3, 2)))),
        ("no integer stands for the pad", moved("pad", grid(0.5, 3), PadAttributes((1, 0), (0, 2), "constant", 0.7))),
    ),
    "largest-comes-before-dequantization": (
        ("compared elements have different scales", moved("reduce_max", grid([0.5, 2]), ReduceAttributes((0,)))),
    ),
    "bound-comes-before-dequantization": (
        ("the operands have different scales", larger(grid(0.5), grid(0.5, 1))),
        ("the scale of the operand varies", bound("max", 0, grid([0.5, 2]))),
        ("no integer stands for the bound", bound("min", 6.3, grid(0.5, 7))),
    ),
    "quantization-of-dequantized-is-nothing": (
        ("it is quantized with another scale or zero point", again(grid(0.3, 7), grid(0.3, 8))),
    ),
    "signed-bytes-are-unsigned-ones-less-128": (
        ("a zero point is no signed byte", signed(grid(0.5, 128, DType.I8), grid(0.5, 0, DType.I8))),
    ),
    "quantization-moves-into-concat": (
        ("the parts would be rounded differently", parts(grid([0.25, 1]))),
        ("no part is dequantized", parts(grid(0.25), is_dequantized=False)),
    ),
    "bound-before-quantization-is-its-own": (
        ("the bound or the scale is not one number", clamped("max", 0, grid([0.5, 1]))),
        ("the bound is within the range of the integers", clamped("max", 0, grid(0.5, 4))),
    ),
}
