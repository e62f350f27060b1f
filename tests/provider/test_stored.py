"""Products by weights that are stored in few bits: compiled, run and compared with the reference in float64."""

from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.stored import StoredAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.gemm import GemmProvider
from korch.provider.provider import SPLIT, Kernel
from korch.testing.kernels import check_kernel, check_offers, offers_of, run_kernel
from korch.testing.samples import random_arrays
from korch.tile.check.check import check_program
from korch.tile.ir.program import Contract, Product
from tests.provider.linear_groups import Graph


def stored(
    a: tuple[int, ...],
    n: int,
    bits: int = 4,
    block: int = 16,
    zero: int | None = None,
    signed: bool = False,
    after: bool = False,
    turned: bool = False,
    is_rounded: bool = False,
) -> Group:
    """Return a product by constant weights; zero points are an input if no number is given.

    The scales of blocks of 16 terms are stored as float16.
    """
    g, at = Graph(), StoredAttributes(bits, block, zero or 0, is_rounded=is_rounded)
    blocks = -(-a[-1] // block)
    dtype = np.int8 if signed else np.uint8
    info = np.iinfo(dtype)
    q = g.rng.integers(info.min, info.max + 1, (-(-blocks * block // at.each), n)).astype(dtype)
    points = g.rng.integers(0, 1 << min(bits, 7), (blocks, n)).astype(dtype)
    scales = (g.rng.uniform(0.5, 2, (blocks, n)) / (1 << bits)).astype(np.float16 if block == 16 else np.float32)
    x = g.tensor(*a)
    if turned:
        x = g.add(
            "transpose",
            [g.tensor(*a[:-2], a[-1], a[-2])],
            TransposeAttributes((*range(len(a) - 2), len(a) - 1, len(a) - 2)),
        )
    weights = [g.constant(array) for array in ((q, scales, points) if zero is None else (q, scales))]
    y = g.add("matmul_stored", [x, *weights], at)
    if after:
        y = g.with_tensor("mul", y, g.tensor(*g.type(y).shape))
        y = g.with_tensor("add", y, g.weights(*(1,) * (len(a) - 1), n))
    return g.group(y)


def test_products_of_few_and_of_many_rows(target, builder, rng):
    n = target.lanes
    groups = [
        *(stored((m, 64), 4 * n) for m in (1, 2, 3, 4, 13)),
        *(stored((m, 96), 5 * n + 3, block=32, zero=8) for m in (2, 5, 6, 7, 8)),
        *(stored((m, 96), 5 * n + 3, bits=8, block=32, zero=128) for m in (2, 3, 4, 7, 8)),
        stored((1, 1, 96), 8 * n, zero=8, after=True),
        stored((1, 5, 96), 8 * n, zero=8, after=True),
        stored((2, 3, 64), 3 * n + 5, after=True),
        stored((1, 64), 3 * n + 5),
        stored((1, 40), 5, bits=2, block=8),
        stored((7, 40), n + 1, bits=2, block=8),
        stored((1, 512), 2 * n, block=512, zero=8),
        stored((9, 640), 2 * n, block=640),
        stored((100, 288), n, block=32, zero=3),
        stored((131, 4096), 2 * n, block=128, zero=3),
        *(stored((m, 70), 2 * n, bits=8, block=14, signed=True) for m in (1, 6)),
        *(stored((m, 48), 2 * n, bits=8, block=16, zero=0, signed=s) for m in (1, 6) for s in (False, True)),
        *(stored((m, 75), 2 * n, block=16) for m in (1, 6)),  # the last block is cut off
        *(stored((m, 5), 2 * n, block=6, zero=1) for m in (1, 6)),
        *(stored((m, 32), 2 * n, turned=True) for m in (2, 6)),
    ]
    for _, _, kernel in check_offers(GemmProvider(), groups, target, builder, rng):
        check_program(kernel.program)


def test_products_of_rounded_data(target, builder, rng):
    n = target.lanes
    groups = [
        *(stored((m, 64), 4 * n, block=32, zero=8, is_rounded=True) for m in (1, 2, 3, 12, 13, 31)),
        *(stored((m, 75), 5 * n + 3, is_rounded=True) for m in (1, 7)),  # the last block is cut off
        *(stored((m, 96), 5 * n + 3, bits=8, block=32, zero=128, is_rounded=True) for m in (1, 2, 14)),
        *(stored((m, 72), 3, bits=8, block=12, is_rounded=True) for m in (1, 4)),
        stored((2, 3, 64), 3 * n + 5, bits=2, after=True, is_rounded=True),
        stored((1, 5, 96), 8 * n, zero=8, after=True, is_rounded=True),
        stored((131, 4096), 2 * n, block=128, zero=3, is_rounded=True),
        stored((6, 32), 2 * n, turned=True, is_rounded=True),
    ]
    for _, _, kernel in check_offers(GemmProvider(), groups, target, builder, rng):
        check_program(kernel.program)
        assert any(
            isinstance(step, Contract) and step.product in (Product.S8U8, Product.S16U8)
            for _, step in kernel.program.stages[1].leaves
        )


@pytest.mark.parametrize(("bits", "block"), [(4, 128), (2, 512)])
def test_sums_of_the_largest_bytes_do_not_overflow(target, builder, bits, block):
    g = Graph()
    at = StoredAttributes(bits, block, 0, is_rounded=True)
    q, scales = np.full((2 * block // at.each, 3), 255, np.uint8), np.ones((2, 3), np.float32)
    x = np.ones((7, 2 * block), np.float32) * (-1.0) ** np.arange(7, dtype=np.float32)[:, None]
    group = g.group(g.add("matmul_stored", [g.tensor(*x.shape), g.constant(q), g.constant(scales)], at))
    for _, offer, kernel in offers_of(GemmProvider(), [group], target):
        assert isinstance(kernel, Kernel)
        (y,) = run_kernel(kernel, group, offer, [x, q, scales], builder)
        assert np.array_equal(y, x[:, :1] * np.full(3, 2 * block * ((1 << bits) - 1), np.float32))


def test_rounded_data_is_widened_once_for_all_columns(target):
    group = stored((6, 96), 4 * target.lanes, bits=8, block=32, zero=128, is_rounded=True)
    for isa, lanes, product in (("avx2", 8, Product.S16U8), ("avx512_vnni", 16, Product.S8U8)):
        ((_, _, kernel),) = offers_of(GemmProvider(), [group], replace(target, isa=isa, lanes=lanes))
        assert isinstance(kernel, Kernel)
        (step,) = (step for _, step in kernel.program.stages[1].leaves if isinstance(step, Contract))
        assert step.product is product


def test_parts_of_bytes_are_added_up_in_sixteen_bits(target):
    group = stored((1, 64), 4 * target.lanes, block=32, zero=8, is_rounded=True)
    ((_, _, kernel),) = offers_of(GemmProvider(), [group], replace(target, isa="avx2", lanes=8))
    assert isinstance(kernel, Kernel)
    # Each part of two groups of bytes, by two vectors of columns.
    assert kernel.source.count("call <16 x i16> @llvm.x86.avx2.pmadd.ub.sw") == 8 * 2
    assert kernel.source.count("call <8 x i32> @llvm.x86.avx2.pmadd.wd") == 2


class SplitGemmProvider(GemmProvider):
    """Offers the matrix units only where there are some; others offer the vector units for such groups, too."""

    def offer(self, group, target):
        offers = super().offer(group, target)
        return [offer for offer in offers if offer.variant == SPLIT] if target.isa == "amx" else offers


def test_products_on_matrix_units(target, builder, rng):
    groups = [
        *(stored((m, 64), 64, block=32, zero=8) for m in (8, 16, 17, 33)),
        stored((1, 9, 96), 96, block=32, after=True),
        stored((2, 5, 64), 53, block=32, after=True),
        stored((40, 256), 40, block=64),
        stored((11, 64), 33, bits=2, block=32),
        stored((131, 4096), 32, block=128, zero=3),  # some rows and some terms at a time
        stored((9, 640), 32, block=640),
        *(stored((10, 96), 32, bits=8, block=96, zero=z, signed=s) for z, s in ((None, True), (0, True), (200, False))),
        stored((12, 64), 64, block=32, turned=True),
    ]
    kernels = check_offers(SplitGemmProvider(), groups, target, builder, rng)
    assert sum(offer.variant == SPLIT for _, offer, _ in kernels) == (len(groups) if target.isa == "amx" else 0)
    for _, _, kernel in kernels:
        check_program(kernel.program)


@pytest.mark.parametrize(("rows", "block"), [(1, 16), (6, 16), (9, 32)])
def test_what_is_not_finite_stays_so(target, builder, rng, rows, block):
    group = stored((rows, 64), 2 * target.lanes, block=block)
    for _, offer, kernel in offers_of(GemmProvider(), [group], target):
        assert isinstance(kernel, Kernel)
        data, weights, scales, zeros = random_arrays(rng, group.input_types, specials=True)
        # The product of two large numbers is infinite in float32, and NaN beside an infinity; float64 holds it.
        if scales.dtype == np.float32:
            scales[np.abs(scales) == np.float32(1e30)] = 1
        check_kernel(kernel, group, offer, [data, weights, scales, zeros], builder)


def test_blocks_of_rounded_data_that_are_not_finite_become_nan(target, builder, rng):
    group = stored((6, 64), 2 * target.lanes, is_rounded=True)
    check_offers(GemmProvider(), [group], target, builder, rng, specials=True)


@pytest.mark.parametrize(("bits", "is_by_words"), [(4, True), (8, False)])
def test_bytes_for_tables_are_loaded_as_words(target, bits, is_by_words):
    group = stored((1, 64), 4 * target.lanes, bits=bits, block=32, zero=8)
    (offer,) = GemmProvider().offer(group, target)
    kernel = GemmProvider().build(group, offer, target)
    assert isinstance(kernel, Kernel)
    assert ("load <16 x i32>" in kernel.source) == (is_by_words and target.lanes == 16)


def test_bytes_with_terms_of_two_blocks_are_refused(target):
    (found,) = [GemmProvider().offer(stored((2, 30), 8, block=15), target)]
    assert isinstance(found, Refusal)
    assert found.reason == "a byte has terms of two blocks"


def test_weights_that_are_no_constants_are_refused(target):
    g = Graph()
    q = g.input("q", ValueType((16, 8), DType.U8))
    y = g.add("matmul_stored", [g.tensor(4, 32), q, g.weights(1, 8)], StoredAttributes(4, 32))
    found = GemmProvider().offer(g.group(y), target)
    assert isinstance(found, Refusal)
    assert found.reason == "the weights are no constants"
