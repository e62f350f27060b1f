"""Programs of Winograd convolutions compute the same as their groups."""

import numpy as np
import pytest

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout, channels_blocked, channels_last
from korch.primitive import reference
from korch.primitive.ops.layout import PadAttributes
from korch.primitive.ops.winograd import WinogradAttributes, transform_weights
from korch.schedule.contraction import NotFusedError
from korch.schedule.split_winograd import SplitWinograd, SplitWinogradBlocking
from korch.schedule.winograd import WinogradBlocking
from korch.target import EDGE
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.text import format_program
from tests.provider.linear_groups import Graph
from tests.support import finite_field
from tests.support.parse_tiles import parse_program
from tests.support.tile_field import Field

LANES = 4
ONE, TWO, SHARED = WinogradBlocking(1, 3, 3), WinogradBlocking(2, 2, 5), WinogradBlocking(1, 2, 100, is_shared=True)
SPLIT = SplitWinogradBlocking(2, 3)


def group_of(x: tuple[int, ...], channels: int, tile: int, begin: tuple[int, int], pad: str) -> Group:
    """A convolution with a residual, of an image that may be padded before."""
    g = Graph()
    value = g.tensor(*x)
    if pad:
        value = g.add("pad", [value], PadAttributes((0, 0, 1, 0), (0, 0, 0, 1), pad, 0.0))
    u = g.constant(transform_weights(g.rng.standard_normal((channels, x[1], 3, 3)), tile).astype(np.float32))
    y = g.add("winograd", [value, u], WinogradAttributes(tile, begin, (1, 1)))
    return g.group(g.with_tensor("add", y, g.tensor(*g.type(y).shape)))


CASES = {
    "odd": (group_of((1, 8, 7, 5), 8, 4, (1, 1), ""), (ONE, TWO, SPLIT, SplitWinogradBlocking(1, 4, run=9))),
    "reflected": (group_of((1, 4, 9, 6), 8, 4, (0, 0), "reflect"), (TWO,)),
    "batch of small tiles": (group_of((2, 4, 4, 6), 8, 2, (0, 1), ""), (ONE, SHARED, SPLIT)),
    "many channels": (group_of((1, 4, 3, 5), 72, 2, (1, 1), ""), (SplitWinogradBlocking(2, 6, run=1, parts=2),)),
    "padded": (group_of((2, 4, 3, 7), 8, 2, (1, 1), "constant"), (TWO,)),
}


def schedule_of(group: Group, blocked: bool) -> SplitWinograd:
    image = channels_blocked(4, LANES) if blocked else channels_last(4)
    weights = group.body.linear[0].inputs[1]
    inputs = tuple(Layout.plain(4) if value == weights else image for _, value in group.body.inputs)
    return SplitWinograd(group, group.body.linear[0], (inputs, (image,)), LANES)


@pytest.mark.parametrize("name", CASES)
def test_every_blocking_computes_the_group(name, rng):
    """In float64, and exactly over a finite field; the text form is read back."""
    group, blockings = CASES[name]
    types = [group.body.types[value] for _, value in group.body.inputs]
    reals = {n: rng.standard_normal(t.shape) for (n, _), t in zip(group.body.inputs, types, strict=True)}
    field = {
        n: rng.integers(0, finite_field.PRIME, t.shape) for (n, _), t in zip(group.body.inputs, types, strict=True)
    }
    expected = reference.run(group.body, reals)["o0"], finite_field.alternatives_agree(group.body, field)["o0"]
    for number, blocking in enumerate(blockings):
        schedule = schedule_of(group, blocked=bool(number % 2))
        schedule.check()
        is_split = isinstance(blocking, SplitWinogradBlocking)
        program = schedule.split_program(blocking) if is_split else schedule.program(blocking)
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        layouts = dict(schedule.fusion.layouts)
        image, weights = layouts["o0"], schedule.fusion.place[schedule.root.inputs[1]]
        layouts[weights] = Layout((3, 0, 1, 2), ((3, blocking.vectors * LANES),))
        if is_split:
            layouts[weights] = Layout((3, 0, 1, 2), ((2, EDGE // 2), (3, EDGE), (2, 2)))
        for feeds, wanted, arithmetic in zip((reals, field), expected, (Float64(), Field()), strict=True):
            given = [layouts[name].pack(array).reshape(-1) for name, array in feeds.items()]
            (found,) = run_program(program, given, number, arithmetic)
            found = image.unpack(found, wanted.shape)
            if arithmetic.__class__ is Field:
                np.testing.assert_array_equal(found, wanted)
            else:
                np.testing.assert_allclose(found, wanted, atol=1e-11)


def test_plain_images_are_refused():
    group, _ = CASES["odd"]
    plain = tuple(Layout.plain(4) for _ in group.input_types)
    with pytest.raises(NotFusedError, match="not adjacent in memory"):
        SplitWinograd(group, group.body.linear[0], (plain, (channels_last(4),)), LANES).check()
