"""Prints the steps of a task: passes, loops around them, and calls of the contraction micro-kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import assert_never

from korch.system.alignment import round_up
from korch.tile.analysis.axes import Steps, even_step, joined
from korch.tile.analysis.components import is_split, reader_of, split_of
from korch.tile.analysis.panels import by_panel, in_rows, panels, strips
from korch.tile.analysis.registers import FEW_REGISTERS, LONG_BLOCK, REGISTERS
from korch.tile.analysis.stages import tile_bytes
from korch.tile.analysis.sums import Sums, batches_of, is_by_lanes, kept_guards, leaves_out, sides_of, sums_of, tails_of
from korch.tile.cpp.axes import rows_type, turns_type
from korch.tile.cpp.finish import FinishPrinter, count_of
from korch.tile.cpp.lanes import axes_around, dense_contraction, print_rows, window_contraction
from korch.tile.cpp.nest import PassPrinter
from korch.tile.cpp.op import condition_of
from korch.tile.cpp.sort import loop_head
from korch.tile.cpp.split_operands import SplitPrinter, bytes_of_components, print_product
from korch.tile.cpp.text import CppWriter, loop_end
from korch.tile.ir.index import add, constant, scale, substitute, var
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Loop,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    TileProgram,
    refused,
)
from korch.tile.lower.buffers import LINE_BYTES


@dataclass(frozen=True)
class _Panel:
    """A pass that writes panels, one panel at a time."""

    axis: Axis
    block: str
    printer: PassPrinter


@dataclass(frozen=True)
class _Block:
    """A contraction, and the printer of the pass that takes its sums, or None."""

    sums: Sums
    finish: FinishPrinter | None


Node = PassPrinter | SplitPrinter | _Panel | _Block | tuple[Loop, "list[Node]"]


def bytes_of_tile(program: TileProgram, stage: Stage, buffer: Buffer) -> int:
    """Return the size of a tile of a stage in the printed code, in bytes, rounded up to whole cache lines."""
    if split_of(buffer) is None:
        return tile_bytes(buffer)
    return round_up(bytes_of_components(program, stage, buffer), LINE_BYTES)


class StepPrinter:
    """Prints the steps of one stage's tasks."""

    def __init__(self, out: CppWriter, stage: Stage, given: Set[str]) -> None:
        """Prepare the printers of all passes; `given` names the buffers that are only read."""
        self.out, self.stage, self.given = out, stage, given
        self.printers: list[PassPrinter] = []
        self.nodes = self._prepare(stage.steps, stage.grid)

    @property
    def is_streamed(self) -> bool:
        """Whether anything is written past the caches."""
        return any(printer.is_streamed for printer in self.printers)

    def run(self) -> None:
        """Print the steps."""
        self._print(self.nodes, self.stage.grid)

    def _prepare(self, steps: Sequence[Step], grid: tuple[Axis, ...]) -> list[Node]:
        found: list[Node] = []
        for step in sums_of(self.out.program, steps):
            match step:
                case Pass() if is_split(self.out.program, step):
                    reader = reader_of(self.stage, step.sinks[0].buffer)
                    found.append(SplitPrinter(self.out, Stage(grid, (step,)), step, self.given, reader))
                case Pass():
                    found.append(self._pass(step, grid))
                case Sums(contract, _, after):
                    axes = {axis.name: axis for axis in contract.axes}
                    own = after and replace(after, axes=tuple(axes[axis.name] for axis in after.axes))
                    stage = Stage(grid, (own,) if own else ())
                    found.append(_Block(step, FinishPrinter(self.out, stage, step, self.given) if own else None))
                case Loop(axis, _, body):
                    found.append((step, self._prepare(body, (*grid, axis))))
                case _:
                    assert_never(step)
        return found

    def _pass(self, pass_: Pass, grid: tuple[Axis, ...]) -> PassPrinter | _Panel:
        found = by_panel(self.out.program, pass_, grid)
        if found is None:
            is_plain = all(isinstance(step, Pass) for step in self.stage.steps)
            return self._printer(self.stage if is_plain else Stage(grid, (pass_,)), pass_)
        block = f"[[maybe_unused]] const long {found.block} = {self.out.expr(found.number)};"
        return _Panel(found.axis, block, self._printer(Stage((*grid, found.axis), (found.pass_,)), found.pass_))

    def _printer(self, stage: Stage, pass_: Pass) -> PassPrinter:
        self.printers.append(PassPrinter(self.out, stage, pass_, self.given))
        return self.printers[-1]

    def _print(self, nodes: Sequence[Node], grid: tuple[Axis, ...]) -> None:
        for node in nodes:
            match node:
                case PassPrinter():
                    self.out.open("")
                    node.run()
                    self.out.close()
                case SplitPrinter():
                    node.run()
                case _Panel(axis, block, printer):
                    self._for(axis)
                    self.out.line(block)
                    printer.run()
                    self.out.close()
                case _Block(finish=FinishPrinter() as finish) if is_split(self.out.program, finish.pass_):
                    self._feed(node, finish, grid)
                case _Block():
                    self._contract(node, grid)
                case (loop, body):
                    self._for(loop.axis, loop.only, loop.is_nearest)
                    self._print(body, (*grid, loop.axis))
                    self.out.close()

    def _for(self, axis: Axis, only: At | None = None, is_nearest: bool = False) -> None:
        self.out.open(loop_head(self.out, axis, only, is_nearest))

    def _contract(self, block: _Block, grid: tuple[Axis, ...]) -> None:
        """Print the call of the micro-kernel; strides are its template arguments."""
        batch = batches_of(block.sums.step)
        for axis in batch:
            self._for(axis)
        step = replace(block.sums.step, axes=tuple(axis for axis in block.sums.step.axes if axis not in batch))
        block = replace(block, sums=replace(block.sums, step=step))
        ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in (*grid, *batch)}
        own = {axis.name for axis in step.axes}  # of split contractions, guards on these axes bound the rows
        guards = tuple(guard for guard in kept_guards(step) if not guard.expr.variables & own)
        self.out.open(f"if ({condition_of(self.out, guards, ranges) or 'true'})" if guards else "")
        if leaves_out(step) or (is_by_lanes(step) and not step.product.is_of_bytes):
            self._contract_windows(block, (*grid, *batch))
        elif step.product is Product.SPLIT:
            self._contract_components(block, (*grid, *batch))
        else:
            self._contract_floats(block, (*grid, *batch), batch)
        self.out.close()
        for _ in batch:
            self.out.close()

    def _feed(self, block: _Block, finish: FinishPrinter, grid: tuple[Axis, ...]) -> None:
        """Print the computation of rows of windows for the next contraction."""
        whole, (name,) = block.sums.step, (sink.buffer for sink in finish.pass_.sinks)
        batch = batches_of(whole)
        takers = (s for _, s in self.stage.leaves if isinstance(s, Contract) and s.a.buffer == name)
        if any({*kept_guards(whole)} - {*taker.where} for taker in takers):
            raise refused(f"the components of buffer {name} are made of fewer rows than are multiplied")
        step, axes = replace(whole, axes=tuple(axis for axis in whole.axes if axis not in batch)), axes_around(whole)
        head = f"[=]({', '.join(f'[[maybe_unused]] long {axis}' for axis in axes)}, const auto& turn)"
        self.out.open(f"const auto {name}_windows = {head} __attribute__((always_inline))")
        kernel, (rows, a, b) = self._windows(step, (*grid, *batch))
        self.out.line(f"{rows}([&](long from_a, long from_b) __attribute__((always_inline)) {{")
        self.out.line(f"  turn({a} + from_a, {b} + from_b, from_a);")
        self.out.line("});")
        self.out.close("};")
        kernel = f"{kernel}, {whole.a.index.coefficient(axes[0]) or 0}"
        made = f"korch_amx::fed_rows<{kernel}>({name}_windows, {finish.feed(axes)}, first, terms)"
        self.out.line(f"const auto {name}_rows = [=](long first, long terms) {{ return {made}; }};")

    def _contract_floats(self, block: _Block, grid: tuple[Axis, ...], batch: Sequence[Axis]) -> None:
        """Print the call of the micro-kernel for floats."""
        step = block.sums.step
        rows, columns, terms = sides_of(step)
        own = Stage((*grid, *step.axes), ())
        (out_at, out), (a_at, a), (b_at, b) = self._operands(step, own)
        self._require_operands(step, out, a, b)
        second, lanes = self.out.program.buffer(step.b.buffer), self.out.lanes
        registers = self._registers(step)
        vector, strip = strips(second, registers.vectors, lanes, b[columns.name])
        terms = joined(terms, a, b)
        last = terms[-1]
        types = rows_type(rows, a), turns_type(terms, a, b)
        steps = (*types, a[last.name], b[last.name], b[columns.name], vector, strip)
        is_panel = "true" if panels(second) else "false"
        each, is_stream = self._fetched(step, registers, vector)
        sizes = (lanes, registers.rows, registers.vectors, *steps, is_panel, each, is_stream)
        arguments = (*sizes, *self._rows_ahead(step, a, terms), *tails_of(rows, registers.rows))
        counts = f"{count_of(rows)}, {loop_end(columns, columns.extent)}, {loop_end(last, last.extent)}"
        sums = self._sums(block, out_at, out, own)
        self.out.line(f"korch::Contraction<{', '.join(map(str, arguments))}>::run(")
        after = self._after(step, own, batch, b[last.name])
        self.out.line(f"    {sums}, {a_at}, {b_at}, {counts}{after});")

    def _contract_components(self, block: _Block, grid: tuple[Axis, ...]) -> None:
        """Print the call of the micro-kernel for components."""
        step = block.sums.step
        own = Stage((*grid, *step.axes), ())
        sums = self._sums(block, *self._place(step.out, step, own), own)
        self.out.line(print_product(self.out, step, self.stage, own, sums))

    def _after(self, step: Contract, own: Stage, batch: Sequence[Axis], row: int) -> str:
        """Return the last argument: the address of the next contraction's second operand, if it follows this one's."""
        buffer = self.out.program.buffer(step.b.buffer)
        layout, (*_, terms) = panels(buffer), step.axes
        if not batch or layout is None or step.registers is None or not step.registers.fetches_b:
            return ""
        ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in own.grid}
        following = substitute(step.b.index, {batch[-1].name: add(var(batch[-1].name), constant(1))}, ranges)
        distance = add(following, scale(substitute(step.b.index, {}, ranges), -1))
        if distance.terms or distance.constant != terms.extent * layout.columns:
            return ""
        return f", {self._place(step.b, step, own)[0]} + {terms.extent * row}"

    def _contract_windows(self, block: _Block, grid: tuple[Axis, ...]) -> None:
        """Print the call of the micro-kernel for floats that reads windows in place."""
        own = Stage((*grid, *block.sums.step.axes), ())
        out_at, out = self._place(block.sums.step.out, block.sums.step, own)
        kernel, operands = self._windows(block.sums.step, grid)
        sums, columns = self._sums(block, out_at, out, own), block.sums.step.axes[1]
        self.out.line(f"{kernel}::run(")
        self.out.line(f"    {sums}, {', '.join(operands)}, {loop_end(columns, columns.extent)});")

    def _windows(self, step: Contract, grid: tuple[Axis, ...]) -> tuple[str, tuple[str, str, str]]:
        """Print the rows of windows; return the micro-kernel's type, and the texts of the rows and both operands."""
        own = Stage((*grid, *step.axes), ())
        ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in own.grid}
        (a_at, a), (b_at, b) = (self._place(at, step, own) for at in (step.a, step.b))
        second = self.out.program.buffer(step.b.buffer)
        kernel_of = window_contraction if is_by_lanes(step) else dense_contraction
        kernel = kernel_of(replace(step, registers=self._registers(step)), second, self.out.lanes, a, b)
        return kernel, (print_rows(self.out, step, ranges, a, b), a_at, b_at)

    def _require_operands(self, step: Contract, out: Steps, a: Steps, b: Steps) -> None:
        rows, columns, terms = sides_of(step)
        tile, first = self.out.program.buffer(step.out.buffer), self.out.program.buffer(step.a.buffer)
        if tile.level is not Level.TILE or out[columns.name] != 1:
            raise refused(f"buffer {tile.name} is no tile with columns side by side")
        if panels(tile) or panels(first):
            raise refused("only the second operand of a contraction is read in panels")
        if a[columns.name] or any(b[axis.name] for axis in rows) or any(out[axis.name] for axis in terms):
            raise refused("an operand of a contraction has an axis of the other")
        if panels(self.out.program.buffer(step.b.buffer)) and b[columns.name] != 1:
            raise refused(f"buffer {step.b.buffer} is not read along its panels")

    def _registers(self, step: Contract) -> Registers:
        """Return the register blocking of a contraction, with no more rows than it has."""
        chosen = step.registers or REGISTERS.get(self.out.lanes, FEW_REGISTERS)
        return replace(chosen, rows=max(1, min(chosen.rows, math.prod(axis.extent for axis in sides_of(step)[0]))))

    def _rows_ahead(self, step: Contract, steps: Steps, terms: Sequence[Axis]) -> tuple[int, int]:
        """Return how many lines of the first operand are prefetched with a term, and how many rows ahead."""
        rows, _, _ = sides_of(step)
        registers, size_bytes = self._registers(step), self.out.program.buffer(step.a.buffer).dtype.size_bytes
        is_dense = steps[terms[-1].name] == 1 and even_step(rows, steps) == terms[-1].extent
        if not registers.fetches_a or not is_dense:
            return 0, 0
        work = registers.rows * registers.vectors * math.prod(axis.extent for axis in terms)
        return -(-registers.rows * size_bytes // LINE_BYTES), registers.rows * -(-LONG_BLOCK // work)

    def _fetched(self, step: Contract, registers: Registers, vector: int) -> tuple[int, str]:
        """Return how many lines of a term are prefetched with a block of rows, and whether b is read as a stream."""
        if not registers.fetches_b:
            return 0, "false"
        rows, second, lanes = sides_of(step)[0], self.out.program.buffer(step.b.buffer), self.out.lanes
        count = math.prod(axis.extent for axis in rows)
        lines = -(-registers.vectors * lanes * second.dtype.size_bytes // LINE_BYTES)
        known = self.out.program.parameter_ranges.keys()  # otherwise the row count depends on an enclosing loop
        ends = [axis.ragged[1] for axis in rows if axis.ragged is not None]
        is_cut = any(isinstance(end, int) or end.variables <= known for end in ends)
        is_once = count <= registers.rows and not is_cut
        if is_once and panels(second) is not None and vector == lanes:
            return lines, "true"
        return -(-lines // max(1, count // registers.rows)), "false"  # only whole blocks prefetch

    def _sums(self, block: _Block, at: str, out: Steps, own: Stage) -> str:
        """Return the text of the object that initializes and takes the sums; print the function that takes them."""
        step = block.sums.step
        if block.finish is not None:
            is_fetched = step.registers is not None and step.registers.fetches_out
            return f"korch::Finished{{{block.finish.run(is_fetched)}}}"
        rows, columns, _ = sides_of(step)
        row = even_step(rows, out)
        if row is None:
            raise refused(f"the rows of buffer {step.out.buffer} are not equally far apart")
        tile, whole = self.out.program.buffer(step.out.buffer), round_up(columns.extent, self.out.lanes)
        is_one = all(axis.extent == 1 for axis in rows)
        has_room = tile.size >= whole if is_one else row >= whole
        is_whole = "true" if has_room and panels(self.out.program.buffer(step.b.buffer)) else "false"
        if step.rescale is not None:
            factors, steps = self._place(step.rescale, step, own)
            factor_step = even_step(rows, steps)
            if steps[columns.name] or factor_step is None or panels(self.out.program.buffer(step.rescale.buffer)):
                raise refused("only factors of rows rescale the sums of a contraction")
            return f"korch::Rescaled<{row}, {is_whole}, {factor_step}>{{{{{at}}}, {factors}}}"
        return f"korch::{'Stored' if block.sums.is_zeroed else 'Added'}<{row}, {is_whole}>{{{at}}}"

    def _operands(self, step: Contract, stage: Stage) -> Iterator[tuple[str, Steps]]:
        """Yield what `_place` returns for the accumulator and both operands."""
        return (self._place(at, step, stage) for at in (step.out, step.a, step.b))

    def _place(self, at: At, step: Contract, stage: Stage) -> tuple[str, Steps]:
        """Return the text of the address of an operand's first element, and the memory steps of the axes."""
        ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in stage.grid}
        index = substitute(at.index, {}, ranges)
        buffer = self.out.program.buffer(at.buffer)
        layout = panels(buffer)
        steps: dict[str, int] = {}
        for axis in step.axes:
            slope = 0 if axis.extent == 1 else index.coefficient(axis.name)
            if slope is None:
                raise refused(f"buffer {at.buffer} is not read in equal steps of {axis.name}", "Pack the operand")
            steps[axis.name] = slope
        columns = sides_of(step)[1]
        if columns.extent == 1:
            steps[columns.name] = 0 if at is step.a or at is step.rescale else 1
        start = substitute(index, {axis.name: constant(0) for axis in step.axes}, ranges)
        if layout is not None:
            start = in_rows(buffer, layout, start, ranges)
            for name in steps.keys() - {columns.name}:
                steps[name] = steps[name] // layout.columns * layout.width
        return f"{at.buffer} + {self.out.expr(start)}", steps
