"""Products and convolutions of bytes on matrix units: equal to the reference bit by bit, no stray reads."""

import ctypes
import itertools
import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Group
from korch.costs.analysis import needed_flop
from korch.measure.compiler import Builder
from korch.primitive.types import ValueType
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.provider import TILES
from korch.target import Target, has_matrix_units
from korch.testing import kernels
from korch.testing.kernels import load_kernels, offers_of, run_kernel
from korch.tile.llvm.tiles import READY
from tests.provider.linear_groups import Graph
from tests.provider.test_bytes import SIGNS, check_exactly, conv, product
from tests.support.matrix_units import NOT_READY, is_software, matrix_units

SHAPES = (
    ((8, 48), (48, 16)),
    ((9, 67), (67, 17)),
    ((16, 64), (64, 32)),
    ((17, 100), (100, 72)),
    ((33, 130), (130, 40)),
    ((2, 3, 20, 52), (1, 1, 52, 70)),
    ((130, 1030), (1030, 50)),
)


@pytest.fixture(scope="module", params=["machine", "software"])
def units(request, target: Target, tmp_path_factory) -> tuple[Target, Builder]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "software":
            if not has_matrix_units():
                pytest.skip("software stands for the units in the other run, too")
            patch.setattr("tests.support.matrix_units.has_matrix_units", lambda: False)
        return matrix_units(target, tmp_path_factory.mktemp("units"))


def is_once_more(builder: Builder) -> bool:
    """Return whether software stands for units that the machine has: the same sources, with other instructions."""
    return is_software(builder) and has_matrix_units()


def in_tiles(groups: list[Group], target: Target, builder: Builder, rng, provider=GemmProvider) -> None:
    """Compare the offers with the reference; all are on matrix units."""
    made = provider()
    for group in groups:
        offers = made.offer(group, target)
        assert {(offer.variant, offer.pairs) for offer in offers} == {(TILES, 0.5)}, group.text
    check_exactly(made, groups, target, builder, rng)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("constant", [True, False])
def test_products(constant, threads, units, rng):
    target, builder = units
    takes_all = threads > 1 and not is_once_more(builder)
    cases = itertools.product(SHAPES, SIGNS) if takes_all else zip(SHAPES, itertools.cycle(SIGNS), strict=False)
    groups = [product(*shape, signs, constant, requantizes=i % 2 == 1) for i, (shape, signs) in enumerate(cases)]
    groups += [] if constant else [product((2, 3, 9, 56), (2, 1, 56, 24), constant=False)]
    in_tiles(groups, replace(target, threads=threads), builder, rng)


def test_rows_and_columns_of_several_tasks(units, rng):
    target, builder = units
    groups = [
        product((190, 96), (96, 250), requantizes=True),
        product((40, 1600), (1600, 48)),
        product((700, 50), (50, 16)),
    ]
    in_tiles(groups, replace(target, l2_bytes=8 << 10), builder, rng)


def windows(signs: tuple[str, str] = ("u8", "i8")) -> list[Group]:
    """Lines of one and several tiles, strides, dilations, pads with zero points, and terms that fill no step."""
    return [
        conv((1, 16, 11, 10), (32, 16, 3, 3), signs, pad=1, adds=True),
        conv((2, 20, 9, 37), (33, 20, 3, 3), signs, pad=1, zero=9, stride=2),
        conv((1, 3, 18, 19), (32, 3, 7, 7), signs, zero=99, pad=3, stride=2),
        conv((1, 66, 4, 4), (128, 66, 3, 3), signs, zero=7, pad=1),
        conv((1, 64, 12, 18), (40, 64, 1, 1), signs, stride=2),
        conv((1, 4, 12, 1), (8, 4, 3, 1), signs),
        conv((1, 8, 1, 17), (16, 8, 1, 3), signs, dilation=2),
        conv((1, 24, 9, 9), (16, 24, 3, 3), signs, pad=2, dilation=2),
        conv((1, 1, 4, 4), (16, 1, 2, 2), signs),
        conv((1, 61, 7, 7), (24, 61, 1, 1), signs, adds=True),
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("signs", SIGNS)
def test_convolutions(signs, threads, units, rng):
    target, builder = units
    if (threads == 1 or is_once_more(builder)) and signs != ("u8", "i8"):
        pytest.skip("one pair of types is enough for one thread, and for software beside matrix units")
    in_tiles(windows(signs), replace(target, threads=threads), builder, rng, ConvProvider)


def test_convolutions_of_several_tasks(units, rng):
    target, builder = units
    groups = [conv((1, 32, 26, 23), (70, 32, 3, 3), pad=1), conv((2, 8, 19, 33), (16, 8, 3, 3), pad=1, stride=2)]
    in_tiles(groups, replace(target, l2_bytes=24 << 10), builder, rng, ConvProvider)


def test_convolutions_without_tiles(units, rng):
    """Those of groups, and of few results, places or terms, stay on the vector units."""
    target, builder = units
    groups = [conv((1, 8, 5, 5), (64, 4, 3, 3), groups=2, pad=1), conv((1, 16, 6, 5), (3, 16, 3, 3))]
    groups += [conv((1, 64, 1, 1), (32, 64, 1, 1)), conv((1, 16, 8, 8), (32, 16, 1, 1))]
    assert all(not offer.pairs for group in groups for offer in ConvProvider().offer(group, target))
    check_exactly(ConvProvider(), groups, target, builder, rng)


@pytest.mark.parametrize("signs", SIGNS)
def test_extreme_sums(signs, units):
    """The largest products of either sign, and sums beyond those that a float32 holds."""
    target, builder = units
    limits = [(0, 255) if sign == "u8" else (-128, 127) for sign in signs]
    types = [ValueType.parse(f"{sign}[]").dtype.numpy for sign in signs]
    g = Graph()
    x, w = (
        g.input(name, ValueType.parse(f"{sign}{shape}"))
        for name, sign, shape in zip("xw", signs, ([18, 1100], [1100, 33]), strict=True)
    )
    group = g.group(g.add("matmul", [x, w]))
    (made,) = [made for made in offers_of(GemmProvider(), [group], target) if made[1].variant == TILES]
    library = load_kernels([made[2]], builder)
    for a, b in itertools.product(*limits):
        inputs = [np.full((18, 1100), a, types[0]), np.full((1100, 33), b, types[1])]
        (found,) = run_kernel(made[2], group, made[1], inputs, builder, library=library)
        np.testing.assert_array_equal(found, np.full((18, 33), 1100 * a * b))


def guarded_bytes(size: int) -> np.ndarray:
    """Memory of some bytes, behind which none may be read."""
    page = mmap.PAGESIZE
    whole = mmap.mmap(-1, -(-size // page) * page + page)
    memory = np.frombuffer(whole, np.uint8)
    end = memory.ctypes.data + memory.size - page
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(page), 0) == 0
    return memory[memory.size - page - size : memory.size - page]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is protected by a call of Linux")
def test_nothing_behind_operands_is_read(units, rng, monkeypatch):
    target, builder = units
    monkeypatch.setattr(kernels, "aligned_bytes", guarded_bytes)
    groups = [product(*shape, constant=i % 2 == 0) for i, shape in enumerate(SHAPES)]
    in_tiles(groups, target, builder, rng)
    in_tiles(windows(), target, builder, rng, ConvProvider)


def test_units_that_the_system_refuses(units, rng):
    target, builder = units
    groups = [product((21, 70), (70, 50), signs, requantizes=True) for signs in SIGNS]
    images = [conv((1, 5, 6, 7), (33, 5, 3, 3), signs, pad=1, stride=2) for signs in SIGNS]
    made = (*offers_of(GemmProvider(), groups, target), *offers_of(ConvProvider(), images, target))
    refused = [replace(kernel, units=(NOT_READY,)) for *_, kernel in made]
    assert all(f"@{READY}()" in kernel.source for kernel in refused)
    libraries = [load_kernels(each, builder) for each in ([kernel for *_, kernel in made], refused)]
    for group, offer, kernel in made:
        inputs = [rng.integers(0, 100, t.shape).astype(t.dtype.numpy) for t in group.input_types]
        pairs = (run_kernel(kernel, group, offer, inputs, builder, library=each) for each in libraries)
        np.testing.assert_array_equal(*(found[0] for found in pairs))


def test_bounds_count_bytes_as_fast_as_the_units_that_multiply_them(units):
    group = product((64, 64), (64, 64))
    wide = replace(units[0], isa="avx512_vnni")
    (tiles,), (vectors,) = (GemmProvider().offer(group, own) for own in (units[0], wide))
    flop = 2 * 64**3
    assert needed_flop(Candidate(group, "gemm", tiles)) == flop
    assert needed_flop(Candidate(group, "gemm", vectors)) == flop // 4
