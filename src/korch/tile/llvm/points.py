"""Prints the operations of a pass at one point, or at a vector of points along an axis."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import assert_never

from korch.primitive.types import DType
from korch.tile.analysis.clip import clipping_guards
from korch.tile.analysis.fetch import fetched_ahead
from korch.tile.analysis.tables import ByteTable, live_ops, tables_of
from korch.tile.ir.index import Expr, Ranges, add, scale, substitute, vector_step
from korch.tile.ir.passes import is_nonpositive
from korch.tile.ir.program import (
    Apply,
    Inside,
    Literal,
    Load,
    Pass,
    Select,
    Stage,
    TileOp,
    TileProgram,
    arguments_of,
    holds,
    ranges_of,
)
from korch.tile.llvm.arithmetic import FUNCTIONS, KIND, Arithmetic
from korch.tile.llvm.emit import Emit, SsaValue, array, constant
from korch.tile.llvm.index import address, both, condition, global_table, lanes_of
from korch.tile.llvm.isa import Isa
from korch.tile.llvm.memory import Memory, Place, stored_kinds


@dataclass
class KernelContext:
    """What all passes of a kernel are printed with."""

    emit: Emit  # the printer of instructions
    isa: Isa  # the instruction set
    program: TileProgram  # the program
    lanes: int  # float32 elements in a vector register
    streamed: Set[str]  # the buffers that are written past the caches
    large: Set[str]  # the inputs that are too large for a core's private cache
    given: Set[str]  # the buffers that the kernel only reads
    bases: dict[str, SsaValue] = field(default_factory=dict)  # the addresses of the buffers
    # the passes that split operands into components, by the name of the tile of components
    makers: dict[str, Pass] = field(default_factory=dict)
    # the tiles of components that are computed block by block while products are computed
    passing: Set[str] = frozenset()
    era: int = 0  # the number of reads that may see different elements

    def __post_init__(self) -> None:
        self.arithmetic = Arithmetic(self.emit, self.isa)
        self.memory = Memory(self.emit, self.arithmetic)
        self.kinds = stored_kinds(self.program)
        self.dtypes = {buffer.name: buffer.dtype for buffer in self.program.buffers}
        self.sizes = {buffer.name: buffer.size for buffer in self.program.buffers}


@dataclass(frozen=True)
class PointVector:
    """A point of a pass, or a vector of points."""

    env: Mapping[str, SsaValue]  # the values of the loop variables; that of the first lane along the vector variable
    ranges: Ranges  # their ranges
    variable: str = ""  # the vector variable; "" for a single point
    lanes: int = 1  # the number of points
    mask: SsaValue | None = None  # which of them exist; None for all
    is_aligned: bool = False  # whether the variable is a multiple of the number of points at the first of them


class PointPrinter:
    """Prints the operations inside the loops of one pass."""

    def __init__(self, context: KernelContext, stage: Stage, pass_: Pass, env: Mapping[str, SsaValue]) -> None:
        """Begin with nothing printed; `env` has the values of the variables around the pass."""
        self.context, self.pass_, self.env = context, pass_, env
        self.emit, self.memory = context.emit, context.memory
        self.ranges: Ranges = {**context.program.parameter_ranges, **ranges_of(stage, pass_)}
        self.ops = {op.name: op for op in pass_.ops}
        self.vector = next((a for a in pass_.axes if a.name == pass_.vector), None)
        self.squares: dict[str, SsaValue] = {}
        self.clips = clipping_guards(pass_)
        self.clipped = frozenset(guard for guards in self.clips.values() for guard in guards)
        self.decided: frozenset[Inside] = frozenset()  # guards that were tested outside of inner loops
        self.written = {sink.buffer for sink in pass_.sinks}
        self.base = self.emit.depth
        context.era += 1
        self.era = context.era
        self.fetched = fetched_ahead(pass_, context.large) if pass_.is_reduction else {}
        self.tables: Mapping[str, ByteTable] = tables_of(pass_.ops) if context.isa.is_avx512 else {}

    @property
    def lines(self) -> int:
        """The approximate number of lines of the body."""
        many = sum(12 if isinstance(op, Apply) and op.op in FUNCTIONS else 1 for op in self.pass_.ops)
        return many + 2 * len(self.pass_.sinks)

    # Guards

    def all_hold(self, guards: Sequence[Inside], ranges: Ranges) -> bool | None:
        """Return True if all guards hold for all points, False if one of them holds for no point, and else None."""
        found = [self._holds(guard, ranges) for guard in guards]
        if False in found:
            return False
        return None if None in found else True

    def _holds(self, guard: Inside, ranges: Ranges) -> bool | None:
        return True if guard in self.clipped or guard in self.decided else holds(guard, ranges)

    def condition(self, guards: Sequence[Inside], points: PointVector) -> SsaValue:
        """Print whether guards hold, without those that are decided."""
        open_guards = [guard for guard in guards if self._holds(guard, points.ranges) is None]
        return condition(self.emit, open_guards, points.env, points.ranges, points.variable, points.lanes)

    # Operations

    def values(self, points: PointVector) -> dict[str, SsaValue]:
        """Print the operations; return the value of each name. Equal numbers in all lanes are a scalar."""
        found: dict[str, SsaValue] = {}
        for op in self._live(points.ranges):
            found[op.name] = self._value(op, found, points)
        return found

    def _live(self, ranges: Ranges) -> Sequence[TileOp]:
        """Return the operations that the sinks need, given the guards that the ranges decide."""
        return live_ops(self.pass_, self.tables, lambda guards: self.all_hold(guards, ranges))

    def _value(self, op: TileOp, values: Mapping[str, SsaValue], points: PointVector) -> SsaValue:
        emit = self.emit
        table = self.tables.get(op.name)
        if table is not None:
            return self._looked_up(table, values[table.byte])
        match op:
            case Literal(_, dtype, value):
                return constant(KIND[dtype], bool(value) if dtype is DType.BOOL else value)
            case Load():
                return self.squares.get(op.name) or self._load(op, points)
            case Select(_, _, guards, inside, outside):
                decided = self.all_hold(guards, points.ranges)
                if decided is not None:
                    return values[inside if decided else outside]
                return emit.select(self.condition(guards, points), *emit.matched(values[inside], values[outside]))
            case Apply():
                return self._apply(op, values)
            case _:
                assert_never(op)

    def _apply(self, op: Apply, values: Mapping[str, SsaValue]) -> SsaValue:
        arithmetic, given = self.context.arithmetic, [values[name] for name in op.arguments]
        source = self.ops[op.arguments[-1]].dtype
        if op.op == "div" and source.is_float and given[1].lanes == 1 < given[0].lanes:
            # Values computed by the kernel are rounded already: an error in the last bit is acceptable.
            is_exact = any(self._is_given(name) for name in op.arguments)
            return arithmetic.quotient_by(*given, is_exact=is_exact)
        if op.op == "exp" and source is DType.F32 and is_nonpositive(op.arguments[0], self.pass_.ops):
            return arithmetic.functions(given[0].lanes).exp_of_nonpositive(given[0])
        if op.op == "where":
            given[1:] = self.emit.matched(*given[1:])
        return arithmetic.apply(op.op, op.dtype, source, given)

    def _looked_up(self, table: ByteTable, byte: SsaValue) -> SsaValue:
        """Print a table lookup by four bits of each byte."""
        emit, wide = self.emit, self.emit.convert("zext", byte, "i32")
        at = emit.op("lshr", wide, constant("i32", table.shift))
        if byte.lanes == 16:
            return emit.call("llvm.x86.avx512.permvar.sf.512", "float", 16, array("float", table.entries), at)
        at = emit.op("and", at, constant("i32", 15))
        place = Place(SsaValue(global_table(emit, "float", table.entries), "ptr"), DType.F32, "float", emit.floor)
        return self.memory.gather(place, at)

    def _is_given(self, name: str) -> bool:
        """Return whether a value is computed only from loads of the kernel's inputs and literals."""
        op = self.ops[name]
        if isinstance(op, Load):
            return op.buffer in self.context.given
        return all(self._is_given(argument) for argument in arguments_of(op))

    # Loads

    def step_of(self, index: Expr, points: PointVector) -> int | None:
        """Return the step between adjacent lanes; None if it varies."""
        if points.is_aligned:
            return vector_step(index, points.variable, points.lanes)
        return index.coefficient(points.variable)

    def place(self, buffer: str, index: Expr, env: Mapping[str, SsaValue]) -> Place:
        """Print the address of an element."""
        context, emit = self.context, self.emit
        kind, era, floor = context.kinds[buffer], 0, emit.floor
        if buffer in self.written:
            context.era += 1
            era, floor = context.era, emit.depth
        elif buffer not in context.given:
            era, floor = self.era, max(floor, self.base)
        at = address(emit, kind, context.bases[buffer], index, env)
        return Place(at, context.dtypes[buffer], kind, floor, era)

    def _load(self, op: Load, points: PointVector) -> SsaValue:
        emit = self.emit
        zero = constant(KIND[op.dtype], 0)
        decided = self.all_hold(op.guards, points.ranges)
        if decided is False:
            return zero
        if decided is True:
            return self._loaded(op, points)
        turning = [g for g in op.guards if points.lanes > 1 and points.variable in g.expr.variables]
        mask = both(emit, points.mask, self.condition(turning, points)) if turning else points.mask
        points = replace(points, mask=mask if mask is not None and mask.lanes > 1 else points.mask)
        outside = self.condition([g for g in op.guards if g not in turning], points)

        def inside() -> tuple[SsaValue]:
            return (self._loaded(op, points, is_masked=bool(turning)),)

        if outside.text == "true":
            return inside()[0]
        lanes = self._lanes_of_load(op, points)
        return emit.branch(outside, inside, lambda: (constant(KIND[op.dtype], 0, lanes),))[0]

    def _lanes_of_load(self, op: Load, points: PointVector) -> int:
        index = substitute(op.index, {}, points.ranges)
        turns = any(points.variable in guard.expr.variables for guard in op.guards)
        return points.lanes if self.step_of(index, points) != 0 or turns else 1

    def _loaded(self, op: Load, points: PointVector, *, is_masked: bool = False) -> SsaValue:
        """Print a load whose guards hold, or are in the mask."""
        emit, memory = self.emit, self.memory
        index = substitute(op.index, {}, points.ranges)
        slope = self.step_of(index, points) if points.lanes > 1 else 0
        if slope is None or (points.mask is not None and slope not in (0, 1)):
            return self._gathered(op, index, points)
        place = self.place(op.buffer, index, points.env)
        if slope == 0:
            one = memory.load(place, 1) if not is_masked else None
            if one is not None:
                return one
            return self._gathered(op, index, points)
        if slope != 1:
            return memory.strided(place, points.lanes, slope)
        if op.name in self.fetched:
            emit.prefetch(memory.offset(place, self.fetched[op.name]), locality=2)
        return memory.load(place, points.lanes, points.mask)

    def _gathered(self, op: Load, index: Expr, points: PointVector) -> SsaValue:
        own, rest = _parts_of(index, points.variable)
        place = self.place(op.buffer, rest, points.env)
        at = lanes_of(self.emit, own, points.env, points.variable, points.lanes, points.ranges)
        return self.memory.gather(place, at, points.mask)

    # Results

    def store(self, buffer: str, index: Expr, value: SsaValue, points: PointVector, *, streams: bool = False) -> None:
        """Print a store at the points."""
        emit, memory = self.emit, self.memory
        index = substitute(index, {}, points.ranges)
        value = emit.splat(value, points.lanes)
        slope = self.step_of(index, points) if points.lanes > 1 else 1
        if slope == 1:
            memory.store(self.place(buffer, index, points.env), value, points.mask, streams=streams)
        elif slope is not None:
            place = self.place(buffer, index, points.env)
            memory.scatter(place, value, [emit.index(i * slope) for i in range(points.lanes)], points.mask)
        else:
            own, rest = _parts_of(index, points.variable)
            at = lanes_of(emit, own, points.env, points.variable, points.lanes, points.ranges)
            offsets = [emit.convert("sext", emit.lane(at, i), "i64") for i in range(points.lanes)]
            memory.scatter(self.place(buffer, rest, points.env), value, offsets, points.mask)

    def can_mask(self, variable: str, ranges: Ranges) -> bool:
        """Return whether points along a variable may be masked out: all accesses have masked instructions."""
        if not self.context.isa.is_avx512:
            return False
        for op in self.pass_.ops:
            if isinstance(op, Load):
                slope = substitute(op.index, {}, ranges).coefficient(variable)
                if slope not in (0, 1) and self.context.kinds[op.buffer] not in ("float", "double", "i32", "i64"):
                    return False
        if any(axis.name == variable and axis.is_reduced for axis in self.pass_.axes):
            return True
        return all(substitute(sink.index, {}, ranges).coefficient(variable) == 1 for sink in self.pass_.sinks)


def _parts_of(index: Expr, variable: str) -> tuple[Expr, Expr]:
    """Return the terms of an index that depend on a variable, and the rest."""
    own = Expr(0, tuple(term for term in index.terms if variable in Expr(0, (term,)).variables))
    return own, add(index, scale(own, -1))
