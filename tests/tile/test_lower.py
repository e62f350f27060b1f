"""Lowered programs compute the same as the primitives, in every layout that is offered."""

import math

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer, Refusal, make_group, make_layout_change
from korch.candidate.layout import layout_choices
from korch.primitive.ops.layout import PadAttributes, SliceAttributes
from korch.provider.generated import GeneratedProvider
from korch.testing.samples import random_arrays
from korch.tile.ir.program import Level, Load
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.support.blocks import normalized_update
from tests.tile.tile_groups import FAMILIES, Graph, check_lowering, lowered, offers_of, random_groups, softmax, whole


@pytest.mark.parametrize("family", FAMILIES)
def test_known_groups(family, target, rng):
    for group in FAMILIES[family]():
        inputs = random_arrays(rng, group.input_types)
        for offer in offers_of(group, target):
            check_lowering(group, offer, target, inputs)


@pytest.mark.parametrize("seed", range(10))
def test_random_groups(seed, target):
    rng = np.random.default_rng(seed)
    for group in random_groups(rng, 25, 14):
        inputs = random_arrays(rng, group.input_types)
        for offer in offers_of(group, target):
            check_lowering(group, offer, target, inputs)


def test_changes_of_layout(target, rng):
    g = Graph()
    x = g.tensor("f32[2,32,3,5]")
    g.output("o", g.add("neg", [x]))
    graph = g.freeze()
    group = make_layout_change(graph, 0)
    choices = layout_choices(graph.types[0], target.lanes)
    assert len(choices) == 3
    for before in choices:
        for after in choices:
            inputs = random_arrays(rng, group.input_types)
            check_lowering(group, Offer((before,), (after,)), target, inputs)


def test_a_softmax_is_one_stage(target):
    group = softmax("f32[64,8,33]", 2)
    (program,) = (lowered(group, offer, target) for offer in offers_of(group, target))
    assert len(program.stages) == 1
    tiles = {buffer.size for buffer in program.buffers if buffer.level is Level.TILE}
    assert tiles == {16}  # a task takes 16 rows


@pytest.mark.parametrize("shape", [(6, 40), (130, 7), (1, 33), (5, 1)])
def test_values_that_passes_over_rows_share_are_computed_once(shape, target, rng):
    """The root of each row, but not what is divided by it."""
    group = whole(normalized_update(*shape))
    for offer in offers_of(group, target) if shape[1] > 1 else ():
        (stage,) = lowered(group, offer, target).stages
        assert count(stage, "sqrt", shape[1]) == 0
        assert count(stage, "div", shape[1]) == 3
    for offer in offers_of(group, target):
        check_lowering(group, offer, target, random_arrays(rng, group.input_types))


def count(stage, op, least):
    """Return how often an operation is in the passes of at least this number of points."""
    found = [p for p in stage.passes if math.prod(axis.extent for axis in p.axes) >= least]
    return sum(getattr(own, "op", "") == op for p in found for own in p.ops)


def test_a_value_of_rows_is_computed_again_in_a_stage_of_other_rows(target, rng):
    """It would need a stage of its own."""
    g = Graph()
    x = g.tensor("f32[40,50]")
    rows, columns = g.reduce("sum", x, 1), g.reduce("max", x, 0)
    roots = g.add("sqrt", [g.add("abs", [rows])])
    group = g.group(g.add("mul", [g.wide(roots, (40, 50)), g.wide(columns, (40, 50))]))
    for offer in offers_of(group, target):
        assert len(lowered(group, offer, target).stages) == 2
        check_lowering(group, offer, target, random_arrays(rng, group.input_types))


def test_a_reduction_of_a_reduction_goes_through_the_workspace(target, rng):
    g = Graph()
    x = g.tensor("f32[40,50]")
    rows = g.add("tanh", [g.reduce("sum", x, 1)])
    group = g.group(g.reduce("max", rows, 0))
    (offer,) = offers_of(group, target)
    program = lowered(group, offer, target)
    assert len(program.stages) == 2
    assert [b.size for b in program.buffers if b.level is Level.WORKSPACE] == [40]
    check_lowering(group, offer, target, random_arrays(rng, group.input_types))


def test_reductions_of_other_lengths_share_no_loop(target, rng):
    g = Graph()
    x, y = g.tensor("f32[4]"), g.tensor("f32[6]")
    group = g.group(g.reduce("max", x, 0), g.reduce("sum", y, 0))
    (offer,) = offers_of(group, target)
    check_lowering(group, offer, target, random_arrays(rng, group.input_types))


def test_a_take_of_a_pad_may_read_nothing_but_the_fill(target, rng):
    for length, indices in ((1, (2, 1, 2)), (2, (3, 3)), (1, (0, 2))):
        g = Graph()
        taken = g.take(g.add("cos", [g.tensor("f32[1]")]), 0, (0,) * length)
        group = g.group(g.take(g.pad(taken, (1,), (2,), fill=1.5), 0, indices))
        (offer,) = offers_of(group, target)
        check_lowering(group, offer, target, random_arrays(rng, group.input_types))
        g = Graph()
        padded = g.pad(g.tensor("f32[3,1]"), (0, 2), (0, 2))
        group = g.group(g.take(g.slice(padded, (0, 0), (3, 1), (1, 1)), 1, (0, 0)))
        (offer,) = offers_of(group, target)
        check_lowering(group, offer, target, random_arrays(rng, group.input_types))


def test_concatenations_are_cut_where_no_order_of_loops_suits_all(target):
    """Classes are transposed in squares; boxes, a score and classes of one row lie side by side."""
    g = Graph()
    wide = g.transpose(g.tensor("f32[80,40]"), 1, 0)
    rows = g.concat(1, *(g.tensor(f"f32[30,{n}]") for n in (4, 1, 75)))
    group = g.group(g.concat(0, wide, rows))
    stages = lowered(group, offers_of(group, target)[0], target).stages
    assert [bool(p.across) for stage in stages for p in stage.passes] == [True, False]
    g = Graph()
    rows = g.concat(1, *(g.tensor(f"f32[30,{n}]") for n in (4, 1, 75)))
    group = g.group(rows)
    assert len(lowered(group, offers_of(group, target)[0], target).stages) == 1
    g = Graph()  # a border reads nothing, and is no part
    group = g.group(g.pad(g.tensor("f32[30,80]"), (2, 0), (0, 0)))
    assert len(lowered(group, offers_of(group, target)[0], target).stages) == 1


def test_cores_write_lines_of_their_own(target):
    """Rows of 169 elements begin inside of lines: each thread writes whole ones."""
    g = Graph()
    g.output("o", g.add("neg", [g.tensor("f32[1,128,13,13]")]))
    graph = g.freeze()
    group = make_layout_change(graph, 0)
    plain, last = (layout_choices(graph.types[0], target.lanes)[i] for i in (0, 1))
    (stage,) = lowered(group, Offer((last,), (plain,), ""), target).stages
    (pass_,) = stage.passes
    rows = (169 * pass_.axes[0].extent, 169 * pass_.axes[1].extent)
    assert pass_.sinks[0].index.coefficient(stage.grid[0].name) in rows
    assert len(stage.grid) == 1 and stage.tasks % target.threads == 0


def test_tiles_of_long_rows_follow_what_is_read(target):
    """Each thread writes a part of every row: of 4096 elements read, all by one thread."""
    g = Graph()
    group = g.group(g.transpose(g.tensor("f32[1024,4096]"), 1, 0))
    (stage,) = lowered(group, offers_of(group, target)[0], target).stages
    (pass_,) = stage.passes
    (load,) = (op for op in pass_.ops if isinstance(op, Load))
    step = load.index.coefficient(pass_.across)
    assert [load.index.coefficient(axis.name) for axis in stage.grid] == [4096 * 64, 64 * step]
    assert [axis.extent for axis in pass_.axes] == [64, 64]


def test_squares_of_large_values_follow_what_is_read(target):
    """Vectors of whole lines go past the caches in any order; others follow what is written."""
    for lanes, batch, rows, is_along in (
        (16, 1, 48, False),
        (16, 512, 48, False),
        (8, 512, 48, True),
        (16, 32, 600, True),
        (16, 4, 601, False),
        (16, 64, 601, True),
        (16, 512, 47, True),
    ):
        g = Graph()
        group = g.group(g.transpose(g.tensor(f"f32[{batch},{rows},800]"), 0, 2, 1))
        offer = offers_of(group, target)[0]
        program = lower(group.body, offer.inputs, offer.outputs, Machine(lanes, 2))
        (pass_,) = program.stages[0].passes
        assert (pass_.axes[-1].name == pass_.vector) == is_along, (lanes, batch, rows)


def doubling(steps: int) -> Group:
    """Return x + (x moved by 1, 2, 4, ...): each step doubles what one element reads."""
    g = Graph()
    x = g.tensor(f"f32[{1 << steps}]")
    for step in range(steps):
        kept = SliceAttributes((0,), ((1 << steps) - (1 << step),), (1,))
        pads = PadAttributes((1 << step,), (0,))
        x = g.add("add", [x, g.add("pad", [g.add("slice", [x], kept)], pads)])
    g.output("o", x)
    graph = g.freeze()
    return make_group(graph, range(len(graph.primitives)), [graph.outputs[0][1]])


def test_a_text_that_would_double_with_each_step_is_refused(target):
    provider = GeneratedProvider()
    small, large = doubling(4), doubling(12)
    (offer,) = provider.offer(small, target)
    assert len(provider.build(small, offer, target).source) < 40_000
    assert provider.offer(large, target) == Refusal("its text would be too long")
    assert provider.build(large, offer, target) == Refusal("it would have more than 2048 operations")
    medium = doubling(9)
    assert provider.build(medium, offer, target) == Refusal("its text would have more than 1024 KiB")
