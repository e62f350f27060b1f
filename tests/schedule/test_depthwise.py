"""Programs of depthwise convolutions of bytes: legal, printable as text, equal to the reference, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from korch.candidate.layout import Layout, channels_last
from korch.errors import InvalidGraphError
from korch.primitive import reference
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.contraction import NotFusedError
from korch.schedule.depthwise import Depthwise, weights_layout
from korch.tile.check import check_program
from korch.tile.cpp import print_cpp
from korch.tile.parse import parse_program
from korch.tile.program import TileProgram
from korch.tile.reference import run_program
from korch.tile.text import format_program
from tests.provider.onednn_groups import Graph
from tests.provider.test_bytes import given, whole

LANES = 4


def schedule_of(x=(1, 6, 7, 5), w=(6, 1, 3, 3), stride=2, pad=1, groups=6) -> Depthwise:
    g = Graph()
    rank = len(x) - 2
    attributes = ConvAttributes((stride,) * rank, (pad,) * rank, (pad,) * rank, (1,) * rank, groups)
    group = g.group(g.add("conv", [given(g, "i8", *x), whole(g, "i8", *w)], attributes))
    last = channels_last(len(x))
    layouts = (last, Layout.plain(len(x))), (last,)
    (root,) = group.body.linear
    return Depthwise(group, root, layouts, LANES)


def program_of(rows: int = 2, channels: int = 4) -> tuple[Depthwise, TileProgram]:
    schedule = schedule_of()
    return schedule, schedule.program(rows, channels, 3)


@pytest.mark.parametrize(("rows", "channels"), [(1, 6), (3, 4), (4, 6)])
def test_programs_compute_the_convolution(rows, channels, rng):
    schedule, program = program_of(rows, channels)
    check_program(program)
    assert parse_program(format_program(program)) == program
    body = schedule.group.body
    x, w = (rng.integers(-128, 128, body.types[value].shape).astype(np.int8) for _, value in body.inputs)
    (found,) = run_program(program, [channels_last(4).pack(x), weights_layout(LANES).pack(w)])
    feeds = dict(zip((name for name, _ in body.inputs), (x, w), strict=True))
    (expected,) = reference.run(body, feeds).values()
    np.testing.assert_array_equal(channels_last(4).unpack(found, expected.shape), expected)


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
        print_cpp(parse_program(text.replace(old, new)), "", LANES, 1)
    assert "only windows with weights in panels of one vector and pairs of terms can be printed" in str(error.value)
