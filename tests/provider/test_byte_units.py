"""Products of bytes on matrix units: results equal the reference's bit by bit, and nothing else is read."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group
from korch.measure import compiler
from korch.measure.compiler import Builder
from korch.primitive.types import ValueType
from korch.provider.gemm import GemmProvider
from korch.provider.provider import TILES
from korch.target import Target
from korch.testing import kernels
from korch.testing.kernels import load_kernels, offers_of, run_kernel
from tests.provider.onednn_groups import Graph
from tests.provider.test_bytes import SIGNS, check_exactly, product
from tests.support.matrix_units import matrix_units

NOT_READY = '#include "korch_amx.h"\n#define is_ready() false\n'
"""What makes a kernel believe that the system does not give it the units."""

SHAPES = (
    ((4, 16), (16, 16)),
    ((5, 67), (67, 17)),
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
            patch.setattr(compiler, "has_matrix_units", lambda: False)
        return matrix_units(target, tmp_path_factory.mktemp("units"))


def in_tiles(groups: list[Group], target: Target, builder: Builder, rng) -> None:
    """Compare the offers with the reference; each group must have some on matrix units."""
    for group in groups:
        offers = GemmProvider().offer(group, target)
        assert any(offer.variant == TILES and offer.pairs == 0.5 for offer in offers), group.text
    check_exactly(GemmProvider(), groups, target, builder, rng)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("constant", [True, False])
def test_products(constant, threads, units, rng):
    target, builder = units
    cases = itertools.product(SHAPES, SIGNS) if threads > 1 else zip(SHAPES, itertools.cycle(SIGNS), strict=False)
    groups = [product(*shape, signs, constant, requantizes=i % 2 == 1) for i, (shape, signs) in enumerate(cases)]
    groups += [] if constant else [product((2, 3, 9, 24), (2, 1, 24, 24), constant=False)]
    in_tiles(groups, replace(target, threads=threads), builder, rng)


def test_rows_and_columns_of_several_tasks(units, rng):
    target, builder = units
    groups = [
        product((190, 96), (96, 250), requantizes=True),
        product((40, 1600), (1600, 48)),
        product((700, 32), (32, 16)),
    ]
    in_tiles(groups, replace(target, l2_bytes=8 << 10), builder, rng)


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


def test_units_that_the_system_refuses(units, rng):
    target, builder = units
    groups = [product((21, 70), (70, 50), signs, requantizes=True) for signs in SIGNS]
    for group, offer, kernel in offers_of(GemmProvider(), groups, target):
        if offer.variant != TILES:
            continue
        refused = replace(kernel, source=NOT_READY + kernel.source)
        inputs = [rng.integers(0, 100, t.shape).astype(t.dtype.numpy) for t in group.input_types]
        pairs = (run_kernel(each, group, offer, inputs, builder) for each in (kernel, refused))
        np.testing.assert_array_equal(*(found[0] for found in pairs))
