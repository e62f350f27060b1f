"""Generated products and convolutions of bytes: results are equal to the reference bit by bit."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.measure.compiler import Builder
from korch.primitive import reference
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.ops.winograd import WinogradAttributes
from korch.primitive.types import ValueType
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.provider import Provider
from korch.provider.winograd import WinogradProvider, provider
from korch.schedule.products import PAIR_LANES
from korch.target import LANES, Target
from korch.testing.kernels import check_offers, load_kernels, offers_of, run_kernel
from tests.provider.linear_groups import Graph
from tests.provider.test_instruction_sets import _assemble
from tests.support.emulated import EMULATED, Emulated, missing_commands

SIGNS = tuple(itertools.product(("u8", "i8"), repeat=2))


def limits(dtype: str) -> tuple[int, int]:
    return {"u8": (0, 256), "i8": (-128, 128), "i16": (-1200, 1200)}.get(dtype, (-9, 9))


def whole(g: Graph, dtype: str, *shape: int) -> int:
    """A constant of bytes, most of them as large as they may be."""
    low, high = limits(dtype)
    numbers = np.clip(g.rng.normal((low + high) / 2, 90, shape), low, high - 1)
    return g.constant(np.rint(numbers).astype(ValueType.parse(f"{dtype}[]").dtype.numpy))


def given(g: Graph, dtype: str, *shape: int) -> int:
    return g.input(f"x{len(g._inputs)}", ValueType.parse(f"{dtype}{list(shape)}"))


def requantized(g: Graph, y: int, axis: int, dtype: str = "u8") -> int:
    """Scales per channel, a bias, rounding and a clamp."""
    shape = g.type(y).shape
    flat = tuple(n if i == axis % len(shape) else 1 for i, n in enumerate(shape))
    bias = g.constant(g.rng.integers(-5000, 5000, flat).astype(np.int32))
    y = g.add("add", [y, g.add("broadcast", [bias], BroadcastAttributes(shape))])
    scales = g.constant(g.rng.uniform(1e-4, 1e-2, flat).astype(np.float32))
    y = g.add(
        "mul", [g.add("cast", [y], CastAttributes("f32")), g.add("broadcast", [scales], BroadcastAttributes(shape))]
    )
    low, high = limits(dtype)
    y = g.with_number("add", g.add("round", [y]), (low + high) // 2 + 5)
    y = g.with_number("min", g.with_number("max", y, low), high - 1)
    return g.add("cast", [y], CastAttributes(dtype))


def product(a: tuple[int, ...], b: tuple[int, ...], signs=("u8", "i8"), constant=True, requantizes=False) -> Group:
    g = Graph()
    x = given(g, signs[0], *a)
    y = g.add("matmul", [x, whole(g, signs[1], *b) if constant else given(g, signs[1], *b)])
    return g.group(requantized(g, y, -1) if requantizes else y)


def check_exactly(
    provider: Provider[Target, object],
    groups: list[Group],
    target: Target,
    builder: Builder | Emulated,
    rng: np.random.Generator,
) -> list[Group]:
    """Compare every offer with the reference in the program's types; return the groups that were run."""
    made = list(offers_of(provider, groups, target))
    assert not [kernel for *_, kernel in made if isinstance(kernel, Refusal)]
    library = load_kernels([kernel for *_, kernel in made], builder)
    for group, offer, kernel in made:
        inputs = []
        for type_ in group.input_types:
            low, high = limits(type_.dtype.value)
            inputs.append(rng.integers(low, high, type_.shape).astype(type_.dtype.numpy))
        feeds = {name: array for (name, _), array in zip(group.body.inputs, inputs, strict=True)}
        expected = reference.run(group.body, feeds)
        found = run_kernel(kernel, group, offer, inputs, builder, library=library)
        for (name, _), actual in zip(group.body.outputs, found, strict=True):
            np.testing.assert_array_equal(actual, expected[name], f"{offer}; {group.text}")
    return [group for group, *_ in made]


SHAPES = (
    ((1, 8), (8, 16)),
    ((3, 1), (1, 1)),
    ((2, 37), (37, 50)),
    ((19, 64), (64, 40)),
    ((130, 66), (66, 33)),
    ((2, 3, 20, 12), (1, 1, 12, 70)),
)


@pytest.fixture
def vectors(target: Target) -> Target:
    """The machine without matrix units: `test_byte_units.py` has these."""
    return replace(target, isa="avx512_vnni") if target.isa == "amx" else target


@pytest.mark.parametrize("constant", [True, False])
def test_products(constant, vectors, builder, rng):
    groups = [
        product(*shape, signs, constant, requantizes=i % 2 == 1)
        for i, (shape, signs) in enumerate(itertools.product(SHAPES, SIGNS))
    ]
    groups += [] if constant else [product((2, 3, 9, 8), (2, 1, 8, 24), constant=False)]
    check_exactly(GemmProvider(), groups, vectors, builder, rng)


def stored(a: tuple[int, ...], b: tuple[int, ...], dtype: str) -> Group:
    """A product of floats by constant bytes, scaled by columns."""
    g = Graph()
    x = g.input("x", ValueType.parse(f"f32{list(a)}"))
    y = g.add("matmul", [x, g.add("cast", [whole(g, dtype, *b)], CastAttributes("f32"))])
    scales = g.constant(g.rng.uniform(1e-4, 1e-2, (b[-1],)).astype(np.float32))
    return g.group(g.add("mul", [y, g.add("broadcast", [scales], BroadcastAttributes(g.type(y).shape))]))


def test_stored_bytes_are_widened_when_they_are_read(target, builder, rng):
    shapes = (
        ((1, 64), (64, 1)),
        ((1, 37), (37, 50)),
        ((3, 1), (1, 21)),
        ((8, 129), (129, 16)),
        ((2, 16, 40), (1, 40, 100)),
    )
    groups = [stored(*shape, dtype) for shape in shapes for dtype in ("i8", "u8")]
    groups += [stored((4, m, 32), (4, 32, 64 * n), "i8") for m in (1, 3, 40) for n in (1, 3)]  # a matrix for each batch
    groups += [stored((2, 3, 1, 16), (2, 3, 16, 70), "u8"), stored((2, 3, 5, 16), (1, 3, 16, 64), "i8")]
    groups += [stored((32, 96), (96, 70), "i8"), stored((1, 300), (300, 520), "i8")]
    for group, offer, _ in check_offers(GemmProvider(), groups, target, builder, rng):
        assert group.input_types[1].dtype.size_bytes == 1
        batch, n = group.input_types[1].shape[:-2], group.input_types[1].shape[-1]
        is_own = batch == group.input_types[0].shape[:-2] and n % 64 == 0
        is_own &= offer.pairs == 0  # matrix units take one matrix for all batches
        assert bool(offer.inputs[1].blocks) == (is_own or all(size == 1 for size in batch))


def conv(
    x: tuple[int, ...],
    w: tuple[int, ...],
    signs=("u8", "i8"),
    stride=1,
    pad=0,
    zero=None,
    groups=1,
    adds=False,
    dilation=1,
) -> Group:
    """A convolution; with a zero point the image is padded with it before."""
    g = Graph()
    image, rank = given(g, signs[0], *x), len(x) - 2
    if zero is not None:
        pads = (0, 0, *(pad,) * rank)
        image, pad = g.add("pad", [image], PadAttributes(pads, pads, "constant", zero)), 0
    attributes = ConvAttributes((stride,) * rank, (pad,) * rank, (pad,) * rank, (dilation,) * rank, groups)
    y = g.add("conv", [image, whole(g, signs[1], *w)], attributes)
    if adds:
        other = g.add("cast", [given(g, signs[0], *g.type(y).shape)], CastAttributes("i32"))
        y = g.add("add", [y, other])
    return g.group(requantized(g, y, 1))


def convolutions(n: int) -> list[Group]:
    """Windows of all kinds, with strips of n columns that are full or not."""
    return [
        conv((1, 12, 9, 7), (n + 3, 12, 1, 1)),
        conv((2, 20, 8, 8), (9, 20, 1, 1), ("i8", "i8"), stride=2, adds=True),
        conv((1, 16, 11, 10), (n, 16, 3, 3), pad=1, adds=True),
        conv((1, 16, 11, 10), (5, 16, 3, 3), ("u8", "u8"), zero=3, pad=1, stride=2),
        conv((1, 3, 18, 17), (n, 3, 5, 5), ("i8", "u8"), pad=2, stride=2),
        conv((1, 6, 5, 5), (2 * n, 3, 3, 3), pad=1, groups=2),
        conv((1, 3, 14, 13), (n, 3, 7, 7), zero=128, pad=3, stride=2),
        conv((2, 1, 9, 8), (5, 1, 1, 3), ("i8", "i8")),
        conv((1, 1, 9, 8), (n, 1, 3, 1)),
        conv((1, 1, 9, 8), (n, 1, 3, 5), ("i8", "i8"), pad=1),
        conv((1, 66, 4, 4), (4 * n, 66, 3, 3), zero=128, pad=1),
        conv((1, 1, 1, 1), (1, 1, 1, 1)),
    ]


def test_convolutions(vectors, builder, rng):
    check_exactly(ConvProvider(), convolutions(2 * vectors.lanes), vectors, builder, rng)


@pytest.mark.parametrize(("size", "channels"), [(7, 512), (14, 256), (28, 128), (56, 64)])
def test_threads_have_equally_many_pixels(size, channels):
    """Nearly: with a task of 36 pixels and one of 13, one of two threads would wait."""
    target = Target(isa="avx512_vnni")
    group = conv((1, channels, size, size), (channels, channels, 3, 3), pad=1)
    offer = ConvProvider().offer(group, target)[0]
    program = ConvProvider().build(group, offer, target).program
    (*_, (_, finish)) = program.stages[-1].leaves
    tasks, rows = program.stages[-1].grid[-1].extent, finish.axes[0].extent
    first = -(-tasks // target.threads) * rows
    assert first <= 1.07 * size * size / target.threads
    assert size * size <= tasks * rows


def winograd(x: tuple[int, ...], channels: int, dtype="u8", begin=(1, 1), end=(1, 1), zero=None, adds=False) -> Group:
    """A convolution of transformed tiles, divided by the factor of its weights."""
    g = Graph()
    image = given(g, dtype, *x)
    if zero is not None:
        image = g.add("pad", [image], PadAttributes((0, 0, 1, 1), (0, 0, 1, 1), "constant", zero))
    weights = g.constant(np.zeros((4, 4, x[1], channels), np.int16))
    y = g.add("winograd", [image, weights], WinogradAttributes(2, begin, end))
    y = g.add(
        "div",
        [y, g.add("broadcast", [g.constant(np.full((1, 1, 1, 1), 4, np.int32))], BroadcastAttributes(g.type(y).shape))],
    )
    if adds:
        y = g.add("add", [y, g.add("cast", [given(g, dtype, *g.type(y).shape)], CastAttributes("i32"))])
    return g.group(requantized(g, y, 1) if adds else y)


def test_winograd_convolutions(target, builder, rng, monkeypatch):
    if target.lanes not in PAIR_LANES:
        pytest.skip("bytes are multiplied without transforms on this CPU")
    monkeypatch.setattr(provider, "MANY_WEIGHTS_BYTES", 0)
    groups = [
        winograd((1, 16, 7, 5), 24),
        winograd((2, 32, 8, 9), 16, "i8", (0, 1), (1, 0), adds=True),
        winograd((1, 48, 6, 6), 8, zero=131, begin=(0, 0), end=(0, 0), adds=True),
        winograd((1, 16, 1, 2), 32, "i8"),
    ]
    check_exactly(WinogradProvider(), groups, target, builder, rng)


def depthwise(
    x: tuple[int, ...],
    window: tuple[int, int],
    signs=("u8", "i8"),
    stride=(1, 1),
    pads=(0, 0, 0, 0),
    dilation=(1, 1),
    zero=None,
    adds=False,
) -> Group:
    """One channel for each; pads are above, left, below and right, and have the zero point if there is one."""
    g = Graph()
    image = given(g, signs[0], *x)
    if zero is not None:
        before, after = (0, 0, *pads[:2]), (0, 0, *pads[2:])
        image, pads = g.add("pad", [image], PadAttributes(before, after, "constant", zero)), (0, 0, 0, 0)
    attributes = ConvAttributes(stride, pads[:2], pads[2:], dilation, x[1])
    y = g.add("conv", [image, whole(g, signs[1], x[1], 1, *window)], attributes)
    if adds:
        y = g.add("add", [y, g.add("cast", [given(g, signs[0], *g.type(y).shape)], CastAttributes("i32"))])
    return g.group(requantized(g, y, 1))


def depthwise_convolutions() -> list[Group]:
    """Windows that reach beyond the image, of all signs, with full vectors of channels or not."""
    return [
        depthwise((1, 16, 14, 13), (3, 3), pads=(1, 1, 1, 1), adds=True),
        depthwise((2, 21, 9, 12), (3, 3), ("i8", "i8"), (2, 2), (0, 0, 1, 1), zero=-7),
        depthwise((1, 40, 7, 7), (5, 5), ("u8", "u8"), pads=(2, 2, 2, 2), zero=200),
        depthwise((1, 33, 15, 11), (5, 5), ("i8", "u8"), (2, 2), (1, 2, 2, 1)),
        depthwise((1, 8, 20, 9), (3, 3), ("u8", "i8"), (1, 1), (2, 2, 2, 2), (2, 3)),
        depthwise((1, 2, 5, 6), (1, 4), ("i8", "i8"), (1, 3)),
        depthwise((3, 24, 6, 1), (4, 1), ("u8", "i8"), (3, 1), (2, 0, 1, 0)),
        depthwise((1, 100, 1, 1), (3, 3), pads=(1, 1, 1, 1)),
        depthwise((1, 12, 70, 50), (2, 7), ("u8", "i8"), (1, 2), (0, 3, 1, 3)),
    ]


def test_depthwise_convolutions(target, builder, rng):
    groups = depthwise_convolutions()
    found = check_exactly(ConvProvider(), groups, target, builder, rng)
    assert all(group in found for group in groups)


@pytest.mark.parametrize("isa", ["avx512", "avx2", "generic", *EMULATED])
def test_other_sets(isa, target, rng, tmp_path):
    """Bytes are multiplied as 16-bit numbers or by other instructions; other numbers of lanes take other tails."""
    if target.lanes < LANES["avx512"] if isa not in EMULATED else missing_commands():
        pytest.skip("this machine runs no other instruction set")
    other = replace(target, isa=isa, lanes=LANES[isa])
    builder = Emulated(tmp_path) if isa in EMULATED else Builder(isa, tmp_path)
    products = [product(*shape, signs, True, requantizes=True) for shape, signs in zip(SHAPES[2:], SIGNS, strict=True)]
    offered = [g for g in products if not isinstance(GemmProvider().offer(g, other), Refusal)]
    check_exactly(GemmProvider(), offered, other, builder, rng)
    windows = [*convolutions(2 * other.lanes)[::3], *depthwise_convolutions()[::2]]
    offered = [g for g in windows if not isinstance(ConvProvider().offer(g, other), Refusal)]
    assert check_exactly(ConvProvider(), offered, other, builder, rng)


@pytest.mark.parametrize(
    ("isa", "names"),
    [
        ("avx512_vnni", ["vpdpbusd"] * 4),
        ("neon_bf16", ["udot", "usdot", "usdot", "sdot"]),
        ("neon_dot", ["udot", "sdot", "udot", "sdot"]),
        ("neon", ["mla"] * 4),
    ],
)
def test_the_instruction_that_adds_four_products(isa, names):
    for signs, name in zip(SIGNS, names, strict=True):
        for text in _assemble(GemmProvider, [product(*SHAPES[3], signs)], Target(isa=isa, lanes=LANES[isa])):
            found = re.findall(r"^\s*(vpdp\w+|u?s?dot|mla)\s", text, re.M)
            assert set(found) == {name}
            assert len(found) >= 24
