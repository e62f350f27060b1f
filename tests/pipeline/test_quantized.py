"""Quantized models: products are of bytes if kernels multiply bytes, and results stay the same."""

import time
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper

from korch.backend import has_kernels
from korch.candidate import enumerate as enumeration
from korch.equivalence.affine_chains import AxisConstant
from korch.equivalence.quantization import QuantizationGrid, write_dequantized, write_quantized
from korch.equivalence.rule import Writer
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.limits import SearchLimits
from korch.options import Options
from korch.pipeline.quantized import in_bytes
from korch.primitive.check import check_graph
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import ConcatAttributes, ReshapeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.reference import run
from korch.primitive.types import DType, ValueType
from korch.system.deadline import Deadline

F32 = DType.F32
PADDED = ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), 1)


def grid(scale: object, zero: float = 0.0, dtype: DType = DType.U8) -> QuantizationGrid:
    """Return a grid, perhaps with a scale for each output channel."""
    return QuantizationGrid(
        AxisConstant(0 if np.ndim(scale) else None, np.asarray(scale)), AxisConstant(None, np.asarray(zero)), dtype
    )


class Model:
    """A quantized model while it is written."""

    def __init__(self) -> None:
        self.builder = GraphBuilder()
        self.writer = Writer(self.builder, "")

    def input(self, *shape: int) -> int:
        return self.builder.input("x", ValueType(shape, F32))

    def again(self, x: int, on: QuantizationGrid) -> int:
        """Quantize and dequantize a value."""
        return write_dequantized(self.writer, write_quantized(self.writer, x, on), on, F32)

    def conv(self, x: int, channels: int, attributes: ConvAttributes, rng: np.random.Generator, unit: float) -> int:
        """Add a convolution of 3 by 3 with dequantized weights and a bias; x has a scale of `unit`."""
        before = self.builder.type(x).shape[1] // attributes.groups
        q = self.builder.constant(rng.integers(-40, 40, (channels, before, 3, 3)).astype(np.int8))
        scale = 2.0 ** rng.integers(-9, -6, channels)
        w = write_dequantized(self.writer, q, grid(scale, 0.0, DType.I8), F32)
        y = self.builder.add("conv", (x, w), attributes)
        bias = rng.integers(-99, 99, channels) * scale * unit
        return self.builder.add("add", (y, self.writer.along(bias, 1, self.builder.type(y))))

    def graph(self, y: int) -> PrimitiveGraph:
        self.builder.output("y", y)
        return self.builder.freeze()


def residual(rng: np.random.Generator, groups: int = 1, dtype: DType = DType.U8) -> PrimitiveGraph:
    """Return two convolutions, the second one added to the first; each result is quantized."""
    model, less = Model(), 128 if dtype is DType.I8 else 0
    x = model.again(model.input(1, 4, 6, 5), grid(2.0**-4, 120 - less, dtype))
    first = model.again(model.conv(x, 8, PADDED, rng, 2.0**-4), grid(2.0**-3, 100 - less, dtype))
    attributes = ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), groups)
    second = model.again(model.conv(first, 8, attributes, rng, 2.0**-3), grid(0.5, 7 - less, dtype))
    return model.graph(model.again(model.builder.add("add", (first, second)), grid(0.25, 3 - less, dtype)))


def multiplied(graph: PrimitiveGraph) -> list[DType]:
    """Return the types of the sums of products."""
    return [graph.types[p.output].dtype for p in graph.linear]


@pytest.fixture(scope="module")
def options() -> Options:
    return Options(threads=1)


def test_products_are_of_bytes_and_nothing_else_multiplies(rng, options):
    given = residual(rng)
    found = in_bytes(given, has_kernels(options), Deadline())
    check_graph(found)
    assert multiplied(found) == [DType.I32] * 2
    assert not found.alternatives
    assert [p.op for p in found.primitives].count("div") == 2, "of the input, and of the sum of both results"


def test_a_value_that_is_needed_as_floats_is_multiplied_as_bytes(rng, options):
    """It is reshaped and quantized once more before the product, and added to the result as it is."""
    model = Model()
    on = grid(2.0**-4, 120)
    x = model.again(model.input(1, 64, 256), on)
    rows = model.again(model.builder.add("reshape", (x,), ReshapeAttributes((64, 256))), on)
    q = model.builder.constant(rng.integers(-40, 40, (256, 256)).astype(np.int8))
    w = write_dequantized(model.writer, q, grid(2.0**-5, 0.0, DType.I8), F32)
    y = model.builder.add("reshape", (model.builder.add("matmul", (rows, w)),), ReshapeAttributes((1, 64, 256)))
    given = model.graph(model.again(model.builder.add("add", (x, y)), grid(0.25, 3)))
    assert multiplied(in_bytes(given, has_kernels(options), Deadline())) == [DType.I32]


@pytest.mark.parametrize("dtype", [DType.U8, DType.I8])
def test_results_are_the_same_integers(rng, options, dtype):
    """All scales are powers of two, so that float32 has no rounding errors; signed bytes are multiplied as unsigned."""
    given = residual(rng, dtype=dtype)
    feeds = {"x": rng.standard_normal((1, 4, 6, 5)).astype(np.float32) * 4}
    feeds["x"].reshape(-1)[:4] = np.nan, np.inf, -np.inf, 1e30
    found = in_bytes(given, has_kernels(options), Deadline())
    assert [found.types[p.inputs[0]].dtype for p in found.linear] == [DType.U8] * 2
    np.testing.assert_array_equal(run(found, feeds, exact=False)["y"], run(given, feeds)["y"])


def test_without_a_kernel_products_stay_in_floats(rng):
    found = in_bytes(residual(rng), lambda group: False, Deadline())
    assert multiplied(found) == [F32] * 2
    assert multiplied(in_bytes(residual(rng), None, Deadline())) == [F32] * 2


def test_a_kernel_is_asked_for_each_kind_of_product(rng):
    asked = []

    def has_kernel(group) -> bool:
        asked.append(group.body.linear[0].attributes.groups)
        return asked[-1] == 1

    assert multiplied(in_bytes(residual(rng, groups=8), has_kernel, Deadline())) == [DType.I32, F32]
    assert {1, 8} <= set(asked)


def test_a_model_without_integers_is_the_same_object(rng):
    model = Model()
    x = model.input(1, 4, 6, 5)
    w = model.builder.constant(rng.standard_normal((2, 4, 3, 3)).astype(np.float32))
    graph = model.graph(model.builder.add("conv", (x, w), PADDED))
    assert in_bytes(graph, lambda group: True, Deadline()) is graph


def test_when_the_deadline_is_over_the_graph_is_right(rng):
    given = residual(rng)
    feeds = {"x": rng.standard_normal((1, 4, 6, 5)).astype(np.float32) * 4}
    found = in_bytes(given, lambda group: True, Deadline(time.monotonic() - 1))
    check_graph(found)
    assert F32 in multiplied(found)
    np.testing.assert_array_equal(run(found, feeds)["y"], run(given, feeds)["y"])


def test_products_of_bytes_with_a_kernel_get_no_floats(rng):
    builder = GraphBuilder()
    x = builder.input("x", ValueType((1, 4, 6, 5), DType.U8))
    w = builder.constant(rng.integers(-40, 40, (8, 4, 3, 3)).astype(np.int8))
    builder.output("y", builder.add("conv", (x, w), PADDED))
    graph = builder.freeze()
    assert multiplied(in_bytes(graph, lambda group: True, Deadline())) == [DType.I32]
    assert sorted(map(str, multiplied(in_bytes(graph, lambda group: False, Deadline())))) == sorted(
        map(str, [DType.I32, F32])
    )


def test_a_requantization_is_one_step_of_the_enumeration(rng, options):
    """A group ends at sums, or at bytes, not between them."""
    graph = in_bytes(residual(rng), has_kernels(options), Deadline())
    groups, _ = enumeration.enumerate_groups(graph, options)
    several = [group for group in groups if len(group.primitives) > 1]
    assert any(group.body.linear for group in several)
    ends = {graph.types[value].dtype for group in several for value in group.outputs}
    assert ends == {DType.U8, DType.I32, F32}
    wide = {v for g in several for v in g.outputs if graph.types[v].dtype is F32}
    assert wide == {value for _, value in graph.outputs}


def test_after_the_deadline_there_are_products_with_their_requantization(rng, options):
    graph = in_bytes(residual(rng), has_kernels(options), Deadline())
    groups, report = enumeration.enumerate_groups(graph, options, deadline=Deadline(time.monotonic() - 1))
    assert report.limits_hit == ("budget",)
    several = [group for group in groups if len(group.primitives) > 1]
    products = [group for group in several if group.body.linear]
    assert [graph.types[value].dtype for group in products for value in group.outputs] == [DType.U8] * 2
    assert {(group.primitives, group.outputs) for group in several} <= report.needed


@pytest.mark.parametrize(("most", "found"), [(3, 3), (9, 5)])
def test_few_casts_to_bytes_are_in_one_group(options, most, found):
    options = replace(options, search=SearchLimits(max_byte_casts=most))
    builder = GraphBuilder()
    writer = Writer(builder, "")
    inputs = [builder.input(f"x{i}", ValueType((2, 3), F32)) for i in range(5)]
    parts = [write_quantized(writer, x, grid(2.0**-i)) for i, x in zip(range(5), inputs, strict=True)]
    builder.output("y", builder.add("concat", parts, ConcatAttributes(1)))
    groups, _ = enumeration.enumerate_groups(builder.freeze(), options)
    assert max(sum(p.op == "cast" for p in group.body.primitives) for group in groups) == found


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_few_bits_lie_by_columns(rng, options, bits):
    """Columns of MatMulNBits, whose last block is cut off, become neighbours; each block keeps its zero point."""
    terms, columns, block = 50, 24, 16
    blocks = -(-terms // block)
    arrays = {
        "q": rng.integers(0, 256, (columns, blocks, block * bits // 8)).astype(np.uint8),
        "s": rng.uniform(0.01, 0.1, columns * blocks).astype(np.float32),
        "z": rng.integers(0, 256, (columns, -(-blocks * bits // 8))).astype(np.uint8),
    }
    node = helper.make_node(
        "MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", K=terms, N=columns, block_size=block, bits=bits
    )
    x, y = (helper.make_tensor_value_info(n, 1, [1, 3, width]) for n, width in (("x", terms), ("y", columns)))
    known = [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    given = fission(
        load_model(helper.make_model(helper.make_graph([node], "g", [x], [y], known), opset_imports=opsets))
    )
    deadline = Deadline(time.monotonic() - 1)
    found = in_bytes(given, has_kernels(options), deadline)  # a budget that is used up does not change this
    assert [p.op for p in found.linear] == ["matmul_stored"]
    assert max(constant.type.size_bytes for constant in found.constants.values()) == 64 * columns * bits // 8
    feeds = {"x": rng.standard_normal((1, 3, terms)).astype(np.float32)}
    np.testing.assert_allclose(run(found, feeds)["y"], run(given, feeds)["y"], rtol=0, atol=1e-9)
    without = in_bytes(given, lambda group: False, Deadline())
    assert [p.op for p in without.linear] == ["matmul"]
