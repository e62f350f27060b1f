"""Chains of convolutions -> tile programs that keep the results between two convolutions in tiles of rows.

A task computes some rows of the last result, a few at a time. For each earlier convolution, it keeps the
rows that the windows of the next one cover. Rows that are needed again are moved to the beginning of the
tile, so that a task computes nothing twice. Channels are stored in blocks of one vector.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, row_major_strides
from korch.ranges.live import blocks
from korch.schedule.blocks import Blocked, cut, fill, flat, loaded, store
from korch.schedule.contraction import Layouts, NotFusedError, Packed, contraction_of, follow, in_panels
from korch.schedule.depthwise import is_depthwise
from korch.schedule.sides import can_clip, sides_of, without_units
from korch.schedule.split_products import MOST_COMPONENTS, given_split, split_into
from korch.system.alignment import ceil_div, round_up
from korch.target import EDGE
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, quotient, remainder, scale, var, vector_step
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Load,
    Loop,
    Panels,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
    holds,
)
from korch.tile.lower.emit import Emitter
from korch.tile.lower.loops import arrange
from korch.tile.lower.staging import Machine


@dataclass(frozen=True, slots=True)
class ChainBlocking:
    """How a chain is cut into tasks."""

    rows: int  # rows of the last result that a task computes
    block: int  # rows of the last result that are computed at a time
    channels: int  # channels of each result that a task computes; all, unless all links except the first are depthwise
    # for each link, pixels and vectors of channels in registers; None for a link on matrix units
    registers: tuple[Registers | None, ...]


@dataclass(frozen=True, slots=True)
class LinkRows:
    """Rows of a tile: how many it has, how many are computed at a time, and how many are needed again."""

    height: int
    new: int
    kept: int


class Link(Blocked):
    """One convolution of a chain, with the operations after it."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts) -> None:
        super().__init__(group, root, layouts, contraction_of(group, root, last=False))
        image, weights, out = (group.body.types[value].shape for value in (*root.inputs, root.output))
        at = root.attributes_as(ConvAttributes)
        self.images, self.channels, self.results = image[0], image[1], out[1]
        self.is_depthwise = is_depthwise(image, weights, at)
        if len(out) != 4 or not (self.is_depthwise or at.groups == 1):
            raise NotFusedError("the channels are in groups")
        self.rows, self.columns = sides_of(group, root)

    @property
    def is_pointwise(self) -> bool:
        """Whether each result is computed from one pixel of the image."""
        sides = (self.rows, self.columns)
        return not self.is_depthwise and all(s.window == 1 and s.pad == 0 and s.reach(s.out) <= s.size for s in sides)

    @property
    def can_be_split(self) -> bool:
        """Whether it can run on matrix units: each result is computed from the pixel at the same position."""
        return self.is_pointwise and all(side.stride == 1 for side in (self.rows, self.columns))


class Chain:
    """What all programs of a group with a chain of convolutions have in common."""

    def __init__(self, group: Group, layouts: Layouts, machine: Machine) -> None:
        """Prepare the links.

        Raises:
            NotFusedError: the group has no such chain.
        """
        self.group, self.machine = group, machine
        self.links = tuple(Link(group, root, layouts) for root in group.body.linear)
        lanes = machine.lanes
        for before, after in zip(self.links, self.links[1:], strict=False):
            if not (after.is_depthwise or after.is_pointwise):
                raise NotFusedError("a convolution in a chain reads windows of all channels")
            if before.results % lanes or before.results != after.channels:
                raise NotFusedError("the channels do not fill a vector register")
        if self.links[-1].is_depthwise and self.links[-1].results % lanes:
            raise NotFusedError("the channels do not fill a vector register")
        if sum(link.is_depthwise for link in self.links[1:]) > 1:
            raise NotFusedError("two windows are met again")

    @property
    def can_split(self) -> bool:
        """Whether channels can be divided among tasks without computing anything twice."""
        return all(link.is_depthwise for link in self.links[1:])

    def tiles(self, block: int, rows: int) -> list[LinkRows]:
        """Return the rows of the tile after each link except the last.

        Args:
            block: rows of the last result that are computed at a time.
            rows: all rows that a task computes; if they are one block, no row is needed again.
        """
        found: list[LinkRows] = []
        new, kept = block, 0
        for link in self.links[:0:-1]:
            height = max(link.rows.reach(new), link.rows.reach(kept))
            kept = link.rows.met_again(new) if block < rows else 0
            new = link.rows.reach(new) - kept
            found.append(LinkRows(height, new, kept))
        return found[::-1]

    def program(self, blocking: ChainBlocking) -> TileProgram:
        """Return the program of a blocking.

        Raises:
            NotFusedError: the operations around the convolutions can't be fused with them.
        """
        return _ChainMaker(self, blocking).program()

    def finish(self, blocking: ChainBlocking, only_last: bool) -> list[Pass]:
        """Return the passes of this program that compute results from sums: of each link, or of the last one only.

        Raises:
            NotFusedError: the program can't be made.
        """
        return _ChainMaker(self, blocking).finish(only_last)


@dataclass(frozen=True, slots=True)
class _RowPart:
    """Rows [first, first + count) of a link, read from a tile whose first row is `base`, stored at row `offset`."""

    first: Expr
    count: int
    base: Expr = ZERO
    offset: int = 0


class _ChainMaker:
    """The builder of one program."""

    def __init__(self, chain: Chain, blocking: ChainBlocking) -> None:
        self.chain, self.blocking, self.lanes = chain, blocking, chain.machine.lanes
        self.last = last = chain.links[-1]
        self.tiles = chain.tiles(blocking.block, blocking.rows)
        is_split = blocking.channels < last.results
        parts = last.results // blocking.channels if is_split else 1
        self.grid = (Axis("n", last.images), Axis("g", parts), Axis("g0", blocks(last.rows.out, blocking.rows)))
        self.turn = Axis("i", ceil_div(blocking.rows, blocking.block))
        self.begin = scale(var("g0"), blocking.rows)
        self.needed = [blocking.rows]
        for link in chain.links[:0:-1]:
            self.needed.insert(0, link.rows.reach(self.needed[0]))
        self.own = [blocking.channels if is_split else link.results for link in chain.links]
        self.copied = 0
        # The rows of components follow each other in memory.
        self.widths = [
            int(link.columns.out) if None in blocking.registers else link.columns.out for link in chain.links
        ]
        self.components: dict[int, int] = {}
        self.sums: list[Buffer] = []

    def finish(self, only_last: bool) -> list[Pass]:
        """Return the passes that compute results from sums."""
        part, count = _RowPart(self.begin, self.blocking.block), len(self.chain.links)
        numbers = range(count - 1 if only_last else 0, count)
        return [self._after(number, part, self._sums(number, part.count)) for number in numbers]

    def program(self) -> TileProgram:
        """Return the program."""
        blocking, links = self.blocking, range(len(self.chain.links))
        if self.turn.extent == 1:
            return self._finished(tuple(self._run(links, _RowPart(self.begin, blocking.block), is_all=True)))
        now = add(self.begin, scale(var("i"), blocking.block))
        body = self._run(links, _RowPart(now, blocking.block))
        before: list[Step] = []
        met = [number for number, tile in enumerate(self.tiles) if tile.kept]
        for number in met:
            before = self._run(range(number + 1), _RowPart(self._base(number, self.begin), self.tiles[number].kept))
            body.append(self._moved(number))
        return self._finished((*before, Loop(self.turn, tuple(f"r{number}" for number in met), tuple(body))))

    def _base(self, number: int, first: Expr) -> Expr:
        """Return the row of a link's result at the beginning of its tile, if the last link begins at row `first`."""
        for link in self.chain.links[:number:-1]:
            first = link.rows.met(first, ZERO)
        return first

    def _run(self, numbers: Sequence[int], part: _RowPart, is_all: bool = False) -> list[Step]:
        """Return the steps that compute rows of the last of some links, and the rows of earlier links that they need.

        `is_all`: whether no tile holds any rows yet.
        """
        *before, last = numbers
        if not before:
            return self._link(last, part)
        rows = self.chain.links[last].rows
        height, base = rows.reach(part.count), rows.met(part.first, ZERO)
        kept = 0 if is_all else rows.met_again(part.count)
        found = self._run(before, _RowPart(add(base, constant(kept)), height - kept, offset=kept), is_all)
        return [*found, *self._link(last, replace(part, base=base))]

    def _finished(self, steps: tuple[Step, ...]) -> TileProgram:
        tiles = [*self.sums]
        for number, (link, tile) in enumerate(zip(self.chain.links, self.tiles, strict=False)):
            size = tile.height * link.columns.out * self.own[number]
            tiles.append(Buffer(f"r{number}", Level.TILE, DType.F32, size))
        for number, elements in self.components.items():
            layout = (Panels(round_up(self.chain.links[number].channels, EDGE), EDGE), split_into(MOST_COMPONENTS))
            tiles.append(Buffer(f"s{number}", Level.TILE, DType.F32, elements, layout))
        if self.copied:
            tiles.append(Buffer("pa", Level.TILE, DType.F32, self.copied))
        packed = {link.name_of(1): self._packed(number) for number, link in enumerate(self.chain.links)}
        memory = self.chain.links[0].fusion.memory(packed)
        return TileProgram((*memory, *tiles), (Stage(self.grid, steps),))

    def _packed(self, number: int) -> Packed:
        """Return how the weights of a link are stored: in panels, or in components."""
        link, width = self.chain.links[number], self._strip(number)
        columns = round_up(link.results, width)
        terms = link.rows.window * link.columns.window * (1 if link.is_depthwise else link.channels)
        if self.blocking.registers[number] is None:
            return given_split(terms, columns, MOST_COMPONENTS)
        return in_panels(terms, columns, width)

    def _strip(self, number: int) -> int:
        """Return the number of channels in a panel of a link's weights."""
        registers = self.blocking.registers[number]
        return EDGE if registers is None else self.lanes * registers.vectors

    def _place(self, number: int, block: Expr, lane: Expr, row: Expr, column: Expr) -> Expr:
        """Return the index of an element of a link's result in its tile."""
        height, width = self.tiles[number].height, self.chain.links[number].columns.out
        return add(scale(_counted((block, 0), (row, height), (column, width)), self.lanes), lane)

    def _moved(self, number: int) -> Step:
        """Return the pass that moves the rows that are needed again to the beginning of a tile."""
        tile, blocks = self.tiles[number], self.own[number] // self.lanes
        axes = (Axis("c", blocks), Axis("y", tile.kept), Axis("x", self.widths[number]), Axis("s", self.lanes))
        c, y, x, s = (var(axis.name) for axis in axes)
        load = Load("x0", DType.F32, f"r{number}", self._place(number, c, s, add(y, constant(tile.new)), x))
        return Pass(axes, "s", (load,), (Store(f"r{number}", self._place(number, c, s, y, x), "x0"),))

    def _axes(self, number: int, count: int) -> tuple[Axis, ...]:
        """Return the axes of some rows of a link's results: blocks of channels, pixels, channels of a block.

        The order is that of memory, so adjacent data are computed together: rows of a block of channels, or blocks
        of a row.
        """
        link = self.chain.links[number]
        x, y = Axis("x", self.widths[number]), Axis("y", count)
        q, j = self._channels(number)
        if self.blocking.registers[number] is None:
            return (y, x, j)
        near = [link.name_of(0)] * (number == 0) + [name for name, _ in link.group.body.outputs] * (link is self.last)
        by_rows = link.is_depthwise and any(not link.fusion.layouts[name].blocks for name in near)
        return (y, q, x, j) if by_rows else (q, y, x, j)

    def _channels(self, number: int) -> tuple[Axis, Axis]:
        own = self.own[number]
        is_whole = self.blocking.registers[number] is None
        return cut(own, own if is_whole else min(self._strip(number), own), ("q", "j"))

    def _ranges(self, *axes: Axis) -> Ranges:
        return {axis.name: (0, axis.extent - 1) for axis in (*self.grid, self.turn, *axes)}

    def _channel(self, number: int, own: Expr) -> Expr:
        """Return the number of a task's channel among all channels."""
        is_all = self.own[number] == self.chain.links[number].results
        return own if is_all else add(scale(var("g"), self.own[number]), own)

    def _inside(self, number: int, row: Expr, ranges: Ranges) -> tuple[Inside, ...]:
        """Return the conditions that a row of a link is in the image, and needed by the task."""
        link = self.chain.links[number]
        emitter = link.fusion.emitter(ranges)
        met = add(row, scale(self._base(number, self.begin), -1))
        return (*emitter.inside(row, 0, link.rows.out), *emitter.inside(met, 0, self.needed[number]))

    def _sums(self, number: int, count: int) -> At:
        """Return an element of a new tile for the sums of some rows of a link."""
        *kept, j = self._axes(number, count)
        sizes = row_major_strides((*(axis.extent for axis in kept), round_up(j.extent, self.lanes)))
        self.sums.append(Buffer(f"sum{len(self.sums)}", Level.TILE, DType.F32, kept[0].extent * sizes[0]))
        place = add(*(scale(var(axis.name), n) for axis, n in zip((*kept, j), sizes, strict=True)))
        return At(self.sums[-1].name, place)

    def _link(self, number: int, part: _RowPart) -> list[Step]:
        """Return the steps that compute some rows of a link."""
        link = self.chain.links[number]
        kept = self._axes(number, part.count)
        taps = (Axis("t0", link.rows.window, True), Axis("t1", link.columns.window, True))
        ranges, row = self._ranges(*kept, *taps), add(part.first, var("y"))
        channel = self._channel(number, flat(*self._channels(number)))
        before: list[Step] = []
        if self.blocking.registers[number] is None:
            a, terms, guards, before = self._of_components(number, part)
        elif number > 0:
            a, terms, guards = self._of_tile(number, row, part.base, taps, ranges)
        else:
            a, terms, guards, before = self._of_image(part, (*kept, *taps), channel)
        where = tuple(dict.fromkeys((*self._inside(number, row, ranges), *guards)))
        term = _counted(*((var(axis.name), axis.extent) for axis in terms))
        weights = At(link.name_of(1), add(scale(term, round_up(link.results, self._strip(number))), channel))
        total = self._sums(number, part.count)
        after = self._after(number, part, total)
        zero = replace(fill(kept, total, 0.0), where=after.where)
        registers = self.blocking.registers[number]
        product = Product.SPLIT if registers is None else link.product
        contract = Contract((*kept, *terms), total, a, weights, product, registers=registers, where=where)
        return [*before, zero, contract, after]

    def _after(self, number: int, part: _RowPart, total: At) -> Pass:
        """Return the pass that computes results from sums: outputs, or the input of the next link."""
        link, kept = self.chain.links[number], self._axes(number, part.count)
        ranges, own, row = self._ranges(*kept), flat(*self._channels(number)), add(part.first, var("y"))
        channel = self._channel(number, own)
        values = {"x0" if link.is_depthwise else "x1": channel, "x3": var("n"), "p0": row, "p1": var("x")}
        where = self._inside(number, row, ranges)
        if link is self.last:
            return replace(link.after(total, kept, values, ranges), where=where)
        lanes = (quotient(own, self.lanes, ranges), remainder(own, self.lanes, ranges))
        to = At(f"r{number}", self._place(number, *lanes, add(var("y"), constant(part.offset)), var("x")))
        after = link.following(total, kept, (values, ranges), self._sinks(number, to))
        return replace(after, where=where)

    def _sinks(self, number: int, to: At) -> Callable[[Emitter, str], Sequence[Store]]:
        """Return the function that computes an element of the next link's input and stores it in a tile."""
        link, value = self.chain.links[number], self.chain.links[number + 1].root.inputs[0]

        def sinks(emitter: Emitter, result: str) -> Sequence[Store]:
            indices = follow(emitter, link.root, link.contraction.out, result)
            if indices.get(value) != link.contraction.out:
                raise NotFusedError("what stands between two convolutions is not computed element by element")
            return [store(to, emitter.value(value, indices[value]))]

        return sinks

    def _component(self, number: int, count: int, channel: Expr) -> At:
        """Return where a pointwise link reads an element of its tile of components, and make room for `count` rows."""
        link = self.chain.links[number]
        width, columns = link.columns.out, round_up(link.channels, EDGE)
        elements = round_up(count * width, EDGE) * columns
        self.components[number] = max(self.components.get(number, 0), elements)
        return At(f"s{number}", add(scale(_counted((var("y"), 0), (var("x"), width)), columns), channel))

    def _of_components(
        self, number: int, part: _RowPart
    ) -> tuple[At, tuple[Axis, ...], tuple[Inside, ...], list[Step]]:
        """Return the components that a pointwise link reads, its terms, its guards, and the passes that split."""
        link, row = self.chain.links[number], add(part.first, var("y"))
        y, x, c = Axis("y", part.count), Axis("x", self.widths[number]), Axis("c", link.channels)
        ranges, value, ops = self._ranges(y, x, c), "x0", list[TileOp]()
        where, terms = self._inside(number, row, ranges), (replace(c, is_reduced=True),)
        at = self._component(number, part.count, var("c"))
        if number > 0:
            lanes = (quotient(var("c"), self.lanes, ranges), remainder(var("c"), self.lanes, ranges))
            place = self._place(number - 1, *lanes, add(row, scale(part.base, -1)), var("x"))
            ops.append(Load(value, DType.F32, f"r{number - 1}", place))
        else:
            emitter = link.fusion.emitter(ranges)
            value = link.fusion.argument(emitter, link.root.inputs[0], (var("n"), var("c"), row, var("x")))
            ops += emitter.ops
        loads = [op for op in ops if isinstance(op, Load)]
        is_inside = all(guard in where for load in loads for guard in load.guards)
        if len(loads) != 1 or not is_inside or vector_step(loads[0].index, "c", self.lanes) != 1:
            raise NotFusedError("the channels of the image are not adjacent in memory")
        own = tuple(replace(op, guards=()) if isinstance(op, Load) else op for op in ops)
        return at, terms, where, [Pass((y, x, c), "c", own, (store(at, value),), where=where)]

    def _of_tile(
        self, number: int, row: Expr, base: Expr, taps: tuple[Axis, Axis], ranges: Ranges
    ) -> tuple[At, tuple[Axis, ...], tuple[Inside, ...]]:
        """Return what a link reads of the tile before it, its terms, and the guards for terms inside of the image."""
        link, name = self.chain.links[number], f"r{number - 1}"
        if not link.is_depthwise:
            terms = (Axis("c", link.channels // self.lanes, True), Axis("s", self.lanes, True))
            inside, column = add(link.rows.met(row, ZERO), scale(base, -1)), link.columns.met(var("x"), ZERO)
            return At(name, self._place(number - 1, var("c"), var("s"), inside, column)), terms, ()
        met = (link.rows.met(row, var("t0")), link.columns.met(var("x"), var("t1")))
        guards = tuple(Inside(at, 0, side.size) for side, at in zip((link.rows, link.columns), met, strict=True))
        guards = tuple(guard for guard in guards if not holds(guard, ranges))
        place = self._place(number - 1, var("q"), var("j"), add(met[0], scale(base, -1)), met[1])
        return At(name, place), taps, guards

    def _of_image(
        self, part: _RowPart, axes: tuple[Axis, ...], channel: Expr
    ) -> tuple[At, tuple[Axis, ...], tuple[Inside, ...], list[Step]]:
        """Return what the first link reads, its terms, their guards, and the pass that copies the image, if any."""
        link, taps = self.chain.links[0], axes[-2:]
        beside = self.lanes if link.fusion.layouts[link.name_of(0)].blocks else link.channels
        c, s = Axis("c", link.channels // beside, True), Axis("s", beside, True)
        terms = taps if link.is_depthwise else (*taps, c, s)
        read = channel if link.is_depthwise else flat(c, s)
        emitter = link.fusion.emitter(self._ranges(*axes, *terms))
        met = (link.rows.met(add(part.first, var("y")), var("t0")), link.columns.met(var("x"), var("t1")))
        _ = link.fusion.argument(emitter, link.root.inputs[0], (var("n"), read, *met))
        load = loaded(emitter.ops, can_widen=link.is_depthwise)
        if load is not None and all(load.index.coefficient(a.name) is not None for a in (*axes, *terms)):
            is_inside = not any(guard.expr.variables & {"x", "t0", "t1", "c", "s"} for guard in load.guards)
            is_window = link.is_depthwise and load.index.coefficient("j") == 1 and can_clip(load.guards, taps, "x")
            if is_window or (is_inside and not link.is_depthwise):
                return At(load.buffer, load.index), terms, load.guards, []
        return self._copied(part, taps, (c, s))

    def _copied(
        self, part: _RowPart, taps: tuple[Axis, ...], channels: tuple[Axis, Axis]
    ) -> tuple[At, tuple[Axis, ...], tuple[Inside, ...], list[Step]]:
        """Return the same as `_of_image`, for a copy of the image with the padding around it."""
        link, (c, s) = self.chain.links[0], channels
        size = (link.rows.reach(part.count), link.columns.reach(link.columns.out))
        if link.is_depthwise:  # the channels of the task, in blocks
            c, s = Axis("c", self.own[0] // self.lanes, True), Axis("s", self.lanes, True)
        own = (replace(c, is_reduced=False), Axis("u0", size[0]), Axis("u1", size[1]), replace(s, is_reduced=False))
        ranges = self._ranges(*own)
        number = self._channel(0, flat(c, s)) if link.is_depthwise else flat(c, s)
        emitter = link.fusion.emitter(ranges)
        row, column = add(link.rows.met(part.first, ZERO), var("u0")), add(link.columns.met(ZERO, ZERO), var("u1"))
        index = tuple(without_units(expr, ranges) for expr in (var("n"), number, row, column))
        value = link.fusion.argument(emitter, link.root.inputs[0], index)

        def place(block: Expr, lane: Expr, row: Expr, column: Expr) -> Expr:
            return add(scale(_counted((block, 0), (row, size[0]), (column, size[1])), s.extent), lane)

        to = without_units(place(var("c"), var("s"), var("u0"), var("u1")), ranges)
        elements = c.extent * math.prod(size) * s.extent
        self.copied = max(self.copied, elements)
        sizes = {b.name: b.size for b in link.memory()} | {"pa": elements}
        axes = tuple(axis for axis in own if axis.extent > 1) or own[-1:]
        pass_ = arrange(
            Pass(axes, axes[-1].name, tuple(emitter.ops), (Store("pa", to, value),)), self.lanes, sizes, self._ranges()
        )
        row = add(scale(var("y"), link.rows.stride), scale(var("t0"), link.rows.dilation))
        column = add(scale(var("x"), link.columns.stride), scale(var("t1"), link.columns.dilation))
        if link.is_depthwise:
            return At("pa", place(var("q"), var("j"), row, column)), taps, (), [pass_]
        return At("pa", place(var("c"), var("s"), row, column)), (*taps, c, s), (), [pass_]


def _counted(*digits: tuple[Expr, int]) -> Expr:
    """Return the number with some mixed-radix digits, each with its radix; that of the first digit is not used."""
    number = ZERO
    for digit, count in digits:
        number = add(scale(number, count), digit)
    return number
