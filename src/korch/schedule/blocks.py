"""What schedules of contractions share: axes that are divided into blocks, operands, and the pass over results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.ranges.live import blocks, count_of
from korch.schedule.contraction import Axes, Contraction, Fusion, Layouts, NotFusedError, Packed
from korch.system.alignment import ceil_div, round_up
from korch.tile.ir.index import Expr, Ranges, add, bounds, quotient, remainder, scale, substitute, var, vector_step
from korch.tile.ir.passes import expressions_of, map_indices, needed
from korch.tile.ir.program import (
    WIDENED,
    Apply,
    At,
    Axis,
    Buffer,
    Inside,
    Literal,
    Load,
    Pass,
    Product,
    Select,
    Stage,
    Store,
    TileOp,
    arguments_of,
    holds,
)
from korch.tile.lower.emit import Emitter, Guards
from korch.tile.lower.loops import LINE_ELEMENTS, PAGE_ELEMENTS, is_across

PRODUCTS = {
    product.types[:2]: product
    for product in (Product.F32, Product.F16, Product.BF16, Product.U8S8, Product.S8S8, Product.S8U8, Product.U8U8)
}
"""The kind of product for each pair of operand types."""


TASKS_PER_THREAD = 8
"""Tasks per thread for the largest size of a range; with this many, smaller sizes are divided evenly, too."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a contraction: where it is read, its buffer, and the stage or pass that writes the buffer.

    For matrix units, `components` has the tile of the operand's components, and the pass that computes them.
    """

    at: At
    buffer: Buffer | None = None
    stage: Stage | None = None
    packing: Pass | None = None
    components: tuple[Buffer, Pass] | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes with which a task computes the operand."""
        found = (self.packing, self.components[1] if self.components else None)
        return tuple(pass_ for pass_ in found if pass_ is not None)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """The buffers that the operand needs."""
        found = (self.buffer, self.components[0] if self.components else None)
        return tuple(buffer for buffer in found if buffer is not None)


class Blocked:
    """A group with one product or convolution, whose programs compute blocks of it."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, product: Product | None = None
    ) -> None:
        self.group, self.root, self.contraction = group, root, contraction
        self.fusion = Fusion(group, layouts, root)
        self.batch = tuple(Axis(f"b{i}", n) for i, (_, n) in enumerate(contraction.batch))
        self.leading = tuple(Axis(f"r{i}", n) for i, (_, n) in enumerate(contraction.leading))
        types = [group.body.types[value].dtype for value in root.inputs]
        self.dtype, self.product = types[0], product or PRODUCTS[types[0], types[1]]
        self.sum_type = self.product.types[2]

    def values(self, flats: Sequence[Expr], ranges: Ranges) -> dict[str, Expr]:
        """Return the contraction's variables, computed from the numbers of a row, a column and a term."""
        contraction = self.contraction
        around = zip((*contraction.batch, *contraction.leading), (*self.batch, *self.leading), strict=True)
        found = {name: var(axis.name) for (name, _), axis in around}
        for axes, number in zip((contraction.rows, contraction.columns, contraction.terms), flats, strict=True):
            found |= digits(substitute(number, {}, ranges), axes, ranges)
        return found

    def argument(self, emitter: Emitter, position: int, values: dict[str, Expr], guards: Guards = ()) -> str:
        """Return the name of an operand's element; 0 outside of its shape and where a guard fails.

        The index is computed in the contraction's variables, and then rewritten in those of the program. The ranges of
        the latter would leave remainders in the index, because their last block may reach beyond the operand.
        """
        value, ranges = self.root.inputs[position], self.contraction.ranges
        type_ = self.group.body.types[value]
        own = {name: var(f"{name}'") for name in ranges}
        inner = emitter.under({**emitter.ranges, **{f"{name}'": ends for name, ends in ranges.items()}})
        found = self.contraction.b if position else self.contraction.a
        index = tuple(substitute(expr, own, inner.ranges) for expr in found)
        for expr, element, n in zip(found, index, type_.shape, strict=True):
            low, high = bounds(expr, ranges)
            if low < 0 or high >= n:
                guards = (*guards, Inside(element, 0, n))
        name = inner.value(value, index, guards)
        if guards and value not in self.fusion.place:
            name = inner.select(type_.dtype, guards, name, inner.literal(type_.dtype, zero_of(type_.dtype)))
        given = {f"{name}'": values.get(name, var(name)) for name in ranges}
        return emitter.include(inner.ops, lambda expr: substitute(expr, given, emitter.ranges))[name]

    def after(
        self, total: At, axes: tuple[Axis, ...], values: dict[str, Expr], ranges: Ranges, factor: At | None = None
    ) -> Pass:
        """Return the pass that computes the outputs of a block from its sums, multiplied by a factor of each row."""

        def sinks(emitter: Emitter, result: str) -> Sequence[Store]:
            outputs = self.fusion.outputs(emitter, self.root, self.contraction.out, result)
            return [Store(buffer, place, value) for buffer, _, place, value in outputs]

        return self.following(total, axes, (values, ranges), sinks, factor)

    def after_all(self) -> Pass:
        """Return the pass over all results, before they are divided into blocks.

        Raises:
            NotFusedError: the operations after the product can't be computed in such a pass.
        """
        contraction = self.contraction
        rows = (*contraction.leading, *contraction.rows)
        axes = tuple(Axis(name, n) for name, n in (*rows, *(contraction.columns or (("j", 1),))))
        return self.after(At("t", var(axes[-1].name)), axes, {}, contraction.ranges)

    def following(
        self,
        total: At,
        axes: tuple[Axis, ...],
        values: tuple[dict[str, Expr], Ranges],
        sinks_of: Callable[[Emitter, str], Sequence[Store]],
        factor: At | None = None,
    ) -> Pass:
        """Return a pass over the sums of a block.

        Args:
            total: where a sum is.
            axes: the loops.
            values: the contraction's variables, expressed in those of the program, and the ranges of the latter.
            sinks_of: emits the operations on the sum with a given name, and returns the stores of their results.
            factor: where the factor is by which a sum is multiplied first.
        """
        emitter = self.fusion.emitter(self.contraction.ranges)  # a block may reach beyond these
        given: list[TileOp] = [Load("x0", self.sum_type, total.buffer, total.index)]
        if factor is not None:
            given += [
                Load("x1", self.sum_type, factor.buffer, factor.index),
                Apply("x2", self.sum_type, "mul", ("x0", "x1")),
            ]
        result = self.group.body.types[self.root.output].dtype
        if self.sum_type is not result:
            given.append(Apply(f"x{len(given)}", result, "cast", (given[-1].name,)))
        emitter.ops.extend(given)
        sinks = tuple(sinks_of(emitter, given[-1].name))
        own = emitter.ops[len(given) :]
        if self.sum_type is not result:
            given, own = _unrounded(given, own, sinks)
        pass_ = Pass(axes, axes[-1].name if axes else "", tuple(own), sinks)
        pass_ = map_indices(pass_, lambda expr: substitute(expr, *values))
        return replace(pass_, ops=(*given, *pass_.ops))

    def memory(self, second: Packed | None = None) -> Iterator[Buffer]:
        """Yield the buffers of the group's inputs and outputs; the second operand may be packed."""
        return self.fusion.memory({} if second is None else {self.name_of(1): second})

    def name_of(self, position: int) -> str:
        """Return the name of the input that an operand reads, perhaps widened or masked."""
        value = self.root.inputs[position]
        while value not in self.fusion.place:
            primitive = self.group.body.primitives[self.group.body.producers[value][0]]
            value = primitive.inputs[primitive.op == "where"]
        return self.fusion.place[value]


def loaded(ops: Sequence[TileOp], can_widen: bool) -> Load | None:
    """Return the load of an operand that is only a load, perhaps widened; else None."""
    match ops:
        case (Load() as load,):
            return load
        case Load() as load, Apply(dtype=DType.F32, op="cast") if can_widen and load.dtype in WIDENED:
            return load
    return None


def direct(ops: Sequence[TileOp], axes: Sequence[Axis], can_widen: bool) -> At | None:
    """Return where an operand is in memory, if it is only a load with a constant stride along each axis; else None."""
    load = loaded(ops, can_widen)
    if load is None or load.guards or any(load.index.coefficient(axis.name) is None for axis in axes):
        return None
    return At(load.buffer, load.index)


def factored(ops: Sequence[TileOp], name: str, variable: str) -> tuple[str, Sequence[TileOp]]:
    """Return the value of which another one is a multiple, and what computes the factor from memory.

    The factor is the same for all values of a variable. If there is none, the value itself and nothing are returned.
    """
    last = next(op for op in ops if op.name == name)
    pairs = [last.arguments, last.arguments[::-1]] if isinstance(last, Apply) and last.op == "mul" else []
    for value, factor in pairs:
        own = needed(ops, factor)
        is_same = not any(variable in expr.variables for op in own for expr in expressions_of(op))
        if is_same and any(isinstance(op, Load) for op in own) and not any(isinstance(op, Select) for op in own):
            return value, own
    return name, ()


def zero_of(dtype: DType) -> float:
    """Return 0 as a number of a type."""
    return 0.0 if dtype.is_float else 0


def store(at: At, value: str) -> Store:
    """Return the store of a value to an element."""
    return Store(at.buffer, at.index, value)


def fill(axes: tuple[Axis, ...], at: At, number: float, dtype: DType = DType.F32) -> Pass:
    """Return the pass that sets elements to a number."""
    return Pass(axes, axes[-1].name, (Literal("x0", dtype, number),), (store(at, "x0"),))


def cut(size: int, block: int, names: tuple[str, str]) -> tuple[Axis, Axis]:
    """Return the axis of blocks and the axis of a block's elements; the last block may be shorter."""
    outer = Axis(names[0], blocks(size, block))
    if block == size and count_of(size):
        return outer, Axis(names[1], size)
    return outer, Axis(names[1], block, ragged=(outer.name, size) if size % block or count_of(size) else None)


def evenly(extent: int, block: int, others: int, threads: int, step: int) -> int:
    """Return the elements of a block: fewer if a size may need a part of the extent, so that all threads have tasks.

    Args:
        extent: the elements of the axis.
        block: the elements of a block if all are needed.
        others: the tasks for each block.
        threads: the threads.
        step: the elements are a multiple of this.
    """
    if count_of(extent) is None:
        return block
    return min(block, round_up(ceil_div(extent, ceil_div(TASKS_PER_THREAD * threads, others)), step))


def flat(outer: Axis, inner: Axis) -> Expr:
    """Return the number of an element of an axis that is divided into blocks."""
    inside = var(inner.name)
    return inside if outer.extent == 1 else add(scale(var(outer.name), inner.extent), inside)


def is_implied(guard: Inside, axes: Sequence[Axis], ranges: Ranges) -> bool:
    """Return whether a guard holds at all points, given that the last blocks of the axes are shorter."""
    expr, ends = guard.expr, dict(ranges)
    for axis in axes:
        step = expr.coefficient(axis.name)
        outer, size = axis.ragged or ("", 0)
        if not step or not outer or not isinstance(size, int):
            continue
        if expr.coefficient(outer) == step * axis.extent:  # the guard depends on the undivided axis
            expr = add(expr, scale(var(outer), -step * axis.extent))
            ends[axis.name] = (0, size - 1)
    return holds(Inside(expr, guard.low, guard.high), ends) is True


def digits(number: Expr, axes: Axes, ranges: Ranges) -> dict[str, Expr]:
    """Return the variables of axes from the number of a point, counted with the last axis fastest."""
    found: dict[str, Expr] = {}
    for position, (name, n) in enumerate(reversed(axes), 1):
        found[name] = number if position == len(axes) else remainder(number, n, ranges)
        number = quotient(number, n, ranges)
    return found


def arranged(packing: Pass, ranges: Ranges, lanes: int) -> Pass:
    """Return a pass of two axes that transposes squares in registers if its loads are contiguous along the rows."""
    rows, columns = (axis.name for axis in packing.axes)
    loads = [op for op in packing.ops if isinstance(op, Load)]
    is_square = any(is_across(load, columns, rows, ranges) for load in loads)
    turns = any(isinstance(op, Load | Select) and op.guards for op in packing.ops)
    is_square &= min(axis.extent for axis in packing.axes) >= lanes > 1 and not turns
    return replace(packing, across=rows) if is_square else packing


def spaced(elements: int, group: int = 1) -> int:
    """Return the row stride of a copy: a multiple of the group, chosen so that rows don't all share an L1 cache set."""
    row = round_up(elements, group)
    return row + (LINE_ELEMENTS if row * group % PAGE_ELEMENTS == 0 else 0)


def require_adjacent(pass_: Pass, lanes: int) -> None:
    """Raise an error if the elements of a vector are not adjacent in memory, or if a guard varies between them."""
    for op in pass_.ops:
        if isinstance(op, Load | Select) and any(pass_.vector in guard.expr.variables for guard in op.guards):
            raise NotFusedError("a pad or a concatenation is not fused into the kernel")
        if isinstance(op, Load) and vector_step(op.index, pass_.vector, lanes) not in (0, 1):
            raise NotFusedError("the columns of a tensor are not adjacent in memory")
    if any(vector_step(sink.index, pass_.vector, lanes) != 1 for sink in pass_.sinks):
        raise NotFusedError("the columns of an output are not adjacent in memory")


def _unrounded(
    given: Sequence[TileOp], own: Sequence[TileOp], sinks: Sequence[Store]
) -> tuple[list[TileOp], list[TileOp]]:
    """Return the operations of a rounded sum and those after it, without the rounding if it is only widened again.

    Unrounded sums are nearer to exact results, and a rounding of scores would be a large part of attention.
    """
    total, rounded = given[-2:]
    uses = [op for op in own if rounded.name in arguments_of(op)]
    is_stored = any(sink.value == rounded.name for sink in sinks)
    match uses:
        case [Apply(op="cast") as wide] if wide.dtype is total.dtype and not is_stored:
            return [*given[:-2], replace(total, name=wide.name)], [op for op in own if op is not wide]
    return list(given), list(own)
