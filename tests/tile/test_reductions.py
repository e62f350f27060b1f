"""Printed reductions along axes of any name, whose last tile may be partial, compute the same as their programs."""

import itertools

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer
from korch.measure.compiler import Builder
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.types import DType
from korch.provider.provider import Kernel
from korch.target import Target
from korch.testing.kernels import load_kernels, run_kernel
from korch.testing.samples import random_arrays
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.index import add, scale, var
from korch.tile.ir.program import Accumulate, Axis, Buffer, Level, Load, Pass, Stage, TileProgram
from korch.tile.llvm.print import print_llvm
from tests.provider.linear_groups import Graph

TILE, TILES = 21, 3


def reduction(kept: Axis, size: int, vector: str) -> TileProgram:
    """The sum and the maximum of each row's tiles, of which the last may end early."""
    last = (TILES - 1) * TILE + size
    g, r = Axis("g", TILES), Axis("r", TILE, is_reduced=True, ragged=("g", last) if size < TILE else None)
    row = add(scale(var("g"), kept.extent), var(kept.name))
    steps = (TILES * TILE, 1) if vector == "r" else (1, kept.extent)
    place = add(scale(var(kept.name), steps[0]), scale(add(scale(var("g"), TILE), var("r")), steps[1]))
    sinks = (Accumulate("sum", row, "x", "sum"), Accumulate("most", row, "x", "max"))
    pass_ = Pass((kept, r), vector, (Load("x", DType.F32, "in", place),), sinks)
    buffers = [Buffer("in", Level.INPUT, DType.F32, TILES * TILE * kept.extent)]
    buffers += [Buffer(name, Level.OUTPUT, DType.F32, TILES * kept.extent) for name in ("sum", "most")]
    return TileProgram(tuple(buffers), (Stage((g,), (pass_,)),))


def sizes(rows: int) -> Group:
    """A group with the inputs and outputs of a program."""
    g = Graph()
    x = g.tensor(rows, TILE)
    return g.group(*(g.add(op, [x], ReduceAttributes((1,))) for op in ("reduce_sum", "reduce_max")))


@pytest.mark.parametrize("name", ["i", "m"])
@pytest.mark.parametrize("size", [TILE, 13, 1])
def test_tiles_end_early(name: str, size: int, target: Target, builder: Builder, rng: np.random.Generator) -> None:
    kept = [Axis(name, n) for n in (1, 5, 8, 37)]
    programs = [reduction(axis, size, vector) for axis, vector in itertools.product(kept, (name, "r"))]
    assert all(check_program(program) == () for program in programs)
    printed = [print_llvm(program, "", target) for program in programs]
    kernels = [Kernel(one.symbol, one.source) for one in printed]
    library = load_kernels(kernels, builder)
    for program, kernel in zip(programs, kernels, strict=True):
        group = sizes(program.buffers[1].size)
        (x,) = random_arrays(rng, group.input_types)
        found = run_kernel(kernel, group, Offer(*group.plain_layouts), [x], builder, library=library)
        expected = run_program(program, [x.reshape(-1)], 0, Float64())
        for own, exact in zip(found, expected, strict=True):
            np.testing.assert_allclose(own.reshape(-1), exact, rtol=1e-5, atol=1e-5)
