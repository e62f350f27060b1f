"""Products of float32 among 16-bit floats: operands are widened when they are read, results rounded when stored."""

from __future__ import annotations

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
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.provider import Provider
from korch.provider.winograd import WinogradProvider
from korch.target import LANES, Target
from korch.testing.kernels import check_offers
from tests.provider.onednn_groups import Graph
from tests.provider.test_instruction_sets import attended, convolved, in_winograds_space, products

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
    if isa and (target.isa not in ("amx", "avx512", "avx2") or isa == target.isa):
        pytest.skip("this machine runs no other instruction set")
    provider, groups = FAMILIES[name]
    other = Target(isa=isa, lanes=LANES[isa], threads=2) if isa else target
    # Both types are read and rounded in the same way by all kernels: of other instruction sets each group has one.
    made = [halved(group, h) for i, group in enumerate(groups(other.lanes)) for h in ((HALF[i % 2],) if isa else HALF)]
    assert check_offers(provider(), made, other, Builder(other.isa, tmp_path), rng)


def test_types_that_are_mixed(target, builder, rng):
    assert check_offers(GemmProvider(), mixed(target.lanes), target, builder, rng)
    assert check_offers(ConvProvider(), padded(target.lanes), target, builder, rng)


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
