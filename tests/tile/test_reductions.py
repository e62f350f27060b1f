"""Printed reductions along axes of any name, whose last tile may be partial, compute the same as their programs."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer
from korch.measure.compiler import Builder
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import TransposeAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.provider.provider import Kernel
from korch.target import Target
from korch.testing.kernels import load_kernels, run_kernel
from korch.testing.samples import random_arrays
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.index import add, scale, var
from korch.tile.ir.program import Accumulate, Apply, Axis, Buffer, Level, Load, Pass, Stage, TileProgram
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


def dots(rows: int, terms: int, size: int, dtype: DType, keys_first: bool = False) -> TileProgram:
    """The products of each of some rows by each row of tiles of keys, of which the last tile may end early."""
    last = (TILES - 1) * TILE + size
    g, i, d = Axis("g", TILES), Axis("i", rows), Axis("d", terms, is_reduced=True)
    j = Axis("j", TILE, ragged=("g", last) if size < TILE else None)
    key = add(scale(var("g"), TILE), var("j"))
    ops = (
        Load("a", DType.F32, "q", add(scale(var("i"), terms), var("d"))),
        Load("b", dtype, "k", add(scale(key, terms), var("d"))),
        *([] if dtype is DType.F32 else [Apply("c", DType.F32, "cast", ("b",))]),
        Apply("x", DType.F32, "mul", ("a", "b" if dtype is DType.F32 else "c")),
    )
    sink = Accumulate("out", add(scale(var("i"), TILES * TILE), key), "x", "sum")
    buffers = (
        Buffer("q", Level.INPUT, DType.F32, rows * terms),
        Buffer("k", Level.INPUT, dtype, TILES * TILE * terms),
        Buffer("out", Level.OUTPUT, DType.F32, rows * TILES * TILE),
    )
    axes = (j, i, d) if keys_first else (i, j, d)
    return TileProgram(buffers, (Stage((g,), (Pass(axes, "d", ops, (sink,)),)),))


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16, DType.I8])
def test_rows_that_several_rows_read_are_reduced_together(
    dtype: DType, target: Target, builder: Builder, rng: np.random.Generator
) -> None:
    cases = list(itertools.product((1, 3), (16, 40, 64, 300), (TILE, 13, 1), (False, True)))
    programs = [dots(rows, terms, size, dtype, keys_first) for rows, terms, size, keys_first in cases]
    assert all(check_program(program) == () for program in programs)
    printed = [print_llvm(program, "", target) for program in programs]
    kernels = [Kernel(one.symbol, one.source) for one in printed]
    library = load_kernels(kernels, builder)
    for (rows, terms, size, _), program, kernel in zip(cases, programs, kernels, strict=True):
        g = Graph()
        q, k = g.tensor(rows, terms), g.input("k", ValueType((TILES * TILE, terms), dtype))
        wide = k if dtype is DType.F32 else g.add("cast", [k], CastAttributes("f32"))
        group = g.group(g.add("matmul", [q, g.add("transpose", [wide], TransposeAttributes((1, 0)))]))
        arrays = random_arrays(rng, group.input_types)
        (found,) = run_kernel(kernel, group, Offer(*group.plain_layouts), arrays, builder, library=library)
        (exact,) = run_program(program, [array.reshape(-1) for array in arrays], 0, Float64())
        done = (TILES - 1) * TILE + size
        np.testing.assert_allclose(found[:, :done], exact.reshape(found.shape)[:, :done], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("isa", "lanes"), [("avx2", 8), ("avx512", 16), ("neon", 4)])
def test_reductions_of_adjacent_rows_are_stored_as_a_vector(isa: str, lanes: int, target: Target) -> None:
    text = print_llvm(dots(3, 64, TILE, DType.F32), "", replace(target, isa=isa, lanes=lanes)).source
    assert re.search(rf"store <{lanes} x float> %\w+, ptr", text)
    assert "store <" not in print_llvm(dots(3, 65, TILE, DType.F32), "", replace(target, isa=isa, lanes=lanes)).source
