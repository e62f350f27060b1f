"""Prints contractions whose second operand has several unsigned numbers in each byte.

The numbers of a byte are shifted and masked in registers, once for all rows of a block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from korch.primitive.types import DType
from korch.tile.ir.program import QUAD, Axis, refused
from korch.tile.llvm.block import OperandSide, SumBlock
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.instructions import DotInstruction
from korch.tile.llvm.integers import IntegerBlockPrinter, IntegerPrinter

UNROLLED = 4
"""The most groups of bytes whose products are printed one after another, without a loop."""

Offsets = tuple[SsaValue, SsaValue, SsaValue]


@dataclass
class PackedBlockPrinter(IntegerBlockPrinter):
    """Prints the blocks of a contraction of bytes by parts of bytes.

    The axes of terms are those of groups of four bytes, of the parts of a byte, and of the bytes of a group.
    """

    @cached_property
    def dot(self) -> DotInstruction | None:
        """The instruction that multiplies and adds four bytes of these types, if there is one."""
        found = super().dot
        return found if found is not None and {found.a, found.b} == {DType.I8, DType.U8} else None

    def _outer(
        self, axes: Sequence[Axis], block: SumBlock, at: Offsets, sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        if len(axes) == 1:
            return self._parts(axes[0], block, at, sums)
        axis = axes[0]
        if axis.extent > UNROLLED:
            return super()._outer(axes, block, at, sums)
        for q in range(axis.extent):
            steps = [self.emit.index(q * side.steps[axis.name]) for side in (self.a, self.b)]
            own = (self.emit.add(at[0], steps[0]), self.emit.add(at[1], steps[1]), at[2])
            sums = self._outer(axes[1:], block, own, sums)
        return sums

    def _parts(self, axis: Axis, block: SumBlock, at: Offsets, sums: Sequence[SsaValue]) -> Sequence[SsaValue]:
        """Print the multiply-adds by each part of a group of bytes."""
        emit, bits = self.emit, 8 // axis.extent
        second = emit.place(self.b.kind, block.second, at[1])
        places = [emit.place(self.b.kind, second, emit.index(v * QUAD * self.lanes)) for v in range(block.vectors)]
        words = [self.raw(self.b, place, "i32", self.lanes) for place in places]
        mask = constant("i32", ((1 << bits) - 1) * 0x01010101)
        for h in range(axis.extent):
            moved = [emit.op("lshr", x, constant("i32", bits * h)) if h else x for x in words]
            columns = [self.widened(emit.op("and", x, mask), DType.U8) for x in moved]
            a_at = emit.add(at[0], emit.index(h * self.a.steps[axis.name]))
            sums = self.multiplied(block, a_at, columns, sums)
        return sums


class PackedPrinter(IntegerPrinter):
    """Prints one contraction of bytes by parts of bytes."""

    printer_of = PackedBlockPrinter

    def _require(self, terms: Sequence[Axis], out: OperandSide, a: OperandSide, b: OperandSide) -> None:
        super()._require(terms, out, a, b)
        is_of_parts = len(terms) > 1 and terms[-2].name == self.step.part and b.steps[self.step.part] == 0
        if not is_of_parts or terms[-1].extent != QUAD or self.context.dtypes[b.buffer] is not DType.U8:
            raise refused("only parts of groups of four unsigned bytes are multiplied")
