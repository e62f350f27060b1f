"""The text form of a program, and for every check a program that violates it."""

from dataclasses import replace

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.primitive.types import DType
from korch.tile.check import check
from korch.tile.check.reference import run_program
from korch.tile.ir.index import ZERO, add, constant, scale, var
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Literal,
    Load,
    Loop,
    Panels,
    Pass,
    Product,
    Select,
    Split,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.ir.sort import Sort, Top
from korch.tile.ir.text import format_program
from tests.tile.tile_groups import Graph, lowered, offers_of

F32 = DType.F32
X = Load("x0", F32, "i0", var("v"))
STORE = Store("o0", var("v"), "x0")
COPY = Pass((Axis("v", 8),), "v", (X,), (STORE,))
ROWS = (Axis("v", 8), Axis("r", 3, True))
SQUARES = Pass(
    (Axis("v", 2), Axis("w", 4)),
    "w",
    (Load("x0", F32, "i0", add(var("v"), scale(var("w"), 2))),),
    (Store("o0", add(scale(var("v"), 4), var("w")), "x0"),),
    "v",
)
SUM = Pass(ROWS, "v", (Load("x0", F32, "i0", ZERO),), (Accumulate("o0", var("v"), "x0", "sum"),))


def program(*passes: Step, grid: tuple[Axis, ...] = (), more: tuple[Buffer, ...] = ()) -> TileProgram:
    buffers = (Buffer("i0", Level.INPUT, F32, 8), Buffer("o0", Level.OUTPUT, F32, 8), *more)
    return TileProgram(buffers, (Stage(grid, passes),))


def test_sound_programs_pass():
    check.check_program(program(COPY))
    check.check_program(program(SUM))
    check.check_program(program(SQUARES))
    check.check_program(program(replace(SQUARES, axes=SQUARES.axes[::-1])))


TILE = Buffer("t", Level.TILE, F32, 1)
READS_TILE = replace(COPY, ops=(Load("x0", F32, "t", ZERO),))
RAGGED = Axis("v", 4, ragged=("g", 7))
TILED = add(scale(var("g"), 4), var("v"))
SHARED = Buffer("w", Level.WORKSPACE, F32, 8)
FILL = Pass((), "", (Load("x0", F32, "i0", var("g")),), (Store("w", var("g"), "x0"),))
READS_NEXT = Pass(
    (), "", (Load("x0", F32, "w", add(constant(7), scale(var("g"), -1))),), (Store("o0", var("g"), "x0"),)
)
READS_OWN = replace(READS_NEXT, ops=(Load("x0", F32, "w", var("g")),))
SUM_OF_PRODUCTS = Contract((Axis("v", 8),), At("o0", var("v")), At("i0", var("v")), At("i0", var("v")), Product.BF16)
KEYS = Buffer("keys", Level.INPUT, DType.I64, 8)
SORT = Sort("i0", 8, 4, 2, "order", "group", "count")
TABLES = tuple(Buffer(name, Level.WORKSPACE, DType.I32, size) for name, size in SORT.written.items())


def top(count: int = 8, values: str = "", places: str = "o0", grid: tuple[Axis, ...] = (Axis("v", 1),)) -> TileProgram:
    """Return a program that takes elements of the one row of its input."""
    return replace(program(COPY), stages=(Stage(grid, (), Top("i0", 1, 8, count, True, values, places)),))


REFUSED = {
    "in 4 groups by 2 to order, group, count': i0 has another type": replace(
        program(COPY, more=TABLES), stages=(Stage((), (), SORT), Stage((), (COPY,)))
    ),
    "in 4 groups by 2 to order, group, count': order has another size": replace(
        program(COPY, more=(*(replace(b, elements=b.elements + 1) for b in TABLES), KEYS)),
        stages=(Stage((), (), replace(SORT, keys="keys")), Stage((), (COPY,))),
    ),
    "of i0 to places o0': o0 has another type": top(),
    "of i0 to values o0': a task is no row": top(grid=(Axis("v", 2),), values="o0", places=""),
    "8 in 1 rows of i0 to values o0': a task is no row": top(grid=(), values="o0", places=""),
    "top 9 largest of 8 in 1 rows of i0 to values o0': nothing is sorted": top(count=9, values="o0", places=""),
    "top 3 largest of 8 in 1 rows of i0 to values o0': o0 has another size": top(count=3, values="o0", places=""),
    "'loop g<4 only i0[0]': a turn is no integer": program(Loop(Axis("g", 4), (), (COPY,), At("i0", ZERO))),
    "'t': panels do not divide a buffer": program(COPY, more=(Buffer("t", Level.TILE, F32, 24, (Panels(12, 8),)),)),
    "'t': a buffer can't be split": program(
        COPY, more=(Buffer("t", Level.TILE, DType.I32, 24, (Split(2, DType.BF16),)),)
    ),
    "i0 is of type f32, not bf16": program(COPY, SUM_OF_PRODUCTS),
    "two buffers have one name": program(COPY, more=(Buffer("i0", Level.INPUT, F32, 1),)),
    "tile program, 'x0 = f32 load i1[v]': there is no such buffer": program(
        replace(COPY, ops=(replace(X, buffer="i1"),))
    ),
    "'store o1[v] = x0': there is no such buffer": program(replace(COPY, sinks=(replace(STORE, buffer="o1"),))),
    "'store i0[v] = x0': an input is written": program(replace(COPY, sinks=(replace(STORE, buffer="i0"),))),
    "'v v': two loops have one variable": program(COPY, grid=(Axis("v", 2),)),
    "'r v': a reduced loop stands outside of a kept one": program(replace(SUM, axes=ROWS[::-1])),
    "'g r': a grid axis is reduced": program(
        replace(SUM, axes=ROWS[1:], vector="", sinks=(Accumulate("o0", ZERO, "x0", "sum"),)), grid=(Axis("g", 1, True),)
    ),
    "'v': the size -1 may be negative": program(replace(COPY, axes=(Axis("v", -1),))),
    "'v': the outer loop of a tile does not exist": program(replace(COPY, axes=(RAGGED,))),
    "'v': tiles do not cover their axis": program(replace(COPY, axes=(RAGGED,)), grid=(Axis("g", 3),)),
    "'w': the vector axis is no loop of its pass": program(replace(COPY, vector="w")),
    "'u': squares are no innermost loops": program(replace(SQUARES, across="u")),
    "'v': squares are reduced": program(replace(SUM, axes=ROWS[:1], across="v")),
    "'v': a guard turns inside of squares": program(
        replace(SQUARES, ops=(replace(SQUARES.ops[0], guards=(Inside(var("v"), 0, 1),)),))
    ),
    "'x0 = f32 neg(x1)': a value is used before it is bound": program(
        replace(COPY, ops=(Apply("x0", F32, "neg", ("x1",)), replace(X, name="x1")))
    ),
    "'x2 = f32 x0 if 0 <= v < 4 else x1': a value is used before it is bound": program(
        replace(COPY, ops=(X, Select("x2", F32, (Inside(var("v"), 0, 4),), "x0", "x1")))
    ),
    "'x0 = f32 0.5': a value is bound twice": program(replace(COPY, ops=(X, Literal("x0", F32, 0.5)))),
    "'x0 = f32 load i0[w]': a variable is no loop": program(replace(COPY, ops=(replace(X, index=var("w")),))),
    "'x0 = f32 load i0[v] if 0 <= w < 4': a variable is no loop": program(
        replace(COPY, ops=(replace(X, guards=(Inside(var("w"), 0, 4),)),))
    ),
    "'store o0[v] = x3': a value is used before it is bound": program(
        replace(COPY, sinks=(replace(STORE, value="x3"),))
    ),
    "'store o0[w] = x0': a variable is no loop": program(replace(COPY, sinks=(replace(STORE, index=var("w")),))),
    "'x1 = f32 pool_max(x0)': this is no elementwise operation": program(
        replace(COPY, ops=(X, Apply("x1", F32, "pool_max", ("x0",))))
    ),
    "'x1 = f32 frobnicate(x0)': this is no elementwise operation": program(
        replace(COPY, ops=(X, Apply("x1", F32, "frobnicate", ("x0",))))
    ),
    "'x1 = f32 add(x0)': an operation takes another number of values": program(
        replace(COPY, ops=(X, Apply("x1", F32, "add", ("x0",))))
    ),
    "a pass writes nothing": program(replace(COPY, sinks=())),
    "a pass stores and accumulates": program(replace(COPY, sinks=(STORE, Accumulate("o0", var("v"), "x0", "sum")))),
    "a store stands in a reduced loop": program(replace(SUM, sinks=(STORE,))),
    "a pass that accumulates leaves points out": program(replace(SUM, where=(Inside(var("v"), 0, 4),))),
    "'j': a loop around steps is reduced": program(Loop(Axis("j", 2, True), (), (COPY,))),
    "'sum o0[r] = x0': a place depends on a reduced loop": program(
        replace(SUM, sinks=(Accumulate("o0", var("r"), "x0", "sum"),))
    ),
    "'store o0[v + 1] = x0': an index of 8 reaches [1, 8]": program(
        replace(COPY, sinks=(replace(STORE, index=add(var("v"), constant(1))),))
    ),
    "'x0 = f32 load i0[v - 1]': an index of 8 reaches [-1, 6]": program(
        replace(COPY, ops=(replace(X, index=add(var("v"), constant(-1))),))
    ),
    "'store o0[4*g + v] = x0': an index of 8 reaches [0, 8]": program(
        replace(
            COPY,
            axes=(Axis("v", 4, ragged=("g", 9)),),
            ops=(Load("x0", F32, "i0", ZERO),),
            sinks=(replace(STORE, index=TILED),),
        ),
        grid=(Axis("g", 3),),
    ),
    "'x0 = f32 load t[0]': a buffer is read before it is written": program(READS_TILE, more=(TILE,)),
    "two tasks of a stage write one element": program(COPY, grid=(Axis("g", 2),)),
    "a task reads what another task of its stage writes": program(
        FILL, READS_NEXT, grid=(Axis("g", 8),), more=(SHARED,)
    ),
    "'p': an output is never written": program(COPY, more=(Buffer("p", Level.OUTPUT, F32, 1),)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_every_check_says_no(message):
    with pytest.raises(InvalidGraphError) as caught:
        check.check_program(REFUSED[message])
    assert message in str(caught.value)


def test_every_check_is_among_the_refusals():
    """Each program is refused by one check, so that each check is met by one of them."""
    met = set()
    for wrong in REFUSED.values():
        for each in check.CHECKS:
            try:
                each(wrong)
            except InvalidGraphError:
                met.add(each)
                break
    assert met == set(check.CHECKS)


def by_row(order: str) -> TileProgram:
    """Return a program of tasks that write the row of their place in an order."""
    sort = replace(SORT, keys="keys")
    places = sort.blocks * sort.block
    row = Loop(Axis("row", 8), (), (Pass((), "", (Literal("x0", F32, 1.0),), (Store("o0", var("row"), "x0"),)),))
    stages = (Stage((), (), sort), Stage((Axis("g", places),), (replace(row, only=At(order, var("g"))),)))
    tables = tuple(replace(b, elements=places) if b.name != "order" else b for b in TABLES)
    whole = replace(program(COPY, more=(*tables, KEYS)), stages=stages)
    return replace(whole, buffers=tuple(b for b in whole.buffers if b.name != "i0"))


def test_rows_of_different_places_are_different():
    found = check.tasks_do_not_race(by_row("order"))
    assert found == []
    with pytest.raises(InvalidGraphError, match="two tasks of a stage write one element"):
        check.tasks_do_not_race(by_row("group"))


def test_tasks_may_read_what_they_write_themselves_or_what_an_earlier_stage_wrote():
    grid = (Axis("g", 8),)
    check.check_program(program(FILL, READS_OWN, grid=grid, more=(SHARED,)))
    two = program(FILL, grid=grid, more=(SHARED,))
    check.check_program(replace(two, stages=(*two.stages, Stage(grid, (READS_NEXT,)))))


def test_the_result_of_a_race_depends_on_the_order_of_tasks():
    racing = program(FILL, READS_NEXT, grid=(Axis("g", 8),), more=(SHARED,))
    given = np.arange(1, 9, dtype=np.float32)
    assert len({tuple(run_program(racing, [given], seed)[0]) for seed in range(4)}) > 1


def test_a_tile_lives_for_one_stage():
    fill = replace(COPY, sinks=(Store("t", ZERO, "x0"),), axes=(), vector="", ops=(Literal("x0", F32, 1.0),))
    good = program(fill, READS_TILE, more=(TILE,))
    check.check_program(good)
    split = replace(good, stages=(Stage((), (fill,)), Stage((), (READS_TILE,))))
    with pytest.raises(InvalidGraphError, match="read before it is written"):
        check.check_program(split)


def test_a_ragged_tile_may_end_at_the_end():
    axes = (Axis("v", 4, ragged=("g", 7)),)
    copy = replace(COPY, axes=axes, ops=(replace(X, index=TILED),), sinks=(replace(STORE, index=TILED),))
    check.check_program(program(copy, grid=(Axis("g", 2),)))
    text = format_program(program(copy, grid=(Axis("g", 2),)))
    assert "  pass v<min(4, 7 - 4*g) vector v\n" in text


def test_each_part_of_two_ragged_tiles_is_checked():
    """The last tiles of both axes hold places that no other tiles reach."""
    axes = (Axis("v", 2, ragged=("g", 3)), Axis("w", 4, ragged=("h", 7)))
    place = add(scale(var("g"), 14), scale(var("v"), 7), scale(var("h"), 4), var("w"))
    copy = Pass(axes, "w", (replace(X, index=place),), (replace(STORE, index=place),), "v")
    grid = (Axis("g", 2), Axis("h", 2))
    buffers = (Buffer("i0", Level.INPUT, F32, 21), Buffer("o0", Level.OUTPUT, F32, 21))
    check.check_program(TileProgram(buffers, (Stage(grid, (copy,)),)))
    smaller = (buffers[0], replace(buffers[1], elements=20))
    with pytest.raises(InvalidGraphError, match="reaches"):
        check.check_program(TileProgram(smaller, (Stage(grid, (copy,)),)))
    assert "w<min(4, 7 - 4*h) vector w across v" in format_program(TileProgram(buffers, (Stage(grid, (copy,)),)))


def test_the_text_form(target):
    g = Graph()
    x = g.tensor("f32[6,40]")
    padded = g.pad(x, (0, 1), (0, 1), fill=2.0)
    group = g.group(g.reduce("sum", g.add("exp", [padded]), 1))
    assert (
        format_program(lowered(group, offers_of(group, target)[0], target))
        == """\
buffer i0: input f32[240]
buffer o0: output f32[6]
stage g0<6
  pass | r1<42 vector r1
    x0 = f32 load i0[40*g0 + r1 - 1] if 0 <= r1 - 1 < 40
    x1 = f32 2.0
    x2 = f32 x0 if 0 <= r1 - 1 < 40 else x1
    x3 = f32 exp(x2)
    sum o0[g0] = x3
"""
    )
