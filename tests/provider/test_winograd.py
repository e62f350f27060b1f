"""Winograd convolutions, compiled, run and compared with the reference in float64."""

from dataclasses import replace
from itertools import repeat

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last
from korch.primitive import reference
from korch.primitive.op import Attributes
from korch.primitive.ops.layout import ConcatAttributes, PadAttributes, SliceAttributes, TakeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.ops.winograd import WinogradAttributes, transform_weights
from korch.provider.provider import SPLIT, Kernel
from korch.provider.winograd import WinogradProvider, provider
from korch.provider.winograd.matrix_units import split_blocking
from korch.provider.winograd.vectors import blocking_for, blocking_of
from korch.schedule.split_winograd import SplitWinograd, SplitWinogradBlocking
from korch.schedule.winograd import Winograd
from korch.target import Target
from korch.testing.kernels import check_kernel, load_kernels, run_kernel
from korch.testing.samples import random_arrays
from tests.provider.linear_groups import Graph
from tests.support.in_turn import InTurn
from tests.support.matrix_units import denied, is_software

NONE = (0, 0)


@pytest.fixture(autouse=True)
def _every_variant(monkeypatch):
    monkeypatch.setattr(provider, "MANY_WEIGHTS_BYTES", 0)


def start(
    g: Graph,
    x: tuple[int, ...],
    channels: int,
    tile: int,
    *,
    pad: Attributes | None = None,
    begin: tuple[int, int] = (1, 1),
    end: tuple[int, int] = (1, 1),
) -> int:
    """The convolution of an image by random weights, a pad before it."""
    value = g.tensor(*x)
    if pad is not None:
        value = g.add("pad", [value], pad)
    weights = transform_weights(g.rng.standard_normal((channels, x[1], 3, 3)), tile)
    u = g.constant(np.ascontiguousarray(weights.astype(np.float32)))
    return g.add("winograd", [value, u], WinogradAttributes(tile, begin, end))


def per_channel(g: Graph, op: str, y: int) -> int:
    return g.with_tensor(op, y, g.weights(1, g.type(y).shape[1], 1, 1))


def check(groups, target, builder, rng, makers=None) -> list[tuple[Group, Offer, Kernel]]:
    """Compare all offers with the reference; the weights are transformed ones."""
    made = []
    for each, maker in zip(groups, makers or repeat(WinogradProvider()), strict=False):
        offers = maker.offer(each, target)
        assert not isinstance(offers, Refusal), offers.reason
        made += [(each, o, maker.build(each, o, target)) for o in offers]
    library = load_kernels([kernel for _, _, kernel in made], builder)
    for each, offer, kernel in made:
        check_kernel(kernel, each, offer, arrays_for(each, rng), builder, library)
    return made


def arrays_for(each: Group, rng: np.random.Generator) -> list[np.ndarray]:
    arrays = random_arrays(rng, each.input_types, False)
    for i, type_ in enumerate(each.input_types):
        if type_.shape[0] in (4, 6) and type_.rank == 4:
            weights = rng.standard_normal((*type_.shape[:1:-1], 3, 3)) / type_.shape[2] / 9
            arrays[i] = transform_weights(weights, type_.shape[0] - 2).astype(np.float32)
    return arrays


def group(x: tuple[int, ...], channels: int, tile: int, **more: object) -> Group:
    g = Graph()
    return g.group(start(g, x, channels, tile, **more))


def reflect(mode: str, value: float = 0.0) -> PadAttributes:
    return PadAttributes((0, 0, 1, 2), (0, 0, 1, 0), mode, value)


@pytest.mark.long
def test_shapes_pads_and_layouts(target, builder, rng):
    n = target.lanes
    groups = [
        group((1, n, 8, 8), n, 4),
        group((1, 2 * n, 7, 9), 3 * n, 4),
        group((2, n, 5, 13), 2 * n, 4, begin=NONE, end=(2, 1)),
        group((1, n, 1, 2), n, 4),
        group((3, 2 * n, 6, 6), n, 2),
        group((1, n, 23, 3), 4 * n, 2, begin=(0, 1), end=(1, 0)),
        group((1, n, 9, 10), n, 4, pad=reflect("reflect"), begin=NONE, end=NONE),
        group((1, n, 9, 10), n, 4, pad=reflect("constant", 2.5), begin=NONE, end=NONE),
        group((1, n, 9, 10), n, 2, pad=reflect("wrap"), begin=NONE, end=NONE),
        group((1, n, 9, 10), n, 2, pad=reflect("edge")),
    ]
    # All offers for two images, and one of them in turn for each of the others.
    checked = check(groups, target, builder, rng, [*2 * [WinogradProvider()], *8 * [InTurn(WinogradProvider())]])
    assert {offer.variant for _, offer, _ in checked} == {"tiles", "channels"}
    layouts = {str(offer.inputs[0]) for _, offer, _ in checked}
    assert {"acdb"} < layouts | {f"aBcd{n}b"}


def test_moves_of_rows_and_columns_are_read_as_indices(target, builder, rng):
    made = []
    for tile in (2, 4):
        g = Graph()
        value = g.tensor(1, 16, 5, 7)
        value = g.add("slice", [value], SliceAttributes((0, 0, 4, 1), (1, 16, 4, 3), (1, 1, -1, 2)))
        for axis, size in ((2, 4), (3, 3)):
            indices = tuple(i // 2 for i in range(2 * size))
            value = g.add("take", [value], TakeAttributes(axis, indices))
        value = g.add("pad", [value], reflect("reflect"))
        value = g.add("pad", [value], reflect("constant", 0.5))
        u = g.weights(tile + 2, tile + 2, 16, 16)
        made.append(g.group(g.add("winograd", [value, u], WinogradAttributes(tile, (1, 1), NONE))))
    check(made, target, builder, rng)


def test_many_groups_of_tiles(target, builder, rng):
    small = replace(target, l2_bytes=1 << 15)
    # The loop over four tiles is unrolled, which decides some of their guards.
    checked = check([group((1, 32, 40, 37), 64, 4), group((1, 32, 13, 13), 16, 4)], small, builder, rng)
    assert len(checked) == 8


def test_points_lie_in_different_sets_of_the_first_cache(target):
    each = group((1, 64, 56, 56), 64, 4)
    layouts = (channels_last(4), Layout.plain(4)), (channels_last(4),)
    schedule = Winograd(each, each.body.linear[0], layouts, target.lanes)
    blocking = blocking_for(schedule, target, False)
    for buffer in schedule.program(blocking).buffers[-3:-1]:
        floats, channels = buffer.size // 36, 64 if buffer.name == "v" else blocking.vectors * target.lanes
        assert blocking.group * channels <= floats <= blocking.group * channels + 31
        assert len({point * floats // 16 % 64 for point in range(36)}) == 36


def test_what_follows_is_fused(target, builder, rng):
    g = Graph()
    y = start(g, (1, 32, 10, 10), 32, 4)
    y = per_channel(g, "add", per_channel(g, "mul", y))
    residual = g.with_tensor("add", y, g.tensor(1, 32, 10, 10))
    relu = g.with_number("max", residual, 0.0)
    both = g.group(relu, g.add("sigmoid", [residual]))
    h = Graph()
    y = per_channel(h, "add", start(h, (1, 32, 6, 6), 32, 2))
    mish = h.group(h.add("mul", [y, h.add("tanh", [h.add("exp", [y])])]))
    checked = check([both, mish], target, builder, rng)
    assert len({kernel.symbol for _, _, kernel in checked}) == 8


@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_lost_and_stays_in_its_tiles(target, builder, rng, tile, bad):
    each = group((1, 16, 16, 16), 16, tile)
    image, weights = arrays_for(each, rng)
    image[0, 3, 5, 6] = bad
    feeds = {"i0": np.nan_to_num(image, nan=0, posinf=0, neginf=0), "i1": weights}
    expected = reference.run(each.body, feeds, exact=True)["o0"]
    for offer in WinogradProvider().offer(each, target):
        kernel = WinogradProvider().build(each, offer, target)
        (found,) = run_kernel(kernel, each, offer, [image, weights], builder)
        lost = np.isfinite(found)
        assert not lost[0, :, 4:7, 5:8].any()
        far = np.ones((16, 16), bool)
        far[5 - tile : 6 + tile, 6 - tile : 7 + tile] = False
        assert np.allclose(found[0][:, far], expected[0][:, far], rtol=1e-4, atol=1e-5)


def a_reduction(g: Graph, y: int) -> int:
    return g.add("reduce_sum", [y], ReduceAttributes((2, 3)))


@pytest.mark.parametrize(
    ("expected", "made"),
    [
        ("an output is not computed from the product element by element", None),
        ("an output is not computed from the product element by element", a_reduction),
        (
            "the columns of a tensor are not adjacent in memory",
            lambda g, y: g.with_tensor("add", y, g.tensor(16, 6, 1)),
        ),
        ("the elements are not floats of at most 32 bits", lambda g, y: g.add("less", [y, y])),
    ],
)
def test_refusals_of_what_follows(target, expected, made):
    g = Graph()
    y = start(g, (1, 16, 6, 6), 16, 4, pad=reflect("edge"), begin=(0, 0), end=(0, 0))
    outputs = [made(g, y)] if made else [y, y - 2]
    found = WinogradProvider().offer(g.group(*outputs), target)
    assert found == Refusal(expected)


@pytest.mark.parametrize(
    ("expected", "x", "channels", "more"),
    [
        ("the channels do not fill a vector register", (1, 17, 8, 8), 32, {}),
        (
            "a pad or a concatenation is not fused into the kernel",
            (1, 16, 8, 8),
            32,
            {"pad": PadAttributes((0, 1, 0, 0), (0, 15, 0, 0))},
        ),
    ],
)
def test_refusals_of_shapes_and_pads(target, expected, x, channels, more):
    if "pad" in expected:
        g = Graph()
        value = g.add("pad", [g.tensor(*x)], more["pad"])
        u = g.weights(6, 6, 32, channels)
        made = g.group(g.add("winograd", [value, u], WinogradAttributes(4, NONE, NONE)))
    else:
        made = group(x, channels, 4, **more)
    assert WinogradProvider().offer(made, target) == Refusal(expected)


def test_what_stands_before_is_computed(target, builder, rng):
    """Pads of two values, a computed image, channels of two images, and a plane for all channels behind."""
    g = Graph()
    value = g.tensor(1, 16, 6, 6)
    for number in (1.0, 2.0):
        value = g.add("pad", [value], reflect("constant", number))
    pads = g.group(g.add("winograd", [value, g.weights(4, 4, 16, 16)], WinogradAttributes(2, NONE, NONE)))
    h = Graph()
    value = h.add("sigmoid", [h.tensor(1, 16, 6, 6)])
    y = h.add("winograd", [value, h.weights(4, 4, 16, 16)], WinogradAttributes(2, (1, 1), (1, 1)))
    computed = h.group(h.with_tensor("add", y, h.tensor(1, 1, 6, 6)))
    k = Graph()
    value = k.add("concat", [k.tensor(1, 16, 7, 5), k.tensor(1, 32, 7, 5)], ConcatAttributes(1))
    joined = k.group(k.add("winograd", [value, k.weights(6, 6, 48, 16)], WinogradAttributes(4, (1, 1), (1, 1))))
    check([pads, computed, joined], target, builder, rng)


def test_weights_from_outside_and_other_groups_are_refused(target):
    g = Graph()
    attributes = WinogradAttributes(4, NONE, NONE)
    given = g.group(g.add("winograd", [g.tensor(1, 16, 8, 8), g.tensor(6, 6, 16, 16)], attributes))
    assert WinogradProvider().offer(given, target) == Refusal("the weights are not constant")
    h = Graph()
    lone = h.group(h.add("exp", [h.tensor(4)]))
    expected = Refusal("it is not one convolution in Winograd's space")
    assert WinogradProvider().offer(lone, target) == expected


@pytest.mark.parametrize("isa", ["avx512", "avx2", "neon"])
@pytest.mark.parametrize("tiles", [1, 9, 196, 10_000])
@pytest.mark.parametrize("channels", [16, 48, 512])
def test_blocks_fit_registers_and_tiles(target, isa, tiles, channels):
    lanes = {"avx512": 16, "avx2": 8, "neon": 4}[isa]
    machine = replace(target, isa=isa, lanes=lanes)
    for is_shared in (False, True):
        made = blocking_of(36, tiles, (channels, channels), machine, is_shared)
        registers = {"avx512": 32, "avx2": 16, "neon": 32}[isa]
        assert made.rows * made.vectors + made.vectors + 1 <= registers
        assert 1 <= made.rows <= made.group <= tiles and channels % (made.vectors * lanes) == 0
        assert is_shared or 36 * channels * 4 * made.group <= max(machine.l2_bytes, 36 * channels * 4 * 14)


def split_kernels(each: Group, machine: Target) -> list[tuple[Offer, Kernel]]:
    """The kernels that multiply on the matrix units."""
    offers = WinogradProvider().offer(each, machine)
    assert not isinstance(offers, Refusal), offers.reason
    split = [offer for offer in offers if offer.variant == SPLIT]
    assert len(split) == 2 and all(offer.pairs for offer in split)
    kernels = [WinogradProvider().build(each, offer, machine) for offer in split]
    assert all("tdpbf16ps" in kernel.source for kernel in kernels)
    return list(zip(split, kernels, strict=True))


def split_groups() -> list[Group]:
    """Channels that are no whole steps, several images, groups and blocks that are not full."""
    g = Graph()
    y = per_channel(g, "add", start(g, (1, 96, 21, 18), 64, 4))
    residual = g.group(g.add("sigmoid", [g.with_tensor("add", y, g.tensor(1, 64, 21, 18))]))
    return [
        group((1, 64, 23, 41), 96, 4),
        group((2, 80, 19, 9), 64, 2),
        residual,
        group((1, 64, 17, 18), 128, 4, pad=reflect("constant", 2.5), begin=NONE, end=NONE),
        group((1, 112, 18, 19), 64, 4, begin=(0, 1), end=(2, 0)),
    ]


@pytest.mark.long
@pytest.mark.parametrize(("threads", "first", "last"), [(2, 2, 3), (5, 1, 2)])
def test_matrix_units_multiply_all_shapes(units, rng, threads, first, last):
    machine, builder = replace(units[0], threads=threads), units[1]
    groups = split_groups()[first:last]
    made = [(each, *k) for each in groups for k in split_kernels(each, machine)]
    library = load_kernels([kernel for *_, kernel in made], builder)
    for each, offer, kernel in made:
        check_kernel(kernel, each, offer, arrays_for(each, rng), builder, library)


def test_where_the_system_denies_matrix_units_the_vector_units_multiply(units, rng):
    """With weights and a workspace made for the units."""
    machine, builder = units
    for each in split_groups()[:1]:
        for offer, kernel in split_kernels(each, machine):
            check_kernel(denied(kernel), each, offer, arrays_for(each, rng), builder)


@pytest.mark.parametrize("tile", [2, 4])
def test_tiles_without_components_are_computed_as_the_vector_units_do(units, rng, tile):
    machine, builder = units
    each = group((1, 64, 19, 22), 64, tile)
    offers = [offer for offer in WinogradProvider().offer(each, machine) if offer.variant in ("tiles", SPLIT)]
    kernels = [WinogradProvider().build(each, offer, machine) for offer in offers]
    library = load_kernels(kernels, builder)
    for bad in (np.inf, -np.inf, np.nan, 3.4e38, 2.0**126):
        arrays = arrays_for(each, rng)
        arrays[0][0, 3, 5, 6] = arrays[0][0, 60, 18, 0] = bad
        found = {}
        for offer, kernel in zip(offers, kernels, strict=True):
            (result,) = run_kernel(kernel, each, offer, arrays, builder, library=library)
            found[offer.variant, offer.inputs[0]] = result
        check_same_specials(found)


def check_same_specials(found) -> None:
    """Compare the results of matrix units with those of vector units."""
    for (variant, layout), result in found.items():
        if variant != SPLIT:
            continue
        expected = found["tiles", layout]
        assert np.array_equal(np.isnan(result), np.isnan(expected))
        assert np.array_equal(np.isinf(result), np.isinf(expected))
        known = np.isfinite(expected) & (np.abs(expected) < 1e30)
        assert 0 < known.sum() < known.size
        np.testing.assert_allclose(result[known], expected[known], rtol=1e-4, atol=1e-4)


def test_split_products_are_as_exact_as_those_of_vector_units(units, rng):
    machine, builder = units
    if is_software(builder):
        pytest.skip("kernels of all offers take long to compile for software that stands for matrix units")
    each = group((1, 128, 20, 20), 64, 4)
    arrays = arrays_for(each, rng)
    feeds = {f"i{i}": array for i, array in enumerate(arrays)}
    exact = reference.run(each.body, feeds, exact=True)["o0"]

    def error(offer: Offer, kernel: Kernel) -> float:
        (found,) = run_kernel(kernel, each, offer, arrays, builder)
        return float(np.sqrt(np.mean((found - exact) ** 2)))

    vectors = min(
        error(offer, WinogradProvider().build(each, offer, machine))
        for offer in WinogradProvider().offer(each, machine)
        if not offer.pairs
    )
    assert all(0 < error(*made) < vectors for made in split_kernels(each, machine))


def test_matrix_units_are_offered_where_they_may_pay(target):
    wide, lesser = (replace(target, isa=isa, lanes=16) for isa in ("amx", "avx512"))

    def is_offered(each: Group, machine: Target = wide) -> bool:
        offers = WinogradProvider().offer(each, machine)
        assert not isinstance(offers, Refusal)
        return any(offer.pairs for offer in offers)

    assert is_offered(group((1, 64, 20, 20), 64, 4))
    assert not is_offered(group((1, 64, 20, 20), 64, 4), lesser)
    assert not is_offered(group((1, 48, 20, 20), 64, 4))  # few channels
    assert not is_offered(group((1, 64, 20, 20), 32, 4))
    assert not is_offered(group((1, 64, 20, 20), 80, 4))  # half a tile of the units
    assert not is_offered(group((1, 64, 16, 16), 64, 4))  # few tiles of the image


@pytest.mark.parametrize(
    ("image", "channels", "tile", "threads", "expected"),
    [
        ((1, 128, 52, 52), 128, 4, 2, SplitWinogradBlocking(4, 85)),
        ((1, 128, 52, 52), 128, 4, 1, SplitWinogradBlocking(4, 169)),
        (
            (1, 64, 104, 104),
            64,
            4,
            1,
            SplitWinogradBlocking(4, 113),
        ),  # more weights are read than points stay in the cache
        ((1, 256, 26, 26), 512, 4, 1, SplitWinogradBlocking(4, 49)),
        ((1, 256, 26, 26), 512, 4, 2, SplitWinogradBlocking(4, 49, run=18)),
        ((1, 512, 13, 13), 512, 2, 7, SplitWinogradBlocking(4, 49, run=1, parts=2)),
        ((1, 64, 20, 20), 96, 4, 1, SplitWinogradBlocking(2, 25)),
    ],
)
def test_groups_are_large_and_threads_share_many_weights(image, channels, tile, threads, expected):
    machine = Target(isa="amx", lanes=16, threads=threads, l2_bytes=2 << 20)
    each = group(image, channels, tile)
    layouts = (channels_last(4), Layout.plain(4)), (channels_last(4),)
    schedule = SplitWinograd(each, each.body.linear[0], layouts, 16)
    assert split_blocking(schedule, machine) == expected
