"""Programs of byte convolutions with few channels compute the same as their groups."""

import numpy as np
import pytest

from korch.candidate.layout import Layout, channels_last
from korch.primitive import reference
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import ValueType
from korch.schedule.contraction import NotFusedError
from korch.schedule.few_channels import FewChannels
from korch.tile.check.arithmetic import Typed
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Registers
from korch.tile.ir.text import format_program
from tests.provider.linear_groups import Graph
from tests.support.parse_tiles import parse_program

LANES = 8


def schedule_of(x: tuple[int, ...], w: tuple[int, ...], attributes: ConvAttributes) -> FewChannels:
    g = Graph()
    image = g.input("x", ValueType.parse(f"u8{list(x)}"))
    weights = g.constant(g.rng.integers(-128, 128, w).astype(np.int8))
    group = g.group(g.add("conv", [image, weights], attributes))
    plain, last = Layout.plain(4), channels_last(4)
    layouts = tuple(last if name == "i0" else plain for name, _ in group.body.inputs), (last,)
    return FewChannels(group, group.body.linear[0], layouts, LANES, Registers(2, 1))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_every_number_of_rows_computes_the_group(rows, rng):
    """Exactly; the text form is read back."""
    schedule = schedule_of((2, 3, 9, 8), (10, 3, 3, 2), ConvAttributes((2, 1), (1, 0), (1, 1), (2, 1), 1))
    program, group = schedule.program(rows), schedule.group
    assert check_program(program) == ()
    assert parse_program(format_program(program)) == program
    arrays = [rng.integers(0, 200, t.shape).astype(t.dtype.numpy) for t in group.input_types]
    feeds = {name: array for (name, _), array in zip(group.body.inputs, arrays, strict=True)}
    packed = Layout((0, 2, 3, 1), ((0, LANES), (1, 2)))
    given = [channels_last(4).pack(arrays[0]).reshape(-1), packed.pack(arrays[1]).reshape(-1)]
    (found,) = run_program(program, given, 0, Typed())
    expected = reference.run(group.body, feeds)["o0"]
    np.testing.assert_array_equal(channels_last(4).unpack(found, expected.shape), expected)


def test_dilated_rows_of_windows_are_refused():
    with pytest.raises(NotFusedError, match="do not lie side by side"):
        schedule_of((1, 3, 9, 8), (4, 3, 3, 2), ConvAttributes((1, 1), (0, 0), (0, 0), (1, 2), 1))
