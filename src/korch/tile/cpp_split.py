"""Operands in pieces of bfloat16, and contractions of these -> text: functions of their elements, and the call.

The pieces of the operand that is split last, right before the contraction, are made beside the products: there is
room for those of two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from korch.alignment import round_up
from korch.tile.cpp_finish import sides_of
from korch.tile.cpp_loops import LoopPrinter
from korch.tile.cpp_panels import in_rows, panels
from korch.tile.cpp_text import Writer, loop_end
from korch.tile.fetch import Fetches
from korch.tile.index import Expr, constant, substitute, vector_step
from korch.tile.program import (
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Pass,
    Product,
    Split,
    Stage,
    Step,
    TileProgram,
    refused,
)

EDGE = 32
"""Rows and columns that the matrix units compute together, and terms of a step."""

PASSING = 2
"""Blocks for which there is room of the operand that is split beside the products."""

WINDOW_AXES = 6
"""Rows, columns and channels of results, rows and columns of a window, and channels of an image."""


def split_of(buffer: Buffer) -> Split | None:
    """Return how the elements of a buffer are split, or None."""
    return next((layout for layout in buffer.layout if isinstance(layout, Split)), None)


def is_split(program: TileProgram, step: Step) -> bool:
    """Return whether a step makes pieces."""
    return isinstance(step, Pass) and any(split_of(program.buffer(sink.buffer)) for sink in step.sinks)


def passing(program: TileProgram, steps: Sequence[Step]) -> Iterator[str]:
    """Yield the tiles of pieces that are made beside products."""
    last = ""
    for step in steps:
        if isinstance(step, Loop):
            yield from passing(program, step.body)
        elif isinstance(step, Pass) and is_split(program, step):
            last = step.sinks[0].buffer
        elif isinstance(step, Contract) and last in (step.a.buffer, step.b.buffer):
            yield last


def bytes_of_pieces(program: TileProgram, stage: Stage, buffer: Buffer) -> int:
    """Return the size of a tile of pieces: what goes by has room for two blocks."""
    layout, split = panels(buffer), split_of(buffer)
    if layout is None or split is None:
        raise refused(f"the pieces of buffer {buffer.name} are in no panels")
    element = split.pieces * split.dtype.size_bytes
    goes_by = buffer.name in passing(program, stage.steps)
    step = next(s for _, s in stage.leaves if isinstance(s, Contract) and buffer.name in (s.a.buffer, s.b.buffer))
    if len(step.axes) == WINDOW_AXES:
        window = Window.of(program, stage, step)
        if buffer.name == step.a.buffer:
            return element * EDGE * ((PASSING if goes_by else 1) * (window.pixels * window.steps + EDGE))
        units = PASSING * window.units if goes_by else window.all_units * -(-layout.columns // EDGE)
        kept = 4 * EDGE * round_up(window.results, EDGE) if goes_by and window.units < window.all_units else 0
        return element * EDGE * EDGE * units + kept
    rows, is_left = buffer.size // layout.columns, layout.group == 1
    block = PASSING * EDGE * (layout.columns if is_left else rows)
    return element * (min(buffer.size, block) if goes_by else buffer.size)


@dataclass(frozen=True, slots=True)
class Window:
    """The sizes of a contraction over windows of an image, as `Window` of `native/korch_contract_image.h` has them."""

    taps: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pitch: int
    channels: int
    columns: int
    block: int
    rows: int
    units: int
    pieces: int

    @staticmethod
    def of(program: TileProgram, stage: Stage, step: Contract) -> Window:
        """Return those of a contraction of a stage."""
        y, x, _, t0, t1, c = step.axes
        made = maker_of(program, stage, step.a.buffer)
        layout, split = panels(program.buffer(step.a.buffer)), split_of(program.buffer(step.a.buffer))
        registers = step.registers
        if layout is None or registers is None or split is None:
            raise refused("windows of pieces have panels and blocks")
        pitch = made.axes[1].extent
        steps = [step.a.index.coefficient(axis.name) or 0 for axis in (y, x, t0, t1)]
        sy, sx, dy, dx = (n // layout.columns for n in steps)
        return Window(
            (t0.extent, t1.extent),
            (max(1, sy // pitch), max(1, sx)),
            (max(1, dy // pitch), max(1, dx)),
            pitch,
            c.extent,
            x.extent,
            registers.rows,
            y.extent,
            registers.vectors,
            split.pieces,
        )

    @property
    def text(self) -> str:
        """The type."""
        sizes = (*self.taps, *self.strides, *self.dilations, self.pitch, self.channels, self.columns, self.block)
        return f"korch_amx::Window<{', '.join(map(str, (*sizes, self.pieces)))}>"

    @property
    def steps(self) -> int:
        """The steps of the channels."""
        return -(-self.channels // EDGE)

    @property
    def all_units(self) -> int:
        """The steps of all terms."""
        return self.taps[0] * self.taps[1] * self.steps

    @property
    def pixels(self) -> int:
        """The pixels that a block of rows meets, with their zeros."""
        (sy, sx), run = self.strides, self.pitch // self.strides[1]
        extra = (self.columns - 1) * sx + (self.taps[1] - 1) * self.dilations[1] + 1 - self.pitch
        depth = self.block + (self.taps[0] - 1) * self.dilations[0] // sy
        return sy * sx * (depth * run + max(0, -(-extra // sx)))

    @property
    def results(self) -> int:
        """The pixels of a task's results, with those between its rows."""
        return (self.rows - 1) * (self.pitch // self.strides[1]) + self.columns


def maker_of(program: TileProgram, stage: Stage, name: str) -> Pass:
    """Return the pass that makes the pieces of a buffer."""
    found = (step for _, step in stage.leaves if isinstance(step, Pass) and is_split(program, step))
    return next(step for step in found if step.sinks[0].buffer == name)


class SplitPrinter(LoopPrinter):
    """The functions that compute the elements of an operand, and fetch what they are computed from."""

    def run(self) -> None:
        """Print them."""
        self.fetches, self.pieces = Fetches(), {}
        (sink,) = self.pass_.sinks
        where = ", ".join(f"[[maybe_unused]] long {axis.name}" for axis in self.pass_.axes)
        head = "[=]{}({}) __attribute__((always_inline))"
        self.out.open(f"const auto {sink.buffer}_element = {head.format('<int W>', where)}")
        values = self._ops(self.ranges, self.pass_.vector, "W")
        self.out.line(f"return {values[sink.value]};")
        self.out.close("};")
        self.out.open(f"const auto {sink.buffer}_fetch = {head.format('', where)}")
        for op in self.pass_.ops:
            if isinstance(op, Load):
                index = self.out.expr(substitute(op.index, {}, self.ranges))
                if "NAME_" not in index:  # tables end
                    self.out.line(f"__builtin_prefetch({op.buffer} + {index});")
        self.out.close("};")
        self.out.line(f"const korch_amx::Computed {sink.buffer}_from{{{sink.buffer}_element, {sink.buffer}_fetch}};")

    def _step(self, index: Expr, variable: str) -> int | None:
        # A vector has all lanes and begins at a multiple of them, or it is a single element.
        return vector_step(index, variable, self.out.lanes)


def print_product(out: Writer, step: Contract, stage: Stage, around: Stage, sums: str) -> str:
    """Return the call of the micro-kernel that multiplies pieces.

    Args:
        out: prints expressions.
        step: the contraction.
        stage: the stage that it is in.
        around: has the axes of the loops around it.
        sums: the text of what takes the sums.
    """
    passes_rows = step.a.buffer in passing(out.program, stage.steps)
    if len(step.axes) == WINDOW_AXES:
        return _print_windows(out, step, stage, passes_rows, sums)
    (rows, *more), columns, (terms, *others) = sides_of(step)
    if more or others:
        raise refused("contractions of pieces have one axis of rows and one of terms")
    counts = (loop_end(rows, rows.extent), loop_end(columns, columns.extent), loop_end(terms, terms.extent))
    first = _made("rows", out.program.buffer(step.a.buffer), counts[0], counts[2])
    second = out.program.buffer(step.b.buffer)
    text = _made("columns", second, counts[1], counts[2])
    if second.level is Level.INPUT:
        text = _given(out, second, step, around, counts)
    return f"korch_amx::Product({sums}, {first}, {text}).template run<{str(passes_rows).lower()}>();"


def _print_windows(out: Writer, step: Contract, stage: Stage, passes_rows: bool, sums: str) -> str:
    """Return the call of the micro-kernel for windows of an image."""
    window, (y, _, j, *_) = Window.of(out.program, stage, step), step.axes
    a, b = step.a.buffer, step.b.buffer
    load = next(op for op in maker_of(out.program, stage, a).ops if isinstance(op, Load))
    is_last = str(load.index.coefficient("c") == 1 or window.channels == 1).lower()
    rows, columns = loop_end(y, y.extent), loop_end(j, j.extent)
    image = f"korch_amx::image_of<{window.text}, {is_last}>({a}_from, {a}, {rows})"
    weights = f"korch_amx::taps_of<{window.text}, {_pieces(out.program.buffer(b))}>({b}_from, {b}, {columns})"
    run = "pass_rows()" if passes_rows else f"pass_strips({window.units})"
    return f"korch_amx::windows_of<{window.text}>({sums}, {image}, {weights}).{run};"


def _made(side: str, buffer: Buffer, count: str, terms: str) -> str:
    name = buffer.name
    return f"korch_amx::{side}_of<{_pieces(buffer)}>({name}_from, {name}, {count}, {terms})"


def _pieces(buffer: Buffer) -> int:
    split = split_of(buffer)
    if split is None:
        raise refused(f"buffer {buffer.name} is not split")
    return split.pieces


def _given(out: Writer, buffer: Buffer, step: Contract, stage: Stage, counts: Sequence[str]) -> str:
    """Return the text of an operand that comes in pieces: strips of whole steps."""
    layout, split = panels(buffer), split_of(buffer)
    if split is None or layout is None:
        raise refused(f"buffer {buffer.name} is not split")
    ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in stage.grid}
    start = substitute(step.b.index, {axis.name: constant(0) for axis in step.axes}, ranges)
    place = in_rows(buffer, layout, start, ranges)
    pieces = Expr(split.pieces * place.constant, tuple((atom, split.pieces * n) for atom, n in place.terms))
    strip = split.pieces * layout.width * buffer.size // layout.columns
    at = f"reinterpret_cast<const uint16_t*>({buffer.name})"
    return f"korch_amx::Given<{split.pieces}>{{{at} + {out.expr(pieces)}, {strip}, {counts[1]}, {counts[2]}}}"


def require_pieces(program: TileProgram, stage: Stage) -> None:
    """Raise an error if pieces are read or multiplied otherwise than they can be."""
    for _, step in stage.leaves:
        if isinstance(step, Pass):
            if any(split_of(program.buffer(op.buffer)) for op in step.ops if isinstance(op, Load)):
                raise refused("passes that read pieces can't be printed")
            if is_split(program, step) and (len(step.sinks) > 1 or len(step.axes) not in (2, 3)):
                raise refused("passes that make pieces have two or three axes and one result")
        elif (step.product is Product.PIECES) != all(split_of(program.buffer(at.buffer)) for at in (step.a, step.b)):
            raise refused("only operands in pieces are multiplied by matrix units")
