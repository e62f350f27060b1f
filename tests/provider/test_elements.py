"""Elements that indices choose along any axis: compiled, and compared with NumPy."""

import numpy as np
import pytest

from korch.candidate.candidate import Refusal
from korch.candidate.layout import Layout
from korch.provider.elements import elements_program, gather_program, in_layout
from korch.provider.generated import GeneratedProvider
from korch.provider.opaque import attributes_of, node_of
from korch.provider.provider import Kernel
from korch.testing.kernels import check_offers, load_kernels, offers_of, run_kernel
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.text import format_program
from korch.tile.lower.staging import Machine
from tests.provider.test_onnxruntime import opaque_group
from tests.support.parse_tiles import parse_program

PROVIDER = GeneratedProvider()
MACHINE = Machine(16, 2)


def group_of(shape, index, axis=0, dtype="f32", integer="i64"):
    """Return the group of one operator."""
    data, places, out = (f"{d}[{','.join(map(str, s))}]" for d, s in ((dtype, shape), (integer, index), (dtype, index)))
    return opaque_group("GatherElements", [data, places], [out], axis=axis)


GROUPS = [
    group_of((64, 128), (64, 128), 1),
    group_of((64, 128), (64, 128), integer="i32"),
    group_of((7,), (3,)),
    group_of((1, 1), (1, 1), -1),
    group_of((5, 300), (5, 2), -1),
    group_of((3, 5, 4, 6), (2, 5, 9, 3), 2),
    group_of((2, 1030), (2, 1030), 1, "f64"),
    group_of((700, 2), (700, 2), 1),
    *(group_of((9, 4), (9, 3), 1, d) for d in ("f16", "bf16", "i64", "i32", "i8", "u8", "bool")),
]


def rows_of(shape, index, axis=0, dtype="f32", integer="i64"):
    """Return the group of a `Gather`."""
    out = (*shape[:axis], *index, *shape[axis + 1 :])
    data, places, out = (f"{d}[{','.join(map(str, s))}]" for d, s in ((dtype, shape), (integer, index), (dtype, out)))
    return opaque_group("Gather", [data, places], [out], axis=axis)


ROWS = [
    rows_of((50, 64), (1, 1)),
    rows_of((50, 2100), (2, 3), integer="i32"),
    rows_of((5, 9, 3), (4,), 1),
    rows_of((5, 70), (37,), 1),
    rows_of((9,), ()),
    rows_of((3, 1, 6), (2, 2), 1, "i64"),
    *(rows_of((9, 20), (3,), 0, d) for d in ("f16", "bf16", "u8", "bool")),
]


def data_of(group, rng):
    """Return elements, of which some are NaN, and indices from both ends of the axis."""
    x, index = group.input_types
    axis = elements_axis(group)
    data = rng.integers(0, 2, x.shape) if x.dtype.value == "bool" else rng.integers(0, 100, x.shape)
    data = data.astype(x.dtype.numpy)
    if x.dtype.is_float:
        data[rng.random(x.shape) < 0.1] = np.nan
    size = x.shape[axis]
    return data, rng.integers(-size, size, index.shape).astype(index.dtype.numpy)


def elements_axis(group):
    """Return the axis of the operator."""
    return attributes_of(node_of(group.body.primitives[0]))["axis"]


def test_it_takes_the_chosen_elements(target, builder, rng):
    """Also as the interpreter of tile programs does."""
    built = list(offers_of(PROVIDER, GROUPS, target))
    kernels = [kernel for _, _, kernel in built if isinstance(kernel, Kernel)]
    assert len(kernels) == len(GROUPS)
    library = load_kernels(kernels, builder)
    for (group, offer, _), kernel in zip(built, kernels, strict=True):
        program = elements_program(group, MACHINE)
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        data, index = data_of(group, rng)
        axis, shape = elements_axis(group) % data.ndim, index.shape
        part = data[tuple(slice(n if i != axis else None) for i, n in enumerate(shape))]
        expected = np.take_along_axis(part, np.where(index < 0, index + data.shape[axis], index), axis)
        (found,) = run_kernel(kernel, group, offer, [data, index], builder, library=library)
        np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))
        if index.size < 1024:  # the interpreter takes a second for 2,000 elements
            (own,) = run_program(program, [data.reshape(-1), index.reshape(-1)])
            np.testing.assert_array_equal(own.astype(np.float64), expected.reshape(-1).astype(np.float64))


def test_it_takes_the_chosen_rows(target, builder, rng):
    """Also as the interpreter of tile programs does."""
    built = list(offers_of(PROVIDER, ROWS, target))
    library = load_kernels([kernel for _, _, kernel in built], builder)
    for (group, offer, _), kernel in zip(built, [kernel for *_, kernel in built], strict=True):
        program = gather_program(group, MACHINE)
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        data, index = data_of(group, rng)
        expected = np.take(data, index, elements_axis(group))
        (found,) = run_kernel(kernel, group, offer, [data, index], builder, library=library)
        np.testing.assert_array_equal(found.astype(np.float64), expected.astype(np.float64))
        (own,) = run_program(program, [data.reshape(-1), index.reshape(-1)])
        np.testing.assert_array_equal(own.astype(np.float64), expected.reshape(-1).astype(np.float64))


@pytest.mark.parametrize("layout", ["Ab32a", "BA2b16a", "AB16a2b", "ba"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_it_takes_rows_of_panels(layout, dtype, target, builder, rng):
    """The layouts in which products read the table; its rows don't fill the last panel."""
    group = rows_of((50, 70), (2, 3), 0, dtype)
    offer = in_layout(group, Layout.parse(layout))
    program = gather_program(group, MACHINE, offer.variant)
    assert check_program(program) == ()
    assert parse_program(format_program(program)) == program
    data, index = data_of(group, rng)
    kernel = PROVIDER.build(group, offer, target)
    (found,) = run_kernel(kernel, group, offer, [data, index], builder)
    np.testing.assert_array_equal(found.astype(np.float64), np.take(data, index, 0).astype(np.float64))
    assert in_layout(rows_of((5, 9, 3), (4,), 1), Layout.parse("abc")) is None
    assert in_layout(rows_of((5, 70), (37,), 1), Layout.parse("ba")) is None


@pytest.mark.parametrize("integer", ["i32", "i64"])
def test_indices_out_of_range_choose_the_nearest_element(integer, target, builder, rng):
    """In vectors of elements and in those that are left over."""
    checked = check_offers(PROVIDER, [group_of((2, 3), (2, 37), 1, integer=integer)], target, builder, rng)
    ((group, offer, kernel),) = checked
    large = np.array([2**40, -(2**40)]) if integer == "i64" else np.array([2**31 - 1, -(2**31)])
    x, index = np.arange(6, dtype=np.float32).reshape(2, 3), rng.integers(-9, 9, (2, 37))
    index[:, [0, 36]] = large
    (found,) = run_kernel(kernel, group, offer, [x, index.astype(f"int{integer[1:]}")], builder)
    nearest = np.clip(np.where(index < 0, index + 3, index), 0, 2)
    np.testing.assert_array_equal(found, np.take_along_axis(x, nearest, 1))


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (group_of((0, 3), (0, 3)), "no elements"),
        (
            opaque_group("GatherElements", ["f32[3]", "i64[2]"], ["f32[2]"], (0,), {0: np.ones(3, np.float32)}),
            "constant",
        ),
    ],
)
def test_refusals_say_why(group, reason, target):
    found = PROVIDER.offer(group, target)
    assert isinstance(found, Refusal)
    assert reason in found.reason
