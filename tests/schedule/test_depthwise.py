"""Programs of depthwise convolutions: valid, printable as text, equal to the reference; and refusals."""

import numpy as np
import pytest

from korch.candidate.layout import Layout, channels_blocked, channels_last
from korch.errors import InvalidGraphError
from korch.primitive import reference
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.contraction import NotFusedError
from korch.schedule.depthwise import Depthwise, DepthwiseBlocking, weights_layout
from korch.target import Target
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Contract, TileProgram
from korch.tile.ir.text import format_program
from korch.tile.llvm.print import print_llvm
from tests.provider.linear_groups import Graph
from tests.provider.test_bytes import given, whole
from tests.support.parse_tiles import parse_program

LANES = 4


def schedule_of(
    x=(1, 6, 7, 5), w=(6, 1, 3, 3), stride=2, pad=1, groups=6, dilation=1, dtype="i8", before: str = "", blocked=False
) -> Depthwise:
    g = Graph()
    rank = len(x) - 2
    attributes = ConvAttributes((stride,) * rank, (pad,) * rank, (pad,) * rank, (dilation,) * rank, groups)
    image = given(g, dtype, *x)
    image = g.add(before, [image]) if before else image
    weights = whole(g, dtype, *w) if dtype == "i8" else g.weights(*w)
    group = g.group(g.add("conv", [image, weights], attributes))
    last = channels_blocked(len(x), LANES) if blocked else channels_last(len(x))
    layouts = (last, Layout.plain(len(x))), (last,)
    (root,) = group.body.linear
    return Depthwise(group, root, layouts, LANES)


def program_of(rows: int = 2, channels: int = 4) -> tuple[Depthwise, TileProgram]:
    schedule = schedule_of()
    return schedule, schedule.program(DepthwiseBlocking(rows, channels, 3))


@pytest.mark.parametrize(("rows", "channels"), [(1, 6), (3, 4), (4, 6)])
def test_programs_compute_the_convolution(rows, channels, rng):
    schedule, program = program_of(rows, channels)
    check_program(program)
    assert parse_program(format_program(program)) == program
    body = schedule.group.body
    x, w = (rng.integers(-128, 128, body.types[value].shape).astype(np.int8) for _, value in body.inputs)
    (found,) = run_program(program, [channels_last(4).pack(x), weights_layout(LANES, 4, is_of_bytes=True).pack(w)])
    feeds = dict(zip((name for name, _ in body.inputs), (x, w), strict=True))
    (expected,) = reference.run(body, feeds).values()
    np.testing.assert_array_equal(channels_last(4).unpack(found, expected.shape), expected)


FLOATS = {
    "read where it lies": {},
    "some lanes": {"x": (2, 5, 6, 7), "w": (5, 1, 3, 3), "groups": 5, "stride": 1},
    "in blocks": {"x": (1, 8, 7, 5), "w": (8, 1, 3, 3), "groups": 8, "blocked": True},
    "far apart": {"x": (1, 6, 9, 5), "pad": 2, "dilation": 3, "stride": 1},
    "computed": {"before": "neg", "x": (1, 8, 7, 5), "w": (8, 1, 3, 3), "groups": 8, "blocked": True},
    "three axes": {"x": (1, 6, 3, 4, 5), "w": (6, 1, 2, 3, 3), "stride": 1},
}


@pytest.mark.parametrize("name", FLOATS)
def test_programs_of_floats_compute_the_convolution(name, rng):
    change = FLOATS[name]
    schedule = schedule_of(**{"dtype": "f32", **change})
    program = schedule.program(DepthwiseBlocking(2, 4, 2, is_by_rows=True))
    check_program(program)
    assert parse_program(format_program(program)) == program
    (*_, contract, _) = program.stages[0].steps
    assert isinstance(contract, Contract)
    assert bool(contract.where) == ("before" not in change)
    body = schedule.group.body
    x, w = (rng.standard_normal(body.types[value].shape).astype(np.float32) for _, value in body.inputs)
    x.reshape(-1)[3] = np.nan  # is met by the windows around it only
    layout, weights = schedule.fusion.layouts["o0"], weights_layout(LANES, x.ndim, is_of_bytes=False)
    (found,) = run_program(program, [layout.pack(x), weights.pack(w)], arithmetic=Float64())
    feeds = dict(zip((name for name, _ in body.inputs), (x, w), strict=True))
    (expected,) = reference.run(body, feeds, exact=True).values()
    np.testing.assert_allclose(layout.unpack(found, expected.shape), expected, rtol=1e-5, atol=1e-5)


def test_a_window_that_leaves_its_image_is_refused():
    text = format_program(schedule_of(dtype="f32").program(DepthwiseBlocking(2, 6, 2)))
    (line,) = (line for line in text.splitlines() if " by f32 " in line)
    with pytest.raises(InvalidGraphError, match="an index of 210 reaches"):
        check_program(parse_program(text.replace(line, line.partition(" if ")[0])))


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("panels(8, 4)", "panels(8, 8)", "of windows, only columns side by side and weights in panels can be printed"),
        ("t1 + 2*x - 1 <", "t1 + 3*x - 1 <", "the guards of a window and its places in memory differ"),
        ("t1 + 2*x - 1 <", "t1 + 2*x + y0 - 1 <", "a guard of a window turns on more than a row of it"),
        ("t0 + 2*y0 - 1 <", "t0 + j + 2*y0 - 1 <", "a guard of a window turns on two axes of it"),
    ],
)
def test_windows_that_are_not_printed_are_refused(old, new, reason):
    text = format_program(schedule_of(dtype="f32").program(DepthwiseBlocking(2, 6, 2)))
    assert old in text
    with pytest.raises(InvalidGraphError) as error:
        print_llvm(parse_program(text.replace(old, new)), "", Target(isa="avx2", lanes=LANES))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 2, "w": (6, 3, 3, 3)}, "the channels are in groups"),
        ({"w": (12, 1, 3, 3)}, "the channels are in groups"),
        ({"x": (1, 6, 7), "w": (6, 1, 3)}, "a depthwise convolution does not have two spatial axes"),
        ({"x": (1, 6, 7, 9), "w": (6, 1, 5, 10)}, "the window is too large"),
    ],
)
def test_other_convolutions_are_refused(change, reason):
    with pytest.raises(NotFusedError) as error:
        schedule_of(**change)
    assert str(error.value) == reason


@pytest.mark.parametrize(("old", "new"), [("panels(8, 4, 2)", "panels(8, 4, 4)"), ("x0 = i32 0", "x0 = i32 1")])
def test_what_is_not_printed_is_refused(old, new):
    text = format_program(program_of()[1])
    assert old in text
    with pytest.raises(InvalidGraphError) as error:
        print_llvm(parse_program(text.replace(old, new)), "", Target(isa="generic", lanes=LANES, threads=1))
    assert "only windows with weights in panels of one vector and pairs of terms can be printed" in str(error.value)
