"""Printed kernels, many of them compiled to one library, compute the same as the primitives."""

import ctypes
import math
import re
from collections.abc import Iterable

import numpy as np
import pytest

from korch.candidate.candidate import Offer, make_layout_change
from korch.candidate.layout import layout_choices
from korch.measure.compiler import Builder
from korch.primitive import reference
from korch.primitive.ops.layout import ReshapeAttributes
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import printed_kernel
from korch.system.alignment import aligned_bytes
from korch.target import Target
from korch.testing.kernels import check_kernel, check_offers, load_kernels, run_kernel
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from korch.tile.analysis.stages import SERIAL_POINTS, stages_that_wait, streamed_outputs
from korch.tile.llvm.print import print_llvm
from korch.tile.lower import loops
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.tile.tile_groups import FAMILIES, Graph, Group, lowered, normalization, offers_of

PROVIDER = GeneratedProvider()


def moderate(array: np.ndarray) -> np.ndarray:
    """Replace finite extremes: inside of a fused multiply-add their product does not overflow."""
    if array.dtype != np.float32:
        return array
    return np.where(np.isfinite(array) & (np.abs(array) > 1e20), np.float32(1), array)


def check_specials(
    groups: Iterable[Group],
    target: Target,
    builder: Builder,
    rng: np.random.Generator,
    provider: GeneratedProvider = PROVIDER,
) -> None:
    """NaN, infinities, zeros and denormals, compared in the types of the kernel."""
    todo = [(g, o, provider.build(g, o, target)) for g in groups for o in offers_of(g, target)]
    library = load_kernels([kernel for *_, kernel in todo], builder)
    for group, offer, kernel in todo:
        inputs = [moderate(a) for a in random_arrays(rng, group.input_types, specials=True)]
        feeds = {name: a for (name, _), a in zip(group.body.inputs, inputs, strict=True)}
        with np.errstate(all="ignore"):
            expected = reference.run(group.body, feeds, exact=False)
        outputs = run_kernel(kernel, group, offer, inputs, builder, library=library)
        for (name, _), actual in zip(group.body.outputs, outputs, strict=True):
            terms = max([1, *(t.size for t in group.body.types)])
            assert_same(actual, expected[name], terms=terms, name=f"{name}, {group.text}")


@pytest.mark.parametrize("family", ["moves", "pools", "short rows", "detections", "resizes", "normalizations"])
def test_special_numbers(family, target, builder, rng):
    check_specials(FAMILIES[family](), target, builder, rng)


@pytest.mark.parametrize("kind", ["i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool"])
def test_moves_of_whole_numbers(kind, target, builder, rng):
    g = Graph()
    x = g.tensor(f"{kind}[2,3,37]")
    y = g.take(g.pad(x, (0, 1, 1), (0, 0, 2), fill=1.0), 1, (3, 0, 0, 1, 2))
    y = g.concat(2, g.transpose(y, 1, 0, 2), g.slice(g.transpose(y, 1, 0, 2), (4, 0, 39), (5, 2, 20), (-1, 1, -2)))
    check_offers(PROVIDER, [g.group(g.reshape(y, 10, 60))], target, builder, rng)


@pytest.mark.parametrize("kind", ["i64", "i32", "i8", "u8"])
def test_reductions_of_whole_numbers(kind, target, builder, rng):
    groups = []
    for op in ("sum", "max", "min", "prod"):
        for axes in ((1,), (0,)):
            g = Graph()
            groups.append(g.group(g.reduce(op, g.tensor(f"{kind}[7,70]"), *axes)))
    check_offers(PROVIDER, groups, target, builder, rng)


@pytest.mark.parametrize("divisor", [1e-40, 3e38, np.inf, np.nan, 0.0, -7.0, 5 / 255])
def test_division_by_one_number(target, builder, divisor):
    """It is rounded as a division is, though an inverse is taken: a `round` may come next."""
    g, constant = Graph(), Graph()
    x, y = g.tensor("f32[2,70]"), g.tensor("f32[2,1]")
    group = g.group(g.add("div", [x, g.wide(y, (2, 70))]))
    x = constant.tensor("f32[2,70]")
    same = constant.group(constant.add("div", [x, constant.number(x, divisor)]))
    rows = np.linspace(-1, 1, 140, dtype=np.float32).reshape(2, 70) * np.float32(abs(divisor) or 1)
    rows[:, :5] = np.inf, -np.inf, 0, -0.0, -2.5
    column = np.full((2, 1), divisor, np.float32)
    offers = [(of, offer) for of in (group, same) for offer in offers_of(of, target)]
    for of, offer in offers:
        kernel = PROVIDER.build(of, offer, target)
        with np.errstate(all="ignore"):
            (found,) = run_kernel(kernel, of, offer, [rows, column][: len(of.inputs)], builder)
            expected = rows / column
        np.testing.assert_array_equal(found, expected)
        is_zero = expected == 0
        np.testing.assert_array_equal(np.signbit(found[is_zero]), np.signbit(expected[is_zero]))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_functions_of_a_kernel_share_no_rounded_numbers(kind, target, builder, rng):
    g = Graph()
    x, y = g.tensor(f"{kind}[40,2]"), g.tensor(f"{kind}[40,1]")
    power = g.add("exp", [g.add("sub", [x, g.wide(y, (40, 2))])])
    check_offers(PROVIDER, [g.group(power, g.reduce("sum", power, 1))], target, builder, rng)


@pytest.mark.parametrize("kind", ["f32", "f64", "i32", "i64", "u8", "f16"])
def test_comparisons_choose_lanes_without_truth_values(kind, target, builder, rng):
    g = Graph()
    x, y = g.tensor(f"{kind}[3,37]"), g.tensor(f"{kind}[3,37]")
    tests = [g.add(op, [x, y]) for op in ("less", "less_equal", "equal")]
    tests += [g.add("isnan", [x])] if kind.startswith("f") else []
    group = g.group(*(g.add("where", [test, y, g.number(x, 1)]) for test in tests))
    check_specials([group], target, builder, rng)


def test_a_comparison_of_other_numbers_is_a_truth_value(target, builder, rng):
    g = Graph()
    x, y = g.tensor("i64[3,37]"), g.tensor("f32[3,37]")
    group = g.group(g.add("where", [g.add("less", [x, g.number(x, 1)]), y, g.add("neg", [y])]))
    check_specials([group], target, builder, rng)


def test_a_division_that_a_guard_leaves_out_does_not_trap(target, builder, rng):
    """A lane that reads nothing holds 0; a division by it must not end the process."""
    g = Graph()
    x, y = g.tensor("i32[5,40]"), g.tensor("i32[5,40]")
    one = g.add("max", [g.add("mul", [y, y]), g.number(y, 1)])
    whole = g.pad(g.add("div", [x, one]), (1, 3), (1, 5), fill=7)
    rest = g.pad(g.add("mod", [x, one]), (1, 3), (1, 5), fill=7)
    check_offers(PROVIDER, [g.group(whole, rest)], target, builder, rng)


@pytest.mark.parametrize("kind", ["u32", "i32"])
def test_a_divisor_with_all_bits_set(kind, target, builder, rng):
    """It is -1 or the largest unsigned number."""
    g = Graph()
    y = g.tensor("i16[5,40]")
    x, bits = g.cast(y, kind), g.cast(g.number(y, -1), kind)
    group = g.group(g.add("div", [bits, bits]), g.add("div", [x, bits]), g.add("mod", [x, bits]))
    check_offers(PROVIDER, [group], target, builder, rng)


def test_changes_of_layout(target, builder, rng):
    g = Graph()
    for text in ("f32[2,32,3,5]", "f32[1,16,2,3,4]", "i64[1,16,6,7]"):
        g.output(f"o{text}", g.add("neg", [g.tensor(text)]))
    graph = g.freeze()
    checked = []
    for _, value in graph.inputs:
        group = make_layout_change(graph, value)
        choices = layout_choices(graph.types[value], target.lanes)
        assert len(choices) == 3
        for before in choices:
            for after in choices:
                offer = Offer((before,), (after,))
                kernel = PROVIDER.build(group, offer, target)
                assert isinstance(kernel, Kernel)
                checked.append((group, offer, kernel))
    library = load_kernels([kernel for *_, kernel in checked], builder)
    for group, offer, kernel in checked:
        inputs = random_arrays(rng, group.input_types, specials=True)
        check_kernel(kernel, group, offer, inputs, builder, library)


def test_squares_behind_guards_that_never_hold_are_not_read(target, builder, rng):
    """Of three concatenated tensors, the first rows see two only: the third lies nowhere near."""
    g = Graph()
    x = g.concat(0, *(g.tensor(text) for text in ("f32[10,20]", "f32[10,20]", "f32[44,20]")))
    y = g.transpose(g.add("reshape", [x], ReshapeAttributes((4, 16, 20))), 0, 2, 1)
    group = g.group(g.add("add", [y, g.tensor("f32[4,20,16]")]))
    assert len(check_offers(PROVIDER, [group], target, builder, rng)) == 1


def test_rows_of_many_lengths_are_reduced(target, builder, rng):
    """What fills no vector is included."""
    groups = []
    for rows, length in ((48, 128), (24, 50), (12, 33), (20, 67), (4, 16), (7, 40), (1, 90)):
        for op, kind in (("sum", "f32"), ("max", "f32"), ("min", "i32"), ("prod", "f32")):
            g = Graph()
            groups.append(g.group(g.reduce(op, g.tensor(f"{kind}[40,{rows},{length}]"), 2)))
    assert len(check_offers(PROVIDER, groups, target, builder, rng)) >= len(groups)
    check_specials([group for group in groups if "reduce_max" in group.text], target, builder, rng)


def streaming(group: Group, offer: Offer, target: Target, least_bytes: int = 0) -> Kernel:
    """Return the kernel that writes outputs of this many bytes past the caches."""
    machine = Machine.of(target)
    program = lower(group.body, offer.inputs, offer.outputs, machine)
    return printed_kernel(program, print_llvm(program, group.text, target, least_bytes))


def spans() -> list[Group]:
    """Rows that begin inside of lines: of pads, transposes and slices, in tiles that end early."""
    groups = []
    for mode in ("constant", "reflect", "edge"):
        g = Graph()
        groups.append(g.group(g.pad(g.tensor("f32[9,40,30]"), (0, 1, 1), (0, 1, 2), mode)))
    for text in ("f32[197,600]", "i32[37,300]", "f32[300,90]", "f32[17,1100]", "f32[530,70]"):
        g = Graph()
        groups.append(g.group(g.transpose(g.tensor(text), 1, 0)))
    g = Graph()
    x = g.tensor("f32[3,23,60,20]")
    y = g.transpose(x, 3, 2, 1, 0)
    groups.append(g.group(g.add("mul", [y, y]), g.add("exp", [y])))
    g = Graph()
    groups.append(g.group(g.slice(g.tensor("f32[5,90,50]"), (0, 3, 1), (5, 80, 47), (1, 1, 1))))
    g = Graph()
    parts = [g.tensor("f32[40,60,7]"), g.tensor("f32[40,60,30]")]
    groups.append(g.group(g.concat(2, *parts)))
    return groups


@pytest.mark.parametrize("lanes", [16, 8, 4])
def test_rows_inside_of_lines_are_written_through_the_caches(lanes, target, rng, tmp_path, monkeypatch):
    """Others leave them, as if these were too small for any of it."""
    if target.lanes < lanes:
        pytest.skip("this machine runs no such instruction set")
    monkeypatch.setattr(loops, "LARGE_ELEMENTS", 0)
    own = Target(isa={16: "avx512", 8: "avx2", 4: "generic"}[lanes], lanes=lanes)
    groups = [*spans(), *list(FAMILIES["squares"]())[::3]]
    todo = [(g, o, streaming(g, o, own)) for g in groups for o in offers_of(g, own)]
    streamed = {"!nontemporal" in kernel.source for *_, kernel in todo}
    assert streamed == ({False, True} if lanes == 16 else {False})
    builder = Builder(own.isa, tmp_path)
    library = load_kernels([kernel for *_, kernel in todo], builder)
    for group, offer, kernel in todo:
        for specials in (False, True):
            inputs = [moderate(a) for a in random_arrays(rng, group.input_types, specials)]
            check_kernel(kernel, group, offer, inputs, builder, library)


@pytest.mark.parametrize("offset", [0, 4, 32, 60])
def test_rows_are_written_whatever_line_they_begin_in(offset, target, builder):
    """Buffers of a caller are aligned to their elements only; nothing beside them is touched."""
    for text in ("f32[6,40,46]", "f32[1,40,40]"):
        g = Graph()
        group = g.group(g.pad(g.tensor(text), (0, 1, 1), (0, 1, 1), fill=2.0))
        kernel = streaming(group, offers_of(group, target)[0], target)
        x = np.arange(math.prod(group.input_types[0].shape), dtype=np.float32)
        x = x.reshape(group.input_types[0].shape)
        expected = np.pad(x, ((0, 0), (1, 1), (1, 1)), constant_values=2.0)
        memory = aligned_bytes(expected.nbytes + 128)
        memory[:] = 0xFF
        end = 64 + offset + expected.nbytes
        pointers = (ctypes.c_void_p * 3)(x.ctypes.data, memory.ctypes.data + 64 + offset, None)
        library = load_kernels([kernel], builder)
        assert library.function(kernel.symbol + "_run")(None, pointers) == 0
        found = memory[64 + offset : end].view(np.float32).reshape(expected.shape)
        np.testing.assert_array_equal(found, expected)
        assert (memory[: 64 + offset] == 0xFF).all() and (memory[end:] == 0xFF).all()


def test_only_large_outputs_that_are_not_read_again_leave_the_caches(target):
    for text, least, is_streamed in (
        ("f32[64,128]", 0, True),
        ("f32[64,128]", 1 << 20, False),
        ("i8[64,128]", 0, False),
        ("f32[64,9]", 0, False),
    ):
        g = Graph()
        columns = 112 if "128" in text else 8
        group = g.group(g.slice(g.tensor(text), (0, 0), (64, columns), (1, 1)))
        source = streaming(group, offers_of(group, target)[0], target, least).source
        assert ("!nontemporal" in source) == is_streamed, text
    g = Graph()
    e = g.add("exp", [g.tensor("f32[64,128]")])
    y = g.add("div", [e, g.wide(g.reduce("sum", e, 1), (64, 128))])
    group = g.group(e, y)
    program = lowered(group, offers_of(group, target)[0], target)
    assert streamed_outputs(program, 0) == {"o1"}


def test_threads_have_equally_much_to_do(target):
    """Tiles are cut so that the busiest thread has hardly more than its share."""
    machine = Machine(16, 2)
    for shape in ((102400,), (1600, 64), (128, 768)):
        g, perm = Graph(), tuple(reversed(range(len(shape))))
        group = g.group(g.add("neg", [g.transpose(g.tensor(f"f32{list(shape)}"), *perm)]))
        offer = offers_of(group, target)[0]
        (stage,) = lower(group.body, offer.inputs, offer.outputs, machine).stages
        points = math.prod(axis.extent for axis in stage.passes[0].axes)
        assert points * -(-stage.tasks // 2) <= 1.05 * math.prod(shape) / 2, shape


def test_large_groups_run_in_parallel_and_small_ones_do_not(target, builder, rng):
    groups = []
    for n in (SERIAL_POINTS // 4, 4 * SERIAL_POINTS):
        g = Graph()
        groups.append(g.group(g.add("neg", [g.tensor(f"f32[{n}]")])))
    checked = check_offers(PROVIDER, groups, target, builder, rng)
    assert ["@korch_region(" in kernel.source for *_, kernel in checked] == [False, True]


def test_a_source_is_deterministic_and_begins_with_its_group(target):
    group = normalization("f32[1,16,4,6]", (2, 3), (1,), "grow")
    for offer in offers_of(group, target):
        program = lowered(group, offer, target)
        first = print_llvm(program, group.text, target)
        again = lowered(group, offer, target)
        assert first == print_llvm(again, group.text, target)
        symbol, source = first.symbol, first.source
        assert f"; graph({group.text[6:].splitlines()[0]}" in source[:300]
        named = re.findall(r"^define (?!internal).*?@(\w+)\(", source, re.M)
        assert named and all(name.startswith(symbol) for name in named)


def test_offers(target):
    def layouts(group):
        return [
            " ".join((*map(str, o.inputs), "->", *map(str, o.outputs), o.variant)).strip()
            for o in offers_of(group, target)
        ]

    g = Graph()
    wide = g.tensor(f"f32[1,{2 * target.lanes},6,5]")
    lone = g.group(g.add("exp", [wide]))
    blocked = f"aBcd{target.lanes}b"
    orders = ("abcd", "acdb", blocked)
    assert layouts(lone) == [f"{a} -> {b}" for a in orders for b in orders]
    g = Graph()
    x, y = (g.tensor(f"f32[1,{2 * target.lanes},6,5]") for _ in range(2))
    assert layouts(g.group(g.add("add", [x, y]))) == [f"{a} {a} -> {a}" for a in orders]
    g = Graph()
    assert layouts(g.group(g.add("exp", [g.tensor("f32[6,5]")]))) == ["ab -> ab"]


def test_a_pad_around_what_a_layout_makes_of_an_empty_tensor(target, builder, rng):
    g = Graph()
    turned = g.reshape(g.tensor("f32[3,0,2]"), 0, 6)
    padded = g.pad(turned, (1, 0), (2, 1), fill=7.0)
    check_offers(PROVIDER, [g.group(g.add("neg", [padded]))], target, builder, rng)


def test_threads_wait_only_for_what_they_read(target):
    """Parts of a concatenation do not wait for each other, and nothing waits behind the last."""
    g = Graph()
    x = g.tensor("f32[64,40]")
    wide = g.transpose(g.tensor("f32[80,64]"), 1, 0)
    total = g.wide(g.reduce("sum", x, 0, 1), (64, 40))
    group = g.group(g.concat(1, wide, g.add("mul", [x, total])))
    program = lowered(group, offers_of(group, target)[0], target)
    assert stages_that_wait(program) == [False, True, False]  # the third reads
