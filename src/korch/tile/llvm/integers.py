"""Prints contractions of bytes, and of bytes that were widened to 16 bits, with exact sums of 32 bits.

Each lane multiplies four adjacent bytes, or two adjacent numbers of 16 bits, and adds the products to its sum. Terms
beyond the last one are 0 in the panels of the second operand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from korch.primitive.types import DType
from korch.system.alignment import ceil_div, round_up
from korch.tile.analysis.panels import panels
from korch.tile.ir.program import PAIR, QUAD, Axis, Buffer, Panels, Registers, refused
from korch.tile.llvm.arithmetic import is_signed
from korch.tile.llvm.block import BlockPrinter, Lines, OperandSide, SumBlock
from korch.tile.llvm.contract import ContractPrinter, Strip
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.instructions import DotInstruction, dot_of_vectors
from korch.tile.llvm.points import KernelContext

PAIRS = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd", 4: "llvm.x86.sse2.pmadd.wd"}
"""The instruction that adds two products of 16-bit numbers in each lane, by number of lanes."""

TOP_BITS = 0x80808080
"""The highest bit of each byte: flipping it adds 128 to a signed byte, or takes 128 from an unsigned one."""


@dataclass
class IntegerBlockPrinter(BlockPrinter):
    """Prints the blocks of a contraction of bytes or of 16-bit numbers; `shift` has what the sums begin with."""

    shift: Sequence[SsaValue] = ()

    @property
    def group(self) -> int:
        """The terms that a lane multiplies at once."""
        return QUAD if self.a.kind == "i8" else PAIR

    @cached_property
    def dot(self) -> DotInstruction | None:
        """The instruction that multiplies and adds four bytes, if there is one."""
        found = dot_of_vectors(self._dtype(self.a), self._dtype(self.b), self.context.isa.features)
        return found if self.group == QUAD and found is not None and found.columns == self.lanes else None

    @property
    def is_shifted(self) -> bool:
        """Whether it multiplies the bytes of the first operand as those of the other sign, which differ by 128."""
        return self.dot is not None and {self.dot.a, self.dot.b} != {self._dtype(self.a), self._dtype(self.b)}

    def begin(self, block: SumBlock) -> list[SsaValue]:
        """Print the initial values of the sums of a block."""
        zero = constant("i32", 0, self.lanes)
        return [self.shift[v] if self.shift else zero for _, v in block.places]

    def shifts(self, second: SsaValue, vectors: int) -> list[SsaValue]:
        """Print the corrections of the sums of a strip, for bytes that are multiplied with 128 more or less."""
        if not self.is_shifted:
            return []
        emit, ones, step = self.emit, constant("i32", 0x01010101, self.lanes), QUAD * self.b.steps[self.terms[-1].name]

        def add(q: SsaValue, *sums: SsaValue) -> list[SsaValue]:
            at = emit.place(self.b.kind, second, emit.times(q, step))
            return [self._sum(x, [ones], self._columns(at, v)) for v, x in enumerate(sums)]

        start = (constant("i32", 0, self.lanes),) * vectors
        turns = math.prod(axis.extent for axis in self.terms[:-1])
        sums = emit.loop(emit.index(0), emit.times(self._steps, turns), 1, add, *start)
        shift = constant("i32", -128 if is_signed(self._dtype(self.a)) else 128)
        return [emit.op("mul", x, shift) for x in sums]

    @property
    def _steps(self) -> SsaValue:
        more = self.emit.add(self.count, self.emit.index(self.group - 1))
        return self.emit.divided(more, self.group)

    def _adjacent(
        self, block: SumBlock, at: tuple[SsaValue, SsaValue, SsaValue], sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        """Print the loop over adjacent terms, four or two at a time."""
        emit, name = self.emit, self.terms[-1].name
        steps = [self.group * side.steps[name] for side in (self.a, self.b)]

        def add(q: SsaValue, *own: SsaValue) -> Sequence[SsaValue]:
            a_at, b_at = (emit.add(x, emit.times(q, step)) for x, step in zip(at, steps, strict=False))
            self._prefetch(block, q)
            return self._added(block, (a_at, 0), (b_at, 0), own)

        return emit.loop(emit.index(0), self._steps, 1, add, *sums)

    def _added(
        self, block: SumBlock, a: tuple[SsaValue, int], b: tuple[SsaValue, int], sums: Sequence[SsaValue]
    ) -> list[SsaValue]:
        """Print the multiply-adds of four or two terms."""
        second = self.emit.place(self.b.kind, block.second, b[0])
        return self.multiplied(block, a[0], [self._columns(second, v) for v in range(block.vectors)], sums)

    def multiplied(
        self, block: SumBlock, a_at: SsaValue, columns: Sequence[Sequence[SsaValue]], sums: Sequence[SsaValue]
    ) -> list[SsaValue]:
        """Print the multiply-adds of all rows by vectors of four or two terms; `a_at` has the terms of the rows."""
        emit, found = self.emit, list(sums)
        for r, (first, offset) in enumerate(block.first):
            at = emit.place(self.a.kind, emit.place(self.a.kind, first, a_at), emit.index(offset))
            x = emit.splat(self.raw(self.a, at, "i32", 1), self.lanes)
            if self.is_shifted:
                x = emit.op("xor", x, constant("i32", TOP_BITS))
            rows = self.widened(x, self._dtype(self.a))
            for v, own in enumerate(columns):
                k = r * block.vectors + v
                found[k] = self._sum(found[k], rows, own)
        return found

    def _sum(self, total: SsaValue, rows: Sequence[SsaValue], columns: Sequence[SsaValue]) -> SsaValue:
        if self.dot is not None:
            factors = [self._as(x, "i8") for x in (*rows, *columns)]
            return self.dot.add(self.emit, total, *factors[:: 1 if self.dot.b is self._dtype(self.b) else -1])
        for x, y in zip(rows, columns, strict=True):
            total = self.emit.op("add", total, self.products(x, y))
        return total

    def products(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print the sum of the two products of 16-bit numbers in each lane."""
        emit, half = self.emit, constant("i32", 16)
        if self.context.isa.is_x86:
            return emit.call(PAIRS[self.lanes], "i32", self.lanes, self._as(a, "i16"), self._as(b, "i16"))
        low = [emit.op("ashr", emit.op("shl", x, half), half) for x in (a, b)]
        high = [emit.op("ashr", x, half) for x in (a, b)]
        return emit.op("add", emit.op("mul", *low), emit.op("mul", *high))

    def _dtype(self, side: OperandSide) -> DType:
        return self.context.dtypes[side.buffer]

    def _as(self, x: SsaValue, kind: str) -> SsaValue:
        """Return the same bits as a vector of narrower or wider elements."""
        lanes = x.lanes * int(x.kind[1:]) // int(kind[1:])
        to = kind if lanes == 1 else f"<{lanes} x {kind}>"
        return self.emit.pure(kind, lanes, f"bitcast {x.typed} to {to}", x)

    def raw(self, side: OperandSide, at: SsaValue, kind: str, lanes: int) -> SsaValue:
        """Print a load of an operand's elements as they are, or as those of another kind."""
        return self.emit.load(kind, lanes, at, side.size_bytes, self.emit.depth, self.era_of(side))

    def _columns(self, second: SsaValue, v: int) -> list[SsaValue]:
        """Print a vector of the second operand, as vectors to multiply with."""
        at = self.emit.place(self.b.kind, second, self.emit.index(v * self.group * self.lanes))
        if self.group == PAIR:
            return [self.pairs(self.raw(self.b, at, self.b.kind, PAIR * self.lanes), self._dtype(self.b))]
        return self.widened(self.raw(self.b, at, "i32", self.lanes), self._dtype(self.b))

    def pairs(self, x: SsaValue, dtype: DType) -> SsaValue:
        """Print pairs of adjacent numbers as a pair of 16-bit numbers in each lane."""
        return self._as(self.emit.convert("sext" if is_signed(dtype) else "zext", x, "i16"), "i32")

    def widened(self, x: SsaValue, dtype: DType) -> list[SsaValue]:
        """Print the vectors of 16-bit numbers to multiply with: the even and the odd bytes of a quad."""
        if self.group == PAIR or self.dot is not None:
            return [x]
        emit, words = self.emit, self._as(x, "i16")
        byte = constant("i16", 8)
        shift = "ashr" if is_signed(dtype) else "lshr"
        parts = [emit.op(shift, emit.op("shl", words, byte), byte), emit.op(shift, words, byte)]
        return [self._as(part, "i32") for part in parts]


class IntegerPrinter(ContractPrinter):
    """Prints one contraction of bytes or of 16-bit numbers whose columns share the first operand."""

    printer_of = IntegerBlockPrinter

    def _strides(self, second: Buffer, b: OperandSide) -> tuple[int, int]:
        """Return the memory steps between the vectors of a strip, and between strips."""
        layout, width = panels(second), self.registers.vectors * self.lanes
        group = self.step.product.group
        if layout is None or (layout.width, layout.group) != (width, group):
            raise refused(f"buffer {second.name} is not in panels of {width} columns and {group} terms")
        return group * self.lanes, second.size // layout.columns * layout.width

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        super()._require(terms, out, a, b)
        last = terms[-1]
        is_adjacent = a.steps[last.name] == 1 or last.extent == 1
        is_whole = len(terms) == 1 or last.extent % self.step.product.group == 0
        if not self.sums.is_zeroed or not is_adjacent or not is_whole:
            raise refused(f"terms of buffer {a.buffer} do not lie side by side, or are added to a tile")

    def _lines(self, strip: Strip, r: SsaValue) -> list[Lines]:
        """Print the addresses of the lines of the next strip, which are prefetched into the second-level cache."""
        registers, terms, group = self.registers, self.printer.terms, self.step.product.group
        if not registers.fetches_b or len(terms) > 1 or strip.vectors < registers.vectors or strip.mask is not None:
            return []
        size, step = registers.vectors * self.lanes * group, self.emit.index(group * self.b.steps[terms[-1].name])
        ahead = self._lines_ahead(strip, r, (size, step), (strip.second, self.emit.index(0)))
        return [replace(lines, locality=2) for lines in ahead]

    def _strip(self, strip: Strip) -> None:
        assert isinstance(self.printer, IntegerBlockPrinter)
        self.printer.shift = self.printer.shifts(strip.second, strip.vectors)
        super()._strip(strip)


@dataclass
class LaneBlockPrinter(IntegerBlockPrinter):
    """Prints the blocks of a contraction of bytes over windows, in which each column has its own first operand.

    `taps` has the axes of the rows and of the columns of a window.
    """

    taps: Sequence[Axis] = ()

    def run(self, block: SumBlock) -> None:
        """Print the multiply-adds of a block, and what takes its sums."""
        emit, (height, width) = self.emit, self.taps
        step = self.a.steps[self.rows[0].name]
        unit = math.gcd(step, self.a.steps[width.name]) or 1
        stride, dilation = (max(n // unit, 1) for n in (step, self.a.steps[width.name]))
        pairs = ceil_div(height.extent, PAIR)
        sums = self.begin(block)
        for c in range((block.rows - 1) * stride + (width.extent - 1) * dilation + 1):
            uses = [(r, *divmod(c - r * stride, dilation)) for r in range(block.rows) if c >= r * stride]
            taken = [(r, kx) for r, kx, rest in uses if rest == 0 and kx < width.extent]
            for q in range(pairs if taken else 0):
                x = self._rows_of_window(block, c * unit, q, is_single=PAIR * q + 1 == height.extent)
                for r, kx in taken:
                    at = emit.index(PAIR * self.lanes * (kx * pairs + q))
                    at = emit.place(self.b.kind, block.second, at)
                    w = self.raw(self.b, at, self.b.kind, PAIR * self.lanes)
                    sums[r] = emit.op("add", sums[r], self.products(x, self.pairs(w, self._dtype(self.b))))
        self.end(block, sums)

    def _rows_of_window(self, block: SumBlock, at: int, q: int, *, is_single: bool) -> SsaValue:
        """Print two rows of windows at a position, as pairs in each lane; the second only if it is one."""
        emit, dtype, row = self.emit, self._dtype(self.a), self.a.steps[self.taps[0].name]
        places = [
            emit.place(self.a.kind, block.first[0][0], emit.index(at + (PAIR * q + i) * row)) for i in range(PAIR)
        ]
        loads = [self.raw(self.a, place, self.a.kind, self.lanes) for place in places[: 1 if is_single else PAIR]]
        if is_single:
            return emit.convert("sext" if is_signed(dtype) else "zext", loads[0], "i32")
        order = [i // PAIR + i % PAIR * self.lanes for i in range(PAIR * self.lanes)]
        return self.pairs(emit.shuffle(loads[0], loads[1], order), dtype)


class LanePrinter(IntegerPrinter):
    """Prints one contraction of bytes over windows, in which each column has its own first operand."""

    printer_of = LaneBlockPrinter

    def __init__(self, context: KernelContext, *given: object) -> None:
        super().__init__(context, *given)  # type: ignore[arg-type]
        chosen = self.step.registers or Registers(1, 1)
        self.step = replace(self.step, registers=replace(chosen, vectors=1))

    def _strides(self, second: Buffer, b: OperandSide) -> tuple[int, int]:
        height, width = (axis.extent for axis in self.step.axes[2:])
        pairs = round_up(height, PAIR)
        if second.layout != (Panels(second.size // (pairs * width), self.lanes, PAIR),):
            raise refused("only windows with weights in panels of one vector and pairs of terms can be printed")
        return 0, pairs * width * self.lanes

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        taps = self.step.axes[2:]
        pairs = round_up(taps[0].extent, PAIR) if len(taps) == PAIR else 0
        expected = {self.columns.name: 1, taps[0].name: self.lanes, taps[-1].name: pairs * self.lanes}
        is_packed = all(step in (0, expected.get(name, 0)) for name, step in b.steps.items())
        if not pairs or a.steps[self.columns.name] != 1 or not is_packed or not self.sums.is_zeroed:
            raise refused("only windows with weights in panels of one vector and pairs of terms can be printed")

    def _rows(self, strip: Strip, r: SsaValue, rows: int) -> None:
        emit, a = self.emit, self.a
        base = emit.place(a.kind, emit.place(a.kind, a.at, emit.times(r, a.steps[self.rows[0].name])), strip.column)
        group = emit.index(0)
        block = SumBlock(r, rows, strip.column, 1, [(base, 0)], strip.second, strip.mask, lambda _: group)
        self.printer.run(block)

    def _strip(self, strip: Strip) -> None:
        assert isinstance(self.printer, LaneBlockPrinter)
        self.printer.taps = self.step.axes[2:]
        ContractPrinter._strip(self, strip)
