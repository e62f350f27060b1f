"""Generated convolutions, compiled, run and compared with the reference."""

from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last
from korch.measure.compiler import Builder
from korch.primitive import reference
from korch.primitive.ops.layout import PadAttributes, TakeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.provider.conv import ConvProvider
from korch.provider.conv.matrix_units import split_of
from korch.provider.conv.rows import lines_of_task
from korch.provider.conv.vectors import plans_of
from korch.provider.provider import SPLIT
from korch.provider.tile_kernel import kernel_of
from korch.schedule.split_windows import SplitWindowBlocking, SplitWindows
from korch.target import Target
from korch.testing.kernels import check_offers, load_kernels, run_kernel
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Contract
from korch.tile.ir.text import format_program
from tests.provider.linear_groups import Graph
from tests.support.in_turn import InTurn, OnUnits
from tests.support.matrix_units import is_software
from tests.support.parse_tiles import parse_program


def conv(
    g: Graph,
    x: int,
    channels: int,
    window: int | tuple[int, int] = 1,
    *,
    stride: int = 1,
    pads: tuple[int, int, int, int] | None = None,
    dilation: int = 1,
) -> int:
    """A dense convolution; `pads` are top, left, bottom, right (the same size if None)."""
    return _conv(g, x, channels, g.type(x).shape[1], 1, window, stride, pads, dilation)


def depthwise(
    g: Graph,
    x: int,
    window: int | tuple[int, int] = 3,
    *,
    stride: int = 1,
    pads: tuple[int, int, int, int] | None = None,
    dilation: int = 1,
) -> int:
    channels = g.type(x).shape[1]
    return _conv(g, x, channels, 1, channels, window, stride, pads, dilation)


def _conv(g, x, channels, depth, groups, window, stride, pads, dilation) -> int:
    rows, columns = (window, window) if isinstance(window, int) else window
    if pads is None:
        pads = (rows // 2 * dilation, columns // 2 * dilation) * 2
    w = g.weights(channels, depth, rows, columns)
    steps = ((stride,) * 2, pads[:2], pads[2:], (dilation,) * 2)
    return g.add("conv", [x, w], ConvAttributes(*steps, groups))


def bias(g: Graph, y: int) -> int:
    return g.with_tensor("add", y, g.weights(1, g.type(y).shape[1], 1, 1))


def silu(g: Graph, y: int) -> int:
    y = bias(g, y)
    return g.add("mul", [y, g.add("sigmoid", [y])])


def check(groups: list[Group], target, builder, rng) -> int:
    for each in groups:
        offers = ConvProvider().offer(each, target)
        assert not isinstance(offers, Refusal), (offers, each.text)
    return len(check_offers(ConvProvider(), groups, target, builder, rng))


def one(shape: tuple[int, ...], make) -> Group:
    g = Graph()
    return g.group(make(g, g.tensor(*shape)))


def test_one_convolution_of_each_kind(target, builder, rng):
    n = target.lanes
    groups = [
        one((1, n, 7, 9), lambda g, x: conv(g, x, 2 * n)),
        one((2, 2 * n, 5, 31), lambda g, x: conv(g, x, 3 * n, 3)),
        one((1, n + 3, 6, 6), lambda g, x: conv(g, x, 5, 3, stride=2)),
        one((1, 3, 9, 17), lambda g, x: conv(g, x, 2 * n, 3, stride=2, pads=(0, 1, 2, 0))),
        one((1, n, 9, 10), lambda g, x: conv(g, x, n, (1, 4), dilation=2, pads=(0, 3, 0, 5))),
        one((1, n, 1, 1), lambda g, x: conv(g, x, n, 3)),
        one((3, 2 * n, 8, 40), lambda g, x: silu(g, depthwise(g, x))),
        one((1, n, 11, 12), lambda g, x: depthwise(g, x, 5, stride=2)),
        one((1, 2 * n, 9, 9), lambda g, x: depthwise(g, x, 3, pads=(0, 0, 0, 0), dilation=2)),
        one((1, n, 4, 20), lambda g, x: depthwise(g, x, (1, 7), pads=(3, 6, 0, 1))),
    ]
    assert check(groups, target, builder, rng) >= 2 * len(groups)


def test_few_channels_are_read_as_they_lie(target, builder, rng):
    n = target.lanes
    groups = [
        one((1, 3, 9, 37), lambda g, x: silu(g, conv(g, x, n, 3, stride=2))),
        one((2, 3, 12, 11), lambda g, x: conv(g, x, 2 * n, 3)),
        one((1, 2, 16, 33), lambda g, x: conv(g, x, n, 7, stride=4)),
        one((1, n - 1, 8, 9), lambda g, x: conv(g, x, n, 3, dilation=2)),
        one((1, 1, 6, 70), lambda g, x: conv(g, x, 3, (2, 5), pads=(0, 0, 0, 0))),
        one((1, 3, 8, 8), lambda g, x: conv(g, x, n, 3, pads=(0, 0, 0, 0), stride=3)),
    ]
    check(groups, target, builder, rng)
    for each in groups:
        offers = ConvProvider().offer(each, target)
        assert any(offer.inputs[0].is_plain for offer in offers)


def test_images_beyond_the_cache(target, builder, rng):
    n = target.lanes
    groups = [
        one((1, n, 20, 19), lambda g, x: silu(g, depthwise(g, x, stride=2))),
        one((2, 3, 21, 40), lambda g, x: conv(g, x, n, 3, stride=2)),
        one((1, 2 * n, 18, 17), lambda g, x: conv(g, x, 4)),
        one((1, n, 40, 40), lambda g, x: conv(g, x, 8 * n)),
    ]
    check(groups, replace(target, l2_bytes=512 * n), builder, rng)


def test_pixels_are_read_where_they_lie_and_fetched_if_the_last_task_has_fewer_rows(target, builder, rng):
    n = target.lanes
    small = replace(target, l2_bytes=2048 * n)
    groups = [
        one((1, 2 * n, 17, 18), lambda g, x: conv(g, x, 3 * n)),
        one((2, 2 * n, 11, 40), lambda g, x: silu(g, conv(g, x, n))),
        one((1, n, 23, 19), lambda g, x: conv(g, x, n + 1, stride=2)),
    ]
    check(groups, small, builder, rng)
    are_ragged = set()
    for each in groups:
        for plan in plans_of(each, small):
            if plan.offer.variant != "windows rows" or plan.offer.inputs[0].is_plain:
                continue
            program = plan.kernel(each, small).program
            (contract,) = (step for step in program.stages[0].steps if isinstance(step, Contract))
            assert contract.a.buffer == "i0"
            assert contract.registers.fetches_a == (each is not groups[2])
            assert parse_program(format_program(program)) == program
            are_ragged.add(any(axis.ragged for axis in contract.axes))
    assert True in are_ragged


def test_parts_of_channels_read_moved_images(target, builder, rng):
    n = target.lanes
    pad = PadAttributes((0, 0, 2, 1), (0, 0, 1, 2), "reflect", 0.0)
    each = one((1, 2 * n, 6, 7), lambda g, x: depthwise(g, g.add("pad", [x], pad)))
    offers = ConvProvider().offer(each, replace(target, threads=2))
    assert {offer.variant for offer in offers} == {"windows rows", "windows channels"}
    check_offers(ConvProvider(), [each], replace(target, threads=2), builder, rng)


def test_pads_and_takes_are_read_in_place(target, builder, rng):
    n = target.lanes

    def padded(mode: str, value: float = 0.0):
        attributes = PadAttributes((0, 0, 2, 1), (0, 0, 1, 2), mode, value)
        return lambda g, x: conv(g, g.add("pad", [x], attributes), n, 3, pads=(1, 0, 0, 1))

    def doubled(g: Graph, x: int) -> int:
        for axis in (2, 3):
            indices = tuple(i // 2 for i in range(2 * g.type(x).shape[axis]))
            x = g.add("take", [x], TakeAttributes(axis, indices))
        return conv(g, x, n)

    shape = (1, n, 6, 7)
    groups = [
        one(shape, make)
        for make in (padded("reflect"), padded("edge"), padded("constant"), padded("constant", 1.5), doubled)
    ]
    check(groups, target, builder, rng)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_rows_or_channels(target, builder, rng, threads):
    few = replace(target, threads=threads)
    n = target.lanes
    each = one((1, 6 * n, 5, 6), depthwise)
    offers = ConvProvider().offer(each, few)
    ways = {"windows rows", "windows channels"}
    assert {offer.variant for offer in offers} == (ways if threads > 1 else {"windows rows"})
    check_offers(ConvProvider(), [each], few, builder, rng)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_lost_and_stays_in_its_window(target, builder, rng, bad):
    g = Graph()
    each = g.group(g.with_number("max", depthwise(g, g.tensor(1, 16, 9, 9)), 0.0))
    arrays = [rng.standard_normal(t.shape).astype(np.float32) for t in each.input_types]
    arrays[0][0, 3, 4, 4] = bad
    feeds = {f"i{i}": a for i, a in enumerate(arrays)}
    expected = reference.run(each.body, feeds, exact=True)["o0"]
    for offer in ConvProvider().offer(each, target):
        kernel = ConvProvider().build(each, offer, target)
        (found,) = run_kernel(kernel, each, offer, arrays, builder)
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        ("it is not one of conv", lambda g, x: g.add("neg", [x])),
        ("it is not one of conv", lambda g, x: conv(g, conv(g, x, 16), 16)),
        (
            "reduce_sum is not fused into a product",
            lambda g, x: g.add("reduce_sum", [depthwise(g, x)], ReduceAttributes((2, 3))),
        ),
    ],
)
def test_refusals(target, expected, make):
    found = ConvProvider().offer(one((1, 16, 6, 6), make), target)
    assert found == Refusal(expected)


def test_layouts(target):
    each = one((1, 32, 6, 6), lambda g, x: conv(g, x, 3, 3))
    offers = ConvProvider().offer(each, target)
    assert {(o.inputs[0], o.outputs[0]) for o in offers} == {(channels_last(4),) * 2, (Layout.plain(4),) * 2}
    assert all(isinstance(o, Offer) for o in offers)


@pytest.mark.long
def test_matrix_units_convolve_all_shapes(units, rng):
    n = 16
    pad = PadAttributes((0, 0, 2, 1), (0, 0, 1, 2), "reflect", 0.0)
    filled = PadAttributes((0, 0, 2, 1), (0, 0, 1, 2), "constant", 1.5)

    def doubled(g: Graph, x: int) -> int:
        for axis in (2, 3):
            indices = tuple(i // 2 for i in range(2 * g.type(x).shape[axis]))
            x = g.add("take", [x], TakeAttributes(axis, indices))
        return conv(g, x, 2 * n, 3)

    groups = [
        one((1, 4 * n - 4, 14, 15), lambda g, x: silu(g, conv(g, x, 2 * n - 1, 3, dilation=2))),
        one((2, 4 * n, 9, 21), lambda g, x: silu(g, conv(g, x, 6 * n - 6, 3, stride=2))),
        one((1, 4 * n - 8, 17, 18), lambda g, x: conv(g, x, 60, (1, 4), pads=(0, 3, 0, 5))),
        one((1, 2 * n, 29, 30), lambda g, x: conv(g, x, 30, (5, 3), pads=(0, 1, 2, 0), stride=3)),
    ]
    if not is_software(units[1]):  # for which kernels take long to compile
        groups += [
            one((1, 32 * n, 7, 7), lambda g, x: conv(g, x, 17 * n)),
            one((1, 2 * n, 9, 40), lambda g, x: conv(g, x, 4 * n, 2, pads=(0, 0, 0, 0), stride=2)),
            one((1, 2 * n, 9, 9), lambda g, x: conv(g, x, 2 * n, 3, pads=(2, 2, 2, 2), dilation=3)),
            one((1, 16 * n, 12, 12), lambda g, x: conv(g, x, 6 * n, 3, stride=2, pads=(3, 3, 3, 3))),
            one((1, 2 * n, 16, 17), lambda g, x: conv(g, x, 4 * n, 3, stride=2, dilation=2)),
            one((1, 2 * n, 6, 7), lambda g, x: conv(g, g.add("pad", [x], pad), 2 * n, 3)),
            one((1, 2 * n, 16, 7), lambda g, x: conv(g, g.add("pad", [x], filled), 2 * n, 3, stride=2)),
            one((1, 2 * n, 6, 7), doubled),
        ]
    groups.append(one((1, 18 * n, 7, 30), lambda g, x: conv(g, x, 16 * n, stride=2)))
    found = check_offers(InTurn(OnUnits(ConvProvider())), groups, *units, rng)
    assert len({offer.inputs[0] for _, offer, _ in found}) == 2


@pytest.mark.parametrize("rows_pass", [True, False])
def test_convolutions_on_matrix_units_agree_with_their_reference(units, rng, rows_pass):
    """Also of sizes for which they are not offered, cut along all axes."""
    target, builder = units
    last, made = channels_last(4), []
    for shape, size, options in (
        ((2, 5, 4, 5), (2, 3), {"stride": 2}),
        ((1, 33, 5, 1), (3, 1), {"pads": (1, 0, 1, 0)}),
    ):
        group = one(shape, lambda g, x, size=size, options=options: conv(g, x, 35, size, **options))
        root, plain = group.body.linear[0], Layout.plain(4)
        windows = SplitWindows(group, root, ((last.normalized(shape), plain), (last,)))
        program = windows.program(SplitWindowBlocking(2, 32, 2 if not rows_pass else 1, 1, rows_pass))
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        strips = Layout((0, 2, 3, 1), ((0, 32),))
        offer = Offer((last.normalized(shape), strips), (last,))
        made.append((group, offer, kernel_of(program, group, offer, target)))
    library = load_kernels([kernel for _, _, kernel in made], builder)
    for group, offer, kernel in made:
        arrays = [rng.standard_normal(t.shape, np.float32) for t in group.input_types]
        packed = [layout.pack(array).reshape(-1) for layout, array in zip(offer.inputs, arrays, strict=True)]
        (expected,) = run_program(kernel.program, packed)
        (found,) = run_kernel(kernel, group, offer, arrays, builder, library=library)
        np.testing.assert_allclose(last.pack(found).reshape(-1), expected, rtol=1e-4, atol=1e-4)
        exact = reference.run(group.body, {f"i{i}": a for i, a in enumerate(arrays)}, exact=True)["o0"]
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("channels", "size", "is_kept"),
    [
        ((64, 64), 56, "strips by channels"),
        ((32, 32), 104, "strips by rows"),
        ((128, 128), 56, "strips by channels"),
        ((256, 512), 13, "rows"),
    ],
)
def test_what_stays_in_the_cache(channels, size, is_kept):
    target = Target(isa="amx", lanes=16, threads=2, l2_bytes=2 << 20)
    group = one((1, channels[0], size, size), lambda g, x: conv(g, x, channels[1], 3))
    plain = Layout.plain(4)
    windows = SplitWindows(group, group.body.linear[0], ((plain, plain), (plain,)))
    found = split_of(windows, target)
    kept = f"strips by {'rows' if found.rows < size else 'channels'}" if found.rows_pass else "rows"
    assert kept == is_kept
    assert windows.across.pitch == size + 1


def test_matrix_units_are_offered_where_they_may_pay(target):
    wide, lesser = (replace(target, isa=isa, lanes=16) for isa in ("amx", "avx512"))

    def variants(shape: tuple[int, ...], make, machine: Target = wide) -> set[tuple[str, int]]:
        offers = ConvProvider().offer(one(shape, make), machine)
        assert not isinstance(offers, Refusal)
        return {(offer.variant, offer.pairs) for offer in offers}

    assert (SPLIT, 6) in variants((1, 64, 20, 20), lambda g, x: conv(g, x, 64, 3))
    for shape, make in (
        ((1, 64, 5, 5), lambda g, x: conv(g, x, 64, 3)),
        ((1, 64, 20, 20), lambda g, x: conv(g, x, 16, 3)),
        ((1, 16, 20, 20), lambda g, x: conv(g, x, 64, 3)),
        ((1, 128, 52, 52), lambda g, x: conv(g, x, 512)),
        ((1, 64, 20, 20), depthwise),
    ):
        assert SPLIT not in {variant for variant, _ in variants(shape, make)}
    assert not any(s for _, s in variants((1, 64, 20, 20), lambda g, x: conv(g, x, 64, 3), lesser))


def check_what_has_no_components(each: Group, arrays, machine: Target, builder: Builder):
    """Compare split kernels with the reference, and return the results of both."""
    feeds = {f"i{i}": a for i, a in enumerate(arrays)}
    with np.errstate(all="ignore"):
        expected = reference.run(each.body, feeds, exact=True)["o0"].astype(np.float32)
    results = []
    for offer in OnUnits(ConvProvider()).offer(each, machine):
        kernel = ConvProvider().build(each, offer, machine)
        assert not isinstance(kernel, Refusal)
        (found,) = run_kernel(kernel, each, offer, arrays, builder)
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        known = np.isfinite(expected) & (np.abs(expected) < 1e30)
        assert 0 < known.sum() < known.size
        np.testing.assert_allclose(found[known], expected[known], rtol=1e-4, atol=1e-4)
        results.append((found, expected))
    return results


@pytest.mark.parametrize("shape", [(1, 64, 20, 21), (1, 192, 11, 9)])
def test_what_has_no_components_is_computed_by_the_vector_units(units, rng, shape):
    each = one(shape, lambda g, x: conv(g, x, 90, 3))
    for bad in (np.inf, -np.inf, np.nan, 3.4e38):
        arrays = [rng.uniform(-0.4, 0.4, t.shape).astype(np.float32) for t in each.input_types]
        arrays[0][0, 3, 4, 4] = arrays[0][0, 60, shape[2] - 1, 0] = bad
        arrays[1][89, 5, 1, 1] = bad
        arrays[1][2, 3] = 0.0
        for found, expected in check_what_has_no_components(each, arrays, *units):
            assert np.array_equal(np.isinf(found), np.isinf(expected))


def test_pads_are_told_apart_where_sums_are_computed_again(units, rng):
    """A convolution's own zeros stand beside rows of another number that a pad wrote."""
    small, builder = units
    filled = PadAttributes((0, 0, 2, 1), (0, 0, 1, 2), "constant", 1.5)
    each = one((1, 32, 12, 9), lambda g, x: conv(g, g.add("pad", [x], filled), 64, 3))
    arrays = [rng.uniform(-0.4, 0.4, t.shape).astype(np.float32) for t in each.input_types]
    arrays[1][[3, 40], 5, 1, 1] = np.nan  # in both strips: all their sums are computed again
    feeds = {f"i{i}": a for i, a in enumerate(arrays)}
    expected = reference.run(each.body, feeds, exact=True)["o0"]
    known = np.delete(np.arange(64), [3, 40])
    for offer in OnUnits(ConvProvider()).offer(each, small):
        kernel = ConvProvider().build(each, offer, small)
        assert not isinstance(kernel, Refusal)
        (found,) = run_kernel(kernel, each, offer, arrays, builder)
        assert np.isnan(found[:, [3, 40]]).all()
        np.testing.assert_allclose(found[:, known], expected[:, known], rtol=1e-4, atol=1e-4)


def test_split_convolutions_are_as_exact_as_float32(units, rng):
    """The error of matrix units is at most that of a chain of float32 multiply-adds."""
    small, builder = units
    each = one((1, 80, 9, 9), lambda g, x: conv(g, x, 64, 3))
    x, w = (rng.standard_normal(t.shape, np.float32) for t in each.input_types)
    exact = reference.run(each.body, {"i0": x, "i1": w}, exact=True)["o0"]

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.mean((found - exact) ** 2)))

    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    chain = np.zeros(exact.shape, np.float32)
    for i, j, c in np.ndindex(3, 3, 80):
        chain += padded[:, c : c + 1, i : i + 9, j : j + 9] * w[None, :, c, i, j, None, None]
    for offer in OnUnits(ConvProvider()).offer(each, small):
        kernel = ConvProvider().build(each, offer, small)
        assert not isinstance(kernel, Refusal)
        (found,) = run_kernel(kernel, each, offer, [x, w], builder)
        assert 0 < error(found) < 0.7 * error(chain)


def test_tasks_have_as_many_lines_as_fit_and_all_threads_have_some():
    assert lines_of_task(56, 9, tasks=1, threads=2) == 7  # 8 tasks
    assert lines_of_task(56, 9, tasks=2, threads=2) == 8  # 7 tasks of each image
    assert lines_of_task(56, 100, tasks=2, threads=4) == 28
    assert lines_of_task(5, 0, tasks=1, threads=16) == 1  # not one line fits, and there are more threads than lines
    assert lines_of_task(5, 5, tasks=3, threads=1) == 5
