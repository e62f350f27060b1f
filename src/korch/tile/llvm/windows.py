"""Prints contractions over the windows of an image, which is read in place: tiles of positions of a row.

Elements outside of the image count as zero. Which columns of a window are outside is known for each tile that touches
an end of a row; the tiles between these are one loop. Rows of a window outside of the image are skipped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from korch.tile.analysis.components import WINDOW_AXES
from korch.tile.analysis.panels import panels
from korch.tile.analysis.sums import Sums, is_by_lanes, leaves_out
from korch.tile.analysis.windows import row_of_window, rows_of_window
from korch.tile.ir.program import Axis, Contract, Product, TileProgram, refused
from korch.tile.llvm.block import MOST_UNROLLED, OperandSide, SumBlock
from korch.tile.llvm.component_tiles import ComponentTilePrinter
from korch.tile.llvm.components import ComponentPrinter, ComponentWindowPrinter, refused_components
from korch.tile.llvm.contract import FLOATS, ContractPrinter, Strip, refused_contraction
from korch.tile.llvm.emit import SsaValue
from korch.tile.llvm.functions import fused
from korch.tile.llvm.index import Env, loop_inside
from korch.tile.llvm.integers import IntegerPrinter, LanePrinter
from korch.tile.llvm.isa import Isa
from korch.tile.llvm.packed import PackedPrinter
from korch.tile.llvm.tiles import TilePrinter
from korch.tile.llvm.window_tiles import ComponentWindowTilePrinter

PLACES_AHEAD = 48
"""The prefetch distance in positions, in memory order.

A row may end at a page boundary, where hardware prefetchers stop. A distance of 64 is 4 KB for vectors of 16 floats, so
that prefetches would use the cache sets of the elements being read.
"""

LOADED = 2
"""The rows whose elements may be in registers at a time: LLVM would load those of all rows first, and spill sums."""

REGISTERS = {16: 32}
"""The vector registers, by number of lanes."""

FEW_REGISTERS = 16
"""The vector registers for other numbers of lanes."""


def contract_printer(sums: Sums, isa: Isa) -> type[ContractPrinter]:
    """Return the class that prints a contraction."""
    if sums.step.product.is_of_bytes:
        if sums.step.registers is not None and sums.step.registers.in_tiles:
            return TilePrinter
        if sums.step.part:
            return PackedPrinter
        return LanePrinter if is_by_lanes(sums.step) else IntegerPrinter
    if sums.step.product is Product.SPLIT:
        on_vectors, on_units = (
            (ComponentWindowPrinter, ComponentWindowTilePrinter)
            if len(sums.step.axes) == WINDOW_AXES
            else (ComponentPrinter, ComponentTilePrinter)
        )
        return on_vectors if isa.has_pairs else on_units
    return WindowPrinter if _is_of_windows(sums.step) else ContractPrinter


def refused_step(program: TileProgram, step: Contract, isa: Isa) -> str:
    """Return why a contraction is not printed yet; "" if it is."""
    if step.product.is_of_bytes:
        return ""
    if step.product is Product.SPLIT:
        return refused_components(program, step, on_units=not isa.has_pairs)
    if not _is_of_windows(step):
        return refused_contraction(program, step)
    return "" if step.product in FLOATS else f"windows by {step.product.value}"


def _is_of_windows(step: Contract) -> bool:
    return leaves_out(step) or (is_by_lanes(step) and not step.product.is_of_bytes)


@dataclass(frozen=True)
class _Tile:
    """Some positions of a row."""

    block: SumBlock  # their sums
    at: int | None  # the number of the first position if it is known; else all their windows are inside of the image
    origin: SsaValue  # the address of the first element of the first position's window


class WindowPrinter(ContractPrinter):
    """Prints one contraction over windows."""

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        (places,), columns = self.rows, self.columns
        self.is_by_lanes = is_by_lanes(self.step)
        layout = panels(self.context.program.buffer(self.step.b.buffer))
        is_wide = self.is_by_lanes and layout is not None and layout.width != self.lanes
        if layout is None or is_wide or b.steps[places.name] or a.steps[columns.name] > 1:
            raise refused("of windows, only columns side by side and weights in panels can be printed")
        self.window = row_of_window(self.step, a.steps)
        self.taps = self.step.axes[-1].extent
        self.reach = (self.taps - 1) * self.window.dilation + 1

    def _blocks(self, env: Env) -> None:
        self.outer = [(axis, *self._inside(axis, env)) for axis in rows_of_window(self.step)]
        super()._blocks(env)

    def _inside(self, axis: Axis, env: Env) -> tuple[SsaValue, SsaValue]:
        """Print the bounds of the loop over an axis of a window's rows within which its guards hold."""
        whole, guards = (self.emit.index(0), self._end(axis, env)), rows_of_window(self.step)[axis]
        return loop_inside(self.emit, guards, axis.name, whole, self.ranges, env)

    def _strip(self, strip: Strip) -> None:
        """Print a row of positions, for a strip of columns."""
        emit, own, most, places = self.emit, self.window, self.registers.rows, self.rows[0].extent
        first = emit.place(self.a.kind, self.a.at, emit.times(strip.column, self.a.steps[self.columns.name]))

        def tile(x: SsaValue, size: int = most, at: int | None = None) -> None:
            origin = emit.place(self.a.kind, first, emit.times(x, own.stride * own.unit))
            block = SumBlock(
                x, size, strip.column, strip.vectors, (), strip.second, strip.mask, lambda r: emit.index(0)
            )
            self._tile(_Tile(block, at, origin))

        if self.count.number is None:
            self._cut_row(tile)
            return

        def is_inside(x: int) -> bool:
            end = (x + most - 1) * own.stride + self.reach - own.before
            return x + most <= places and x * own.stride >= own.before and end <= own.width

        inside = [x for x in range(0, places, most) if is_inside(x)]
        for x in range(0, places, most):
            if x not in inside:
                tile(emit.index(x), min(most, places - x), x)
            elif x == inside[0]:
                emit.loop(emit.index(x), emit.index(inside[-1] + most), most, tile)

    def _cut_row(self, tile: Callable[[SsaValue, int, int | None], None]) -> None:
        """Print a row of which the number of positions is known at run time only; those at its ends are alone."""
        emit, own, most, places = self.emit, self.window, self.registers.rows, self.rows[0].extent
        begin = min(places, -(-own.before // own.stride))
        end = max(begin, min(places, (own.width + own.before - self.reach) // own.stride + 1))

        def alone(positions: range) -> None:
            for x in positions:
                emit.branch(emit.before(emit.index(x), self.count), lambda x=x: tile(emit.index(x), 1, x))  # type: ignore[misc]

        alone(range(begin))
        stop = emit.most(emit.index(begin), emit.least(emit.index(end), self.count))
        whole = emit.add(emit.index(begin), self._whole(emit.add(stop, emit.index(-begin)), most))
        emit.loop(emit.index(begin), whole, most, lambda x: tile(x, most, None))
        emit.in_halves(whole, stop, most // 2, lambda x, size: tile(x, size, None))
        alone(range(end, places))

    def _tile(self, tile: _Tile) -> None:
        """Print the multiply-adds of a tile, and what takes its sums."""
        emit, block = self.emit, tile.block
        if self.registers.fetches_out:
            self._fetch(tile)

        def rows(level: int, a_at: SsaValue, b_at: SsaValue, sums: tuple[SsaValue, ...]) -> tuple[SsaValue, ...]:
            if level == len(self.outer):
                return (self._by_lanes if self.is_by_lanes else self._dense)(tile, a_at, b_at, sums)
            axis, begin, end = self.outer[level]

            def one(i: SsaValue, *own: SsaValue) -> tuple[SsaValue, ...]:
                a_own = emit.add(a_at, emit.times(i, self.a.steps[axis.name]))
                return rows(level + 1, a_own, emit.add(b_at, emit.times(i, self.b.steps[axis.name])), own)

            return emit.loop(begin, end, 1, one, *sums)

        zero = emit.index(0)
        self.printer.end(block, rows(0, zero, zero, tuple(self.printer.begin(block))))

    def _is_outside(self, tile: _Tile, p: int) -> bool:
        """Return whether column p of the windows of a tile is outside of the image."""
        if tile.at is None:
            return False
        return not 0 <= tile.at * self.window.stride - self.window.before + p < self.window.width

    def _by_lanes(
        self, tile: _Tile, a_at: SsaValue, b_at: SsaValue, sums: tuple[SsaValue, ...]
    ) -> tuple[SsaValue, ...]:
        """Print the multiply-adds of a row of windows whose elements depend on the column."""
        emit, block, found, own = self.emit, tile.block, list(sums), self.window
        line, weights = emit.place(self.a.kind, tile.origin, a_at), emit.place(self.b.kind, block.second, b_at)
        each = self.b.steps[self.step.axes[-1].name]
        used = [
            (p, k, (p - k * own.dilation) // own.stride)
            for p in range((block.rows - 1) * own.stride + self.reach)
            for k in range(self.taps)
            if (p - k * own.dilation) % own.stride == 0 and 0 <= p - k * own.dilation < block.rows * own.stride
        ]
        used = [use for use in used if not self._is_outside(tile, use[0])]
        # With enough registers, each element is loaded once for all columns of the window.
        is_kept = block.rows + self.taps + 1 < REGISTERS.get(self.lanes, FEW_REGISTERS)
        if not is_kept:
            used.sort(key=lambda use: use[1])
        columns, elements = dict[int, SsaValue](), dict[int, SsaValue]()
        for p, k, r in used:
            if k not in columns:
                columns[k] = self.printer.loaded(
                    self.b, emit.place(self.b.kind, weights, emit.index(k * each)), self.lanes, block.mask
                )
            if p not in elements or not is_kept:
                elements[p] = self.printer.loaded(
                    self.a, emit.place(self.a.kind, line, emit.index(p * own.unit)), self.lanes, block.mask
                )
            found[r] = fused(emit, columns[k], elements[p], found[r])
        return tuple(found)

    def _dense(self, tile: _Tile, a_at: SsaValue, b_at: SsaValue, sums: tuple[SsaValue, ...]) -> tuple[SsaValue, ...]:
        """Print the multiply-adds of a row of windows whose elements are the same for all columns."""
        emit, block, own, last = self.emit, tile.block, self.window, self.step.axes[-1].name
        line, weights = emit.place(self.a.kind, tile.origin, a_at), emit.place(self.b.kind, block.second, b_at)

        def add(k: SsaValue, *given: SsaValue) -> tuple[SsaValue, ...]:
            found = list(given)
            at = emit.place(self.a.kind, line, emit.times(k, own.dilation * own.unit))
            at_b = emit.place(self.b.kind, weights, emit.times(k, self.b.steps[last]))
            places = [emit.place(self.b.kind, at_b, emit.index(v * self.printer.vector)) for v in range(block.vectors)]
            columns = [self.printer.loaded(self.b, at, self.lanes, block.mask_of(v)) for v, at in enumerate(places)]
            for r in range(block.rows):
                if k.number is not None and self._is_outside(tile, r * own.stride + k.number * own.dilation):
                    continue
                if r and r % LOADED == 0:
                    at = emit.opaque(at)
                x = self.printer.repeated(self.a, emit.place(self.a.kind, at, emit.index(r * own.stride * own.unit)))
                for v, column in enumerate(columns):
                    i = r * block.vectors + v
                    found[i] = fused(emit, x, column, found[i])
            return tuple(found)

        if tile.at is None and self.taps * block.rows * block.vectors > MOST_UNROLLED:
            return emit.loop(emit.index(0), emit.index(self.taps), 1, add, *sums)
        for k in range(self.taps):
            sums = add(emit.index(k), *sums)
        return sums

    def _fetch(self, tile: _Tile) -> None:
        """Print prefetches of the positions that are soon stored to, and of the last rows of the windows soon read."""
        emit, block, own = self.emit, tile.block, self.window
        self.printer.fetch_out(block, PLACES_AHEAD)
        steps = [self.a.steps[axis.name] for axis, *_ in self.outer]
        last = sum((axis.extent - 1) * step for (axis, *_), step in zip(self.outer, steps, strict=True))
        lines = [last - i * steps[-1] for i in range(own.stride)] if steps and steps[-1] else [last]
        for r in range(block.rows * own.stride):
            for line in filter(lambda line: line >= 0, lines):
                place = emit.index(line + (PLACES_AHEAD + r) * own.unit)
                emit.prefetch(emit.place(self.a.kind, tile.origin, place))
