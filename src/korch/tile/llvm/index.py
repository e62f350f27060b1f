"""Prints index expressions, conditions and addresses."""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import assert_never

from korch.tile.analysis.clip import loop_ends
from korch.tile.ir.index import (
    ROWS,
    Atom,
    Choice,
    Expr,
    Quotient,
    Ranges,
    Remainder,
    TableEntry,
    Times,
    Var,
    add,
    bounds,
    parts_of_atom,
    scale,
    var,
)
from korch.tile.ir.index import constant as number
from korch.tile.ir.program import Axis, Inside
from korch.tile.llvm.emit import Emit, SsaValue, array, constant

Env = Mapping[str, SsaValue]
"""The values of the loop variables; a vector variable has its value in the first lane."""

MOST_NARROW = 1 << 31

ROW_TABLE = " rows"
"""The name of the address of the table of row positions; no variable has a space in its name."""


def index_of(emit: Emit, expr: Expr, env: Env) -> SsaValue:
    """Print an expression of integers of 64 bits; parts that change in outer loops are summed up first."""
    return reduce(emit.add, (part for _, part in sorted(_terms(emit, expr, env), key=lambda t: t[0])), emit.index(0))


def lanes_of(emit: Emit, expr: Expr, env: Env, variable: str, lanes: int, ranges: Ranges) -> SsaValue:
    """Print an expression at each lane of a vector along a variable."""
    kind = "i32" if _is_narrow(expr, ranges) else "i64"
    narrow = {name: emit.convert("trunc", value, kind) for name, value in env.items() if name in expr.variables}
    if ROW_TABLE in env:
        narrow[ROW_TABLE] = env[ROW_TABLE]
    if variable in narrow:
        narrow[variable] = emit.op("add", narrow[variable], array(kind, range(lanes)))
    found = index_of(emit, expr, narrow) if kind == "i64" else _sum(emit, expr, narrow)
    return emit.splat(found, lanes)


def end_of(emit: Emit, axis: Axis, high: int, env: Env) -> SsaValue:
    """Print the end of the loop over the first `high` values of an axis; the last block of an axis may end early."""
    if axis.ragged is None:
        return emit.index(high)
    outer, total = axis.ragged
    whole = total if isinstance(total, Expr) else number(total)
    left = index_of(emit, add(whole, scale(var(outer), -axis.extent)), env)
    return emit.least(emit.index(high), left)


def address(emit: Emit, kind: str, base: SsaValue, expr: Expr, env: Env) -> SsaValue:
    """Print the address of an element of a buffer; constants come last, as they are part of an instruction."""
    terms = sorted(_terms(emit, Expr(0, expr.terms), env), key=lambda t: t[0])
    sums: dict[int, SsaValue] = {}
    for depth, part in terms:
        sums[depth] = emit.add(sums[depth], part) if depth in sums else part
    for part in sums.values():
        base = emit.place(kind, base, part)
    return emit.place(kind, base, emit.index(expr.constant))


def condition(
    emit: Emit, guards: Iterable[Inside], env: Env, ranges: Ranges, variable: str = "", lanes: int = 1
) -> SsaValue:
    """Print whether guards hold, without what the ranges imply; of each lane if a guard depends on `variable`."""
    found = constant("i1", 1)
    for guard in guards:
        low, high = bounds(guard.expr, ranges)
        if lanes > 1 and variable in guard.expr.variables:
            at = lanes_of(emit, guard.expr, env, variable, lanes, ranges)
        else:
            at = index_of(emit, guard.expr, env)
        tests = []
        if low < guard.low:
            tests.append(emit.test("icmp sge", at, constant(at.kind, guard.low)))
        if high >= guard.high:
            tests.append(emit.test("icmp slt", at, constant(at.kind, guard.high)))
        for test in tests:
            found = both(emit, found, test)
    return found


def loop_inside(
    emit: Emit, guards: tuple[Inside, ...], name: str, ends: tuple[SsaValue, SsaValue], ranges: Ranges, env: Env
) -> tuple[SsaValue, SsaValue]:
    """Print the bounds of the loop over an axis, from one end to the other, within which its guards hold."""
    begin, end = ends

    def quotient(expr: Expr, divisor: int) -> SsaValue:
        value = index_of(emit, expr, env)
        return value if divisor == 1 else emit.op("sdiv", value, constant("i64", divisor))

    lows, highs = loop_ends(guards, name, ranges)
    for above, step in lows:
        begin = emit.most(begin, quotient(above, step))
    for above, step in highs:
        end = emit.least(end, quotient(above, step))
    return begin, end


def both(emit: Emit, a: SsaValue | None, b: SsaValue | None) -> SsaValue:
    """Print whether two conditions hold; None holds."""
    a, b = (None if v is None or v.text in ("true", "splat (i1 true)") else v for v in (a, b))
    if a is None or b is None:
        return a or b or constant("i1", 1)
    return emit.op("and", a, b)


def _terms(emit: Emit, expr: Expr, env: Env) -> list[tuple[int, SsaValue]]:
    found = [(0, emit.index(expr.constant))] if expr.constant else []
    for atom, factor in expr.terms:
        value = emit.times(_atom(emit, atom, env), factor)
        found.append((value.depth, value))
    return found


def _sum(emit: Emit, expr: Expr, env: Env) -> SsaValue:
    """Print an expression whose variables have 32 bits."""
    total: SsaValue | None = None
    for atom, factor in expr.terms:
        value = _atom(emit, atom, env)
        value = value if factor == 1 else emit.op("mul", value, constant(value.kind, factor))
        total = value if total is None else emit.op("add", total, value)
    number = constant("i32", expr.constant)
    return number if total is None else emit.op("add", total, number) if expr.constant else total


def _atom(emit: Emit, atom: Atom, env: Env) -> SsaValue:
    is_narrow = any(value.kind == "i32" for value in env.values())

    def inner(expr: Expr) -> SsaValue:
        return _sum(emit, expr, env) if is_narrow else index_of(emit, expr, env)

    match atom:
        case Var(name):
            return env[name]
        case Quotient(expr, divisor):
            return emit.divided(inner(expr), divisor)
        case Remainder(expr, divisor):
            return emit.rest(inner(expr), divisor)
        case TableEntry(table, expr) if table == ROWS:
            at = inner(expr)
            place = emit.place("i32", env[ROW_TABLE], emit.convert("sext", at, "i64"))
            return emit.convert("sext", emit.load("i32", 1, place, 4, emit.floor), at.kind)
        case TableEntry(table, expr):
            return table_entries(emit, table, inner(expr))
        case Choice(expr, cases, otherwise):
            at, found = inner(expr), inner(otherwise)
            for limit, then in reversed(cases):
                value = inner(then)
                found = emit.select(emit.test("icmp slt", at, constant(at.kind, limit)), value, found)
            return found
        case Times():
            raise AssertionError("a printed program has no parameters")
        case _:
            assert_never(atom)


def table_entries(emit: Emit, table: Sequence[int], at: SsaValue) -> SsaValue:
    """Print the entries of a constant table at a position, or at each lane's position."""
    name = global_table(emit, "i32", table)
    entries = []
    for i in range(at.lanes):
        own = emit.lane(at, i)
        place = emit.place("i32", SsaValue(name, "ptr"), emit.convert("sext", own, "i64"))
        entries.append(emit.load("i32", 1, place, 4, emit.floor))
    found = entries[0] if at.lanes == 1 else emit.joined(entries)
    return emit.convert("sext", found, at.kind)


def global_table(emit: Emit, kind: str, values: Sequence[float | int]) -> str:
    """Return the name of a table in the module."""
    items = ", ".join(constant(kind, value).typed for value in values)
    text = f"private unnamed_addr constant [{len(values)} x {kind}] [{items}], align 64"
    if text not in emit.globals:
        emit.globals[text] = f"@table{len(emit.globals)} = {text}"
    return emit.globals[text].split(" ", 1)[0]


def _is_narrow(expr: Expr, ranges: Ranges) -> bool:
    """Return whether no part of an expression exceeds 31 bits."""
    low, high = bounds(expr, ranges)
    ends = [bounds(Expr(0, (term,)), ranges) for term in expr.terms]
    most = abs(expr.constant) + sum(abs(end) for pair in ends for end in pair)
    is_small = most < MOST_NARROW and -MOST_NARROW < low <= high < MOST_NARROW
    return is_small and all(_is_narrow(part, ranges) for atom, _ in expr.terms for part in parts_of_atom(atom))
