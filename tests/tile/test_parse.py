"""Parsing the printed form of a tile program gives the same program."""

import contextlib

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.tile.ir.index import Choice, Expr, Quotient, Remainder, TableEntry, Times, Var, add, constant, scale, var
from korch.tile.ir.stored import read_program, stored_program
from korch.tile.ir.text import format_program
from tests.support.parse_tiles import parse_program
from tests.tile.tile_groups import FAMILIES, lowered, offers_of, random_groups

V, N = Expr(0, ((Var("v"), 1),)), Var("n")
EXPRESSIONS = (
    constant(0),
    constant(-3),
    scale(var("v"), -1),
    add(scale(var("a"), -2), scale(var("b"), 5), constant(-7)),
    Expr(4, ((Quotient(Expr(-1, ((Var("v"), -1),)), 3), 2), (Remainder(V, 8), -1))),
    Expr(0, ((TableEntry((3, -1, 4), V), 12), (Var("table1"), 1))),
    Expr(-1, ((Choice(V, ((-2, constant(-5)), (7, scale(V, -1))), Expr(3, ((Var("w"), 2),))), -3),)),
    Expr(0, ((Choice(V, ((1, Expr(0, ((Choice(V, ((2, V),), constant(1)), 1),))),), V), 1),)),
    Expr(1, ((Times(N, V), 3), (Times(Quotient(Expr(7, ((N, 1),)), 8), V), 1))),
)


@pytest.mark.parametrize("expr", EXPRESSIONS, ids=str)
def test_an_expression_is_read_as_what_was_printed(expr):
    (buffer,) = parse_program(f"buffer b: tile f32[{expr}]").buffers
    assert buffer.elements == (expr if expr.terms else expr.constant)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_programs_is_read_as_what_was_printed(family, target):
    for group in FAMILIES[family]():
        for offer in offers_of(group, target):
            program = lowered(group, offer, target)
            assert parse_program(format_program(program)) == program
            assert read_program(stored_program(program)) == program


def test_random_programs_are_read_as_what_was_printed(target):
    for group in random_groups(np.random.default_rng(3), 40):
        for offer in offers_of(group, target):
            text = format_program(lowered(group, offer, target))
            assert format_program(parse_program(text)) == text


EVERYTHING = """\
parameter k: 0..512
buffer i0: input f32[40*k + 3]
buffer t0: tile f32[128] panels(16, 8) split(2, bf16)
buffer t1: tile f32[160]
buffer o0: output f32[160]
stage g0<4 g1<(k + 7)/8
  pass v1<10 | r2<3 vector v1 across r2
    x0 = f32 load i0[10*g0 + v1] if 0 <= g0 - 1 < 3 and -2 <= v1 < 7
    x1 = f32 -inf
    x2 = f32 x0 if 0 <= g0 - 1 < 3 else x1
    x3 = bool True
    x4 = f32 1e-05
    x5 = i32 -7
    x6 = f32 add(x2, x4)
    sum o0[g0] = x6
  loop j<(k + 7)/8 carries t1, t0
    contract m<10 n<16 | p<min(8, k - 8*j) by split
      t1[16*m + n] += i0[8*j + p] * t0[16*p + n] rescale t2[m]
    loop q<3
      pass
        x0 = f32 0.0
        store t1[q] = x0
stage
"""


def test_every_part_is_read_as_it_is_printed():
    assert format_program(parse_program(EVERYTHING)) == EVERYTHING


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("stage g0<4", "stages g0<4", "line 6: can't read 'stages g0<4 g1<(k + 7)/8' at 'stages'; expected parameter,"),
        ("0..512", "0-512", "line 1: can't read 'parameter k: 0-512' at '-'; expected '..'"),
        ("tile f32[128]", "tiles f32[128]", "'tiles'; expected one of input, output, workspace, tile"),
        ("panels(16, 8)", "panels(16)", "at ')'; expected ','"),
        ("i0[10*g0 + v1]", "i0[10*g0 + ]", "at ']'; expected a name"),
        ("(k + 7)/8 carries", "(k + 7) carries", "line 16: can't read 'loop j<(k + 7) carries t1, t0' at 'carries'"),
        ("(k + 7)/8 carries", "(k + 7)/0 carries", "at '0'; expected a divisor greater than 0"),
        ("k - 8*j)", "k - 4*j)", "at ')'; expected 8 times the outer variable"),
        ("by split", "by f33", "line 17: can't read 'contract m<10 n<16 | p<min(8, k - 8*j) by f33' at 'f33'"),
        ("rescale t2[m]", "rescale t2[m] x", "at 'x'; expected the end of the line"),
        ("    loop q<3", "      loop q<3", "at 'loop'; expected an indentation of 4 spaces"),
        ("  pass v1<10", "  path v1<10", "at 'path'; expected pass, contract or loop"),
        ("x6 = f32 add(x2, x4)", "x6 = f32 add(x2 x4)", "at 'x4'; expected ','"),
        ("sum o0[g0] = x6", "sum o0[g0]", "line 15: can't read 'sum o0[g0]' at its end; expected '='"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(old, new, message):
    assert old in EVERYTHING
    with pytest.raises(InvalidGraphError) as caught:
        parse_program(EVERYTHING.replace(old, new))
    assert message in str(caught.value)


def test_a_stored_program_is_read_as_it_was():
    program = parse_program(EVERYTHING)
    assert read_program(stored_program(program)) == program
    assert format_program(read_program(stored_program(program))) == EVERYTHING


@pytest.mark.parametrize("text", ["", "3", "[3]", '["Load"]', '["Nothing", 1]', '["", 1, 2]'])
def test_a_damaged_stored_program_is_refused(text):
    with pytest.raises(ValueError):
        read_program(text)


def test_no_damaged_text_raises_another_error():
    rng = np.random.default_rng(5)
    read = 0
    for _ in range(800):
        at, length = rng.integers(0, len(EVERYTHING)), rng.integers(1, 5)
        with contextlib.suppress(InvalidGraphError):
            parse_program(EVERYTHING[:at] + EVERYTHING[at + length :])
            read += 1
    assert 80 < read < 700
