"""Prints contractions of operands that are split into bfloat16 components: functions of their elements, and the call.

The tile of an operand that is split block by block (`korch.tile.analysis.components`) holds two blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from korch.system.alignment import round_up
from korch.target import EDGE
from korch.tile.analysis.components import WINDOW_AXES, is_split, passing, reader_of, split_of
from korch.tile.analysis.fetch import Fetches
from korch.tile.analysis.panels import in_rows, panels
from korch.tile.analysis.sums import by_row, sides_of
from korch.tile.cpp.finish import count_of, print_places
from korch.tile.cpp.loops import LoopPrinter, print_ends
from korch.tile.cpp.text import CppWriter, loop_end
from korch.tile.ir.index import Expr, add, constant, substitute, vector_step
from korch.tile.ir.program import PAIR, Axis, Buffer, Contract, Level, Load, Pass, Product, Stage, TileProgram, refused

PASSING = 2
"""The blocks that the tile of an operand holds if it is split while products are computed; twice as many in a chain."""

MOST_FACTOR_ROWS = 4 * EDGE
"""The maximum rows of a contraction with a factor per block of terms: their sums stay in the cache."""

CHAIN_AXES = 4
"""The number of axes: rows, columns and channels of results, and channels of an image."""


def bytes_of_components(program: TileProgram, stage: Stage, buffer: Buffer) -> int:
    """Return the size of a tile of components in bytes: of `PASSING` blocks if it is split while products run."""
    layout, split = panels(buffer), split_of(buffer)
    if layout is None or split is None:
        raise refused(f"the components of buffer {buffer.name} are in no panels")
    element = split.components * split.dtype.size_bytes
    goes_by = buffer.name in passing(program, stage.steps)
    step = reader_of(stage, buffer.name)
    if len(step.axes) == WINDOW_AXES:
        window = ImageWindow.of(program, stage, step)
        if buffer.name == step.a.buffer:
            return element * EDGE * ((PASSING if goes_by else 1) * (window.pixels * window.steps + EDGE))
        units = PASSING * window.units if goes_by else window.all_units * -(-layout.columns // EDGE)
        kept = 4 * EDGE * round_up(window.results, EDGE) if goes_by and window.units < window.all_units else 0
        return element * EDGE * EDGE * units + kept
    rows, is_left = buffer.size // layout.columns, layout.group == 1
    if step.factor is not None and not is_left:
        return element * PASSING * EDGE * step.axes[-1].extent
    if is_chained(step):
        return element * 2 * PASSING * EDGE * layout.columns
    block = PASSING * EDGE * (layout.columns if is_left else rows)
    return element * (min(buffer.size, block) if goes_by else buffer.size)


HALF_BYTE = 4
"""The bits of each of the two integers that are packed in a byte."""

BF16_BITS = 16


@dataclass(frozen=True, slots=True)
class ImageWindow:
    """The sizes of a contraction over windows of an image: those of `Window` in `native/korch_contract_image.h`."""

    taps: tuple[int, int]
    strides: tuple[int, int]
    dilations: tuple[int, int]
    pitch: int
    channels: int
    columns: int
    block: int
    rows: int
    units: int
    components: int

    @staticmethod
    def of(program: TileProgram, stage: Stage, step: Contract) -> ImageWindow:
        """Return the sizes of a contraction of a stage."""
        y, x, _, t0, t1, c = step.axes
        made = maker_of(program, stage, step.a.buffer)
        layout, split = panels(program.buffer(step.a.buffer)), split_of(program.buffer(step.a.buffer))
        registers = step.registers
        if layout is None or registers is None or split is None:
            raise refused("windows of components have panels and blocks")
        pitch = made.axes[1].extent
        steps = [step.a.index.coefficient(axis.name) or 0 for axis in (y, x, t0, t1)]
        sy, sx, dy, dx = (n // layout.columns for n in steps)
        return ImageWindow(
            (t0.extent, t1.extent),
            (max(1, sy // pitch), max(1, sx)),
            (max(1, dy // pitch), max(1, dx)),
            pitch,
            c.extent,
            x.extent,
            registers.rows,
            y.extent,
            registers.vectors,
            split.components,
        )

    @property
    def text(self) -> str:
        """The C++ type."""
        sizes = (*self.taps, *self.strides, *self.dilations, self.pitch, self.channels, self.columns, self.block)
        return f"korch_amx::Window<{', '.join(map(str, (*sizes, self.components)))}>"

    @property
    def steps(self) -> int:
        """The number of steps that the channels take."""
        return -(-self.channels // EDGE)

    @property
    def all_units(self) -> int:
        """The number of steps that all terms take."""
        return self.taps[0] * self.taps[1] * self.steps

    @property
    def pixels(self) -> int:
        """The pixels of the image that a block of rows reads, including padding zeros."""
        (sy, sx), run = self.strides, self.pitch // self.strides[1]
        extra = (self.columns - 1) * sx + (self.taps[1] - 1) * self.dilations[1] + 1 - self.pitch
        depth = self.block + (self.taps[0] - 1) * self.dilations[0] // sy
        return sy * sx * (depth * run + max(0, -(-extra // sx)))

    @property
    def results(self) -> int:
        """The pixels of a task's results, including the unused ones between its rows."""
        return (self.rows - 1) * (self.pitch // self.strides[1]) + self.columns


def maker_of(program: TileProgram, stage: Stage, name: str) -> Pass:
    """Return the pass that computes the components of a buffer."""
    found = (step for _, step in stage.leaves if isinstance(step, Pass) and is_split(program, step))
    return next(step for step in found if step.sinks[0].buffer == name)


class SplitPrinter(LoopPrinter):
    """Prints the functions that compute the elements of an operand, and prefetch their inputs."""

    def __init__(self, out: CppWriter, stage: Stage, pass_: Pass, given: Set[str], reader: Contract) -> None:
        """Prepare the functions; unless the operand is an image for windows, they index by the row number."""
        super().__init__(out, stage, pass_, given)
        if len(pass_.axes) not in (2, 3):
            raise refused("passes that make components, but those behind sums, have two or three axes")
        *rows, self.last = pass_.axes
        is_image = len(reader.axes) == WINDOW_AXES and reader.a.buffer == pass_.sinks[0].buffer
        self.rows = () if is_image or len(rows) < 2 else tuple(rows)
        self.is_chained = is_chained(reader)
        self.pass_ = by_row(pass_, self.rows, self.ranges)

    def run(self) -> None:
        """Print the functions."""
        self.fetches, self.spans = Fetches(), {}
        name, each = self.pass_.sinks[0].buffer, len(self.pass_.sinks)
        outer, *inner = ["row", self.last.name] if self.rows else [axis.name for axis in self.pass_.axes]
        term = "term" if each > 1 else outer
        self._open(f"{name}_element", "<int W>", (term, *inner), outer)
        values = self._ops(self.ranges, self.pass_.vector, "W")
        *others, last = (values[sink.value] for sink in self.pass_.sinks)
        chosen = "".join(f"term % {each} == {h} ? {value} : " for h, value in enumerate(others))
        self.out.line(f"return {chosen}{last};")
        self.out.close("};")
        self._open(f"{name}_fetch", "", (term, *inner), outer)
        for op in self.pass_.ops:
            if isinstance(op, Load):
                index = self.out.expr(substitute(op.index, {}, self.ranges))
                if "NAME_" not in index and "row_at[" not in index:  # prefetching must not read beyond a table
                    self.out.line(f"__builtin_prefetch({op.buffer} + {index});")
        self.out.close("};")
        self.out.line(f"const korch_amx::Computed {name}_computed{{{name}_element, {name}_fetch}};")
        found = f"{name}_computed"
        if each == PAIR:
            found = self._print_pairs(name, (outer, *inner))
        self.out.line(f"const auto {name}_from = {found};")
        if self.rows and self.is_chained:
            rows = f"korch_amx::read_rows({name}_from, first, terms)"
            self.out.line(f"const auto {name}_rows = [=](long first, long terms) {{ return {rows}; }};")

    def _open(self, name: str, template: str, parameters: Sequence[str], outer: str) -> None:
        """Print the head of a function of an element; its first parameter is a term if a row has several terms."""
        where = ", ".join(f"[[maybe_unused]] long {parameter}" for parameter in parameters)
        self.out.open(f"const auto {name} = [=]{template}({where}) __attribute__((always_inline))")
        if outer not in parameters:
            self.out.line(f"[[maybe_unused]] const long {outer} = term / {len(self.pass_.sinks)};")
        print_places(self.out, self.rows)

    def _print_pairs(self, name: str, parameters: Sequence[str]) -> str:
        """Print the function that gives pairs of results, or the address of their bytes; return the source object."""
        table, function = self._table(), f"{name}_pairs"
        self._open(function, "", parameters, parameters[0])
        load = next(op for op in self.pass_.ops if isinstance(op, Load))
        index = substitute(load.index, {}, self.ranges)
        if table and index.coefficient(parameters[0]) is not None:
            self.out.line(f"return {load.buffer} + {self.out.expr(index)};")
            source = f"looked_up<{', '.join(map(str, table))}>"
        else:
            values = self._ops(self.ranges, self.pass_.vector, str(self.out.lanes))
            first, second = (values[sink.value] for sink in self.pass_.sinks)
            self.out.line(f"return korch_amx::joined({first}, {second});")
            source = "paired"
        self.out.close("};")
        return f"korch_amx::{source}({name}_computed, {function})"

    def _table(self) -> tuple[int, ...]:
        """Return the table of both results for each half of a byte, as bfloat16 bits; () if there is no such table."""
        found = [self.tables.get(sink.value) for sink in self.pass_.sinks]
        bits = [bits for table in found if table is not None for bits in table.bits]
        is_whole = [table and table.shift for table in found] == [0, HALF_BYTE]
        return tuple(b >> BF16_BITS for b in bits) if is_whole and not any(b % (1 << BF16_BITS) for b in bits) else ()

    def _step(self, index: Expr, variable: str) -> int | None:
        # A vector is full and begins at a multiple of the lanes, or it is a single element.
        return vector_step(index, variable, self.out.lanes)


def print_product(out: CppWriter, step: Contract, stage: Stage, around: Stage, sums: str) -> str:
    """Return the call of the micro-kernel that multiplies components.

    Args:
        out: prints expressions.
        step: the contraction.
        stage: the stage that it is in.
        around: a stage whose grid has the axes of the loops around it.
        sums: the text of the object that takes the sums.
    """
    passes_rows = step.a.buffer in passing(out.program, stage.steps)
    if len(step.axes) == WINDOW_AXES:
        return _print_windows(out, step, stage, passes_rows, sums)
    rows, columns, (*blocks, terms) = sides_of(step)
    scales = ""
    if step.factor is not None:
        scales, terms = _factors(out, step, around, (*blocks, terms))
    elif blocks:
        raise refused("contractions of components without a factor have one axis of terms")
    begin, count = _span(out, step, around) if is_chained(step) else ("", count_of(rows))
    counts = (count, loop_end(columns, columns.extent), loop_end(terms, terms.extent))
    second = out.program.buffer(step.b.buffer)
    if is_chained(step):
        return _print_chained(out, step, around, sums, (begin, *counts))
    first = _made("rows", out.program.buffer(step.a.buffer), counts[0], counts[2])
    text = _made("columns", second, counts[1], counts[2])
    if second.level is Level.INPUT:
        text = _given(out, second, step, around, counts)
    if scales:
        return f"korch_amx::Product{{{sums}, {first}, {text}{scales}}}.run_blocks();"
    return f"korch_amx::Product{{{sums}, {first}, {text}}}.template run<{str(passes_rows).lower()}>();"


def _factors(out: CppWriter, step: Contract, around: Stage, axes: Sequence[Axis]) -> tuple[str, Axis]:
    """Print the function that loads the factors of columns; return their text, and a single axis of all terms."""
    (*_, terms), columns = axes, sides_of(step)[1]
    whole, at = math.prod(axis.extent for axis in axes), step.factor
    blocks = next((axis for axis in axes[:-1]), None)
    ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in (*around.grid, *step.axes)}
    is_joined = blocks is None or all(
        place.index.coefficient(blocks.name) == terms.extent * (place.index.coefficient(terms.name) or 0)
        for place in (step.a, step.b)
    )
    count = math.prod(axis.extent for axis in step.axes if not axis.is_reduced) // columns.extent
    if count > MOST_FACTOR_ROWS:
        raise refused(f"contractions with a factor have at most {MOST_FACTOR_ROWS} rows")
    if at is None or len(axes) > 2 or not is_joined or terms.extent % EDGE or terms.name in at.index.variables:
        raise refused("a factor of products is that of whole blocks of terms")
    if vector_step(at.index, columns.name, out.lanes) != 1:
        raise refused(f"the factors in buffer {at.buffer} are not adjacent")
    name = f"factors{out.lambdas}"
    out.lambdas += 1
    where = f"[[maybe_unused]] long {blocks.name if blocks else 'block'}, long {columns.name}"
    place = out.expr(substitute(at.index, {}, ranges))
    out.open(f"const auto {name} = [=]({where}) __attribute__((always_inline))")
    out.line(f"return korch::load<float, {out.lanes}>({at.buffer} + {place});")
    out.close("};")
    return f", korch_amx::factors_of<{terms.extent // EDGE}>({name})", replace(terms, size=whole)


def _print_windows(out: CppWriter, step: Contract, stage: Stage, passes_rows: bool, sums: str) -> str:
    """Return the call of the micro-kernel for windows of an image."""
    window, (y, _, j, *_) = ImageWindow.of(out.program, stage, step), step.axes
    a, b = step.a.buffer, step.b.buffer
    load = next(op for op in maker_of(out.program, stage, a).ops if isinstance(op, Load))
    is_last = str(load.index.coefficient("c") == 1 or window.channels == 1).lower()
    rows, columns = loop_end(y, y.extent), loop_end(j, j.extent)
    image = f"korch_amx::image_of<{window.text}, {is_last}>({a}_from, {a}, {rows})"
    weights = f"korch_amx::taps_of<{window.text}, {_components(out.program.buffer(b))}>({b}_from, {b}, {columns})"
    run = "pass_rows()" if passes_rows else f"pass_strips({window.units})"
    return f"korch_amx::windows_of<{window.text}>({sums}, {image}, {weights}).{run};"


def _span(out: CppWriter, step: Contract, around: Stage) -> tuple[str, str]:
    """Print the bounds of the rows within guards; return the texts of the first row ("" for row 0) and their number."""
    outer, inner, *_ = step.axes
    ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in (*around.grid, *step.axes)}
    guards = tuple(guard for guard in step.where if outer.name in guard.expr.variables)
    begin, end = print_ends(out, outer, guards, ranges)
    first = "" if begin == "0" else f"{begin} * {inner.extent}"
    if not guards:
        return first, str(outer.extent * inner.extent)
    return first, f"korch::larger(0, {end} - {begin}) * {inner.extent}"


def _made(side: str, buffer: Buffer, count: str, terms: str) -> str:
    name = buffer.name
    return f"korch_amx::{side}_of<{_components(buffer)}>({name}_from, {name}, {count}, {terms})"


def _components(buffer: Buffer) -> int:
    split = split_of(buffer)
    if split is None:
        raise refused(f"buffer {buffer.name} is not split")
    return split.components


def is_chained(step: Contract) -> bool:
    """Return whether a contraction of components belongs to a chain of convolutions: its rows are image positions."""
    return step.product is Product.SPLIT and len(step.axes) == CHAIN_AXES and step.factor is None


def _print_chained(out: CppWriter, step: Contract, around: Stage, sums: str, counts: Sequence[str]) -> str:
    """Return the call of the micro-kernel for rows of a chain.

    `counts` has the first row and the numbers of rows, columns and terms.
    """
    first, count, _, terms = counts
    a, second = step.a.buffer, out.program.buffer(step.b.buffer)
    if second.level is not Level.INPUT:
        raise refused("the weights of a chain of convolutions come in components")
    rows = f"{a}_rows({first or 0}, {terms})"
    return f"korch_amx::Chained{{{sums}, {rows}, {_given(out, second, step, around, counts[1:])}}}.run({a}, {count});"


def _given(out: CppWriter, buffer: Buffer, step: Contract, stage: Stage, counts: Sequence[str]) -> str:
    """Return the text of an operand that is given in components, in strips of whole steps."""
    layout, split = panels(buffer), split_of(buffer)
    if split is None or layout is None:
        raise refused(f"buffer {buffer.name} is not split")
    ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in stage.grid}
    start = substitute(step.b.index, {axis.name: constant(0) for axis in step.axes}, ranges)
    place = in_rows(buffer, layout, start, ranges)
    components = Expr(split.components * place.constant, tuple((atom, split.components * n) for atom, n in place.terms))
    strip = str(split.components * layout.width * buffer.size // layout.columns)
    at = f"reinterpret_cast<const uint16_t*>({buffer.name})"
    return f"korch_amx::Given<{split.components}>{{{at} + {out.expr(components)}, {strip}, {counts[1]}, {counts[2]}}}"


def require_components(program: TileProgram, stage: Stage) -> None:
    """Raise an error if components are used in a way that can't be printed."""
    for _, step in stage.leaves:
        if isinstance(step, Pass):
            if any(split_of(program.buffer(op.buffer)) for op in step.ops if isinstance(op, Load)):
                raise refused("passes that read components can't be printed")
            if is_split(program, step) and not _are_consecutive(step):
                raise refused("results of passes that make components are terms one after another")
        elif (step.product is Product.SPLIT) != all(split_of(program.buffer(at.buffer)) for at in (step.a, step.b)):
            raise refused("only split operands are multiplied by matrix units")


def _are_consecutive(pass_: Pass) -> bool:
    """Return whether the results of a pass are consecutive terms of a row."""
    (outer, *_), first, each = pass_.axes, pass_.sinks[0], len(pass_.sinks)
    if each == 1:
        return True
    row = (first.index.coefficient(outer.name) or 0) // each
    places = [add(first.index, constant(h * row)) for h in range(each)]
    return len(pass_.axes) == 2 and [sink.index for sink in pass_.sinks] == places
