"""Blocked programs of products and convolutions compute the same as their groups."""

import dataclasses

import numpy as np
import pytest

from korch.candidate.candidate import Group, make_group
from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.layout import ReshapeAttributes, TransposeAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import ValueType
from korch.schedule.contraction import NotFusedError, contraction_of
from korch.schedule.device import Blocks, DeviceProduct
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Contract, Loop, Panels, Product, TileProgram
from korch.tile.ir.text import format_program
from korch.tile.lower.staging import Machine
from tests.support import finite_field
from tests.support.blocked_products import products
from tests.support.parse_tiles import parse_program
from tests.support.tile_field import Field

MACHINE = Machine(lanes=4, threads=2)


class Graph(GraphBuilder):
    """A builder with short words."""

    def tensor(self, text: str) -> int:
        return self.input(f"x{len(self._inputs)}", ValueType.parse(text))

    def wide(self, value: int, like: int) -> int:
        return self.add("broadcast", [value], BroadcastAttributes(self.type(like).shape))

    def group(self, *outputs: int) -> Group:
        for i, value in enumerate(outputs):
            self.output(f"o{i}", value)
        graph = self.freeze()
        return make_group(graph, range(len(graph.primitives)), list(outputs))


def matmul(a: str, b: str, bias: bool = True, before: bool = False) -> Group:
    g = Graph()
    x, w = g.tensor(a), g.tensor(b)
    x = g.add("mul", [x, x]) if before else x
    y = g.add("matmul", [x, w])
    if bias:
        y = g.add("add", [y, g.wide(g.tensor(f"f32[{g.type(y).shape[-1]}]"), y)])
        y = g.add("mul", [y, y])
    return g.group(y)


def conv(x: str, w: str, strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), groups=1, before=False) -> Group:
    g = Graph()
    image, weights = g.tensor(x), g.tensor(w)
    image = g.add("neg", [image]) if before else image
    y = g.add("conv", [image, weights], ConvAttributes(strides, pads[:2], pads[2:], dilations, groups))
    bias = g.add("reshape", [g.tensor(f"f32[{g.type(y).shape[1]}]")], ReshapeAttributes((1, g.type(y).shape[1], 1, 1)))
    return g.group(g.add("add", [y, g.wide(bias, y)]))


def moved() -> Group:
    """Heads of attention: the result is reshaped and transposed."""
    g = Graph()
    y = g.add("matmul", [g.tensor("f32[10,7]"), g.tensor("f32[7,12]")])
    y = g.add("reshape", [g.add("neg", [y])], ReshapeAttributes((2, 5, 3, 4)))
    return g.group(g.add("transpose", [y], TransposeAttributes((0, 2, 1, 3))))


GROUPS = {
    "odd": matmul("f32[29,67]", "f32[67,21]"),
    "one row": matmul("f32[1,70]", "f32[70,33]"),
    "one column": matmul("f32[9,70]", "f32[70,1]"),
    "one term": matmul("f32[9,1]", "f32[1,10]"),
    "one of all": matmul("f32[1,1]", "f32[1,1]"),
    "batches": matmul("f32[2,3,7,5]", "f32[2,3,5,9]"),
    "shared matrix": matmul("f32[2,3,7,5]", "f32[1,1,5,9]", before=True),
    "moved": moved(),
    "convolution": conv("f32[2,3,8,9]", "f32[5,3,3,3]", pads=(1, 1, 1, 1)),
    "computed image": conv("f32[1,4,7,6]", "f32[6,4,3,2]", (2, 1), (1, 0, 0, 1), before=True),
    "dilated": conv("f32[1,3,9,9]", "f32[4,3,3,3]", (1, 2), (2, 0, 1, 1), (2, 1)),
    "groups": conv("f32[1,6,5,5]", "f32[9,2,3,3]", pads=(1, 1, 1, 1), groups=3),
    "pixels": conv("f32[1,8,13,13]", "f32[6,8,1,1]"),
    "depthwise": conv("f32[1,5,6,7]", "f32[5,1,3,3]", pads=(1, 1, 1, 1), groups=5),
}


def programs_of(group: Group) -> list[TileProgram]:
    layouts = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    return products(group, group.body.linear[0], layouts, MACHINE)


def check_programs(group: Group, found: list[TileProgram], rng) -> None:
    """Compare programs with the group in float64, and over a finite field."""
    types = [group.body.types[value] for _, value in group.body.inputs]
    reals = {n: rng.standard_normal(t.shape) for (n, _), t in zip(group.body.inputs, types, strict=True)}
    expected = reference.run(group.body, reals)
    field = {
        n: rng.integers(0, finite_field.PRIME, t.shape) for (n, _), t in zip(group.body.inputs, types, strict=True)
    }
    exact = finite_field.alternatives_agree(group.body, field)
    for number, program in enumerate(found):
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        for (output, _), result in zip(
            group.body.outputs, run_program(program, [*reals.values()], number, Float64()), strict=True
        ):
            np.testing.assert_allclose(result, expected[output].reshape(-1), atol=1e-11)
        for (output, _), result in zip(
            group.body.outputs, run_program(program, [*field.values()], number, Field()), strict=True
        ):
            np.testing.assert_array_equal(result, exact[output].reshape(-1))


@pytest.mark.parametrize("name", GROUPS)
def test_every_blocking_computes_the_group(name, rng):
    found = programs_of(GROUPS[name])
    assert len(found) == len(set(found))
    assert name == "one of all" or len(found) >= 2
    check_programs(GROUPS[name], found, rng)


def test_places_have_no_remainders_where_the_last_block_is_shorter():
    assert not [text for text in map(format_program, programs_of(GROUPS["pixels"])) if "%" in text]


@pytest.mark.parametrize("name", GROUPS)
def test_programs_for_devices_compute_the_group(name, rng):
    """Blocks that end early or are longer than an axis, terms in parts, and an element a task."""
    group = GROUPS[name]
    (root,) = group.body.linear
    layouts = tuple(tuple(Layout.plain(t.rank) for t in types) for types in (group.input_types, group.output_types))
    schedule = DeviceProduct(group, root, layouts, contraction_of(group, root, last=False))
    blocks = (Blocks(16, 16, 32), Blocks(16, 8, 4), Blocks(4, 16, 8, parts=3))
    found = [schedule.blocked(each, Product.F32) for each in blocks]
    check_programs(group, [*found, schedule.direct()], rng)


def test_blockings_differ_in_blocks_and_in_what_is_packed():
    found = programs_of(matmul("f32[300,700]", "f32[700,210]"))
    shapes = set()
    for program in found:
        _, loop, _ = program.stages[0].steps
        assert isinstance(loop, Loop)
        contract = loop.body[-1]
        assert isinstance(contract, Contract)
        packs = contract.a.buffer == "pa", contract.b.buffer == "pb"
        shapes.add((*(axis.extent for axis in contract.axes), *packs))
        assert all(b.layout == (Panels(contract.axes[1].extent, 4),) for b in program.buffers if b.name == "pb")
    assert len(shapes) == len(found) == 3 * 2 * 2 * 4
    assert (24, 32, 512, True, False) in shapes


def test_an_operand_that_is_computed_is_always_packed():
    for program in programs_of(matmul("f32[8,9]", "f32[9,5]", before=True)):
        assert "pa" in {buffer.name for buffer in program.buffers}


def test_large_products_are_checked_without_enumeration():
    for program in programs_of(matmul("f32[5000,7000]", "f32[7000,3001]"))[:6]:
        assert check_program(program) == ()


def test_a_block_that_is_too_long_is_refused():
    program = programs_of(matmul("f32[29,67]", "f32[67,21]"))[0]
    (stage,) = program.stages
    grid = tuple(dataclasses.replace(axis, size=axis.extent + 1) for axis in stage.grid)
    with pytest.raises(InvalidGraphError, match="tiles do not cover their axis"):
        check_program(dataclasses.replace(program, stages=(dataclasses.replace(stage, grid=grid),)))


def test_a_product_of_a_product_is_not_fused():
    g = Graph()
    y = g.add("matmul", [g.tensor("f32[4,5]"), g.tensor("f32[5,6]")])
    group = g.group(g.add("matmul", [y, g.tensor("f32[6,3]")]))
    layouts = tuple(tuple(Layout.plain(2) for _ in types) for types in (group.input_types, group.output_types))
    with pytest.raises(NotFusedError):
        products(group, group.body.linear[0], layouts, MACHINE)
