"""Generated attention, compiled, run and compared with the reference in float64."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Refusal
from korch.candidate.enumerate import enumerate_groups
from korch.options import Options
from korch.primitive import reference
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.attention import AttentionProvider, provider
from korch.schedule.attention import rows_of_block
from korch.schedule.contraction import NotFusedError
from korch.system.deadline import Deadline
from korch.testing.kernels import check_offers, load_kernels, offers_of, run_kernel
from korch.tile.analysis.registers import usual_registers
from tests.provider.linear_groups import Graph
from tests.support.in_turn import InTurn, OnUnits


def moved(g: Graph, value: int, *perm: int) -> int:
    return g.add("transpose", [value], TransposeAttributes(perm))


def shaped(g: Graph, value: int, *shape: int) -> int:
    return g.add("reshape", [value], ReshapeAttributes(shape))


def softmax(g: Graph, x: int) -> int:
    shape = g.type(x).shape
    axes, wide = ReduceAttributes((len(shape) - 1,)), BroadcastAttributes(shape)
    top = g.add("broadcast", [g.add("reduce_max", [x], axes)], wide)
    power = g.add("exp", [g.add("sub", [x, top])])
    total = g.add("broadcast", [g.add("reduce_sum", [power], axes)], wide)
    return g.add("div", [power, total])


def guarded(g: Graph, x: int, fill: float = 0.0, test: int | None = None) -> int:
    y = softmax(g, x)
    other = g.add("broadcast", [g.constant(np.float32([[fill]]))], BroadcastAttributes(g.type(y).shape))
    return g.add("where", [g.add("isnan", [y if test is None else test]), other, y])


def plain(batch: tuple[int, ...], m: int, n: int, d: int, e: int, *, swap: bool = False) -> Group:
    g = Graph()
    q = g.tensor(*batch, m, d)
    k = g.tensor(*batch, n, d) if swap else g.tensor(*batch, d, n)
    k = moved(g, k, *range(len(batch)), len(batch) + 1, len(batch)) if swap else k
    v = g.tensor(*batch, n, e)
    return g.group(g.add("matmul", [softmax(g, g.add("matmul", [q, k])), v]))


def heads(g: Graph, x: int, count: int) -> int:
    """[b, n, h d] as [b, h, n, d]."""
    b, n, width = g.type(x).shape
    return moved(g, shaped(g, x, b, n, count, width // count), 0, 2, 1, 3)


def whole(
    g: Graph, mask: tuple[int, ...] = (), rows: int = 30, keys: int = 21, weights: Callable[[Graph, int], int] = softmax
) -> int:
    """Attention of 2 heads with a scale, a mask and a residual."""
    q, k, v = (g.tensor(1, n, 32) for n in (rows, keys, keys))
    s = g.add("matmul", [heads(g, q, 2), moved(g, heads(g, k, 2), 0, 1, 3, 2)])
    s = g.with_number("mul", s, 0.25)
    if mask:
        s = g.with_tensor("add", s, g.tensor(*mask))
    y = g.add("matmul", [weights(g, s), heads(g, v, 2)])
    return g.add("add", [shaped(g, moved(g, y, 0, 2, 1, 3), 1, rows, 32), q])


def test_sizes(target, builder, rng):
    n = target.lanes
    groups = [
        plain((1,), 16, 2 * n, 8, n),
        plain((2, 3), 37, 3 * n, 20, 2 * n, swap=True),
        plain((1, 1), 64, 5, 4, 3),
        plain((3,), 9, n + 1, n, 3 * n + 2, swap=True),
        plain((1,), 29, 4 * n - 1, 5, n - 1),
        plain((2,), 8, 1, 3, n),
    ]
    check_offers(AttentionProvider(), groups, target, builder, rng)


def shared(heads: int, kept: int, m: int, n: int, d: int) -> Group:
    """Attention whose heads share keys and values in groups."""
    g = Graph()
    q = g.tensor(heads, m, d)
    k, v = (
        shaped(g, g.add("broadcast", [x], BroadcastAttributes((kept, heads // kept, n, d))), heads, n, d)
        for x in (g.tensor(kept, 1, n, d), g.tensor(kept, 1, n, d))
    )
    return g.group(g.add("matmul", [softmax(g, g.add("matmul", [q, moved(g, k, 0, 2, 1)])), v]))


def test_few_rows(target, builder, rng, monkeypatch):
    """Keys are read where they lie, by several tasks for a row; heads that share keys are rows of one block."""
    monkeypatch.setattr(provider, "SPLIT_KEYS", (2 * target.lanes,))
    n = 7 * target.lanes + 3
    groups = [plain((3,), 1, n, 8, 5, swap=True), shared(6, 2, 1, n, 5), shared(4, 1, 3, n, 7)]
    found = check_offers(AttentionProvider(), groups, target, builder, rng)
    kinds = {(offer.variant.split()[0], offer.variant.endswith(" split")) for _, offer, _ in found}
    assert kinds == {("read", False), ("read", True), ("stage", False)}
    rows = [offer.variant.split()[1].split("x")[0] for group, offer, _ in found if group is groups[1]]
    assert set(rows) == {"3"}


def stored(g: Graph, heads: int, kept: int, m: int, n: int, d: int) -> int:
    """Attention whose keys and values are bytes, with a scale for each row of a group of heads."""
    q, rows = g.tensor(heads, m, d), []
    for name in "kv":
        q8, scale = g.input(name, ValueType((kept, n, d), DType.I8)), g.tensor(kept, n, 1)
        wide = g.add("broadcast", [scale], BroadcastAttributes((kept, n, d)))
        x = shaped(g, g.add("mul", [g.add("cast", [q8], CastAttributes("f32")), wide]), kept, 1, n, d)
        x = g.add("broadcast", [x], BroadcastAttributes((kept, heads // kept, n, d)))
        rows.append(shaped(g, x, heads, n, d))
    k, v = rows
    return g.add("matmul", [softmax(g, g.add("matmul", [q, moved(g, k, 0, 2, 1)])), v])


def test_keys_and_values_that_are_bytes_are_read_where_they_lie(target, builder, rng, monkeypatch):
    monkeypatch.setattr(provider, "SPLIT_KEYS", (2 * target.lanes,))
    n, groups = 7 * target.lanes + 3, []
    for sizes in ((6, 2, 1, n, 2 * target.lanes), (4, 2, 3, n, 7), (2, 2, 1, 2, target.lanes)):
        g = Graph()
        groups.append(g.group(stored(g, *sizes)))
    found = check_offers(AttentionProvider(), groups, target, builder, rng)
    kinds = {(offer.variant.split()[0], offer.variant.endswith(" split")) for _, offer, _ in found}
    assert {("read", False), ("read", True)} <= kinds


def test_a_group_begins_at_the_bytes(target):
    g = Graph()
    g.output("y", stored(g, 6, 2, 1, 40, 16))
    graph = g.freeze()
    groups, _ = enumerate_groups(graph, Options(), shapes=AttentionProvider.group_shapes)
    whole = [group for group in groups if len(group.primitives) == len(graph.primitives)]
    assert [len(group.inputs) for group in whole] == [5]
    assert not isinstance(AttentionProvider().offer(whole[0], target), Refusal)


@pytest.mark.parametrize("blocks", [4, 5.5, 11])
def test_rows_of_heads_are_shared_out(target, builder, rng, blocks):
    own = replace(target, threads=2)
    group = plain((1, 3), int(blocks * usual_registers(target.lanes).rows), 9, 4, 5)
    found = check_offers(AttentionProvider(), [group], own, builder, rng)
    assert {offer.variant.split()[0] for _, offer, _ in found} == {"task"}


def test_chunks_of_rows_are_equal_but_for_one_row():
    for rows, chunks, most in itertools.product(range(1, 120), (1, 2, 3), (1, 6, 24)):
        try:
            block = rows_of_block(rows, chunks, most)
        except NotFusedError:
            assert chunks > 1
            continue
        left = rows % (block * chunks)
        last = -(-left // chunks)
        sizes = [min(last, left - last * chunk) for chunk in range(chunks)]
        assert 0 < block <= most
        assert block * chunks <= rows
        assert sum(sizes) == left
        assert not left or min(sizes) > 0
    with pytest.raises(NotFusedError, match="too few rows for the chunks"):
        rows_of_block(2, 3, 6)


def test_many_keys_are_looked_at_in_blocks(target, builder, rng, monkeypatch):
    monkeypatch.setattr(provider, "MANY_KEYS", 40)
    monkeypatch.setattr(provider, "KEYS", 2 * target.lanes)
    n = target.lanes
    groups = [
        plain((2,), 19, 100, 8, n + 3),
        plain((1,), 30, 4 * n + 1, 5, 2 * n, swap=True),
        plain((1,), 9, 6 * n, 4, 3),
    ]
    check_offers(AttentionProvider(), groups, target, builder, rng)
    g = Graph()
    masked = g.group(whole(g, (1, 1, 30, 100), keys=100))
    arrays = [rng.standard_normal(t.shape).astype(np.float32) for t in masked.input_types]
    mask = arrays[next(i for i, t in enumerate(masked.input_types) if t.rank == 4)]
    mask[..., : 3 * n] = -np.inf  # whole blocks, first and last
    mask[..., 3, 5 * n :] = -np.inf
    mask[..., 4, :] = -np.inf
    mask[..., 5, 70] = np.nan
    feeds = {f"i{i}": a for i, a in enumerate(arrays)}
    with np.errstate(invalid="ignore"):
        expected = reference.run(masked.body, feeds, exact=True)["o0"]
    built = list(offers_of(AttentionProvider(), [masked], target))
    library = load_kernels([kernel for *_, kernel in built], builder)
    for _, offer, kernel in built:
        (found,) = run_kernel(kernel, masked, offer, arrays, builder, library=library)
        assert np.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert any(offer.variant.endswith(f"x{2 * n}") for _, offer, _ in built)
    assert np.isnan(expected[0, 4:6]).all() and np.isfinite(expected[0, :4]).all()


@pytest.mark.parametrize(("threads", "mask"), [(1, (30, 21)), (2, ()), (2, (1, 1, 1, 21)), (3, (1, 1, 30, 21))])
def test_heads_scale_mask_and_residual(target, builder, rng, mask, threads):
    g = Graph()
    group = g.group(whole(g, mask))
    check_offers(AttentionProvider(), [group], replace(target, threads=threads), builder, rng)


def test_what_is_not_finite_travels(target, builder, rng):
    g = Graph()
    group = g.group(whole(g, (1, 1, 1, 21)))
    arrays = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
    mask = next(i for i, t in enumerate(group.input_types) if t.rank == 4)
    built = [
        (offer, AttentionProvider().build(group, offer, target)) for offer in AttentionProvider().offer(group, target)
    ]
    library = load_kernels([kernel for _, kernel in built], builder)
    for bad in (np.nan, np.inf, -np.inf):
        arrays[mask][..., 3:] = bad
        feeds = {f"i{i}": a for i, a in enumerate(arrays)}
        with np.errstate(invalid="ignore"):
            expected = reference.run(group.body, feeds, exact=True)["o0"]
        for offer, kernel in built:
            (found,) = run_kernel(kernel, group, offer, arrays, builder, library=library)
            assert np.isnan(expected).any() == (bad != -np.inf)
            assert np.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_weights_that_are_not_numbers_become_zero(target, builder, rng, monkeypatch, is_blocked):
    """As PyTorch exports it: a row that a mask leaves nothing of gives 0."""
    if is_blocked:
        monkeypatch.setattr(provider, "MANY_KEYS", 40)
        monkeypatch.setattr(provider, "KEYS", 2 * target.lanes)
    g = Graph()
    group = g.group(whole(g, (1, 1, 30, 100), keys=100, weights=guarded))
    arrays = [rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types]
    mask = arrays[next(i for i, t in enumerate(group.input_types) if t.rank == 4)]
    q = next(a for a in arrays if a.shape == (1, 30, 32))
    v = [a for a in arrays if a.shape == (1, 100, 32)][-1]
    mask[..., 1, :] = -np.inf
    mask[..., 2, :99] = -np.inf
    mask[..., 3, :50] = -np.inf
    mask[..., 4, 3], mask[..., 5, 98] = np.nan, np.nan
    mask[..., 6, 70], mask[..., 7, 2] = np.inf, np.inf
    mask[..., 8, :] = np.nan
    offers = AttentionProvider().offer(group, target)
    kernels = [AttentionProvider().build(group, offer, target) for offer in offers]
    library = load_kernels(kernels, builder)
    for value in (1.0, np.inf, np.nan):  # 0 times what is not finite is no number
        v[0, 97, 5] = value
        feeds = {f"i{i}": a for i, a in enumerate(arrays)}
        with np.errstate(invalid="ignore"):
            expected = reference.run(group.body, feeds, exact=True)["o0"]
        for offer, kernel in zip(offers, kernels, strict=True):
            (found,) = run_kernel(kernel, group, offer, arrays, builder, library=library)
            assert np.isnan(expected).sum() == (0 if value == 1.0 else np.isnan(found).sum())
            assert np.allclose(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
            if value == 1.0:
                nothing = [1, 4, 5, 6, 7, 8]
                assert np.array_equal(found[0, nothing], q[0, nothing])


def other_test(g: Graph, x: int) -> int:
    return guarded(g, x, test=x)


def other_fill(g: Graph, x: int) -> int:
    return guarded(g, x, fill=1.0)


@pytest.mark.parametrize("weights", [other_test, other_fill])
def test_other_choices_between_weights_are_no_guard(target, weights):
    g = Graph()
    group = g.group(whole(g, weights=weights))
    expected = Refusal("no softmax is the left operand of the second product")
    assert AttentionProvider().offer(group, target) == expected


def test_attention_is_a_group_even_if_there_is_no_time_for_others(target):
    g = Graph()
    g.output("y", whole(g, (1, 1, 30, 21)))
    graph = g.freeze()
    groups, report = enumerate_groups(graph, Options(), deadline=Deadline(0), shapes=AttentionProvider.group_shapes)
    (group,) = (group for group in groups if sum(p.op == "matmul" for p in group.body.primitives) == 2)
    assert (group.primitives, group.outputs) in report.needed
    assert not isinstance(AttentionProvider().offer(group, target), Refusal)
    assert {str(type_) for type_ in group.input_types} >= {"f32[1,21,32]"}  # keys as they are stored


def test_keys_of_16_bits_are_widened_in_the_group_if_there_is_no_time_for_others(target):
    graph = halved(1, 21, 16, 16, "bf16", is_wide=True).body
    groups, _ = enumerate_groups(graph, Options(), deadline=Deadline(0), shapes=AttentionProvider.group_shapes)
    (group,) = (group for group in groups if sum(p.op == "matmul" for p in group.body.primitives) == 2)
    assert not isinstance(AttentionProvider().offer(group, target), Refusal)
    assert [str(type_) for type_ in group.input_types if type_.shape[-2] > 1] == ["bf16[2,21,16]"] * 2


@pytest.mark.parametrize("weights", [softmax, guarded])
def test_all_of_it_is_one_group_of_a_graph(target, weights):
    g = Graph()
    g.output("y", whole(g, (1, 1, 30, 21), weights=weights))
    graph = g.freeze()
    groups, _ = enumerate_groups(graph, Options(), shapes=AttentionProvider.group_shapes)
    linear = [sum(p.op == "matmul" for p in group.body.primitives) for group in groups]
    both = [group for group, count in zip(groups, linear, strict=True) if count == 2]
    taken = [not isinstance(AttentionProvider().offer(group, target), Refusal) for group in both]
    assert any(taken)
    assert any(len(group.primitives) == len(graph.primitives) for group in both)


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        ("it is not two matrix products", lambda g: softmax(g, g.tensor(4, 4))),
        (
            "no softmax is the left operand of the second product",
            lambda g: g.add("matmul", [g.add("matmul", [g.tensor(9, 4), g.tensor(4, 4)]), g.tensor(4, 4)]),
        ),
        ("a tensor is empty", lambda g: whole(g, rows=0)),
    ],
)
def test_refusals(target, expected, make):
    g = Graph()
    assert AttentionProvider().offer(g.group(make(g)), target) == Refusal(expected)


def test_keys_that_fill_the_memory_are_refused(target, monkeypatch):
    target = replace(target, isa="avx512" if target.isa == "amx" else target.isa)
    monkeypatch.setattr(provider, "MOST_BYTES", 4)
    g = Graph()
    found = AttentionProvider().offer(g.group(whole(g)), target)
    assert found == Refusal("there are too many keys to pack")


def halved(m: int, n: int, d: int, e: int, dtype: str, is_wide: bool) -> Group:
    """Attention in 16-bit floats; perhaps with the softmax in float32."""
    g, half = Graph(), CastAttributes(dtype)
    q, k, v = (
        g.input(name, ValueType.parse(f"{dtype}[2,{a},{b}]")) for name, a, b in (("q", m, d), ("k", n, d), ("v", n, e))
    )
    q, k, v = (g.add("cast", [x], CastAttributes("f32")) for x in (q, moved(g, k, 0, 2, 1), v))
    scores = g.add("cast", [g.add("matmul", [q, k])], half)
    if is_wide:
        weights = g.add("cast", [softmax(g, g.add("cast", [scores], CastAttributes("f32")))], half)
    else:
        weights = softmax(g, scores)
    weights = g.add("cast", [weights], CastAttributes("f32"))
    return g.group(g.add("cast", [g.add("matmul", [weights, v])], half))


def test_matrix_units_attend(units, rng):
    groups = [
        plain((2,), 33, 40, 17, 33),
        plain((1, 3), 70, 16, 16, 16, swap=True),
        plain((3,), 17, 65, 36, 18, swap=True),
        plain((1,), 129, 31, 33, 65),
        shared(4, 2, 20, 33, 16),
        halved(37, 50, 20, 32, "bf16", is_wide=True),
        halved(37, 50, 20, 32, "f16", is_wide=True),
        halved(18, 33, 32, 17, "bf16", is_wide=False),
    ]
    for weights in (softmax, guarded):
        g = Graph()
        groups.append(g.group(whole(g, (1, 1, 37, 44), 37, 44, weights)))
    checked = check_offers(InTurn(OnUnits(AttentionProvider())), groups, *units, rng)
    assert {offer.pairs for _, offer, _ in checked} == {1, 4, 6}


def test_matrix_units_multiply_what_is_not_finite(units, rng):
    """A score that is infinite or no number, and values that are, go where the reference has them."""
    group, (target, builder) = plain((1,), 35, 40, 20, 24), units
    for offer in OnUnits(AttentionProvider()).offer(group, target):
        kernel = AttentionProvider().build(group, offer, target)
        library = load_kernels([kernel], builder)
        numbers = [(k, number) for k in range(3) for number in (np.inf, -np.inf, np.nan)] + [(2, 3e38)]
        for (operand, number), place in itertools.product(numbers, ((0, 3, 5), (0, 18, 17))):
            arrays = [rng.standard_normal(type_.shape).astype(np.float32) for type_ in group.input_types]
            arrays[operand][place] = number
            with np.errstate(invalid="ignore"):
                expected = reference.run(group.body, {f"i{i}": a for i, a in enumerate(arrays)}, exact=True)["o0"]
            (found,) = run_kernel(kernel, group, offer, arrays, builder, library=library)
            assert not np.array_equal(np.isfinite(expected), np.ones_like(expected)) or number == 3e38
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * (1e38 if number == 3e38 else 1))
