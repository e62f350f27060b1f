"""Running sums and products along any axis: compiled, and compared with NumPy."""

from dataclasses import replace

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from korch.candidate.candidate import Refusal
from korch.primitive.ops.opaque import opaque_model
from korch.provider.generated import GeneratedProvider
from korch.provider.opaque import node_of
from korch.provider.provider import Kernel
from korch.provider.running import running_program
from korch.testing.kernels import check_offers, load_kernels, offers_of, run_kernel
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.text import format_program
from korch.tile.lower.staging import Machine
from tests.provider.test_onnxruntime import opaque_group
from tests.support.parse_tiles import parse_program

PROVIDER = GeneratedProvider()


def group_of(shape, axis, dtype="f32", op="CumSum", **attributes):
    """Return the group of one operator."""
    text = f"{dtype}[{','.join(map(str, shape))}]"
    known = {1: np.array(axis)}
    return opaque_group(op, [text, "i64[]"], [text], (0,), known, opset=26 if op == "CumProd" else 14, **attributes)


FLAGS = [{}, {"exclusive": 1}, {"reverse": 1}, {"exclusive": 1, "reverse": 1}]
SHAPES = [((3, 5, 4), 1), ((2, 3, 130), 0), ((20, 70), 1), ((40, 128), -1), ((2, 1100), 1), ((6, 1030), 0), ((1, 1), 1)]
GROUPS = [
    *(group_of(shape, axis, **flags) for shape, axis in SHAPES for flags in FLAGS),
    group_of((4133,), 0),
    *(group_of((33, 2048), 0, **flags) for flags in (FLAGS[0], FLAGS[3])),
    group_of((300, 2), 0, op="CumProd"),
    *(group_of((18, 70), 1, dtype) for dtype in ("f64", "f16", "bf16", "i64", "i32", "u32")),
]


def test_programs_compute_what_the_operator_does(target, builder, rng):
    checked = check_offers(PROVIDER, GROUPS, target, builder, rng)
    assert [group for group, offer, _ in checked if not offer.variant] == GROUPS


def test_long_sequences_are_offered_cut_and_whole(target):
    """Which is faster depends on whether other processes leave a core to each thread."""
    offers = PROVIDER.offer(group_of((33, 2048), 0), replace(target, threads=2))
    assert not isinstance(offers, Refusal)
    stages = [len(PROVIDER.program(group_of((33, 2048), 0), offer, Machine(16, 2)).stages) for offer in offers]
    assert stages == [2, 1]


@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize("shape", [((3, 5, 4), 1), ((20, 70), 1), ((2, 1100), 1), ((5,), 0)])
def test_programs_are_legal(shape, lanes):
    for flags in FLAGS:
        program = running_program(group_of(*shape, "i64", **flags), Machine(lanes, 2))
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        x = np.random.default_rng(3).integers(-9, 9, shape[0])
        sums = (
            np.flip(np.cumsum(np.flip(x, shape[1]), shape[1]), shape[1]) if "reverse" in flags else x.cumsum(shape[1])
        )
        (found,) = run_program(program, [x.reshape(-1)])
        np.testing.assert_array_equal(found.reshape(x.shape), sums - x if "exclusive" in flags else sums)


@pytest.mark.parametrize(
    ("shape", "tasks"), [((9, 1000), 1), ((9, 10), 1), ((9, 98304), 12), ((4, 9, 1000), 4), ((9, 20000), 3)]
)
def test_a_task_reads_long_rows(shape, tasks):
    """It has as many adjacent sequences as a cache holds results."""
    program = running_program(group_of(shape, -2), Machine(16, 2))
    (stage,) = program.stages
    assert np.prod([axis.extent for axis in stage.grid]) == tasks


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize(("shape", "threads", "parts"), [((33, 2048), 2, 2), ((50, 2048), 3, 3), ((2, 50, 2048), 8, 3)])
def test_parts_of_sequences_keep_threads_busy(shape, threads, parts, flags):
    program = running_program(group_of(shape, -2, "i64", **flags), Machine(16, threads))
    sums, results = program.stages
    assert check_program(program) == ()
    assert results.tasks == parts * np.prod(shape[:-2])
    assert sums.tasks >= min(threads, results.tasks)
    x = np.random.default_rng(3).integers(-9, 9, shape)
    expected = np.flip(np.flip(x, -2).cumsum(-2), -2) if "reverse" in flags else x.cumsum(-2)
    (found,) = run_program(program, [x.reshape(-1)])
    np.testing.assert_array_equal(found.reshape(shape), expected - x if "exclusive" in flags else expected)


def test_an_infinity_is_in_later_sums_only(target, builder):
    groups = [group_of((2, 4096), 1), group_of((4096, 2), 0), group_of((32, 200), 1)]
    built = [item for item in offers_of(PROVIDER, groups, target) if isinstance(item[2], Kernel)]
    library = load_kernels([kernel for _, _, kernel in built], builder)
    for group, offer, kernel in built:
        shape = group.input_types[0].shape
        axis = 1 if shape[0] < shape[1] else 0
        x = np.ones(shape, np.float32)
        place = [0, 0]
        place[axis] = 100
        x[tuple(place)] = np.inf
        (found,) = run_kernel(kernel, group, offer, [x], builder, library=library)
        np.testing.assert_array_equal(found, np.cumsum(x, axis))


@pytest.mark.parametrize(("shape", "axis"), [((2, 2048), 1), ((64, 4096), 0)])
def test_products_after_a_zero_are_zero(shape, axis):
    """A part of the sequence that is multiplied by itself would overflow: 0 times infinity is not 0."""
    x = np.full(shape, 1e9, np.float32)
    x[(slice(None),) * axis + (1,)] = 0
    program = running_program(group_of(shape, axis, op="CumProd"), Machine(16, 8))
    (found,) = run_program(program, [x.reshape(-1)])
    np.testing.assert_array_equal(found.reshape(shape), np.cumprod(x, axis))


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (group_of((0, 8), 1), "no elements"),
        (opaque_group("CumSum", ["f32[3]", "i64[]"], ["f32[3]"]), "the axis is none"),
    ],
)
def test_refusals_say_why(group, reason, target):
    found = PROVIDER.offer(group, target)
    assert isinstance(found, Refusal)
    assert reason in found.reason


def test_the_reference_agrees_with_the_standard(rng):
    """`onnx.reference` computes in the type of the elements."""
    for flags in FLAGS:
        group = group_of((3, 5), 1, "i32", **flags)
        primitive = group.body.primitives[0]
        x = rng.integers(-9, 9, (3, 5)).astype(np.int32)
        (expected,) = ReferenceEvaluator(opaque_model(node_of(primitive))).run(None, {"x0": x, "x1": np.array(1)})
        found = primitive.row.reference([x, np.array(1)], primitive.attributes)
        np.testing.assert_array_equal(found, expected)
