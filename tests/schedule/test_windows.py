"""Programs that read the windows of a convolution in place compute the same as their groups."""

import dataclasses
import itertools

import numpy as np
import pytest

from korch.candidate.candidate import Group, make_group
from korch.candidate.layout import Layout, channels_blocked, channels_last
from korch.errors import InvalidGraphError
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder
from korch.primitive.op import Array
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import ValueType
from korch.schedule.contraction import NotFusedError
from korch.schedule.windows import ConvBlocking, Windows
from korch.target import Target
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Axis, Contract, Level, TileProgram
from korch.tile.ir.text import format_program
from korch.tile.llvm.print import print_llvm
from korch.tile.lower.staging import Machine
from tests.support import finite_field
from tests.support.parse_tiles import parse_program
from tests.support.tile_field import Field

LANES = 4
MACHINE = Machine(lanes=LANES, threads=2)
RESULT = "o0"


def conv(x, channels: int, window, stride=1, pad=1, dilation=1, groups=1, is_computed: bool = False) -> Group:
    """A convolution with a bias; image and weights may be computed."""
    g = GraphBuilder()
    rank = len(x) - 2
    window, *steps = (n if isinstance(n, tuple) else (n,) * rank for n in (window, stride, pad, dilation))
    image = g.input("x0", ValueType.parse(f"f32{list(x)}"))
    weights = g.input("x1", ValueType.parse(f"f32{[channels, x[1] // groups, *window]}"))
    image, weights = (g.add("neg", [v]) for v in (image, weights)) if is_computed else (image, weights)
    strides, pads, dilations = steps
    y = g.add("conv", [image, weights], ConvAttributes(strides, pads, pads, dilations, groups))
    bias = g.input("x2", ValueType.parse(f"f32{[1, channels] + [1] * rank}"))
    y = g.add("add", [y, g.add("broadcast", [bias], BroadcastAttributes(g.type(y).shape))])
    g.output(RESULT, y)
    graph = g.freeze()
    return make_group(graph, range(len(graph.primitives)), [y])


GROUPS = {
    "plain": conv((2, 8, 5, 6), 12, 3),
    "strided": conv((1, 8, 9, 7), 5, 3, stride=2),
    "one element": conv((1, 8, 4, 5), 8, 1, pad=0),
    "groups": conv((1, 6, 5, 5), 9, 3, groups=3),
    "multiplied": conv((1, 3, 5, 6), 6, 3, groups=3),
    "dilated": conv((1, 3, 9, 8), 4, 3, stride=(1, 2), pad=(2, 0), dilation=(2, 1)),
    "one axis": conv((2, 4, 19), 6, 3, stride=2, groups=2),
    "three axes": conv((1, 4, 4, 5, 3), 8, (2, 3, 2), pad=(1, 0, 1)),
    "three strided": conv((1, 2, 5, 6, 5), 3, 3, stride=(1, 2, 2)),
    "one channel": conv((1, 8, 5, 5), 1, 3),
    "computed": conv((1, 4, 5, 5), 4, 3, is_computed=True),
    "one place": conv((1, 8, 3, 3), 4, 3, pad=0),
}


def windows_of(group: Group, kind: str = "plain") -> tuple[Windows, tuple[Layout, ...], Layout]:
    """Return the schedule of a group whose image and result are plain, channels-last or blocked."""
    make = {"plain": Layout.plain, "last": channels_last, "blocked": lambda rank: channels_blocked(rank, LANES)}[kind]
    own, sink = make(group.input_types[0].rank), make(group.output_types[0].rank)
    inputs = (own, *(Layout.plain(type_.rank) for type_ in group.input_types[1:]))
    return Windows(group, group.body.linear[0], (inputs, (sink,)), MACHINE), inputs, sink


def blockings(windows: Windows, has_panels: bool) -> list[ConvBlocking]:
    """Whole images, some rows, and one; all channels and some; copies by tasks and before all tasks."""
    *outer, last = (side.out for side in windows.sides)
    rows = [(1,) * (len(outer) - 1) + (2, last)] if outer else [(min(3, last),)]
    rows += [(1,) * (len(outer) - 1) + (2, max(1, last - 1))] * (
        bool(outer) and has_panels
    )  # lines that are cut are batches
    places = dict.fromkeys([(*outer, last), (1,) * len(outer) + (last,), *rows])
    found = []
    for place, channels, is_shared in itertools.product(places, {windows.results, 4}, (False, True)):
        is_whole = channels > windows.results or sum(n > 1 for n in place) > 2
        for beside in dict.fromkeys((1, LANES, windows.channels)) if has_panels else (1,):
            if not is_whole and windows.channels % beside == 0:
                found.append(ConvBlocking(place, channels, None, LANES * has_panels, beside, is_shared))
    return found


IN_PLACE = ("plain", "strided", "dilated", "groups", "three axes", "one channel", "one place")
"""Groups whose images need not be copied."""


def in_place(windows: Windows, kind: str) -> list[ConvBlocking]:
    """Whole images, and lines, that are read where they lie."""
    *outer, last = (side.out for side in windows.sides)
    beside = LANES if kind == "blocked" else 1
    places = dict.fromkeys([(*outer, last), (1,) * len(outer) + (last,)])
    return [ConvBlocking(place, windows.results, None, LANES, beside, in_place=True) for place in places]


def packed(weights: Array) -> Array:
    """Return weights in panels: channels of the result beside each other, then those of the image."""
    return Layout((0, *range(2, weights.ndim), 1), ((0, LANES),)).pack(weights)


def check(program: TileProgram, group: Group, feeds: list[Array], plain: list[Array], sink: Layout, rng) -> None:
    """Compare a program with the group, in float64 or over a finite field."""
    is_field = plain[0].dtype != np.float64
    names = [name for name, _ in group.body.inputs]
    values = dict(zip(names, plain, strict=True))
    run = finite_field.alternatives_agree if is_field else reference.run
    expected = run(group.body, values)[RESULT]
    (result,) = run_program(program, feeds, int(rng.integers(100)), Field() if is_field else Float64())
    result = sink.unpack(result, group.output_types[0].shape)
    np.testing.assert_allclose(result, expected, atol=0 if is_field else 1e-11)


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("kind", ["plain", "last", "blocked"])
def test_every_blocking_computes_the_group(name, kind, rng):
    group = GROUPS[name]
    x, w, _ = group.input_types
    if kind == "blocked" and (x.shape[1] % LANES or w.shape[0] % LANES):
        pytest.skip("the channels are no whole blocks")
    windows, inputs, sink = windows_of(group, kind)
    reals = [rng.standard_normal(type_.shape) for type_ in group.input_types]
    field = [rng.integers(0, finite_field.PRIME, type_.shape) for type_ in group.input_types]
    can_pack = name != "computed" and (windows.groups == 1 or windows.results % LANES == 0)
    for has_panels in (False, True)[: 1 + can_pack]:
        for blocking in blockings(windows, has_panels) + in_place(windows, kind) * (has_panels and name in IN_PLACE):
            program = windows.program(blocking)
            assert check_program(program) == ()
            assert parse_program(format_program(program)) == program
            for plain in (reals, field):
                feeds = [layout.pack(array) for layout, array in zip(inputs, plain, strict=True)]
                feeds[1] = packed(plain[1]) if has_panels else feeds[1]
                check(program, group, feeds, plain, sink, rng)


def buffers_of(name: str, blocking: ConvBlocking) -> dict[str, Level]:
    return {b.name: b.level for b in windows_of(GROUPS[name])[0].program(blocking).buffers}


def test_an_image_is_copied_only_if_windows_leave_it():
    assert "p" not in buffers_of("one element", ConvBlocking((4, 5), 8, None, LANES))
    assert "p" not in buffers_of("one place", ConvBlocking((1, 1), 4))
    assert buffers_of("plain", ConvBlocking((5, 6), 12, None, LANES))["p"] is Level.TILE
    assert buffers_of("plain", ConvBlocking((5, 6), 12, is_shared=True))["p"] is Level.WORKSPACE


def test_an_image_is_read_in_place_if_windows_leave_it():
    for name in sorted({*IN_PLACE} - {"groups"}):
        windows, _, _ = windows_of(GROUPS[name])
        program = windows.program(in_place(windows, "plain")[0])
        assert [b.name for b in program.buffers if b.level is Level.TILE] == ["t"]
        assert print_llvm(program, "", Target(isa="avx2", lanes=LANES)).source
    windows, _, _ = windows_of(GROUPS["computed"])
    with pytest.raises(NotFusedError, match="the image is not read where it lies"):
        windows.program(in_place(windows, "plain")[0])


def test_an_element_is_copied_once_for_all_windows():
    def elements(name: str, blocking: ConvBlocking) -> int:
        return windows_of(GROUPS[name])[0].program(blocking).buffer("p").size

    assert elements("plain", ConvBlocking((5, 6), 12, None, LANES)) == 8 * 7 * 8
    assert elements("plain", ConvBlocking((1, 6), 12)) == 8 * 3 * 8
    # Along an axis with a stride, once for each place of a window.
    assert elements("strided", ConvBlocking((5, 4), 5)) == 8 * 3 * 3 * 5 * 4


def test_weights_are_copied_only_if_they_are_computed():
    assert "w" in buffers_of("computed", ConvBlocking((5, 5), 4))
    assert "w" not in buffers_of("plain", ConvBlocking((5, 6), 12))


def refusal(program: TileProgram, **changes: object) -> str:
    """Return why a program is refused after a change of its contraction."""
    stage = program.stages[-1]
    steps = tuple(dataclasses.replace(s, **changes) if isinstance(s, Contract) else s for s in stage.steps)
    stages = (*program.stages[:-1], dataclasses.replace(stage, steps=steps))
    with pytest.raises(InvalidGraphError) as error:
        print_llvm(dataclasses.replace(program, stages=stages), "", Target(isa="avx2", lanes=LANES))
    return str(error.value)


def test_what_is_not_printed_is_refused():
    windows, _, _ = windows_of(GROUPS["three axes"])
    text = refusal(windows.program(ConvBlocking((5, 3, 4), 8, None, LANES)))
    assert "at most two axes of rows" in text
    windows, _, _ = windows_of(GROUPS["plain"])
    program = windows.program(ConvBlocking((5, 6), 12))
    (*_, contract, _) = program.stages[-1].steps
    text = refusal(program, axes=(Axis("one", 1), *(a for a in contract.axes if a.is_reduced)))
    assert "only contractions of rows, columns and terms" in text
