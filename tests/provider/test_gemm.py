"""Generated matrix products, compiled, run and compared with the reference in float64."""

from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last
from korch.primitive.ops.layout import ReshapeAttributes, SliceAttributes, TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.provider.cache_room import SHARES
from korch.provider.gemm import GemmProvider
from korch.provider.gemm.blocking import VectorBlocking, have_conflicts
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.contraction import contraction_of
from korch.schedule.products import ProductBlocking
from korch.schedule.split_products import SplitProducts
from korch.target import Target
from korch.testing.kernels import check_offers, load_kernels, offers_of, run_kernel
from korch.testing.tolerance import assert_same
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Contract, Registers
from korch.tile.ir.text import format_program
from korch.tile.lower.staging import Machine
from tests.provider.linear_groups import Graph
from tests.support.in_turn import OnUnits
from tests.support.parse_tiles import parse_program


def transposed(g: Graph, value: int, *perm: int) -> int:
    return g.add("transpose", [value], TransposeAttributes(perm))


def reshaped(g: Graph, value: int, *shape: int) -> int:
    return g.add("reshape", [value], ReshapeAttributes(shape))


def product(a: tuple[int, ...], b: tuple[int, ...], *, constant: bool = True) -> Group:
    g = Graph()
    return g.group(g.add("matmul", [g.tensor(*a), g.weights(*b) if constant else g.tensor(*b)]))


def test_shapes(target, builder, rng):
    n = target.lanes
    groups = [
        *(product((m, 20), (20, 2 * n)) for m in (1, 2, 13, 14, 15, 29, 128, 131)),
        *(product((7, 5), (5, columns)) for columns in (1, n - 1, n, n + 3, 3 * n, 4 * n + 1)),
        product((3, 1), (1, n)),
        product((2, 3, 9, 8), (1, 1, 8, 40)),
        product((1, 60, 300), (1, 300, 5 * n)),
        product((2, 9, 8), (2, 8, 2 * n), constant=False),
        product((2, 9, 8), (2, 8, 1), constant=False),
        product((3, 1, 30, 7), (1, 2, 7, 4 * n), constant=False),
    ]
    check_offers(GemmProvider(), groups, target, builder, rng)


def test_operands_are_packed_where_they_would_drive_each_other_out_of_the_cache(target, builder, rng):
    wide = 32 * target.lanes * target.threads
    groups = [
        product((29, 1024), (1024, wide)),
        product((29, 1024), (1024, wide + 3)),
        product((300, 600), (600, wide)),
        product((600, 8), (8, wide + 1)),
        product((30, 8), (8, 1024), constant=False),
        product((30, 8), (8, 1023), constant=False),
        product((2, 30, 8), (2, 8, 3 * target.lanes + 1), constant=False),
        product((1, 8), (8, 3 * target.lanes + 1), constant=False),
    ]
    check_offers(GemmProvider(), groups, target, builder, rng)


def test_rows_that_share_a_set_of_the_first_cache_are_copied(target, builder, rng):
    machine = replace(target, l1_bytes=2 * 4096)
    groups = [
        product((9, 1024), (1024, 2 * target.lanes + 1)),
        product((1024, 1024), (1024, 3 * target.lanes)),
        product((3, 5, 1024), (3, 1024, 5 * target.lanes), constant=False),
    ]
    for _, _, kernel in offers_of(GemmProvider(), groups, machine, most=1):
        assert {"pa", "ca"} & {buffer.name for buffer in kernel.program.buffers}
    check_offers(GemmProvider(), groups, machine, builder, rng)


def test_a_strip_of_columns_has_few_rows_where_more_would_share_a_set_of_the_first_cache(target, builder, rng):
    machine = replace(target, isa="avx512", lanes=16, l1_bytes=32 << 10)
    for columns in (1, 9, 32):
        assert VectorBlocking.of(1, 256, columns, 1024, machine).rows == 7
        assert VectorBlocking.of(1, 256, columns, 1040, machine).rows > 7
    assert VectorBlocking.of(1, 256, 64, 1024, machine).vectors == 4
    assert VectorBlocking.of(1, 256, 64, 1040, machine).vectors == 2
    small = replace(target, l1_bytes=4 * 4096)
    groups = [product((29, 1024), (1024, columns)) for columns in (1, 3, target.lanes, 2 * target.lanes)]
    for _, _, kernel in offers_of(GemmProvider(), groups, small, most=1):
        assert not {"pa", "ca"} & {buffer.name for buffer in kernel.program.buffers}
    check_offers(GemmProvider(), groups, small, builder, rng)


@pytest.mark.parametrize(
    ("rows", "terms", "kilobytes", "expected"),
    [(8, 1024, 32, True), (7, 1024, 32, False), (13, 1024, 48, True), (15, 512, 32, False), (16, 512, 32, True)],
)
def test_lines_have_conflicts_if_they_take_all_ways_of_a_set(target, rows, terms, kilobytes, expected):
    assert have_conflicts(rows, terms, replace(target, l1_bytes=kilobytes << 10)) is expected


def test_images_are_read_and_written_channels_last(target, builder, rng):
    n = target.lanes
    g = Graph()
    y = linear(g, g.tensor(1, 30, 24), 2 * n)
    out = g.group(reshaped(g, transposed(g, y, 0, 2, 1), 1, 2 * n, 5, 6))
    h = Graph()
    tokens = transposed(h, reshaped(h, h.tensor(1, 20, 5, 6), 1, 20, 30), 0, 2, 1)
    into = h.group(linear(h, tokens, n + 3))
    k = Graph()
    x = k.tensor(1, 20, 5, 6)
    y = linear(k, transposed(k, reshaped(k, x, 1, 20, 30), 0, 2, 1), 20)
    back = reshaped(k, transposed(k, y, 0, 2, 1), 1, 20, 5, 6)
    both = k.group(k.add("add", [back, x]))
    found = check_offers(GemmProvider(), [out, into, both], target, builder, rng)
    last = channels_last(4)
    layouts = dict.fromkeys((o.inputs[0] == last, o.outputs[0] == last) for _, o, _ in found)
    assert layouts.keys() == {(False, True), (False, False), (True, False), (True, True)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_travels(target, builder, rng, bad):
    group = product((17, 9), (9, 40))
    (offer,) = GemmProvider().offer(group, target)
    a, b = (rng.standard_normal(t.shape).astype(np.float32) for t in group.input_types)
    a[3, 2] = b[4, 7] = bad
    kernel = GemmProvider().build(group, offer, target)
    (found,) = run_kernel(kernel, group, offer, [a, b], builder)
    with np.errstate(invalid="ignore"):
        expected = a.astype(np.float64) @ b.astype(np.float64)
    assert_same(found, expected, terms=9)


def test_few_rows_are_split_by_columns(target):
    made = VectorBlocking.of(1, 4, 1024, 64, target)
    assert made.parts == target.threads and made.block == 4
    assert VectorBlocking.of(1, 4096, 64, 64, target).parts == 1


def test_vector_units_beside_matrix_units_have_all_their_registers(target):
    with_units, without = (replace(target, isa=isa, lanes=16) for isa in ("amx", "avx512"))
    for sizes in ((1, 14, 1024, 64), (1, 512, 64, 256), (2, 100, 100, 100)):
        assert VectorBlocking.of(*sizes, with_units) == VectorBlocking.of(*sizes, without)


def test_long_rows_are_stored_from_end_to_end(target, builder, rng):
    """Where few terms make each result, and the right operand stays in the second cache."""
    machine = replace(target, l2_bytes=2 << 20)
    made = VectorBlocking.of(1, 40, 4096, 32, machine)
    assert made.block == made.rows < 40
    assert VectorBlocking.of(1, 40, 4096, 128, machine).block == 40  # many terms
    assert VectorBlocking.of(1, 40, 1024, 32, machine).block == 40  # short rows
    assert VectorBlocking.of(1, 40, 1 << 16, 64, machine).block == 40  # a large operand
    shapes = ((40, 7), (7, 2100)), ((23, 20), (20, 2048)), ((30, 9), (9, 2049))
    groups = [product(a, b, constant=is_one) for a, b in shapes for is_one in (True, False)]
    check_offers(GemmProvider(), groups, machine, builder, rng)


def test_rows_are_blocked_where_they_leave_the_second_cache(target):
    n = 64 * target.lanes * target.threads
    assert VectorBlocking.of(1, 256, n, 4096, target).block == 256
    made = VectorBlocking.of(1, 1500, 4 * n, target.l2_bytes // 4 // 300, target)
    assert made.block < 1500 and made.block % made.rows == 0


def test_threads_share_blocks_of_rows_only_if_they_get_about_as_many_rows_each(target, builder, rng):
    def outermost(m: int, threads: int) -> str:
        wide = Target(isa="avx512", lanes=16, l1_bytes=48 << 10, l2_bytes=2 << 20, threads=threads)
        group = product((m, 64), (64, 4096), constant=False)
        (offer,) = GemmProvider().offer(group, wide)
        return GemmProvider().build(group, offer, wide).program.stages[-1].grid[0].name

    assert [outermost(m, 2) for m in (64, 96, 48 * 15, 48 * 16 - 1)] == ["gn", "gm", "gn", "gm"]
    assert outermost(64, 1) == "gn" and outermost(96, 1) == "gm"
    groups = [product((64, 64), (64, 4096), constant=False), product((2, 50, 33), (2, 33, 1030), constant=False)]
    check_offers(GemmProvider(), groups, replace(target, threads=2), builder, rng)


def test_strips_are_wide_where_lines_of_the_right_operand_crowd_each_other_out(target):
    n = 64 * 1024 + 256  # four lines apart, but for multiples of a page
    wide = replace(target, isa="avx512", lanes=16, l1_bytes=48 << 10)
    assert VectorBlocking.of(1, 32, n, 64, wide, n).vectors == 4
    assert VectorBlocking.of(1, 32, n, 32, wide, n).vectors == 2  # few lines
    assert VectorBlocking.of(1, 32, n, 64, wide, n + 16).vectors == 2  # spread over all sets
    assert VectorBlocking.of(1, 32, n, 64, wide).vectors == 2  # packed
    assert VectorBlocking.of(1, 32, 1 << 16, 64, wide, 1 << 16).vectors == 2  # packed, for all lines do
    assert VectorBlocking.of(1, 32, n, 64, replace(target, isa="avx2", lanes=8), n).vectors == 2


def test_strips_are_wide_where_they_stay_in_the_first_cache(target):
    wide = replace(target, isa="avx512", lanes=16, l1_bytes=48 << 10, l2_bytes=2 << 20)
    assert VectorBlocking.of(1, 16384, 128, 32, wide).vectors == 4
    assert VectorBlocking.of(5, 1024, 256, 32, wide, 256).vectors == 4
    assert VectorBlocking.of(1, 16384, 128, 256, wide).vectors == 2  # many terms
    assert VectorBlocking.of(1, 16384, 96, 32, wide).vectors == 2  # half a strip would be empty
    assert VectorBlocking.of(1, 16384, 128, 32, replace(wide, isa="avx2", lanes=8)).vectors == 2
    made = VectorBlocking.of(1, 256, 4096, 64, wide)  # stored after few terms
    assert (made.vectors, made.block) == (4, 8 * made.rows)
    assert VectorBlocking.of(1, 256, 4096, 16, wide).vectors == 2
    assert VectorBlocking.of(1, 32, 4096, 64, wide).vectors == 2


def registers_of(kernel: Kernel | Refusal) -> list[Registers]:
    """Return how the contractions of a kernel are computed in registers."""
    assert isinstance(kernel, Kernel) and kernel.program is not None
    steps = [step for stage in kernel.program.stages for _, step in stage.leaves]
    found = [step.registers for step in steps if isinstance(step, Contract) and step.registers is not None]
    assert found
    return found


def test_lines_of_large_results_are_fetched(target, builder, rng):
    """Those at the edge, whose addresses lie beyond the result, are not."""
    tiny = replace(target, isa="avx512" if target.isa == "amx" else target.isa, l2_bytes=1 << 12)
    groups = [
        product(a, b, constant=is_one)
        for is_one in (True, False)
        for a, b in (((9, 40), (40, 1100)), ((20, 32), (32, 1024)), ((3, 32), (32, 1025)))
    ]
    for group, offer, _ in check_offers(GemmProvider(), groups, tiny, builder, rng):
        kernel = GemmProvider().build(group, offer, tiny)
        assert all(registers.fetches_out for registers in registers_of(kernel))
    for each in (product((9, 31), (31, 1100)), product((40, 40), (40, 1000))):  # few; short rows
        (offer, *_) = GemmProvider().offer(each, tiny)
        kernel = GemmProvider().build(each, offer, tiny)
        assert not any(registers.fetches_out for registers in registers_of(kernel))


def test_wide_strips_agree(target, builder, rng):
    n = 64 * target.lanes * target.threads + 256
    groups = [product((m, 64), (64, n), constant=False) for m in (7, 30)]
    for group, offer, _ in check_offers(GemmProvider(), groups, target, builder, rng):
        if not offer.variant and target.registers >= 32:
            (registers, *_) = registers_of(GemmProvider().build(group, offer, target))
            assert (registers.rows, registers.vectors) == (6, 4)


def linear(g: Graph, x: int, channels: int) -> int:
    """x W + b."""
    type_ = g.type(x)
    ones = (1,) * (type_.rank - 2)
    y = g.add("matmul", [x, g.weights(*ones, type_.shape[-1], channels)])
    return g.with_tensor("add", y, g.weights(channels))


def test_elementwise_steps_and_moves_after_it(target, builder, rng):
    n = target.lanes
    g = Graph()
    y = linear(g, g.tensor(1, 30, 24), 4 * n)
    gelu = g.with_number("add", g.add("erf", [g.with_number("mul", y, 0.7)]), 1.0)
    one = g.group(g.with_number("mul", g.add("mul", [y, gelu]), 0.5))
    h = Graph()
    width = max(16, 2 * n)  # of a head: whole vectors of every instruction set
    heads = reshaped(h, linear(h, h.tensor(1, 30, 24), 2 * width), 1, 30, 2, width)
    two = h.group(transposed(h, heads, 0, 2, 1, 3))
    k = Graph()
    y = linear(k, k.tensor(2, 9, 16), 2 * n)
    y = k.with_tensor("add", y, k.tensor(2, 9, 2 * n))
    y = k.with_tensor("mul", y, k.tensor(9, 1))
    three = k.group(y, k.add("sigmoid", [reshaped(k, y, 18, 2 * n)]))
    check_offers(GemmProvider(), [one, two, three], target, builder, rng)


def attention_products(heads: int, tokens: int, width: int) -> list[Group]:
    """Scores of heads that lie in one row, with a scale and a mask; and their way back."""
    g = Graph()
    q, k = (
        transposed(g, reshaped(g, g.tensor(1, tokens, heads * width), 1, tokens, heads, width), *p)
        for p in ((0, 2, 1, 3), (0, 2, 3, 1))
    )
    scores = g.add("matmul", [q, k])
    scaled = g.with_number("div", scores, 8.0)
    first = g.group(g.with_tensor("add", scaled, g.tensor(1, 1, tokens, tokens)))
    h = Graph()
    v = reshaped(h, h.tensor(1, tokens, heads * width), 1, tokens, heads, width)
    mixed = h.add("matmul", [h.tensor(1, heads, tokens, tokens), transposed(h, v, 0, 2, 1, 3)])
    back = reshaped(h, transposed(h, mixed, 0, 2, 1, 3), 1, tokens, heads * width)
    return [first, h.group(back)]


def test_heads_are_read_and_written_in_place(target, builder, rng):
    n = target.lanes
    groups = [*attention_products(3, 20, 2 * n), *attention_products(2, 4 * n, 5)]
    groups += attention_products(1, 3 * n + 2, n + 3)
    check_offers(GemmProvider(), groups, target, builder, rng)
    g = Graph()
    x = g.add("slice", [g.tensor(40, 3 * n)], SliceAttributes((4, n), (20, 2 * n), (1, 1)))
    sliced = g.group(g.add("matmul", [x, g.weights(2 * n, 2 * n)]))
    check_offers(GemmProvider(), [sliced], target, builder, rng)


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        ("it is not one of matmul", lambda g, y: g.add("exp", [g.tensor(3, 4)])),
        ("reduce_sum is not fused into a product", lambda g, y: g.add("reduce_sum", [y], ReduceAttributes((1,)))),
        ("the elements are not floats of at most 32 bits", lambda g, y: g.add("less", [y, y])),
        (
            "an operand is computed in the group",
            lambda g, y: g.add("matmul", [g.add("exp", [g.tensor(3, 4)]), g.weights(4, 16)]),
        ),
        ("a tensor is empty", lambda g, y: g.add("matmul", [g.tensor(0, 4), g.weights(4, 16)])),
    ],
)
def test_refusals(target, expected, make):
    g = Graph()
    is_first = expected.startswith(("reduce", "the elements"))
    y = g.add("matmul", [g.tensor(5, 8), g.weights(8, 16)]) if is_first else -1
    assert GemmProvider().offer(g.group(make(g, y)), target) == Refusal(expected)


@pytest.mark.parametrize(
    ("expected", "make"),
    [
        ("the columns of an output are not adjacent in memory", lambda g, y: transposed(g, y, 1, 0)),
        (
            "operands have the results of the product in different orders",
            lambda g, y: g.add("add", [y, transposed(g, y, 1, 0)]),
        ),
        (
            "an output is not computed from the product element by element",
            lambda g, y: g.add("slice", [y], SliceAttributes((0, 0), (4, 16), (1, 1))),
        ),
    ],
)
def test_refusals_of_a_kernel(target, expected, make):
    g = Graph()
    group = g.group(make(g, g.add("matmul", [g.tensor(16, 8), g.weights(8, 16)])))
    assert GemmProvider().offer(group, target) == Refusal(expected)


def test_large_results_are_offered(target):
    g = Graph()
    y = g.add("matmul", [g.tensor(4096, 8), g.weights(8, 4096)])
    assert not isinstance(GemmProvider().offer(g.group(g.with_number("max", y, 0.0)), target), Refusal)


def test_what_is_computed_beside_the_product(target, builder, rng):
    g = Graph()
    y = g.add("matmul", [g.tensor(5, 8), g.weights(8, 33)])
    beside = g.add("exp", [g.with_number("mul", g.tensor(5, 33), 0.5)])
    moved = g.add("reshape", [g.add("mul", [y, beside])], ReshapeAttributes((5, 3, 11)))
    swapped = g.add("transpose", [moved], TransposeAttributes((1, 0, 2)))
    check_offers(GemmProvider(), [g.group(g.add("tanh", [moved])), g.group(y, moved)], target, builder, rng)
    assert GemmProvider().offer(g.group(swapped), target) == Refusal(
        "the columns of an output are not adjacent in memory"
    )


def test_operands_whose_terms_or_columns_are_apart(target, builder, rng):
    g = Graph()
    x = transposed(g, g.tensor(8, 20), 1, 0)
    first = g.group(g.add("matmul", [x, g.weights(8, 16)]))
    h = Graph()
    taken = h.add("slice", [h.tensor(16, 40)], SliceAttributes((0, 0), (8, 20), (2, 2)))
    second = h.group(h.add("matmul", [h.tensor(5, 8), taken]))
    check_offers(GemmProvider(), [first, second], target, builder, rng)


@pytest.mark.parametrize(
    ("batch", "m", "n", "terms", "is_kept"),
    [
        (1, 128, 768, 3072, "rows in chunks"),
        (1, 128, 768, 64, "rows"),
        (1, 4096, 64, 64, "columns"),
        (1, 4096, 512, 64, "columns in groups"),
        (1, 3000, 512, 2048, "rows in chunks"),
        (2, 400, 32, 40, "columns"),
    ],
)
def test_what_stays_in_the_cache(batch, m, n, terms, is_kept):
    target = Target(isa="amx", lanes=16, threads=2, l2_bytes=256 << 10)
    found = VectorBlocking.split((batch, m, n, terms), (3, 3), target)
    kept = "columns" if found.group else "rows"
    kept += " in chunks" if found.chunk < terms else ""
    kept += " in groups" if 0 < found.group * 32 < n else ""
    assert kept == is_kept
    assert found.block == m or found.block % 32 == 0
    assert found.chunk == terms or found.chunk % 32 == 0


@pytest.mark.parametrize(("terms", "chunk"), [(768, 768), (384, 384), (3072, 320)])
def test_rows_stay_with_all_terms_where_a_right_operand_in_components_can_be_read_again(terms, chunk):
    target = Target(isa="amx", lanes=16, threads=2, l2_bytes=2 << 20)
    found = VectorBlocking.split((1, 512, 768, terms), (3, 3), target, is_given=True)
    assert found.chunk == chunk
    assert (found.block < 512) == (chunk == terms)
    assert found.block % 32 == 0


@pytest.mark.parametrize(("m", "n", "parts"), [(128, 768, 2), (256, 169, 1), (300, 300, 2)])
def test_threads_share_the_larger_operand_out(m, n, parts):
    target = Target(isa="amx", lanes=16, threads=2, l2_bytes=2 << 20)
    found = VectorBlocking.split((1, m, n, 512), (3, 3), target)
    assert found.parts == parts
    assert found.block == (m if parts == 2 else -(-m // 64) * 32)


@pytest.fixture(params=[True, False], ids=["kept as components", "split in each run"])
def is_kept(request, monkeypatch):
    """Whether constant operands are kept as components; both are offered where components don't stay in the cache."""
    monkeypatch.setitem(SHARES, "constant", 0.0)
    return request.param


def test_constant_operands_come_in_components_or_are_split_in_each_run_where_components_do_not_stay_in_the_cache(units):
    for n, constant, kept in ((300, True, {True}), (400, True, {True, False}), (300, False, {False})):
        offers = OnUnits(GemmProvider()).offer(product((100, 140), (140, n), constant=constant), units[0])
        assert {offer.inputs[1].is_split for offer in offers} == kept and len(offers) == len(kept)


def test_matrix_units_multiply_all_shapes(units, rng):
    groups = [
        *(product((m, 40), (40, n)) for m, n in ((17, 70), (33, 17), (131, 61))),
        *(product((60, terms), (terms, 64)) for terms in (16, 31, 65)),
        product((100, 1100), (1100, 96)),  # chunks of terms
        product((520, 128), (128, 320)),  # groups of columns
        product((2, 40, 50), (2, 50, 70), constant=False),
        product((3, 1, 40, 50), (1, 2, 50, 48), constant=False),
        product((200, 300), (300, 100), constant=False),  # rows are shared out
    ]
    assert check_offers(OnUnits(GemmProvider()), groups, *units, rng)


def test_operands_are_packed_before_they_are_split(units, rng):
    """Where neighbours are not adjacent, or columns lie a page apart."""
    g = Graph()
    turned = g.group(g.add("matmul", [transposed(g, g.tensor(36, 40), 1, 0), transposed(g, g.tensor(50, 36), 1, 0)]))
    groups = [turned, product((40, 17), (17, 1024), constant=False)]
    for _, _, kernel in check_offers(OnUnits(GemmProvider()), groups, *units, rng):
        assert "pb" in {buffer.name for buffer in kernel.program.buffers}


def test_constant_operands_may_be_split_in_each_run(units, rng, monkeypatch):
    monkeypatch.setitem(SHARES, "constant", 0.0)
    groups = [product(*shapes) for shapes in (((49, 33), (33, 70)), ((500, 40), (40, 64)))]
    checked = check_offers(OnUnits(GemmProvider()), groups, *units, rng)
    kept = {(group.key, any(layout.is_split for layout in offer.inputs)) for group, offer, _ in checked}
    assert kept == {(group.key, is_kept) for group in groups for is_kept in (True, False)}


def split_kernel(units, group: Group, is_kept: bool):
    """Return a function that runs a group on the matrix units, whose constant operand is kept as components or not."""
    target, builder = units
    (offer,) = (offer for offer in OnUnits(GemmProvider()).offer(group, target) if offer.inputs[1].is_split == is_kept)
    kernel = GemmProvider().build(group, offer, target)
    assert not isinstance(kernel, Refusal)
    return lambda *inputs: run_kernel(kernel, group, offer, inputs, builder)[0]


@pytest.mark.parametrize(("m", "terms"), [(40, 70), (500, 70), (40, 1100)], ids=["rows", "columns", "chunks"])
def test_what_has_no_components_is_computed_by_the_vector_units(is_kept, units, rng, m, terms):
    group = product((m, terms), (terms, 65))
    run = split_kernel(units, group, is_kept)
    for bad in (np.inf, -np.inf, np.nan, 3.4e38):
        a, b = (rng.uniform(-0.4, 0.4, t.shape).astype(np.float32) for t in group.input_types)
        a[3, 5], a[m - 1, 69], b[60, 64] = bad, bad, bad
        b[5, 2] = 0.0
        with np.errstate(all="ignore"):
            expected = (a.astype(np.float64) @ b).astype(np.float32)
        found = run(a, b)
        assert np.array_equal(np.isnan(found), np.isnan(expected))
        assert np.array_equal(np.isinf(found), np.isinf(expected))
        known = np.isfinite(expected) & (np.abs(expected) < 1e30)
        np.testing.assert_allclose(found[known], expected[known], rtol=1e-4, atol=1e-4)


def test_split_products_are_as_exact_as_float32(is_kept, units, rng):
    """The error of matrix units is at most that of a chain of float32 multiply-adds."""
    group = product((64, 700), (700, 64))
    run = split_kernel(units, group, is_kept)
    for scale in (1e-30, 1.0, 1e15):
        a, b = (rng.standard_normal(t.shape, np.float32) for t in group.input_types)
        a *= np.float32(scale)
        exact = a.astype(np.float64) @ b

        def error(found, exact=exact, scale=scale):
            return float(np.sqrt(np.mean((found - exact) ** 2))) / scale

        chain = np.zeros(exact.shape, np.float32)
        for k in range(700):
            chain += a[:, k : k + 1] * b[k : k + 1]
        assert 0 < error(run(a, b)) < 0.7 * error(chain)


def test_programs_for_matrix_units_agree_with_their_reference(units, rng):
    """Also of sizes for which they are not offered, cut along all axes."""
    target, builder = units
    made = []
    for m, terms, n, rows_pass in ((33, 1, 1, False), (1, 40, 33, True)):
        group = product((m, terms), (terms, n), constant=False)
        layouts = ((Layout.plain(2),) * 2, (Layout.plain(2),))
        root = group.body.linear[0]
        schedule = SplitProducts(group, root, layouts, contraction_of(group, root, last=False), Machine(16, 2))
        program = schedule.program(ProductBlocking(32, 32, 32, (False, False), rows_pass=rows_pass))
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        made.append((group, Offer(*layouts), kernel_of(program, group, Offer(*layouts), target)))
    library = load_kernels([kernel for _, _, kernel in made], builder)
    for group, offer, kernel in made:
        a, b = (rng.standard_normal(t.shape, np.float32) for t in group.input_types)
        (expected,) = run_program(kernel.program, [a.reshape(-1), b.reshape(-1)])
        np.testing.assert_allclose(expected, (a @ b).reshape(-1), rtol=1e-5, atol=1e-5)
        (found,) = run_kernel(kernel, group, offer, [a, b], builder, library=library)
        np.testing.assert_allclose(found.reshape(-1), expected, rtol=1e-5, atol=1e-5)
