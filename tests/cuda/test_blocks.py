"""Contractions and loops of tile programs whose tiles are blocks, in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest

from korch.cuda.kernel import kernel_of
from korch.errors import InvalidGraphError
from korch.primitive.types import DType
from korch.tile.check.reference import run_program
from korch.tile.ir.bind import bind
from korch.tile.ir.index import var
from korch.tile.ir.program import Axis, Buffer, Inside, Level, Load, Pass, Stage, Store, TileProgram
from korch.tile.triton.print import print_triton
from tests.support.interpret import run_interpreted
from tests.support.parse_tiles import parse_program
from tests.tile.test_programs import ATTENTION, CHAIN, PRODUCT

BLOCKS = PRODUCT.replace(" panels(8, 4)", "")
SIZES = {"m": 11, "n": 21, "k": 13}


def run(program: TileProgram, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Return the flat outputs of the kernel of a program."""
    ports = {
        level: [(b.name, b.dtype) for b in program.buffers if b.level is level] for level in (Level.INPUT, Level.OUTPUT)
    }
    kernel = kernel_of(print_triton(program, "", 2), ports[Level.INPUT], ports[Level.OUTPUT])
    sizes = [(b.dtype, b.size) for b in program.buffers if b.level is Level.OUTPUT]
    return run_interpreted(kernel, inputs, sizes)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (BLOCKS, SIZES),
        # a tile that is written in another order than it is read
        (BLOCKS.replace("pass i<min(4, m - 4*gm) p<", "pass p<", 1).replace(
            "k - 8*g)\n      x0 = f32 load a", "k - 8*g) i<min(4, m - 4*gm)\n      x0 = f32 load a"), SIZES),
        (ATTENTION, {"rows": 9, "keys": 11}),
        (CHAIN, {"m": 10}),
    ],
    ids=["product", "turned", "attention", "chain"],
)  # fmt: skip
def test_blocks_that_end_early(text, sizes, rng):
    program = bind(parse_program(text), sizes)
    inputs = [rng.standard_normal(b.size).astype(np.float32) for b in program.buffers if b.level is Level.INPUT]
    for found, expected in zip(run(program, inputs), run_program(program, inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_only_what_is_summed_is_masked():
    """Rows and columns beyond the end give sums that are not stored; terms beyond it are read as 0."""
    program = bind(parse_program(BLOCKS), SIZES)
    (launch,) = print_triton(program, "", 2).launches
    assert "tl.where" not in launch.source
    negated = BLOCKS.replace("store pa[8*i + p] = x0", "x1 = f32 neg(x0)\n      store pa[8*i + p] = x1")
    (launch,) = print_triton(bind(parse_program(negated), SIZES), "", 2).launches
    assert launch.source.count("tl.where") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("pa[8*i + p] * pb", "pa[8*i + p + 1] * pb", "tile pa is read in another order than written"),
        ("      store pa[8*i + p] = x0\n", "      store pb[8*i + p] = x0\n", "tile pa is read before it is written"),
        ("by f32", "by f64", "contractions by f64 can't be printed"),
    ],
)
def test_what_is_not_printed_is_refused(old, new, message):
    assert old in BLOCKS
    with pytest.raises(InvalidGraphError, match=message):
        print_triton(bind(parse_program(BLOCKS.replace(old, new)), SIZES), "", 2)


def test_points_are_left_out_between_passes_only():
    v = Axis("v", 8)
    buffers = (Buffer("i0", Level.INPUT, DType.F32, 8), Buffer("o0", Level.OUTPUT, DType.F32, 8))
    copy = Pass((), "", (Load("x0", DType.F32, "i0", var("v")),), (Store("o0", var("v"), "x0"),))
    some = replace(copy, where=(Inside(var("v"), 0, 5),))
    assert "mask" not in print_triton(TileProgram(buffers, (Stage((v,), (copy,)),)), "", 1).launches[0].source
    with pytest.raises(InvalidGraphError, match="leave points out"):
        print_triton(TileProgram(buffers, (Stage((v,), (some,)),)), "", 1)
    assert "< 5" in print_triton(TileProgram(buffers, (Stage((v,), (some, some)),)), "", 1).launches[0].source
