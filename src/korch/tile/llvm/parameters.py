"""Prints how parameters follow from the sizes, and the table of the rows that a size needs."""

from functools import reduce

from korch.ranges.live import Count
from korch.tile.ir.program import Parameter
from korch.tile.llvm.emit import Emit, SsaValue
from korch.tile.llvm.index import Env

ROWS_BEHIND = 64
"""Kernels that compute rows in blocks may look up this many entries of the row table beyond the last row."""


def counted(emit: Emit, count: Count, sizes: SsaValue) -> SsaValue:
    """Print a count; `sizes` is the address of the sizes, integers of 64 bits."""

    def rounded(value: SsaValue, step: int) -> SsaValue:
        return emit.times(_divided(emit, emit.add(value, emit.index(step - 1)), step), step)

    size = emit.load("i64", 1, emit.place("i64", sizes, emit.index(count.dimension)), 8, 0)
    terms = (
        rounded(_divided(emit, emit.add(emit.times(size, e.times), emit.index(e.plus)), e.over), e.step)
        for e in count.extents
    )
    found = emit.times(rounded(reduce(emit.most, terms), count.step), count.times)
    if count.rows is None:
        return found
    outer, inner = count.rows
    return emit.op("mul nsw", counted(emit, outer, sizes), emit.least(emit.index(inner), found))


def _divided(emit: Emit, value: SsaValue, over: int) -> SsaValue:
    return value if over == 1 else emit.op("sdiv", value, emit.index(over))


def share_of(emit: Emit, count: SsaValue, me: SsaValue, threads: SsaValue, unit: int = 1) -> SsaValue:
    """Print where a thread's range begins; ranges begin at multiples of `unit`, those beyond the others are empty."""
    units = _divided(emit, emit.add(count, emit.index(unit - 1)), unit)
    me = emit.least(me, threads)
    each, rest = emit.op("udiv", units, threads), emit.op("urem", units, threads)
    first = emit.times(emit.add(emit.op("mul", each, me), emit.least(me, rest)), unit)
    return first if unit == 1 else emit.least(first, count)


def placed_rows(emit: Emit, part: Parameter, first: SsaValue, most: int, env: Env) -> tuple[SsaValue, SsaValue]:
    """Print the table of the positions of rows relative to a first one, each group having `part` of its rows.

    `first`: the number of the first row among those that are needed.

    Returns:
        The first row's position, and the address of the table.
    """
    size, count, whole = most + ROWS_BEHIND, env[part.name], emit.index(part.high)
    table = emit.array("i32", size)
    inside = emit.op("urem", first, count)
    place = emit.add(emit.op("mul nsw", emit.op("udiv", first, count), whole), inside)
    missing = emit.add(whole, emit.times(count, -1))

    def row(i: SsaValue, at: SsaValue, gap: SsaValue) -> tuple[SsaValue, SsaValue]:
        emit.store(emit.convert("trunc", emit.add(i, gap), "i32"), emit.place("i32", table, i), 4)
        following = emit.add(at, emit.index(1))
        is_end = emit.test("icmp eq", following, count)
        return emit.select(is_end, emit.index(0), following), emit.select(is_end, emit.add(gap, missing), gap)

    emit.loop(emit.index(0), emit.index(size), 1, row, inside, emit.index(0))
    return place, SsaValue(table.text, "ptr", depth=emit.depth)
