"""Hand-written programs: contractions, loops that carry tiles, layouts and parameters."""

import itertools
import re

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.primitive.types import DType
from korch.target import Target
from korch.tile.check.arithmetic import Float64
from korch.tile.check.check import check_program
from korch.tile.check.reference import panel_place, run_program
from korch.tile.ir.bind import bind
from korch.tile.ir.program import Buffer, Level, Panels, TileProgram
from korch.tile.ir.text import format_program
from korch.tile.llvm.print import print_llvm
from korch.tile.triton.print import print_triton
from tests.support.finite_field import PRIME, NotPolynomialError
from tests.support.parse_tiles import parse_program
from tests.support.tile_field import Field

PRODUCT = """\
parameter m: 0..500
parameter n: 0..500
parameter k: 0..500
buffer a: input f32[m*(k)]
buffer b: input f32[k*(n)]
buffer c: output f32[m*(n)]
buffer pa: tile f32[32]
buffer pb: tile f32[64] panels(8, 4)
buffer t: tile f32[32]
stage gm<(m + 3)/4 gn<(n + 7)/8
  pass i<4 j<8 vector j
    x0 = f32 0.0
    store t[8*i + j] = x0
  loop g<(k + 7)/8 carries t
    pass p<min(8, k - 8*g) j<min(8, n - 8*gn) vector j
      x0 = f32 load b[8*n*(g) + n*(p) + 8*gn + j]
      store pb[8*p + j] = x0
    pass i<min(4, m - 4*gm) p<min(8, k - 8*g)
      x0 = f32 load a[4*k*(gm) + k*(i) + 8*g + p]
      store pa[8*i + p] = x0
    contract i<4 j<8 | p<min(8, k - 8*g) by f32
      t[8*i + j] += pa[8*i + p] * pb[8*p + j]
  pass i<min(4, m - 4*gm) j<min(8, n - 8*gn) vector j
    x0 = f32 load t[8*i + j]
    store c[4*n*(gm) + n*(i) + 8*gn + j] = x0
"""

ATTENTION = """\
parameter rows: 0..300
parameter keys: 1..300
buffer q: input f32[3*rows]
buffer w: input f32[3*keys]
buffer v: input f32[5*keys]
buffer o: output f32[5*rows]
buffer s: tile f32[16]
buffer e: tile f32[16]
buffer top: tile f32[4]
buffer most: tile f32[4]
buffer new: tile f32[4]
buffer factor: tile f32[4]
buffer part: tile f32[4]
buffer total: tile f32[4]
buffer y: tile f32[20]
stage g<(rows + 3)/4
  pass i<4
    x0 = f32 -inf
    x1 = f32 0.0
    store top[i] = x0
    store total[i] = x1
  pass i<4 c<5
    x0 = f32 0.0
    store y[5*i + c] = x0
  loop j<(keys + 3)/4 carries top, total, y
    pass i<4 r<4
      x0 = f32 0.0
      store s[4*i + r] = x0
    contract i<min(4, rows - 4*g) r<min(4, keys - 4*j) | d<3 by f32
      s[4*i + r] += q[12*g + 3*i + d] * w[12*j + 3*r + d]
    pass i<4 | r<min(4, keys - 4*j)
      x0 = f32 load s[4*i + r]
      max most[i] = x0
    pass i<4
      x0 = f32 load top[i]
      x1 = f32 load most[i]
      x2 = f32 max(x0, x1)
      x3 = f32 sub(x0, x2)
      x4 = f32 exp(x3)
      store new[i] = x2
      store factor[i] = x4
    pass i<4 r<min(4, keys - 4*j)
      x0 = f32 load s[4*i + r]
      x1 = f32 load new[i]
      x2 = f32 sub(x0, x1)
      x3 = f32 exp(x2)
      store e[4*i + r] = x3
    pass i<4 | r<min(4, keys - 4*j)
      x0 = f32 load e[4*i + r]
      sum part[i] = x0
    pass i<4
      x0 = f32 load total[i]
      x1 = f32 load factor[i]
      x2 = f32 mul(x0, x1)
      x3 = f32 load part[i]
      x4 = f32 add(x2, x3)
      x5 = f32 load new[i]
      store total[i] = x4
      store top[i] = x5
    contract i<4 c<5 | r<min(4, keys - 4*j) by f32
      y[5*i + c] += e[4*i + r] * v[20*j + 5*r + c] rescale factor[i]
  pass i<min(4, rows - 4*g) c<5
    x0 = f32 load y[5*i + c]
    x1 = f32 load total[i]
    x2 = f32 div(x0, x1)
    store o[20*g + 5*i + c] = x2
"""

CHAIN = """\
parameter m: 0..300
buffer a: input f32[7*m]
buffer b: input f32[35]
buffer d: input f32[5]
buffer c: input f32[45]
buffer y: output f32[9*m]
buffer t: tile f32[20]
buffer u: tile f32[36]
stage g<(m + 3)/4
  pass i<4 j<5
    x0 = f32 load d[j]
    store t[5*i + j] = x0
  contract i<min(4, m - 4*g) j<5 | p<7 by f32
    t[5*i + j] += a[28*g + 7*i + p] * b[5*p + j]
  pass i<min(4, m - 4*g) j<5
    x0 = f32 load t[5*i + j]
    x1 = f32 mul(x0, x0)
    store t[5*i + j] = x1
  pass i<4 j<9
    x0 = f32 0.0
    store u[9*i + j] = x0
  contract i<min(4, m - 4*g) j<9 | p<5 by f32
    u[9*i + j] += t[5*i + p] * c[9*p + j]
  pass i<min(4, m - 4*g) j<9
    x0 = f32 load u[9*i + j]
    store y[36*g + 9*i + j] = x0
"""

SUMS = """\
parameter n: 0..300
buffer x: input f32[n]
buffer y: output f32[n]
buffer r: tile f32[n + 1]
stage
  pass
    x0 = f32 0.0
    store r[0] = x0
  loop i<n carries r
    pass
      x0 = f32 load r[i]
      x1 = f32 load x[i]
      x2 = f32 add(x0, x1)
      store r[i + 1] = x2
      store y[i] = x2
"""

PROGRAMS = {"product": PRODUCT, "attention": ATTENTION, "chain": CHAIN, "sums": SUMS}


def elements(rng, *shape):
    return rng.integers(0, PRIME, shape)


def multiply(a, b):
    return (a.astype(object) @ b.astype(object)) if a.shape[1] else np.zeros((a.shape[0], b.shape[1]), object)


@pytest.mark.parametrize("text", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_pass_every_check_for_all_values_of_parameters(text):
    program = parse_program(text)
    assert format_program(program) == text
    assert check_program(program) == ()


@pytest.mark.parametrize(("m", "n", "k"), [*itertools.product((0, 1, 9), (1, 8), (0, 1, 17)), (5, 13, 8), (3, 0, 2)])
def test_a_blocked_product_with_packed_panels(m, n, k, rng):
    program, sizes = parse_program(PRODUCT), {"m": m, "n": n, "k": k}
    check_program(bind(program, sizes))
    a, b = rng.standard_normal((m, k)), rng.standard_normal((k, n))
    (c,) = run_program(program, [a, b], arithmetic=Float64(), parameters=sizes)
    np.testing.assert_allclose(c.reshape(m, n), a @ b, atol=1e-13)
    (c,) = run_program(program, [a.astype(np.float32), b.astype(np.float32)], 1, parameters=sizes)
    assert c.dtype == np.float32
    np.testing.assert_allclose(c.reshape(m, n), a @ b, atol=1e-4)
    a, b = elements(rng, m, k), elements(rng, k, n)
    (c,) = run_program(program, [a, b], 2, Field(), sizes)
    np.testing.assert_array_equal(c.reshape(m, n), multiply(a, b) % PRIME)


@pytest.mark.parametrize(("rows", "keys"), [(0, 1), (1, 1), (1, 9), (7, 4), (9, 13)])
def test_attention_carries_its_rows_and_rescales_them(rows, keys, rng):
    program, sizes = parse_program(ATTENTION), {"rows": rows, "keys": keys}
    q, w, v = (rng.standard_normal(s) * 3 for s in ((rows, 3), (keys, 3), (keys, 5)))
    scores = q @ w.T
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = e @ v / e.sum(axis=1, keepdims=True)
    (o,) = run_program(program, [q, w, v], arithmetic=Float64(), parameters=sizes)
    np.testing.assert_allclose(o.reshape(rows, 5), expected, atol=1e-13)
    (o,) = run_program(program, [q, w, v], parameters=sizes)
    np.testing.assert_allclose(o.reshape(rows, 5), expected, atol=1e-4)
    with pytest.raises(NotPolynomialError):
        run_program(program, [q, w, v], arithmetic=Field(), parameters={"rows": 1, "keys": keys})


@pytest.mark.parametrize("m", [0, 1, 4, 11])
def test_a_chain_of_two_products_through_a_tile(m, rng):
    program = parse_program(CHAIN)
    a, b, d, c = (rng.standard_normal(s) for s in ((m, 7), (7, 5), (5,), (5, 9)))
    (y,) = run_program(program, [a, b, d, c], arithmetic=Float64(), parameters={"m": m})
    np.testing.assert_allclose(y.reshape(m, 9), (a @ b + d) ** 2 @ c, atol=1e-12)
    a, b, d, c = (elements(rng, *s) for s in ((m, 7), (7, 5), (5,), (5, 9)))
    (y,) = run_program(program, [a, b, d, c], 3, Field(), {"m": m})
    np.testing.assert_array_equal(y.reshape(m, 9), multiply((multiply(a, b) + d) ** 2 % PRIME, c) % PRIME)


@pytest.mark.parametrize("n", [0, 1, 10])
def test_a_loop_carries_sums(n, rng):
    x = elements(rng, n)
    (y,) = run_program(parse_program(SUMS), [x], arithmetic=Field(), parameters={"n": n})
    np.testing.assert_array_equal(y, np.cumsum(x) % PRIME)
    outside = parse_program(SUMS.replace("load r[i]", "load r[i - 3]"))
    if n:
        with pytest.raises(IndexError, match="a load leaves buffer r"):
            run_program(outside, [x], arithmetic=Field(), parameters={"n": n})


REFUSED = {
    "two tasks of a stage write one element": (PRODUCT, "store c[4*n*(gm) + n*(i)", "store c[n*(gm) + n*(i)"),
    "a task reads what another task of its stage writes": (
        CHAIN.replace("a: input f32[7*m]", "a: input f32[7*m]\nbuffer h: workspace f32[9*m]"),
        "    store y[36*g + 9*i + j] = x0\n",
        "    store y[36*g + 9*i + j] = x0\n    store h[36*g + 9*i + j] = x0\n"
        "  pass i<min(4, m - 4*g)\n    x0 = f32 load h[9*m - 1]\n    store y[36*g + 9*i] = x0\n",
    ),
    "reaches": (PRODUCT, "a[4*k*(gm) + k*(i) + 8*g + p]", "a[4*k*(gm) + k*(i) + 8*g + p + 1]"),
    "an index of 20 reaches [1, 20]": (CHAIN, "store t[5*i + j] = x1", "store t[5*i + j + 1] = x1"),
    "an index of 36 reaches": (CHAIN, "u[9*i + j] +=", "u[9*i + j + 1] +="),
    "a buffer is read before it is written": (CHAIN, "t[5*i + p] * c", "u2[5*i + p] * c"),
    "'t': a carried tile is not written before its loop": (
        PRODUCT,
        "  pass i<4 j<8 vector j\n    x0 = f32 0.0\n    store t[8*i + j] = x0\n",
        "",
    ),
    "'t[8*i + j] += pa[8*i + p] * pb[8*p + j]': a buffer is read before it is written": (PRODUCT, " carries t", ""),
    "what a loop carries is no tile": (PRODUCT, "carries t", "carries c"),
    "tiles do not cover their axis": (ATTENTION, "stage g<(rows + 3)/4", "stage g<(rows + 4)/4"),
    "a place depends on a reduced loop": (CHAIN, "u[9*i + j] +=", "u[9*i + p] +="),
    "a variable is no loop": (CHAIN, "a[28*g + 7*i + p]", "a[28*g + 7*i + q]"),
    "two loops have one variable": (PRODUCT, "loop g<(k + 7)/8", "loop gm<(k + 7)/8"),
    "'m': the range of a parameter is empty or negative": (CHAIN, "m: 0..300", "m: 3..2"),
    "two parameters have one name": (CHAIN, "m: 0..300", "m: 0..300\nparameter m: 0..4"),
    "'a': the size 7*l depends on what is no parameter": (CHAIN, "a: input f32[7*m]", "a: input f32[7*l]"),
    "'a': the size 7*m - 1 may be negative": (CHAIN, "a: input f32[7*m]", "a: input f32[7*m - 1]"),
    "'pb': panels do not divide a buffer": (PRODUCT, "panels(8, 4)", "panels(8, 3)"),
    "'pb': panels do not": (PRODUCT, "panels(8, 4)", "panels(8, 0)"),
    "a is of type f32, not u8": (CHAIN, "| p<7 by f32", "| p<7 by u8s8"),
    "factor is of type f64, not f32": (ATTENTION, "factor: tile f32", "factor: tile f64"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_mutated_program_is_refused(message):
    text, old, new = REFUSED[message]
    assert old in text
    if "u2" in new:
        text = text.replace("buffer u:", "buffer u2: tile f32[36]\nbuffer u:")
    with pytest.raises(InvalidGraphError) as caught:
        check_program(parse_program(text.replace(old, new)))
    assert message in str(caught.value)


def test_a_refusal_names_the_values_of_parameters():
    text = CHAIN.replace("store y[36*g + 9*i + j]", "store y[36*g + 9*i + j + 1]")
    with pytest.raises(InvalidGraphError, match=r"an index of \d+ reaches \[\d+, \d+\] with m=\d+"):
        check_program(parse_program(text))


def test_what_is_neither_shown_nor_refuted_is_returned():
    """Tasks write different elements here, but a sum of quotients is beyond the algebra."""
    text = """\
parameter n: 1..100000
buffer i0: input f32[n]
buffer o0: output f32[200000]
stage g<n
  pass
    x0 = f32 load i0[g]
    store o0[(g + 1)/1 + (2*g + 1)/2] = x0
"""
    assert check_program(parse_program(text)) == ("stage 0: whether tasks race for o0",)


def test_rows_of_unwritten_tiles_are_unknown(rng):
    """A program that reads a part of a tile before it is written has results that show it."""
    text = CHAIN.replace("  pass i<4 j<9\n", "  pass i<3 j<9\n")
    (y,) = run_program(parse_program(text), [rng.standard_normal(n) for n in (56, 35, 5, 45)], parameters={"m": 8})
    assert np.isnan(y.reshape(8, 9)[[3, 7]]).all()
    assert np.isfinite(y.reshape(8, 9)[[0, 1, 2, 4, 5, 6]]).all()


TYPES = """\
buffer a: input f32[640]
buffer b: input f32[640]
buffer c: output f32[1]
buffer pa: tile f32[640] split(2, bf16)
buffer t: tile f32[1]
stage
  pass
    x0 = f32 0.0
    store t[0] = x0
  pass i<640
    x0 = f32 load a[i]
    store pa[i] = x0
  contract | p<640 by split
    t[0] += pa[p] * b[p]
  pass
    x0 = f32 load t[0]
    store c[0] = x0
"""


def test_products_round_as_their_names_say(rng):
    a, b = rng.standard_normal(640).astype(np.float32), rng.standard_normal(640).astype(np.float32)
    exact = float(a.astype(float) @ b.astype(float))

    def error(text, *given):
        program = parse_program(text)
        assert check_program(program) == ()
        return abs(float(run_program(program, given)[0][0]) - exact)

    low = (
        re.sub(r"f32\[640\].*", "bf16[640]", TYPES).replace("by split", "by bf16").replace("f32 load a", "bf16 load a")
    )
    kind = DType.BF16.numpy
    assert error(low, a.astype(kind), b.astype(kind)) > 1e-3
    assert 0 < error(TYPES, a, b) < 1e-3


def test_bytes_are_added_up_in_32_bits(rng):
    text = re.sub(r"buffer (c|t)(.*) f32", r"buffer \1\2 i32", TYPES).replace(" split(2, bf16)", "")
    text = (
        text.replace("a: input f32", "a: input u8")
        .replace("pa: tile f32", "pa: tile u8")
        .replace("by split", "by u8s8")
    )
    text = text.replace("b: input f32", "b: input i8").replace("f32 load a", "u8 load a").replace("f32 0.0", "i32 0")
    program = parse_program(text.replace("f32 load t", "i32 load t"))
    assert check_program(program) == ()
    a, b = rng.integers(0, 256, 640).astype(np.uint8), rng.integers(-128, 128, 640).astype(np.int8)
    assert run_program(program, [a, b])[0][0] == a.astype(int) @ b.astype(int)


def test_panels_are_a_permutation():
    buffer = Buffer("p", Level.TILE, DType.F32, 48, (Panels(16, 8),))
    place = panel_place(buffer, Panels(16, 8), np.arange(48)).reshape(3, 16)
    assert sorted(place.reshape(-1)) == list(range(48))
    assert [*place[0, :9]] == [*range(8), 24]
    assert place[1, 0] == 8


PARTS = """\
buffer i0: input f32[20]
buffer o0: output f32[20]
buffer t: tile f32[5]
stage g<2
  loop j<min(3, 4 - 3*g)
    pass v<5 vector v
      x0 = f32 load i0[15*g + 5*j + v]
      store t[v] = x0
    pass v<8 vector v if 0 <= 3*g + j < 3 and 0 <= v < 5
      x0 = f32 load t[v]
      store o0[15*g + 5*j + v] = x0
"""


def test_a_loop_may_end_early_and_a_pass_leave_points_out():
    program = parse_program(PARTS)
    assert check_program(program) == ()
    assert format_program(program) == PARTS
    (found,) = run_program(program, [np.arange(1, 21)])
    assert np.array_equal(found, np.where(np.arange(20) < 15, np.arange(1, 21), 0))
    wrong = PARTS.replace("pass v<8 vector v if 0 <= 3*g + j < 3 and 0 <= v < 5", "pass v<8 vector v if 0 <= v < 6")
    with pytest.raises(InvalidGraphError, match="an index of 5 reaches"):
        check_program(parse_program(wrong))


@pytest.mark.parametrize(
    ("text", "llvm", "triton"),
    [
        (PARTS, "passes that leave elements of a vector out can't be printed", "loops that end early can't be printed"),
        (PRODUCT, "m is known at run time only. Bind the parameters first", "m is known at run time only"),
        (TYPES, "the layout of buffer pa can't be printed", "the layout of buffer pa can't be printed"),
        (
            TYPES.replace(" split(2, bf16)", ""),
            "a product of numbers that are not split can't be printed",
            "contractions by split can't be printed",
        ),
    ],
)
def test_printers_refuse_what_they_do_not_print(text, llvm, triton):
    program = parse_program(text)
    for refused, message in (
        (lambda: print_llvm(program, "", Target()), llvm),
        (lambda: print_triton(program, "", 132), triton),
    ):
        with pytest.raises(InvalidGraphError) as caught:
            refused()
        assert message in str(caught.value)


def test_a_parameter_needs_a_number_in_its_range():
    program = parse_program(CHAIN)
    with pytest.raises(InvalidGraphError, match=r"parameter m is not given; expected 0\.\.300"):
        bind(program, {})
    with pytest.raises(InvalidGraphError, match=r"parameter m is 301; expected 0\.\.300"):
        bind(program, {"m": 301})
    bound = bind(program, {"m": 9})
    assert isinstance(bound, TileProgram)
    assert [bound.buffer("a").size, bound.stages[0].tasks, bound.parameters] == [63, 3, ()]
