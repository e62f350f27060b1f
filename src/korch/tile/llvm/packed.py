"""Prints contractions whose second operand has several unsigned numbers in each byte.

The numbers of a byte are shifted and masked in registers, once for all rows of a block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from korch.primitive.types import DType
from korch.tile.ir.program import PAIR, QUAD, Axis, refused
from korch.tile.llvm.block import OperandSide, SumBlock
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.instructions import DotInstruction
from korch.tile.llvm.integers import IntegerBlockPrinter, IntegerPrinter

UNROLLED = 4
"""The most groups of bytes whose products are printed one after another, without a loop, and added up in 16 bits:
more would not fit."""

SHORTS = {16: ("avx512bw", "llvm.x86.avx512.pmaddubs.w.512"), 8: ("avx2", "llvm.x86.avx2.pmadd.ub.sw")}
"""The instruction that adds two products of an unsigned and a signed byte to 16 bits, and its extension, by lanes."""

Offsets = tuple[SsaValue, SsaValue, SsaValue]


@dataclass
class PackedBlockPrinter(IntegerBlockPrinter):
    """Prints the blocks of a contraction of bytes by parts of bytes.

    The axes of terms are those of groups of four bytes, of the parts of a byte, and of the bytes of a group. Parts are
    so small that the products of some groups are added up in 16 bits, exactly, if no instruction adds four of them.
    """

    @cached_property
    def dot(self) -> DotInstruction | None:
        """The instruction that multiplies and adds four bytes of these types, if there is one."""
        found = super().dot
        return found if found is not None and {found.a, found.b} == {DType.I8, DType.U8} else None

    @cached_property
    def short(self) -> str:
        """The instruction that adds two products in 16 bits, if sums are begun in these; else ""."""
        extension, name = SHORTS.get(self.lanes, ("", ""))
        return name if self.dot is None and extension in self.context.isa.features else ""

    def _outer(
        self, axes: Sequence[Axis], block: SumBlock, at: Offsets, sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        if len(axes) > 2:
            return super()._outer(axes, block, at, sums)
        emit, (groups, parts) = self.emit, axes if len(axes) == 2 else (Axis("", 1), axes[0])
        at_once = next(n for n in range(min(groups.extent, UNROLLED), 0, -1) if groups.extent % n == 0)
        steps = [side.steps.get(groups.name, 0) for side in (self.a, self.b)]

        def turn(i: SsaValue, *own: SsaValue) -> Sequence[SsaValue]:
            numbers = [emit.add(emit.times(i, at_once), emit.index(q)) for q in range(at_once)]
            offsets = [[emit.add(x, emit.times(n, step)) for x, step in zip(at, steps, strict=False)] for n in numbers]
            return self._groups(parts, block, offsets, own)

        if at_once == groups.extent:
            return turn(emit.index(0), *sums)
        return emit.loop(emit.index(0), emit.index(groups.extent // at_once), 1, turn, *sums)

    def _groups(
        self, parts: Axis, block: SumBlock, offsets: Sequence[Sequence[SsaValue]], sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        """Print the multiply-adds by each part of some groups of bytes, whose offsets in both operands are given."""
        largest = len(offsets) * parts.extent * PAIR * ((1 << 8 // parts.extent) - 1) * 128
        assert not self.short or largest < 1 << 15, "sums of these products do not fit 16 bits"
        own = [constant("i16", 0, PAIR * self.lanes)] * len(sums) if self.short else sums
        for a_at, columns in self._parts(parts, block, offsets):
            own = self.multiplied(block, a_at, columns, own)
        if not self.short:
            return own
        ones = constant("i16", 1, PAIR * self.lanes)
        return [self.emit.op("add", x, self.products(y, ones)) for x, y in zip(sums, own, strict=True)]

    def _parts(
        self, parts: Axis, block: SumBlock, offsets: Sequence[Sequence[SsaValue]]
    ) -> Iterator[tuple[SsaValue, list[list[SsaValue]]]]:
        """Yield the offset of the first operand and the vectors of columns of each part of some groups of bytes."""
        emit, bits = self.emit, 8 // parts.extent
        mask = constant("i32", ((1 << bits) - 1) * 0x01010101)
        for a_at, b_at in offsets:
            second = emit.place(self.b.kind, block.second, b_at)
            places = [emit.place(self.b.kind, second, emit.index(v * QUAD * self.lanes)) for v in range(block.vectors)]
            words = [self.raw(self.b, place, "i32", self.lanes) for place in places]
            for h in range(parts.extent):
                moved = [emit.op("lshr", x, constant("i32", bits * h)) if h else x for x in words]
                columns = [self.widened(emit.op("and", x, mask), DType.U8) for x in moved]
                yield emit.add(a_at, emit.index(h * self.a.steps[parts.name])), columns

    def widened(self, x: SsaValue, dtype: DType) -> list[SsaValue]:
        """Print the vectors to multiply with: the bytes themselves, if an instruction multiplies them."""
        return [x] if self.short else super().widened(x, dtype)

    def _sum(self, total: SsaValue, rows: Sequence[SsaValue], columns: Sequence[SsaValue]) -> SsaValue:
        if not self.short:
            return super()._sum(total, rows, columns)
        factors = [self._as(x, "i8") for x in (*columns, *rows)]
        return self.emit.op("add", total, self.emit.call(self.short, total.kind, total.lanes, *factors))


class PackedPrinter(IntegerPrinter):
    """Prints one contraction of bytes by parts of bytes."""

    printer_of = PackedBlockPrinter

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        super()._require(terms, out, a, b)
        is_of_parts = len(terms) > 1 and terms[-2].name == self.step.part and b.steps[self.step.part] == 0
        if not is_of_parts or terms[-1].extent != QUAD or self.context.dtypes[b.buffer] is not DType.U8:
            raise refused("only parts of groups of four unsigned bytes are multiplied")
