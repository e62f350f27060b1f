"""Prints a block of a contraction: multiply-adds of rows and vectors of columns whose sums stay in registers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from korch.primitive.types import DType
from korch.tile.analysis.axes import Steps, even_step
from korch.tile.ir.program import Axis, Registers, refused
from korch.tile.llvm.arithmetic import NARROW
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.functions import fused
from korch.tile.llvm.memory import Place, element_bytes
from korch.tile.llvm.points import KernelContext, PointVector
from korch.tile.llvm.sums import SumsPrinter
from korch.tile.lower.buffers import LINE_BYTES

UNROLLED, MOST_UNROLLED = 16, 90
"""Up to UNROLLED adjacent terms are unrolled if they have at most MOST_UNROLLED multiply-adds."""

UNROLL = 4
"""Otherwise, this number of terms is unrolled."""

SHORT_FINISH = 24
"""What takes the sums is printed for each vector of them if it has at most this number of lines, else for all rows."""


@dataclass(frozen=True)
class OperandSide:
    """An operand of a contraction."""

    buffer: str  # its buffer
    kind: str  # the type in which this stores elements
    at: SsaValue  # the address of the first element
    steps: Steps  # the memory step along each axis
    is_panel: bool  # whether it is in panels, whose rows are whole vectors

    @property
    def size_bytes(self) -> int:
        """The size of an element."""
        return element_bytes(self.kind)


@dataclass(frozen=True)
class Lines:
    """Cache lines to prefetch."""

    at: SsaValue  # the address of those of the first term
    step: SsaValue  # the step from term to term, in bytes
    each: int  # how many adjacent ones per term
    locality: int = 3  # the level of the cache, as LLVM counts them


@dataclass(frozen=True)
class SumBlock:
    """A block of sums in registers."""

    row: SsaValue  # its first row
    rows: int  # the number of rows
    column: SsaValue  # its first column
    vectors: int  # vectors of columns of each row
    # for each row, an address in the first operand and the distance from it in elements
    first: Sequence[tuple[SsaValue, int]]
    second: SsaValue  # the address of its columns of the second operand
    mask: SsaValue | None  # which lanes of the last vector exist; None for all
    # returns the value of the outer of two axes of rows, given the number of a row in the block
    group: Callable[[int], SsaValue]
    lines: Sequence[Lines] = ()  # what is prefetched with its terms

    @property
    def places(self) -> list[tuple[int, int]]:
        """The rows and vectors of the block."""
        return [(r, v) for r in range(self.rows) for v in range(self.vectors)]

    def mask_of(self, vector: int) -> SsaValue | None:
        """Return which lanes of a vector exist; None for all."""
        return self.mask if vector == self.vectors - 1 else None


@dataclass
class BlockPrinter:
    """Prints the blocks of one contraction."""

    context: KernelContext  # the kernel
    registers: Registers  # the sizes of blocks
    sides: tuple[OperandSide, OperandSide, OperandSide]  # the accumulator and both operands
    rows: Sequence[Axis]  # the axes of rows
    terms: Sequence[Axis]  # the axes of terms
    vector: int  # the step between adjacent vectors of the second operand
    count: SsaValue  # how many of the innermost terms there are
    finish: SumsPrinter | None  # prints what takes the sums; None if they are stored
    is_zeroed: bool = True  # whether sums begin with 0
    rescale: OperandSide | None = None  # the factors by which the sums of the rows are multiplied first, or None

    def __post_init__(self) -> None:
        self.emit, self.lanes = self.context.emit, self.context.lanes
        self.out, self.a, self.b = self.sides

    def run(self, block: SumBlock) -> None:
        """Print the multiply-adds of a block, and what takes its sums."""
        if self.registers.fetches_out:
            self.fetch_out(block)
        zero = self.emit.index(0)
        self.end(block, self._outer(self.terms[:-1], block, (zero, zero, zero), self.begin(block)))

    def begin(self, block: SumBlock) -> list[SsaValue]:
        """Print the initial values of the sums of a block."""
        return [self._begin(block, r, v) for r, v in block.places]

    def end(self, block: SumBlock, sums: Sequence[SsaValue]) -> None:
        """Print what takes the sums of a block."""
        if self.finish is None:
            for (r, v), x in zip(block.places, sums, strict=True):
                self.context.memory.store(self._place_of_sum(block, r, v), x, block.mask_of(v))
        elif self.finish.lines <= SHORT_FINISH or len(sums) <= self.registers.vectors:
            for (r, v), x in zip(block.places, sums, strict=True):
                self.finish.move(r, v * self.lanes)
                self.finish.take(x, self._points(block, r, v))
        else:
            self._finish_rows(block, sums)

    def fetch_out(self, block: SumBlock, ahead: int = 0) -> None:
        """Print the prefetches of the lines that results are stored to, of rows that are `ahead` of a block's."""
        if self.finish is not None:
            for r, v in block.places:
                self.finish.move(r + ahead, v * self.lanes)
                self.finish.fetch(self._points(block, r + ahead, v))

    def _finish_rows(self, block: SumBlock, sums: Sequence[SsaValue]) -> None:
        """Print the loop over rows that takes the sums, which are stored on the stack first."""
        assert self.finish is not None
        emit, lanes, finish = self.emit, self.lanes, self.finish
        kind = sums[0].kind
        base, align = emit.array(kind, len(sums) * lanes), lanes * element_bytes(kind)
        for i, x in enumerate(sums):
            emit.store(x, emit.place(kind, base, emit.index(i * lanes)), align)

        def row(r: SsaValue) -> None:
            own = replace(block, row=emit.add(block.row, r))
            if len(self.rows) == 2:
                own = replace(own, group=lambda i: emit.divided(own.row, self.rows[1].extent))
            for v in range(block.vectors):
                self.context.era += 1
                at = emit.place(kind, base, emit.times(r, block.vectors * lanes))
                at = emit.place(kind, at, emit.index(v * lanes))
                x = emit.load(kind, lanes, at, align, emit.depth, self.context.era)
                finish.move(0, v * lanes)
                finish.take(x, self._points(own, 0, v))

        emit.loop(emit.index(0), emit.index(block.rows), 1, row)

    def _points(self, block: SumBlock, r: int, v: int) -> PointVector:
        assert self.finish is not None
        group = block.group(r) if self.finish.has_groups else self.emit.index(0)
        return self.finish.points(block.row, group, block.column, block.mask_of(v))

    # Sums

    def _place_of_sum(self, block: SumBlock, r: int, v: int) -> Place:
        emit, step = self.emit, even_step(self.rows, self.out.steps)
        if step is None:
            raise refused(f"the rows of buffer {self.out.buffer} are not equally far apart")
        base = emit.place(self.out.kind, self.out.at, emit.times(block.row, step))
        base = emit.place(self.out.kind, base, block.column)
        at = emit.place(self.out.kind, base, emit.index(r * step + v * self.lanes))
        self.context.era += 1
        return Place(at, self.context.dtypes[self.out.buffer], self.out.kind, emit.depth, self.context.era)

    def _begin(self, block: SumBlock, r: int, v: int) -> SsaValue:
        if self.is_zeroed:
            return constant("float", 0.0, self.lanes)
        found = self.context.memory.load(self._place_of_sum(block, r, v), self.lanes, block.mask_of(v))
        if self.rescale is None:
            return found
        emit, step, kind = self.emit, even_step(self.rows, self.rescale.steps), self.rescale.kind
        if step is None or self.rescale.is_panel:
            raise refused("only factors of rows rescale the sums of a contraction")
        at = emit.place(kind, self.rescale.at, emit.times(block.row, step))
        return emit.op("fmul", found, self.loaded(self.rescale, emit.place(kind, at, emit.index(r * step))))

    # Terms

    def _outer(
        self, axes: Sequence[Axis], block: SumBlock, at: tuple[SsaValue, SsaValue, SsaValue], sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        """Print the loops over terms; `at` has the offsets in both operands and the number of terms before."""
        if not axes:
            return self._adjacent(block, at, sums)
        emit, axis, inner = self.emit, axes[0], math.prod(x.extent for x in (*axes[1:], self.terms[-1]))
        steps = (self.a.steps[axis.name], self.b.steps[axis.name], inner)

        def turn(i: SsaValue, *own: SsaValue) -> Sequence[SsaValue]:
            a_at, b_at, done = (emit.add(x, emit.times(i, step)) for x, step in zip(at, steps, strict=True))
            return self._outer(axes[1:], block, (a_at, b_at, done), own)

        return emit.loop(emit.index(0), emit.index(axis.extent), 1, turn, *sums)

    def _adjacent(
        self, block: SumBlock, at: tuple[SsaValue, SsaValue, SsaValue], sums: Sequence[SsaValue]
    ) -> Sequence[SsaValue]:
        """Print the loop over adjacent terms."""
        emit, extent = self.emit, self.count.number
        from_a, from_b, before = at
        a_step, b_step = (side.steps[self.terms[-1].name] for side in (self.a, self.b))

        def several(count: int, k: SsaValue, own: Sequence[SsaValue]) -> Sequence[SsaValue]:
            a_at, b_at = emit.add(from_a, emit.times(k, a_step)), emit.add(from_b, emit.times(k, b_step))
            for u in range(count):
                self._prefetch(block, emit.add(emit.add(k, emit.index(u)), before))
                own = self._added(block, (a_at, u * a_step), (b_at, u * b_step), own)
            return own

        if extent is not None and extent <= UNROLLED and extent * len(sums) <= MOST_UNROLLED:
            return several(extent, emit.index(0), sums)
        whole = emit.op("and", self.count, emit.index(-UNROLL)) if extent is None else emit.index(extent & -UNROLL)
        sums = emit.loop(emit.index(0), whole, UNROLL, lambda k, *own: several(UNROLL, k, own), *sums)
        if extent is None:
            return emit.loop(whole, self.count, 1, lambda k, *own: several(1, k, own), *sums)
        return several(extent % UNROLL, whole, sums)

    def _prefetch(self, block: SumBlock, term: SsaValue) -> None:
        emit = self.emit
        for lines in block.lines:
            offset = emit.times(term, lines.step.number) if lines.step.number is not None else None
            at = emit.place("i8", lines.at, emit.op("mul", term, lines.step) if offset is None else offset)
            for q in range(lines.each):
                emit.prefetch(emit.place("i8", at, emit.index(q * LINE_BYTES)), locality=lines.locality)

    def _added(
        self, block: SumBlock, a: tuple[SsaValue, int], b: tuple[SsaValue, int], sums: Sequence[SsaValue]
    ) -> list[SsaValue]:
        """Print the multiply-adds of one term, at offsets of both operands: a variable part and a constant."""
        emit, found = self.emit, list(sums)
        first = {
            at: emit.place(self.a.kind, emit.place(self.a.kind, at, a[0]), emit.index(a[1])) for at, _ in block.first
        }
        if len(first) < len(block.first):  # else LLVM would hold the elements of terms that rows share in registers
            first = {at: emit.opaque(place) for at, place in first.items()}
        second = emit.place(self.b.kind, block.second, b[0])
        places = [emit.place(self.b.kind, second, emit.index(b[1] + v * self.vector)) for v in range(block.vectors)]
        columns = [self.loaded(self.b, at, self.lanes, block.mask_of(v)) for v, at in enumerate(places)]
        for r, (at, offset) in enumerate(block.first):
            x = self.repeated(self.a, emit.place(self.a.kind, first[at], emit.index(offset)))
            for v, column in enumerate(columns):
                k = r * block.vectors + v
                found[k] = fused(emit, x, column, found[k])
        return found

    def loaded(self, side: OperandSide, at: SsaValue, lanes: int = 1, mask: SsaValue | None = None) -> SsaValue:
        """Print the load of elements of an operand as float32; panels have whole vectors."""
        context = self.context
        place = Place(at, context.dtypes[side.buffer], side.kind, self.emit.depth, self.era_of(side))
        found = context.memory.load(place, lanes, None if side.is_panel else mask)
        return context.arithmetic.cast(found, place.dtype, DType.F32)

    def era_of(self, side: OperandSide) -> int:
        """Return a number for a read of an operand: a new one if the kernel writes it."""
        if side.buffer in self.context.given:
            return 0
        self.context.era += 1
        return self.context.era

    def repeated(self, side: OperandSide, at: SsaValue) -> SsaValue:
        """Print a vector with an element of an operand in each lane; 16 bits are widened after they are repeated."""
        if side.kind != "i16" or self.context.dtypes[side.buffer] not in NARROW:
            return self.emit.splat(self.loaded(side, at), self.lanes)
        place = Place(at, self.context.dtypes[side.buffer], side.kind)
        one = self.emit.load("i16", 1, at, place.size_bytes, self.emit.depth)
        return self.context.memory.computed(self.emit.splat(one, self.lanes), place)
