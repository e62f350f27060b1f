"""Operands in pieces of bfloat16, and contractions of these -> text: functions of their elements, and the call.

The pieces of the operand that is split last, right before the contraction, are made beside the products: there is
room for those of two blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from korch.tile.cpp_finish import sides_of
from korch.tile.cpp_loops import LoopPrinter
from korch.tile.cpp_panels import in_rows
from korch.tile.cpp_text import Writer, loop_end
from korch.tile.fetch import Fetches
from korch.tile.index import Expr, constant, substitute, vector_step
from korch.tile.program import (
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Panels,
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


def elements_in_memory(program: TileProgram, stage: Stage, buffer: Buffer) -> int:
    """Return for how many elements of a tile of a stage there is room."""
    if buffer.name not in passing(program, stage.steps):
        return buffer.size
    layout = next(layout for layout in buffer.layout if isinstance(layout, Panels))
    rows, is_left = buffer.size // layout.columns, layout.group == 1
    return min(buffer.size, PASSING * EDGE * (layout.columns if is_left else rows))


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
            if isinstance(op, Load) and not op.guards:
                index = self.out.expr(substitute(op.index, {}, self.ranges))
                self.out.line(f"__builtin_prefetch({op.buffer} + {index});")
        self.out.close("};")
        self.out.line(f"const korch_amx::Computed {sink.buffer}_from{{{sink.buffer}_element, {sink.buffer}_fetch}};")

    def _step(self, index: Expr, variable: str) -> int | None:
        # A vector has all lanes and begins at a multiple of them, or it is a single element.
        return vector_step(index, variable, self.out.lanes)


def print_product(out: Writer, step: Contract, stage: Stage, passes_rows: bool, sums: str) -> str:
    """Return the call of the micro-kernel that multiplies pieces.

    Args:
        out: prints expressions.
        step: the contraction.
        stage: the axes around it.
        passes_rows: whether the pieces of rows were made last.
        sums: the text of what takes the sums.
    """
    (rows, *more), columns, (terms, *others) = sides_of(step)
    if more or others:
        raise refused("contractions of pieces have one axis of rows and one of terms")
    counts = (loop_end(rows, rows.extent), loop_end(columns, columns.extent), loop_end(terms, terms.extent))
    first = _made("rows", out.program.buffer(step.a.buffer), counts[0], counts[2])
    second = out.program.buffer(step.b.buffer)
    text = _made("columns", second, counts[1], counts[2])
    if second.level is Level.INPUT:
        text = _given(out, second, step, stage, counts)
    return f"korch_amx::Product({sums}, {first}, {text}).template run<{str(passes_rows).lower()}>();"


def _made(side: str, buffer: Buffer, count: str, terms: str) -> str:
    name = buffer.name
    return f"korch_amx::{side}_of({name}_from, {name}, {count}, {terms})"


def _given(out: Writer, buffer: Buffer, step: Contract, stage: Stage, counts: Sequence[str]) -> str:
    """Return the text of an operand that comes in pieces: strips of whole steps."""
    layout = next(layout for layout in buffer.layout if isinstance(layout, Panels))
    split = split_of(buffer)
    if split is None:
        raise refused(f"buffer {buffer.name} is not split")
    ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in stage.grid}
    start = substitute(step.b.index, {axis.name: constant(0) for axis in step.axes}, ranges)
    place = in_rows(buffer, layout, start, ranges)
    pieces = Expr(split.pieces * place.constant, tuple((atom, split.pieces * n) for atom, n in place.terms))
    strip = split.pieces * layout.width * buffer.size // layout.columns
    at = f"reinterpret_cast<const uint16_t*>({buffer.name})"
    return f"korch_amx::Given{{{at} + {out.expr(pieces)}, {strip}, {counts[1]}, {counts[2]}}}"


def require_pieces(program: TileProgram, stage: Stage) -> None:
    """Raise an error if pieces are read or multiplied otherwise than they can be."""
    for _, step in stage.leaves:
        if isinstance(step, Pass):
            if any(split_of(program.buffer(op.buffer)) for op in step.ops if isinstance(op, Load)):
                raise refused("passes that read pieces can't be printed")
            if is_split(program, step) and (len(step.sinks) > 1 or len(step.axes) != 2):
                raise refused("passes that make pieces have two axes and one result")
        elif (step.product is Product.BF16X6) != all(split_of(program.buffer(at.buffer)) for at in (step.a, step.b)):
            raise refused("only operands in pieces are multiplied by matrix units")
