"""The memory positions of elements of matrices in panels, for printed contractions."""

from __future__ import annotations

from korch.tile.ir.index import Expr, Ranges, add, bounds, quotient, remainder, scale
from korch.tile.ir.program import Buffer, Panels, Pass, TileProgram, refused


def panels(buffer: Buffer) -> Panels | None:
    """Return the panel layout of a buffer, or None."""
    return next((layout for layout in buffer.layout if isinstance(layout, Panels)), None)


def panel_width(program: TileProgram, pass_: Pass) -> int:
    """Return the width of the panels that a pass writes; 0 if it writes plain rows (one panel without groups)."""
    layouts = (panels(program.buffer(sink.buffer)) for sink in pass_.sinks)
    widths = {each.width for each in layouts if each and (each.width < each.columns or each.group > 1)}
    if len(widths) > 1:
        raise refused("one pass writes panels of several widths")
    return next(iter(widths), 0)


def in_rows(buffer: Buffer, layout: Panels, rest: Expr, ranges: Ranges) -> Expr:
    """Return the memory offset of an index that must be at the beginning of a row of a panel."""
    columns = Expr(0, tuple(term for term in rest.terms if term[1] % layout.columns))
    parts = (rest.constant % layout.columns, *(factor for _, factor in columns.terms))
    low, high = bounds(columns, ranges)
    is_cut = any(f // layout.columns % layout.group for f in (rest.constant, *(f for _, f in rest.terms)))
    is_cut |= layout.columns % layout.width != 0 or any(p % layout.width for p in parts)
    if is_cut or low < 0 or high >= layout.columns:
        raise refused(f"the rows of buffer {buffer.name} do not begin at whole rows of its panels")
    rows = buffer.size // layout.columns
    start = rest.constant // layout.columns * layout.width + rest.constant % layout.columns * rows
    terms = (
        (atom, factor * rows if factor % layout.columns else factor // layout.columns * layout.width)
        for atom, factor in rest.terms
    )
    return Expr(start, tuple(terms))


def in_group(buffer: Buffer, layout: Panels, row: Expr, ranges: Ranges) -> Expr:
    """Return the offset of a row in the first panel; the elements of the rows of a group are interleaved."""
    if layout.group == 1:
        return in_rows(buffer, layout, row, ranges)
    if any(factor % layout.columns for factor in (row.constant, *(f for _, f in row.terms))):
        raise refused(f"the rows of buffer {buffer.name} do not begin at whole rows of its panels")
    number = Expr(row.constant // layout.columns, tuple((a, f // layout.columns) for a, f in row.terms))
    group = scale(quotient(number, layout.group, ranges), layout.group * layout.width)
    return add(group, remainder(number, layout.group, ranges))


def strips(second: Buffer, vectors: int, lanes: int, column: int) -> tuple[int, int]:
    """Return the memory steps between the vectors of a strip of the second operand, and between its strips."""
    layout = panels(second)
    if layout is not None and layout.group > 1:
        raise refused(f"buffer {second.name} is in panels for bytes")
    if layout is None:
        return lanes * column, vectors * lanes * column
    rows = second.size // layout.columns
    if layout.width == lanes:
        return rows * lanes, vectors * rows * lanes
    if layout.width == vectors * lanes:
        return lanes, rows * layout.width
    raise refused(f"buffer {second.name} is not in panels of one vector or of one strip")
