"""Float32 products with 16-bit operands and results: operands are widened on load, results rounded on store."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.shape import shapes_of
from korch.measure.compiler import Builder
from korch.options import Options
from korch.primitive.op import Category
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import PadAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.provider import Provider
from korch.provider.winograd import WinogradProvider
from korch.schedule.split_products import components_of
from korch.target import LANES, Target
from korch.testing.kernels import check_kernel, check_offers, load_kernels
from korch.testing.samples import random_arrays
from korch.tile.ir.program import Split
from tests.provider.linear_groups import Graph
from tests.provider.test_instruction_sets import attended, convolved, in_winograds_space, products
from tests.support.in_turn import OnUnits

HALF = (DType.F16, DType.BF16)


def cast(g: Graph, value: int, to: DType) -> int:
    return g.add("cast", [value], CastAttributes(to.value)) if g.type(value).dtype is not to else value


def halved(group: Group, half: DType) -> Group:
    """Return a group of 16-bit floats whose products are of float32, as a model of that type is lowered."""
    body, g = group.body, Graph()
    values = {value: g.input(name, ValueType(body.types[value].shape, half)) for name, value in body.inputs}
    weights = {v for p in body.linear for v in p.inputs if v in group.body.constants or v in constants_of(group)}
    values |= {v: g.constant(a if v in weights else a.astype(half.numpy)) for v, a in constants_of(group).items()}
    for primitive in body.primitives:
        is_product = primitive.row.category is Category.LINEAR
        read = [cast(g, values[v], DType.F32) if is_product else values[v] for v in primitive.inputs]
        found = g.add(primitive.op, read, primitive.attributes)
        values[primitive.output] = cast(g, found, half) if is_product else found
    return g.group(*(values[value] for _, value in body.outputs))


def constants_of(group: Group) -> dict[int, np.ndarray]:
    """Return arrays for the constants of a group's body: its own, and those that it reads as inputs."""
    body, rng = group.body, np.random.default_rng(3)
    found = {value: constant.array for value, constant in body.constants.items()}
    for position in group.constant_inputs:
        value = body.inputs[position][1]
        found[value] = rng.standard_normal(body.types[value].shape).astype(np.float32)
    return found


def mixed(n: int) -> list[Group]:
    """A sum of both types after a product, which is stored in both; and a product of one tensor with itself."""
    g = Graph()
    x = g.input("x", ValueType((5, 7), DType.F16))
    y = g.add("matmul", [cast(g, x, DType.F32), g.weights(7, 2 * n + 1)])
    other = g.input("other", ValueType((5, 2 * n + 1), DType.BF16))
    total = g.add("add", [y, cast(g, other, DType.F32)])
    h = Graph()
    x = cast(h, h.input("x", ValueType((2, 9, 9), DType.BF16)), DType.F32)
    return [g.group(total, cast(g, total, DType.F16)), h.group(h.add("matmul", [x, x]))]


def padded(n: int) -> list[Group]:
    """A pad before a convolution, of a value that is not zero, before and after the cast."""
    groups = []
    for is_before in (True, False):
        g = Graph()
        x = g.input("x", ValueType((1, n, 8, 9), DType.F16))
        pad = PadAttributes((0, 0, 1, 2), (0, 0, 1, 1), "constant", 1.5)
        wide = cast(g, g.add("pad", [x], pad), DType.F32) if is_before else g.add("pad", [cast(g, x, DType.F32)], pad)
        one = ConvAttributes((1, 2), (0, 0), (0, 0), (1, 1), 1)
        groups.append(g.group(cast(g, g.add("conv", [wide, g.weights(n + 2, n, 3, 3)], one), DType.F16)))
    return groups


FAMILIES: dict[str, tuple[Callable[[], Provider], Callable[[int], list[Group]]]] = {
    "gemm": (GemmProvider, products),
    "conv": (ConvProvider, convolved),
    "winograd": (WinogradProvider, in_winograds_space),
    "attention": (AttentionProvider, attended),
}


@pytest.mark.parametrize("isa", ["", "avx2", "generic"])
@pytest.mark.parametrize("name", FAMILIES)
def test_each_provider(isa, name, target, rng, tmp_path):
    if isa and (target.lanes < LANES["avx2"] or isa == target.isa):
        pytest.skip("this machine runs no other instruction set")
    provider, groups = FAMILIES[name]
    other = Target(isa=isa, lanes=LANES[isa], threads=2) if isa else target
    # Both types are read and rounded in the same way by all kernels: of other instruction sets each group has one.
    made = [halved(group, h) for i, group in enumerate(groups(other.lanes)) for h in ((HALF[i % 2],) if isa else HALF)]
    assert check_offers(provider(), made, other, Builder(other.isa, tmp_path), rng)


def test_types_that_are_mixed(target, builder, rng):
    assert check_offers(GemmProvider(), mixed(target.lanes), target, builder, rng)
    assert check_offers(ConvProvider(), padded(target.lanes), target, builder, rng)


COMPONENTS = {DType.F32: 3, DType.F16: 2, DType.BF16: 1, DType.I8: 1}


def narrow_product(
    types: tuple[DType, DType], shapes: tuple[tuple[int, ...], tuple[int, ...]], is_constant: bool
) -> Group:
    """Return a product of operands of two types, the second perhaps constant, rounded to the type of the first."""
    g = Graph()
    x = g.input("x", ValueType(shapes[0], types[0]))
    numbers = g.rng.standard_normal(shapes[1]) * 20
    w = g.constant(numbers.astype(types[1].numpy)) if is_constant else g.input("w", ValueType(shapes[1], types[1]))
    y = g.add("matmul", [cast(g, x, DType.F32), cast(g, w, DType.F32)])
    return g.group(cast(g, g.with_number("max", y, -3.0), types[0]))


TYPES = (
    *itertools.product((DType.F32, DType.F16, DType.BF16), repeat=2),
    (DType.F32, DType.I8),
    (DType.BF16, DType.I8),
)


@pytest.mark.parametrize("types", TYPES, ids=lambda types: " ".join(t.value for t in types))
def test_matrix_units_multiply_as_many_components_as_a_type_has(units, rng, types):
    machine, builder = units
    a, b = (COMPONENTS[dtype] for dtype in types)
    shapes = (((33, 70), (70, 65)), ((500, 40), (40, 33)), ((40, 1100), (1100, 64)))
    groups = [narrow_product(types, both, is_constant=True) for both in shapes]
    if types[1].is_float:
        groups.append(narrow_product(types, ((2, 35, 33), (2, 33, 34)), is_constant=False))
    checked = check_offers(OnUnits(GemmProvider()), groups, machine, builder, rng)
    for _, offer, kernel in checked:
        assert offer.pairs == sum(i + j < 3 for i in range(a) for j in range(b))
        made = [layout for buffer in kernel.program.buffers for layout in buffer.layout if isinstance(layout, Split)]
        assert sorted(layout.components for layout in made) == sorted((a, b))
    library = load_kernels([kernel for _, _, kernel in checked], builder)
    for group, offer, kernel in checked:
        inputs = random_arrays(rng, group.input_types)
        for array in (x for x in inputs if np.issubdtype(x.dtype, np.floating) or x.dtype == DType.BF16.numpy):
            array.reshape(-1)[[3, 70, -1]] = (np.inf, np.nan, -np.inf)
        check_kernel(kernel, group, offer, inputs, builder, library)


@pytest.mark.parametrize(("half", "pairs"), [(DType.BF16, 1), (DType.F16, 4)])
def test_matrix_units_convolve_images_of_few_components(units, rng, half, pairs):
    machine, builder = units
    groups = []
    for channels, results, window, stride in ((32, 59, 3, 2), (192, 192, 1, 1)):
        g = Graph()
        x = g.input("x", ValueType((1, channels, 13, 14), half))
        w = g.constant(g.rng.standard_normal((results, channels, window, window)).astype(half.numpy))
        pad = window // 2
        attributes = ConvAttributes((stride, stride), (pad, pad), (pad, pad), (1, 1), 1)
        y = g.add("conv", [cast(g, x, DType.F32), cast(g, w, DType.F32)], attributes)
        groups.append(g.group(cast(g, y, half)))
    checked = check_offers(OnUnits(ConvProvider()), groups, machine, builder, rng)
    assert {group.key for group, *_ in checked} == {group.key for group in groups}
    assert all(offer.pairs == pairs for _, offer, _ in checked)


def test_matrix_units_multiply_products_of_few_components_of_few_rows(units, rng):
    machine, builder = units
    groups = [narrow_product((DType.BF16, DType.BF16), ((m, 70), (70, 65)), is_constant=True) for m in (4, 16)]
    assert check_offers(OnUnits(GemmProvider()), groups, machine, builder, rng)
    few = narrow_product((DType.F32, DType.F32), ((16, 70), (70, 65)), is_constant=True)
    assert OnUnits(GemmProvider()).offer(few, machine) == []


def test_numbers_are_of_one_component_only_if_their_type_says_so():
    g = Graph()
    x = g.input("x", ValueType((4, 4), DType.BF16))
    wide = cast(g, x, DType.F32)
    rounded = cast(g, cast(g, g.tensor(4, 4), DType.F16), DType.F32)
    moved = g.add("transpose", [wide], TransposeAttributes((1, 0)))
    scaled = g.with_number("mul", wide, 1.1)
    padded_ = g.add("pad", [wide], PadAttributes((1, 0), (0, 0), "constant", 0.1))
    body = g.group(moved, rounded, scaled, padded_).body
    assert [components_of(body, value) for _, value in body.outputs] == [1, 2, 3, 3]


def test_a_product_of_16_bits_or_of_integers_is_refused(target):
    g = Graph()
    a, b = (g.input(name, ValueType((4, 4), DType.F16)) for name in "ab")
    assert isinstance(GemmProvider().offer(g.group(g.add("matmul", [a, b])), target), Refusal)
    h = Graph()
    x = cast(h, h.input("x", ValueType((4, 4), DType.I32)), DType.F32)
    assert isinstance(GemmProvider().offer(h.group(h.add("matmul", [x, h.weights(4, 4)])), target), Refusal)


def test_casts_that_widen_stand_before_products_and_no_others():
    def before(source: DType) -> set[tuple[str, ...]]:
        g = Graph()
        x = cast(g, g.input("x", ValueType((4, 4), source)), DType.F32)
        g.output("y", g.add("matmul", [x, g.weights(4, 4)]))
        groups, _ = enumerate_groups(g.freeze(), Options(), shapes=shapes_of([GemmProvider()]))
        return {tuple(p.op for p in group.body.primitives) for group in groups}

    assert ("cast", "matmul") in before(DType.F16)
    assert ("cast", "matmul") in before(DType.BF16)
    assert ("cast", "matmul") not in before(DType.F64)
