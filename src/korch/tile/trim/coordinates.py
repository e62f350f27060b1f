"""Finds the axes of each stage of a tile program that count a coordinate of its inputs.

The *coordinate* is an index that takes fewer values for a smaller served size, such as the number of a key of
attention. Loads of inputs show which axes count it. Writes to tiles and workspace buffers along these axes show where
those buffers have the coordinate, and hence which axes of other passes count it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from korch.system.alignment import ceil_div, round_up
from korch.tile.check.accesses import Access, accesses_of
from korch.tile.check.digits import ranges_of_axes
from korch.tile.ir.index import Expr, Ranges, Var, bounds
from korch.tile.ir.program import Axis, Level, Load, Pass, Stage, TileProgram


@dataclass(frozen=True, slots=True)
class Needed:
    """Element i of a buffer is needed if (i // stride) % extent is less than the number of needed coordinates."""

    stride: int
    extent: int


class UnclearError(Exception):
    """The analysis can't determine how a part of a program depends on the coordinate."""


class CoordinateKind(Enum):
    """What an index counts: elements, elements within a block, or blocks."""

    ELEMENT = "element"
    INNER = "inner"  # an element within its block, for a tile that holds one block only
    BLOCK = "block"


@dataclass(frozen=True, slots=True)
class Counter:
    """The axes that count a coordinate: block * outer + inner.

    Attributes:
        inner: the axis of elements within a block; "" if only blocks are counted.
        outer: the axis of blocks; "" if there is only one.
        block: the number of elements per block.
    """

    inner: str
    outer: str
    block: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name in (self.inner, self.outer) if name)


@dataclass(frozen=True, slots=True)
class CoordinatePlace:
    """How the coordinate follows from a buffer's index: index // stride % (period // stride)."""

    kind: CoordinateKind
    stride: int
    period: int
    block: int = 0


@dataclass(frozen=True, slots=True)
class Visit:
    """An access with its context.

    Attributes:
        stage: the number of the stage.
        access: the access.
        axes: all axes around it.
        is_fill: whether its pass loads nothing, so that it writes constants.
    """

    stage: int
    access: Access
    axes: tuple[Axis, ...]
    is_fill: bool


class Coordinates:
    """The counters of each stage of a program.

    Attributes:
        counters: the counters by stage, then by the name of an axis.
        places: by buffer, how inputs, and buffers written along counters, have the coordinate.
        visits: all accesses, in order.
    """

    def __init__(self, program: TileProgram, known: Mapping[str, Needed], step: int) -> None:
        """Find the counters.

        Args:
            program: the program.
            known: how input and output buffers have the coordinate, by name. All have the same extent.
            step: an axis may be as long as the extent rounded up to a multiple of this.

        Raises:
            UnclearError: the coordinate can't be separated from the other terms of an index.
        """
        self._program, self._step = program, step
        (self._extent,) = {entry.extent for entry in known.values()}
        self.counters: list[dict[str, Counter]] = [{} for _ in program.stages]
        self.places = {
            name: CoordinatePlace(CoordinateKind.ELEMENT, entry.stride, entry.stride * entry.extent)
            for name, entry in known.items()
        }
        self.visits = tuple(_visits(program))
        self._given = {buffer.name for buffer in program.buffers if buffer.level is Level.INPUT} | {*known}
        before = -1
        while before != self._known:
            before = self._known
            for visit in self.visits:
                self._look(visit)
        for name in self.places.keys() - known.keys():
            self._require_apart(name)

    @property
    def _known(self) -> int:
        return len(self.places) + sum(map(len, self.counters))

    def counter(self, visit: Visit) -> Counter | None:
        """Return the counter whose axes occur in the index of an access, if there is one."""
        own, ranges = self.counters[visit.stage], self._ranges(visit)
        used = {n for n in visit.access.index.variables if ranges.get(n, (0, 0)) != (0, 0)}
        found = {own[name] for name in used if name in own}
        if len(found) > 1:
            raise UnclearError
        return found.pop() if found else None

    def length(self, counter: Counter, axis: Axis) -> int:
        """Return how many elements an axis of elements covers in all blocks together."""
        if axis.ragged is not None:
            outer, total = axis.ragged
            is_own = outer == counter.outer if counter.outer else isinstance(total, int) and total <= axis.extent
            if not is_own or not isinstance(total, int):
                raise UnclearError
            return total
        return axis.extent * (self._blocks(axis.extent) if counter.outer else 1)

    def _ranges(self, visit: Visit) -> Ranges:
        return ranges_of_axes(visit.axes, self._program.parameter_ranges)

    def _look(self, visit: Visit) -> None:
        name, counter = visit.access.buffer, self.counter(visit)
        place = self.places.get(name)
        if name not in self._given and counter is not None:
            self._write_down(visit, counter)
        elif place is not None and not visit.is_fill:
            self._count(visit, place)

    def _count(self, visit: Visit, place: CoordinatePlace) -> None:
        """Record the counter of an access to a buffer whose coordinate is known."""
        if place.kind is CoordinateKind.INNER:
            raise UnclearError
        found = self._counter_of(visit, place)
        if found is None:  # a single element
            if visit.access.buffer not in self._given:
                raise UnclearError
            return
        own = self.counters[visit.stage]
        if any(own.setdefault(name, found) != found for name in found.names):
            raise UnclearError

    def _counter_of(self, visit: Visit, place: CoordinatePlace) -> Counter | None:
        terms, axes = self._coordinate(visit, place), {axis.name: axis for axis in visit.axes}
        if not terms:
            return None
        names = sorted(terms, key=lambda name: terms[name])
        inner = axes[names[0]]
        if terms[inner.name] != 1 or len(names) > 2:
            raise UnclearError
        if place.kind is CoordinateKind.BLOCK:
            if len(names) > 1 or inner.extent != ceil_div(self._extent, place.block):
                raise UnclearError
            return Counter("", inner.name, place.block)
        outer = axes[names[1]] if len(names) > 1 else None
        if outer is not None and (terms[outer.name] != inner.extent or self._blocks(inner.extent) != outer.extent):
            raise UnclearError
        found = Counter(inner.name, outer.name if outer is not None else "", inner.extent if outer is not None else 0)
        if not self._extent <= self.length(found, inner) <= round_up(self._extent, self._step):
            raise UnclearError
        return found

    def _blocks(self, block: int) -> int:
        return ceil_div(self._extent, block)

    def _coordinate(self, visit: Visit, place: CoordinatePlace) -> dict[str, int]:
        """Return the coefficients of the coordinate of an access, by axis; empty if it is always 0."""
        ranges, stride = self._ranges(visit), place.stride
        found: dict[str, int] = {}
        low = []
        for atom, factor in visit.access.index.terms:
            is_single = isinstance(atom, Var) and ranges.get(atom.name, (0, 0)) == (0, 0)
            if factor % place.period == 0 or is_single:
                continue
            if abs(factor) < stride:
                low.append((atom, factor))
            elif isinstance(atom, Var) and factor > 0 and factor % stride == 0:
                found[atom.name] = factor // stride
            else:
                raise UnclearError
        least, most = bounds(Expr(visit.access.index.constant % place.period, tuple(low)), ranges)
        if least < 0 or most >= stride:
            raise UnclearError
        return found

    def _write_down(self, visit: Visit, counter: Counter) -> None:
        """Record how a buffer that is accessed along a counter has the coordinate."""
        index, ranges = visit.access.index, self._ranges(visit)
        slopes = [index.coefficient(name) if name else 0 for name in (counter.inner, counter.outer)]
        inner, outer = (-1 if slope is None else slope for slope in slopes)
        kind = (
            CoordinateKind.BLOCK
            if inner == 0
            else CoordinateKind.INNER
            if counter.outer and outer == 0
            else CoordinateKind.ELEMENT
        )
        if min(inner, outer) < 0 or (kind is CoordinateKind.ELEMENT and outer not in (0, inner * counter.block)):
            raise UnclearError
        stride, name = inner or outer, visit.access.buffer
        others = tuple(t for t in index.terms if not (isinstance(t[0], Var) and t[0].name in counter.names))
        own = Expr(index.constant, others)
        low = tuple(term for term in own.terms if abs(term[1]) < stride)
        least, most = bounds(Expr(own.constant % stride, low), ranges)
        if least < 0 or most >= stride:
            raise UnclearError
        high = [factor for atom, factor in own.terms if abs(factor) >= stride and not _is_single(atom, ranges)]
        period = math.gcd(*high, own.constant - own.constant % stride)
        known = self.places.get(name)
        if known is not None:
            if (known.kind, known.stride) != (kind, stride) or (
                kind is CoordinateKind.BLOCK and known.block != counter.block
            ):
                raise UnclearError
            period = math.gcd(period, known.period)
        self.places[name] = CoordinatePlace(kind, stride, period or self._program.buffer(name).size, counter.block)

    def _require_apart(self, name: str) -> None:
        """Raise an error if other terms of an index could change the coordinate of a buffer."""
        place = self.places[name]
        count = {
            CoordinateKind.ELEMENT: self._extent,
            CoordinateKind.INNER: place.block,
            CoordinateKind.BLOCK: ceil_div(self._extent, place.block or 1),
        }[place.kind]
        is_tile = self._program.buffer(name).level is Level.TILE
        if place.period < place.stride * count or (place.kind is CoordinateKind.INNER and not is_tile):
            raise UnclearError


def _is_single(atom: object, ranges: Ranges) -> bool:
    return isinstance(atom, Var) and ranges.get(atom.name, (0, 0)) == (0, 0)


def _visits(program: TileProgram) -> Iterator[Visit]:
    for number, stage in enumerate(program.stages):
        for loops, step in stage.leaves:
            outer = tuple(loop.axis for loop in loops)
            is_fill = isinstance(step, Pass) and not any(isinstance(op, Load) for op in step.ops)
            for access in accesses_of(step, outer):
                yield Visit(number, access, (*stage.grid, *access.axes), is_fill)


def axes_of(stage: Stage) -> Sequence[Axis]:
    """Return all axes of a stage."""
    found = [*stage.grid]
    for loops, step in stage.leaves:
        found += [*(loop.axis for loop in loops), *step.axes]
    return tuple(dict.fromkeys(found))
