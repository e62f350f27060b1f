"""Programs of products by weights of few bits, on matrix units, compute the same as their groups."""

import dataclasses

import numpy as np
import pytest

from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.primitive import reference
from korch.schedule.contraction import NotFusedError
from korch.schedule.split_stored import SplitStored, SplitStoredBlocking
from korch.schedule.stored import strips
from korch.target import Target
from korch.testing.samples import random_arrays
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import At, Contract, TileProgram
from korch.tile.ir.text import format_program
from korch.tile.llvm.print import print_llvm
from korch.tile.lower.staging import Machine
from tests.provider.test_stored import stored
from tests.support.parse_tiles import parse_program

LANES = 16


def schedule_of(a: tuple[int, ...], n: int, **options: int) -> SplitStored:
    group = stored(a, n, **options)
    root = group.body.linear[0]
    weights = {group.position[value] for value in root.inputs[1:]}
    inputs = tuple(strips(32) if i in weights else Layout.plain(t.rank) for i, t in enumerate(group.input_types))
    return SplitStored(group, root, (inputs, (Layout.plain(len(a)),)), Machine(LANES, 2))


@pytest.mark.parametrize(
    ("rows", "columns", "options"),
    [
        (32, 64, {"bits": 4, "block": 32}),
        (5, 32, {"bits": 4, "block": 64, "zero": 8}),
        (33, 64, {"bits": 2, "block": 32}),
        (9, 32, {"bits": 8, "block": 128, "signed": True}),
    ],
)
def test_every_blocking_computes_the_group(rows, columns, options, rng):
    """The text form is read back."""
    schedule = schedule_of((rows, 128), columns, **options)
    group = schedule.group
    feeds = {
        name: array for (name, _), array in zip(group.body.inputs, random_arrays(rng, group.input_types), strict=True)
    }
    expected = reference.run(group.body, feeds, exact=True)["o0"]
    for blocking in (SplitStoredBlocking(rows, columns, 128), SplitStoredBlocking(min(rows, 32), 32, 64)):
        program = schedule.split_program(blocking)
        assert check_program(program) == ()
        assert parse_program(format_program(program)) == program
        layouts = schedule.fusion.layouts
        given = [layouts[name].pack(array).reshape(-1) for name, array in feeds.items()]
        (found,) = run_program(program, given, 0)
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("terms", "block"), [(96, 64), (80, 16), (30, 10)])
def test_blocks_that_are_no_whole_steps_are_refused(terms, block):
    with pytest.raises(NotFusedError, match="no whole steps of 32 terms"):
        schedule_of((8, terms), 32, block=block).split_program(SplitStoredBlocking(8, 32, terms))


def test_a_factor_that_changes_within_a_step_is_not_printed():
    program = schedule_of((8, 64), 32, block=32).split_program(SplitStoredBlocking(8, 32, 64))
    assert printed(program)
    stage = program.stages[0]
    steps = [
        dataclasses.replace(step, factor=At(step.factor.buffer, step.a.index))
        if isinstance(step, Contract) and step.factor
        else step
        for step in stage.steps
    ]
    wrong = dataclasses.replace(program, stages=(dataclasses.replace(stage, steps=tuple(steps)),))
    with pytest.raises(InvalidGraphError, match="not that of whole blocks of terms"):
        printed(wrong)


def printed(program: TileProgram) -> str:
    """Return the text of a program."""
    return print_llvm(program, "", Target(isa="amx", lanes=LANES, threads=2)).source
