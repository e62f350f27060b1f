"""Printed contractions of bytes are exact: 32-bit sums, and values that are computed from them."""

import ctypes
import itertools

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.measure.compiler import Builder
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import printed_kernel
from korch.target import LANES, Target
from korch.testing.kernels import load_kernels
from korch.tile.check.check import check_program
from korch.tile.check.reference import panel_place, run_program
from korch.tile.ir.program import TileProgram
from korch.tile.ir.text import format_program
from korch.tile.llvm.print import print_llvm
from tests.support.parse_tiles import parse_program

SIZES = ((1, 1, 1), (3, 5, 2), (70, 37, 67), (13, 48, 1030), (37, 16, 2049), (64, 33, 128), (5, 4, 0))
SIGNS = {"u8s8": ("u8", "i8"), "s8s8": ("i8", "i8"), "s8u8": ("i8", "u8"), "u8u8": ("u8", "u8")}

SUMS = """
    pass i<{i} j<{j} vector j
      x0 = i32 load t[{j}*i + j]
      store o0[{out}] = x0"""

MOVED = """
    pass i<{i} j<{j} vector i
      x0 = i32 load t[{j}*i + j]
      store o0[{out}] = x0"""

REQUANTIZED = """
    pass i<{i} j<{j} vector j
      x0 = i32 load t[{j}*i + j]
      x1 = f32 cast(x0)
      x2 = f32 load i2[{first}j]
      x3 = f32 mul(x1, x2)
      x4 = f32 round(x3)
      x5 = f32 3.0
      x6 = f32 add(x4, x5)
      x7 = f32 0.0
      x8 = f32 max(x6, x7)
      x9 = f32 255.0
      x10 = f32 min(x8, x9)
      x11 = u8 cast(x10)
      store o0[{out}] = x11"""


def ceiling(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def program_of(m: int, n: int, k: int, lanes: int, product: str, after: str, block: int = 0) -> TileProgram:
    """A product in blocks of rows, and of columns that are two strips."""
    strip = 2 * lanes
    kp, np_, rows, width = ceiling(k, 4), ceiling(n, strip), block or m, min(2 * strip, ceiling(n, strip))
    a, b = SIGNS[product]
    i = f"min({rows}, {m} - {rows}*gm)" if m % rows else f"{rows}"
    j = f"min({width}, {n} - {width}*gn)" if n % width else f"{width}"
    first = f"{width}*gn + " if n > width else ""
    kind = "u8" if after == REQUANTIZED else "i32"
    out = f"{n * rows}*gm + {first}{n}*i + j"
    text = f"""buffer i0: input {a}[{m * kp}]
buffer i1: input {b}[{kp * np_}] panels({np_}, {strip}, 4)
buffer i2: input f32[{n}]
buffer o0: output {kind}[{m * n}]
buffer t: tile i32[{rows * width}]
stage gm<{-(-m // rows)} gn<{-(-n // width)}
  pass i<{i} j<{j} vector j
    x0 = i32 0
    store t[{width}*i + j] = x0
  contract i<{i} j<{j} | p<{k} by {product}
    t[{width}*i + j] += i0[{kp * rows}*gm + {kp}*i + p] * i1[{first}{np_}*p + j]"""
    tail = after.format(i=i, j=j, out=out, first=first).replace("\n    ", "\n  ").replace(f"t[{j}*i", f"t[{width}*i")
    return parse_program(text + tail + "\n")


def operands(rng, m: int, n: int, k: int, lanes: int, product: str, kind: str):
    """Return both matrices, and the arrays in memory: terms are padded, of b with zeros."""
    kp, np_ = ceiling(k, 4), ceiling(n, 2 * lanes)
    ranges = [np.iinfo(np.uint8 if t == "u8" else np.int8) for t in SIGNS[product]]
    if kind == "extreme":
        a, b = (
            rng.choice([r.min, r.max], size).astype(r.dtype) for r, size in zip(ranges, ((m, k), (k, n)), strict=True)
        )
    else:
        a = rng.integers(ranges[0].min, ranges[0].max + 1, (m, k)).astype(ranges[0].dtype)
        spread = np.clip(np.rint(rng.normal(0, 36, (k, n))), -127, 127)  # few pairs of large weights
        b = (np.abs(spread) if ranges[1].min == 0 else spread).astype(ranges[1].dtype)
    memory = rng.integers(0, 100, (m, kp)).astype(a.dtype)
    memory[:, :k] = a
    whole = np.zeros((kp, np_), b.dtype)
    whole[:k, :n] = b
    return a, b, memory, whole


def run(kernel: Kernel, program: TileProgram, arrays, library: ctypes.CDLL):
    """Run a program on arrays in its input buffers' memory."""
    result = program.buffer("o0")
    output = np.full(max(1, result.size), 77, result.dtype.numpy)
    room = np.zeros(kernel.workspace_bytes + 64, np.uint8)
    memory = [np.ascontiguousarray(array) if array.size else np.zeros(64, array.dtype) for array in arrays]
    pointers = (ctypes.c_void_p * (len(memory) + 2))(*(x.ctypes.data for x in (*memory, output, room)))
    assert library.function(kernel.symbol + "_run")(None, pointers) == 0
    return output[: result.size]


def check(kinds, products, afters, sizes, lanes: int, builder: Builder, rng, block: int = 0) -> None:
    """Compare products of all these kinds with NumPy's and with the interpreter of programs."""
    todo = []
    for size, product, after in itertools.product(sizes, products, afters):
        program = program_of(*size, lanes, product, after, block)
        check_program(program)
        assert parse_program(format_program(program)) == program
        kernel = printed_kernel(program, print_llvm(program, "", Target(isa=builder.isa, lanes=lanes, threads=2)))
        todo.append((size, product, after, program, kernel))
    library = load_kernels([*dict.fromkeys(kernel for *_, kernel in todo)], builder)
    for (size, product, after, program, kernel), kind in itertools.product(todo, kinds):
        m, n, k = size
        a, b, memory, whole = operands(rng, m, n, k, lanes, product, kind)
        scale = rng.uniform(0.0001, 0.01, n).astype(np.float32)
        buffer = program.buffer("i1")
        packed = np.zeros(whole.size, whole.dtype)
        packed[panel_place(buffer, buffer.layout[0], np.arange(whole.size))] = whole.reshape(-1)
        found = run(kernel, program, (memory, packed, scale), library)
        (expected,) = run_program(program, [memory.reshape(-1), packed, scale])
        np.testing.assert_array_equal(found, expected)
        sums = wanted = a.astype(np.int64) @ b.astype(np.int64)
        if after == REQUANTIZED:
            wanted = np.clip(np.rint(sums.astype(np.float32) * scale) + 3, 0, 255).astype(np.uint8)
        np.testing.assert_array_equal(found.reshape(m, n), wanted)


@pytest.mark.parametrize("product", SIGNS)
def test_sums_are_exact(product, target, builder, rng):
    check(("usual", "extreme"), [product], [SUMS], SIZES, target.lanes, builder, rng)


def test_what_follows_is_computed_from_the_sums(target, builder, rng):
    check(["usual"], ["u8s8"], [REQUANTIZED, MOVED], [(13, 37, 70), (1, 16, 5)], target.lanes, builder, rng)


def test_blocks_of_rows_and_columns(target, builder, rng):
    check(["usual"], ["s8s8"], [REQUANTIZED, SUMS], [(50, 75, 40)], target.lanes, builder, rng, block=24)


@pytest.mark.parametrize("isa", ["avx2", "generic"])
def test_other_instruction_sets(isa, target, rng, tmp_path):
    if target.isa == isa or target.lanes < LANES[isa]:
        pytest.skip("this machine runs no other instruction set")
    check(["usual"], ["u8s8", "s8u8"], [SUMS], [(21, 19, 70)], LANES[isa], Builder(isa, tmp_path), rng)


def refusal(old: str, new: str) -> str:
    text = format_program(program_of(20, 40, 70, 8, "u8s8", SUMS)).replace(old, new)
    with pytest.raises(InvalidGraphError) as error:
        print_llvm(parse_program(text), "", Target(isa="avx2", lanes=8, threads=1))
    return str(error.value)


def test_what_is_not_printed_is_refused():
    assert "is not in panels of 16 columns and 4 terms" in refusal("panels(48, 16, 4)", "panels(48, 8, 4)")
    assert "is not in panels of 16 columns and 4 terms" in refusal(" panels(48, 16, 4)", "")
    assert "do not lie side by side" in refusal("72*i + p]", "i + 20*p]")
    assert "are added to a tile" in refusal("x0 = i32 0", "x0 = i32 1")
    assert "panels of 16 columns" in refusal("panels(48, 16, 4)", "panels(48, 16, 2)")
