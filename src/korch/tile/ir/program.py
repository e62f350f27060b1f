"""The tile program: the intermediate representation between a candidate and its source code.

A program is a list of *stages* that run one after another, with a barrier between them. A stage has grid axes; each
grid point is a *task*, which any thread may run. A task runs *steps* in order. A step is a *pass*, a loop nest in
which values flow through tile operations from loads to stores or accumulators; a *contraction*, which adds products
to a tile; or a *loop* around further steps, which carries tiles from iteration to iteration. Tiles are buffers of
level TILE, private to a task; they stay in registers or in a core's cache, in the layout that their reader needs. The
three levels correspond to Mirage's kernel, block and thread graphs. A size may be an expression in *parameters*,
integers that are known at run time only; `korch.tile.ir.bind` replaces them by numbers.

Two printers generate code from it, LLVM IR (`korch.tile.llvm`) and Triton (`korch.tile.triton`); for tests,
`korch.tile.check.reference` interprets it. The printers take programs of known sizes; that for LLVM IR also
takes programs with loops that end at parameters (`korch.tile.ir.parameters`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import assert_never

from korch.primitive.types import DType
from korch.tile.ir.growth import UnprintableError
from korch.tile.ir.index import Expr, Ranges, add, bounds, constant, quotient, var
from korch.tile.ir.sort import Ordering

Size = int | Expr
"""A number of elements or of iterations: an integer, or an expression in parameters."""


class Level(Enum):
    """The memory level of a buffer."""

    INPUT = "input"
    OUTPUT = "output"
    WORKSPACE = "workspace"  # memory, shared by all tasks
    TILE = "tile"  # in a core's registers or cache, private to a task


@dataclass(frozen=True, slots=True)
class Parameter:
    """An integer from `low` to `high` that is known at run time only."""

    name: str
    low: int
    high: int

    @property
    def value(self) -> Expr:
        """The parameter as an index expression."""
        return var(self.name)


@dataclass(frozen=True, slots=True)
class Panels:
    """A matrix stored in panels of `width` columns: (r, c) is at `[c / width][r / group][c % width][r % group]`."""

    columns: int
    width: int
    group: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """Each element is stored as a sum of narrower numbers; the first is the element rounded to their type."""

    components: int
    dtype: DType


Layout = Panels | Split


@dataclass(frozen=True, slots=True)
class Buffer:
    """A dense array; a tile is one such array per task.

    Attributes:
        name: its name.
        level: the memory level it is in.
        dtype: the type of its elements.
        elements: the number of elements.
        layout: how indices are mapped to memory; if empty, the index is the element's offset.
    """

    name: str
    level: Level
    dtype: DType
    elements: Size
    layout: tuple[Layout, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements, which must be known."""
        return known(self.elements, f"the size of buffer {self.name}")


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop variable.

    Attributes:
        name: the variable.
        size: the number of values it takes, starting from 0.
        is_reduced: whether it is a reduction axis, along which accumulators collect values.
        ragged: for the inner part of an axis that was cut into tiles: (outer variable, elements
            of the whole axis); the last tile may be shorter than the others.
    """

    name: str
    size: Size
    is_reduced: bool = False
    ragged: tuple[str, Size] | None = None

    @property
    def extent(self) -> int:
        """The number of values it takes, which must be known."""
        return known(self.size, f"the extent of loop {self.name}")


def known(size: Size, what: str) -> int:
    """Return a size as an integer; `what` names it in the error.

    Raises:
        InvalidGraphError: it depends on a parameter.
    """
    if isinstance(size, Expr):
        raise refused(f"{what} is {size}, known at run time only", "Bind the parameters first")
    return size


@dataclass(frozen=True, slots=True)
class Inside:
    """The condition low <= expr < high."""

    expr: Expr
    low: int
    high: int


def holds(guard: Inside, ranges: Ranges) -> bool | None:
    """Return whether a guard holds for all points (True), for none (False), or may depend on the point (None)."""
    low, high = bounds(guard.expr, ranges)
    if guard.low <= low and high < guard.high:
        return True
    return False if high < guard.low or low >= guard.high else None


@dataclass(frozen=True, slots=True)
class Load:
    """Read buffer[index]. Where a guard fails, nothing is read and the value is 0."""

    name: str
    dtype: DType
    buffer: str
    index: Expr
    guards: tuple[Inside, ...] = ()


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant number."""

    name: str
    dtype: DType
    value: float | int | bool


@dataclass(frozen=True, slots=True)
class Apply:
    """An elementwise operation of the primitive table."""

    name: str
    dtype: DType
    op: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Select:
    """`inside` where all guards hold, else `outside`."""

    name: str
    dtype: DType
    guards: tuple[Inside, ...]
    inside: str
    outside: str


@dataclass(frozen=True, slots=True)
class Store:
    """Write a value to buffer[index]."""

    buffer: str
    index: Expr
    value: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Reduce a value along the reduced axes by sum, prod, max or min; write the result at the end."""

    buffer: str
    index: Expr
    value: str
    op: str


TileOp = Load | Literal | Apply | Select
Sink = Store | Accumulate


def arguments_of(op: TileOp) -> tuple[str, ...]:
    """Return the names of the values that an operation is computed from."""
    match op:
        case Apply(arguments=arguments):
            return arguments
        case Select(inside=inside, outside=outside):
            return inside, outside
        case Load() | Literal():
            return ()
        case _:
            assert_never(op)


@dataclass(frozen=True, slots=True)
class Pass:
    """A loop nest: axes outermost first, kept axes before reduced ones.

    Attributes:
        axes: the loops inside a task.
        vector: the axis whose elements fill the lanes of vector registers, or "".
        ops: the operations that are computed at each point, in order.
        sinks: where results are written: only stores, or only accumulators.
        across: the axis along which loads are contiguous if they are not along the vector axis, or "":
            square blocks of both axes are read as whole vectors and transposed. It is adjacent to
            the vector axis in the loop order, and no guard depends on it.
        where: guards of the whole pass; where one of them fails, nothing is read or stored.
    """

    axes: tuple[Axis, ...]
    vector: str
    ops: tuple[TileOp, ...]
    sinks: tuple[Sink, ...]
    across: str = ""
    where: tuple[Inside, ...] = ()

    @property
    def is_reduction(self) -> bool:
        """Whether it accumulates."""
        return isinstance(self.sinks[0], Accumulate)


QUAD = 4
"""The number of adjacent reduction terms per column of a panel, for factors of one byte."""

PAIR = 2
"""The same for factors of 16 bits, and where each column has its own first operand."""


WIDENED = (DType.F16, DType.BF16, DType.I8, DType.U8)
"""Element types of the second operand that a float32 contraction widens when it reads them."""


class Product(Enum):
    """How a contraction multiplies: the types of a, b and the accumulator, and the components of a and b."""

    F64 = "f64"
    F32 = "f32"
    TF32 = "tf32"  # factors have 11 bits; the program rounds them, or reads rounded ones
    SPLIT = "split"  # each factor is one to three bfloat16 numbers; of their nine products the six largest are added
    BF16 = "bf16"
    F16 = "f16"
    S8S8 = "s8s8"
    U8S8 = "u8s8"
    S8U8 = "s8u8"
    U8U8 = "u8u8"
    S16S8 = "s16s8"
    S16U8 = "s16u8"
    S16S16 = "s16s16"

    @property
    def types(self) -> tuple[DType, DType, DType]:
        """The types of the two operands' buffers and of the accumulator's."""
        return _TYPES.get(self, (DType.F32, DType.F32, DType.F32))

    @property
    def is_of_bytes(self) -> bool:
        """Whether bytes, or bytes widened to 16 bits, are multiplied, with exact sums."""
        return self.types[2] is DType.I32

    @property
    def group(self) -> int:
        """The number of adjacent reduction terms per column in a panel of the second operand."""
        if not self.is_of_bytes:
            return 1
        return QUAD if self.types[0].size_bytes == 1 else PAIR


_TYPES = {
    Product.F64: (DType.F64, DType.F64, DType.F64),
    Product.BF16: (DType.BF16, DType.BF16, DType.F32),
    Product.F16: (DType.F16, DType.F16, DType.F32),
    Product.S8S8: (DType.I8, DType.I8, DType.I32),
    Product.U8S8: (DType.U8, DType.I8, DType.I32),
    Product.S8U8: (DType.I8, DType.U8, DType.I32),
    Product.U8U8: (DType.U8, DType.U8, DType.I32),
    Product.S16S8: (DType.I16, DType.I8, DType.I32),
    Product.S16U8: (DType.I16, DType.U8, DType.I32),
    Product.S16S16: (DType.I16, DType.I16, DType.I32),
}


@dataclass(frozen=True, slots=True)
class At:
    """An element of a buffer."""

    buffer: str
    index: Expr


@dataclass(frozen=True, slots=True)
class Registers:
    """How a contraction is computed in registers.

    Attributes:
        rows: rows of the accumulator that are in registers at a time.
        vectors: vectors of columns of each row.
        fetches_b: whether the part of the second operand that is read next is prefetched into the cache.
        fetches_out: whether the cache lines that results are stored to are prefetched.
        fetches_a: whether later rows of the first operand are prefetched.
        in_tiles: whether the registers are the tile registers of matrix units, which multiply bytes.

    For windows of an image that is split into components, `rows` is the number of result rows whose image components
    are computed together, and `vectors` the steps of terms of the weights.
    """

    rows: int
    vectors: int
    fetches_b: bool = False
    fetches_out: bool = False
    in_tiles: bool = False
    fetches_a: bool = False


@dataclass(frozen=True, slots=True)
class Contract:
    """The contraction out = out * rescale + sum of a * b * factor along the reduced axes.

    Attributes:
        axes: the loops, kept ones before reduced ones.
        out: the accumulator, a tile that has been written before; its type is that of the product's sums.
        a: the first operand.
        b: the second operand.
        product: how they are multiplied.
        rescale: the factor by which the accumulator is multiplied first, or None.
        factor: a further factor of each product, or None.
        registers: how it is computed in registers; the printer chooses if this is None.
        where: guards; where one of them fails, no operand is read and nothing is added.
        part: the reduced axis that numbers the parts of each byte of b, lowest bits first; "" for whole bytes.
    """

    axes: tuple[Axis, ...]
    out: At
    a: At
    b: At
    product: Product
    rescale: At | None = None
    factor: At | None = None
    registers: Registers | None = None
    where: tuple[Inside, ...] = ()
    part: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """Steps that a task runs one after another, for each value of an axis.

    Attributes:
        axis: the loop variable.
        carried: tiles, written before the loop, that keep their elements from iteration to iteration;
            other tiles that an iteration writes are undefined when it ends.
        body: the steps of an iteration.
        only: an element with the number of the only iteration to run; if this is None, all run.
        is_nearest: if `only` is out of range, whether the nearest iteration runs, a negative one from the end, or none.
    """

    axis: Axis
    carried: tuple[str, ...]
    body: tuple[Step, ...]
    only: At | None = None
    is_nearest: bool = False


Step = Pass | Contract | Loop


@dataclass(frozen=True, slots=True)
class Stage:
    """Tasks that may run in any order; the steps of one task run one after another.

    A stage with `sort` has no steps: its tasks sort rows or select the largest or smallest elements.
    """

    grid: tuple[Axis, ...]
    steps: tuple[Step, ...]
    sort: Ordering | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The steps, which must all be passes."""
        found = tuple(step for step in self.steps if isinstance(step, Pass))
        if len(found) < len(self.steps):
            raise refused("a stage with contractions or loops has more than passes")
        return found

    @property
    def leaves(self) -> Iterator[tuple[tuple[Loop, ...], Pass | Contract]]:
        """The passes and contractions in order, each with the loops around it."""
        return _leaves((), self.steps)

    @property
    def tasks(self) -> int:
        """The number of grid points."""
        return math.prod(axis.extent for axis in self.grid)

    @property
    def work(self) -> int:
        """Points of all loop nests, and elements that are ordered: a measure of how much there is to do."""
        nests = ((*(loop.axis for loop in loops if loop.only is None), *step.axes) for loops, step in self.leaves)
        points = sum(math.prod(axis.extent for axis in nest) for nest in nests)
        return self.tasks * points + (self.sort.work if self.sort is not None else 0)


@dataclass(frozen=True, slots=True)
class TileProgram:
    """A whole kernel; the order of input and output buffers is the kernel's."""

    buffers: tuple[Buffer, ...]
    stages: tuple[Stage, ...]
    parameters: tuple[Parameter, ...] = ()

    @property
    def parameter_ranges(self) -> Ranges:
        """The range of each parameter."""
        return {parameter.name: (parameter.low, parameter.high) for parameter in self.parameters}

    def buffer(self, name: str) -> Buffer:
        """Return a buffer by name."""
        return next(buffer for buffer in self.buffers if buffer.name == name)

    @property
    def is_sorted(self) -> bool:
        """Whether a stage orders rows or elements."""
        return any(stage.sort is not None for stage in self.stages)


def parts_of(total: Size, part: int, parameters: Ranges) -> Size:
    """Return the number of parts that an axis is cut into."""
    if isinstance(total, int):
        return -(-total // part)
    return quotient(add(total, constant(part - 1)), part, parameters)


def read_by(steps: tuple[Step, ...]) -> set[str]:
    """Return the buffers that some steps read."""
    found: set[str] = set()
    for loops, step in _leaves((), steps):
        found |= {loop.only.buffer for loop in loops if loop.only is not None}
        if isinstance(step, Pass):
            found |= {op.buffer for op in step.ops if isinstance(op, Load)}
        else:
            found |= {at.buffer for at in (step.out, step.a, step.b, step.rescale, step.factor) if at is not None}
    return found


def written_by(steps: tuple[Step, ...]) -> set[str]:
    """Return the buffers that some steps write."""
    written = (step.sinks if isinstance(step, Pass) else (step.out,) for _, step in _leaves((), steps))
    return {own.buffer for outs in written for own in outs}


def _leaves(loops: tuple[Loop, ...], steps: tuple[Step, ...]) -> Iterator[tuple[tuple[Loop, ...], Pass | Contract]]:
    for step in steps:
        if isinstance(step, Loop):
            yield from _leaves((*loops, step), step.body)
        else:
            yield loops, step


def ranges_of(stage: Stage, pass_: Pass) -> Ranges:
    """Return the range of every variable that a pass may use."""
    return {axis.name: (0, max(axis.extent - 1, 0)) for axis in (*stage.grid, *pass_.axes)}


def refused(text: str, hint: str = "") -> UnprintableError:
    """Return the error for a program that can't be printed."""
    return UnprintableError(text, where="tile program", hint=hint)
