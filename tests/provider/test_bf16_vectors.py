"""Products of bfloat16 by the instruction for vectors of them: of AVX-512 without matrix units, and of NEON."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.measure.compiler import Builder
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.stored import StoredAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.attention import AttentionProvider
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.provider import Kernel, Provider
from korch.runtime.machine import cpu_flags
from korch.target import LANES, REQUIRED_FLAGS, Target
from korch.testing.kernels import check_kernel, check_offers, load_kernels, run_kernel
from korch.testing.samples import random_arrays
from tests.provider.linear_groups import Graph
from tests.provider.test_attention import halved
from tests.provider.test_instruction_sets import _assemble
from tests.provider.test_sixteen_bit_floats import cast, narrow_product
from tests.support.emulated import EMULATED, Emulated, missing_commands

HALVES = (DType.BF16, DType.BF16)
TARGETS = {
    isa: Target(isa=isa, lanes=LANES[isa], threads=2, l2_bytes=256 << 10) for isa in ("avx512_bf16", "neon_bf16")
}
"""Small caches, so that blocks, chunks and groups are many."""
EACH = pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))


class Pairs:
    """Offers of a provider that multiply pairs of bfloat16 only."""

    name = version = "pairs"
    group_shapes = ()

    def __init__(self, provider: Provider[Target, Kernel]) -> None:
        self.provider = provider

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Return them."""
        offers = self.provider.offer(group, target)
        assert not isinstance(offers, Refusal), offers.reason
        return [offer for offer in offers if offer.pairs]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        return self.provider.build(group, offer, target)


def convolved(channels: int, results: int, window: int, stride: int) -> Group:
    """Return a convolution of an image of bfloat16."""
    g = Graph()
    x = g.input("x", ValueType((1, channels, 13, 14), DType.BF16))
    w = g.constant(g.rng.standard_normal((results, channels, window, window)).astype(DType.BF16.numpy))
    attributes = ConvAttributes((stride, stride), (window // 2,) * 2, (window // 2,) * 2, (1, 1), 1)
    y = g.add("conv", [cast(g, x, DType.F32), cast(g, w, DType.F32)], attributes)
    return g.group(cast(g, y, DType.BF16))


def chosen(rows: int, matrices: int, terms: int, columns: int) -> Group:
    """Return a product of rows of bfloat16 by matrices that an index chooses."""
    g = Graph()
    w = g.constant(g.rng.standard_normal((matrices, terms, columns)).astype(DType.BF16.numpy))
    x = g.input("x", ValueType((rows, terms), DType.BF16))
    keys = g.constant(g.rng.integers(0, matrices, rows))
    wide = [g.add("cast", [value], CastAttributes("f32")) for value in (x, w)]
    return g.group(cast(g, g.add("matmul_gathered", [*wide, keys]), DType.BF16))


def few_bits(rows: int, terms: int, columns: int, bits: int, block: int) -> Group:
    """Return a product of rows of bfloat16 by weights that are stored in few bits."""
    g, at = Graph(), StoredAttributes(bits, block, 3)
    stored = g.constant(g.rng.integers(0, 256, (terms // at.each, columns)).astype(np.uint8))
    scales = g.constant(g.rng.uniform(0.5, 2, (terms // block, columns)).astype(np.float32) / (1 << bits))
    x = g.input("x", ValueType((rows, terms), DType.BF16))
    return g.group(cast(g, g.add("matmul_stored", [cast(g, x, DType.F32), stored, scales], at), DType.BF16))


PRODUCTS = [
    *(narrow_product(HALVES, ((m, k), (k, n)), is_constant=True) for m, k, n in ((33, 70, 65), (500, 40, 33))),
    *(narrow_product(HALVES, ((m, k), (k, n)), is_constant=True) for m, k, n in ((9, 16, 17), (40, 1100, 64))),
    narrow_product((DType.BF16, DType.I8), ((37, 70), (70, 65)), is_constant=True),
    *(narrow_product(HALVES, ((2, m, k), (2, k, n)), is_constant=False) for m, k, n in ((35, 33, 34), (70, 64, 96))),
]
CASES: dict[str, tuple[Provider[Target, Kernel], list[Group]]] = {
    "products": (GemmProvider(), PRODUCTS),
    "few bits": (GemmProvider(), [few_bits(37, 128, 70, 4, 32), few_bits(9, 384, 40, 8, 128)]),
    "chosen": (GemmProvider(), [chosen(67, 3, 40, 65)]),
    "convolutions": (ConvProvider(), [convolved(32, 59, 3, 2), convolved(48, 64, 3, 1), convolved(192, 192, 1, 1)]),
    "attention": (
        AttentionProvider(),
        [halved(37, 50, 20, 32, "bf16", is_wide=True), halved(18, 33, 32, 17, "bf16", is_wide=False)],
    ),
}


@pytest.fixture
def compiled(target: Target, tmp_path):
    """A compiler for the instructions."""
    if not (missing := {*REQUIRED_FLAGS[target.isa]} - cpu_flags()):
        return Builder(target.isa, tmp_path)
    if target.isa not in EMULATED or missing_commands():
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    return Emulated(tmp_path)


@EACH
@pytest.mark.parametrize("name", CASES)
def test_kernels_agree_with_the_reference(name, target, compiled, rng):
    provider, groups = CASES[name]
    checked = check_offers(Pairs(provider), groups, target, compiled, rng)
    assert {group.key for group, *_ in checked} == {group.key for group in groups}
    assert all(offer.pairs == 1 for _, offer, _ in checked)


@EACH
@pytest.mark.parametrize("name", ["products", "convolutions"])
def test_what_is_not_finite_goes_where_the_reference_has_it(name, target, compiled, rng):
    provider, groups = CASES[name]
    checked = check_offers(Pairs(provider), groups, target, compiled, rng)
    library = load_kernels([kernel for _, _, kernel in checked], compiled)
    for group, offer, kernel in checked:
        inputs = random_arrays(rng, group.input_types)
        for array in (x for x in inputs if x.dtype == DType.BF16.numpy):
            array.reshape(-1)[[3, 70, -1]] = (np.inf, np.nan, -np.inf)
        check_kernel(kernel, group, offer, inputs, compiled, library)


@EACH
def test_denormal_numbers_count_as_zero(target, compiled, rng):
    group = narrow_product(HALVES, ((32, 64), (64, 32)), is_constant=False)
    (offer,) = Pairs(GemmProvider()).offer(group, target)
    kernel = GemmProvider().build(group, offer, target)
    x, w = random_arrays(rng, group.input_types)
    x[:], w[:] = 2.0**-130, 2.0**100
    (found,) = run_kernel(kernel, group, offer, [x, w], compiled)
    assert x.astype(np.float32).all() and not found.astype(np.float32).any()


@EACH
@pytest.mark.parametrize("name", CASES)
def test_sums_stay_in_registers(name, target):
    (provider, groups), dot = CASES[name], "bfdot" if target.isa in EMULATED else "vdpbf16ps"
    for text in _assemble(lambda: Pairs(provider), groups[:1], target):
        loops = [part for part in re.split(r"\n\.LBB\S+:", text) if part.count(dot) > 1]
        assert loops
        for loop in loops:
            products = loop[loop.index(dot) : loop.rindex(dot)]
            assert not re.search(r"vmov\w+\s+%zmm\d+, -?\d*\(%rsp\)|st[rp]\s+q.*\[sp", products)


@pytest.mark.parametrize(("isa", "lesser"), [("avx512_bf16", "avx512_vnni"), ("neon_bf16", "neon_dot")])
def test_numbers_of_more_components_are_left_to_float32(isa, lesser):
    target = TARGETS[isa]
    for types in ((DType.F32, DType.F32), (DType.F32, DType.BF16), (DType.F16, DType.F16)):
        group = narrow_product(types, ((64, 64), (64, 64)), is_constant=True)
        assert Pairs(GemmProvider()).offer(group, target) == []
    few = narrow_product(HALVES, ((8, 64), (64, 64)), is_constant=True)
    assert Pairs(GemmProvider()).offer(few, target) == []
    assert Pairs(GemmProvider()).offer(PRODUCTS[0], replace(target, isa=lesser)) == []
