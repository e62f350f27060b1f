"""Prints ordering steps: sorting rows by group into blocks, and selecting the first elements of a sorted row."""

from collections.abc import Callable
from functools import partial

from korch.primitive.types import DType
from korch.tile.ir.sort import Ordering, Sort, Top
from korch.tile.llvm.arithmetic import is_signed
from korch.tile.llvm.emit import SsaValue, constant
from korch.tile.llvm.memory import Place
from korch.tile.llvm.points import KernelContext


def print_order(context: KernelContext, step: Ordering, task: SsaValue) -> None:
    """Print an ordering step; a task of one that selects elements is a row."""
    if isinstance(step, Sort):
        _sort_rows(context, step)
    else:
        _TopPrinter(context, step, task).run()


class _Numbers:
    """An array of integers that are read and written one by one."""

    def __init__(self, context: KernelContext, base: SsaValue, kind: str = "i32") -> None:
        self.context, self.base, self.kind = context, base, kind

    def at(self, i: SsaValue) -> SsaValue:
        """Print the load of an element, as an index."""
        emit = self.context.emit
        self.context.era += 1
        place = emit.place(self.kind, self.base, i)
        found = emit.load(self.kind, 1, place, int(self.kind[1:]) // 8, emit.depth, self.context.era)
        return emit.convert("sext", found, "i64")

    def set(self, i: SsaValue, value: SsaValue) -> None:
        """Print the store of an index to an element."""
        emit = self.context.emit
        emit.store(
            emit.convert("trunc", value, self.kind), emit.place(self.kind, self.base, i), int(self.kind[1:]) // 8
        )

    def fill(self, begin: SsaValue, end: SsaValue, value: int) -> None:
        """Print the store of a number to some elements."""
        emit = self.context.emit
        emit.loop(begin, end, 1, lambda i: self.set(i, emit.index(value)))


def _sort_rows(context: KernelContext, step: Sort) -> None:
    """Print the loops that count the rows of each group, divide the groups into blocks, and place the rows."""
    emit, index = context.emit, context.emit.index
    zero, rows, groups, blocks = map(index, (0, step.rows, step.groups, step.blocks))
    order, group, count = (_Numbers(context, context.bases[name]) for name in (step.order, step.group, step.count))
    place = _Numbers(context, emit.array("i32", step.groups))

    def group_of(row: SsaValue) -> SsaValue:
        key = _element(context, step.keys, row)
        key = emit.convert("sext" if is_signed(context.dtypes[step.keys]) else "zext", key, "i64")
        key = emit.select(emit.test("icmp slt", key, zero), emit.add(key, groups), key)
        return emit.most(zero, emit.least(key, index(step.groups - 1)))

    def counted(row: SsaValue) -> None:
        own = group_of(row)
        place.set(own, emit.add(place.at(own), index(1)))

    def divided(g: SsaValue, first: SsaValue) -> tuple[SsaValue]:
        size = place.at(g)
        own = emit.divided(emit.add(size, index(step.block - 1)), step.block)

        def block(b: SsaValue) -> None:
            group.set(emit.add(first, b), g)
            left = emit.add(size, emit.times(b, -step.block))
            count.set(emit.add(first, b), emit.least(left, index(step.block)))

        emit.loop(zero, own, 1, block)
        place.set(g, emit.times(first, step.block))
        return (emit.add(first, own),)

    def placed(row: SsaValue) -> None:
        own = group_of(row)
        at = place.at(own)
        order.set(at, row)
        place.set(own, emit.add(at, index(1)))

    place.fill(zero, groups, 0)
    emit.loop(zero, rows, 1, counted)
    (used,) = emit.loop(zero, groups, 1, divided, zero)
    group.fill(used, blocks, -1)
    count.fill(used, blocks, 0)
    order.fill(zero, index(step.blocks * step.block), -1)
    emit.loop(zero, rows, 1, placed)


def _element(context: KernelContext, buffer: str, at: SsaValue) -> SsaValue:
    """Print the load of an element of an input."""
    kind = context.kinds[buffer]
    place = context.emit.place(kind, context.bases[buffer], at)
    context.era += 1
    return context.memory.load(Place(place, context.dtypes[buffer], kind, context.emit.depth, context.era), 1)


class _TopPrinter:
    """Prints the selection of the first elements by a heap of their positions, of which the last one is at the top."""

    def __init__(self, context: KernelContext, step: Top, row: SsaValue) -> None:
        self.context, self.emit, self.step, self.row = context, context.emit, step, row
        self.heap = _Numbers(context, context.emit.array("i32", step.count))

    def run(self) -> None:
        """Print the loops."""
        emit, step, heap, index = self.emit, self.step, self.heap, self.emit.index
        zero, count = index(0), index(step.count)
        emit.loop(zero, count, 1, lambda i: heap.set(i, i))
        self._backwards(step.count // 2, lambda i: self._sink(i, heap.at(i), count))

        def compared(i: SsaValue) -> None:
            emit.branch(self._is_before(i, heap.at(zero)), partial(self._sink, zero, i, count))

        def sorted_last(i: SsaValue) -> None:
            last = heap.at(i)
            heap.set(i, heap.at(zero))
            self._sink(zero, last, i)

        def written(i: SsaValue) -> None:
            at, to = heap.at(i), emit.add(emit.times(self.row, step.count), i)
            if step.values:
                base, kind = self.context.bases[step.values], self.context.kinds[step.values]
                place = Place(emit.place(kind, base, to), self._dtype, kind)
                self.context.memory.store(place, self._value(at))
            if step.places:
                _Numbers(self.context, self.context.bases[step.places], "i64").set(to, at)

        emit.loop(count, index(step.size), 1, compared)
        self._backwards(step.count, sorted_last)
        emit.loop(zero, count, 1, written)

    @property
    def _dtype(self) -> DType:
        return self.context.dtypes[self.step.source]

    def _backwards(self, count: int, body: Callable[[SsaValue], None]) -> None:
        emit = self.emit
        last = emit.index(count - 1)
        emit.loop(emit.index(0), emit.index(count), 1, lambda i: body(emit.add(last, emit.times(i, -1))))

    def _value(self, at: SsaValue) -> SsaValue:
        return _element(self.context, self.step.source, self.emit.add(self.emit.times(self.row, self.step.size), at))

    def _is_before(self, i: SsaValue, j: SsaValue) -> SsaValue:
        """Print whether the element at position i is sorted before that at j; equal elements keep their order."""
        emit, (a, b) = self.emit, (self._value(i), self._value(j))
        is_not_after = emit.op("xor", self._comes_first(b, a), constant("i1", 1))
        return emit.op("or", self._comes_first(a, b), emit.op("and", is_not_after, emit.test("icmp slt", i, j)))

    def _comes_first(self, a: SsaValue, b: SsaValue) -> SsaValue:
        """Print whether a number is sorted before another one; NaN is greater than all numbers."""
        emit, is_largest = self.emit, self.step.is_largest
        if not self._dtype.is_float:
            sign = "s" if is_signed(self._dtype) else "u"
            return emit.test(f"icmp {sign}{'gt' if is_largest else 'lt'}", a, b)
        nan, other = (a, b) if is_largest else (b, a)
        is_nan = emit.op("and", emit.test("fcmp uno", nan, nan), emit.test("fcmp ord", other, other))
        return emit.op("or", emit.test("fcmp ogt" if is_largest else "fcmp olt", a, b), is_nan)

    def _sink(self, hole: SsaValue, item: SsaValue, size: SsaValue) -> None:
        """Print the insertion of a position at an empty place of the heap, whose first `size` places are used."""
        emit, heap, index = self.emit, self.heap, self.emit.index
        last = emit.most(emit.add(size, index(-1)), index(0))

        def level(at: SsaValue) -> tuple[SsaValue, SsaValue]:
            left = emit.add(emit.times(at, 2), index(1))
            first, second = (emit.least(place, last) for place in (left, emit.add(left, index(1))))
            child = emit.select(self._is_before(heap.at(first), heap.at(second)), second, first)
            own = heap.at(child)
            moves = emit.op("and", emit.test("icmp slt", left, size), self._is_before(item, own))
            emit.branch(moves, partial(heap.set, at, own))
            return moves, emit.select(moves, child, at)

        (to,) = emit.repeat(level, hole)
        heap.set(to, item)
