"""The memory positions of elements of matrices in panels, for printed contractions."""

from dataclasses import dataclass, replace

from korch.tile.ir.index import Expr, Ranges, add, bounds, constant, quotient, remainder, scale, substitute, var
from korch.tile.ir.passes import map_indices
from korch.tile.ir.program import Axis, Buffer, Panels, Pass, Sink, Stage, TileProgram, parts_of, ranges_of, refused


def panels(buffer: Buffer) -> Panels | None:
    """Return the panel layout of a buffer, or None."""
    return next((layout for layout in buffer.layout if isinstance(layout, Panels)), None)


@dataclass(frozen=True, slots=True)
class PanelPass:
    """A pass over the columns of one panel."""

    axis: Axis  # the loop over panels
    block: str  # the variable with the panel's number among those of all tasks
    number: Expr  # its value
    pass_: Pass  # the pass, whose stores have offsets in memory


def by_panel(program: TileProgram, pass_: Pass, grid: tuple[Axis, ...]) -> PanelPass | None:
    """Return a pass that writes panels as one over each panel; None if it writes plain rows.

    Raises:
        InvalidGraphError: it does not write whole rows of panels.
    """
    width = _panel_width(program, pass_)
    if width == 0:
        return None
    vector = next((axis for axis in pass_.axes if axis.name == pass_.vector), None)
    if vector is None or pass_.is_reduction or vector.extent % width:
        raise refused("panels are written by passes along whole rows of them only")
    name, count = vector.name, vector.extent // width
    panel, block = f"{name}_panel", f"{name}_block"
    outer, inner, number = Axis(panel, count), Axis(name, width), var(panel)
    if vector.ragged is not None:
        around, total = vector.ragged
        outer = Axis(panel, count, ragged=(around, parts_of(total, width, program.parameter_ranges)))
        inner = Axis(name, width, ragged=(block, total))
        number = add(scale(var(around), count), number)
    return PanelPass(outer, block, number, _in_panels(program, pass_, vector, inner, (*grid, outer)))


def _in_panels(program: TileProgram, pass_: Pass, vector: Axis, inner: Axis, grid: tuple[Axis, ...]) -> Pass:
    """Return the pass over the columns of one panel; the last axis of the grid is that of panels."""
    axes, panel = tuple(inner if axis is vector else axis for axis in pass_.axes), grid[-1].name
    ranges = ranges_of(Stage(grid, ()), replace(pass_, axes=axes))
    moves = {vector.name: add(scale(var(panel), inner.extent), var(vector.name))}

    def moved(expr: Expr) -> Expr:
        return substitute(expr, moves, ranges)

    def sink_of(sink: Sink) -> Sink:
        buffer = program.buffer(sink.buffer)
        layout = panels(buffer)
        if layout is None:
            return replace(sink, index=moved(sink.index))
        if sink.index.coefficient(vector.name) != 1:
            raise refused(f"buffer {buffer.name} is not written along its panels")
        row = substitute(sink.index, {vector.name: constant(0)}, ranges)
        step, place = buffer.size // layout.columns * layout.width, in_group(buffer, layout, row, ranges)
        return replace(sink, index=add(scale(var(panel), step), place, scale(var(vector.name), layout.group)))

    return replace(map_indices(pass_, moved), axes=axes, sinks=tuple(map(sink_of, pass_.sinks)))


def _panel_width(program: TileProgram, pass_: Pass) -> int:
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
