"""Convolutions of any rank -> tile programs that read the windows of an image in place.

A task computes a block of output positions and output channels of one image and one group. The part of the
image that its windows cover is copied first, with zeros outside of the image; or it is read in memory, if no
window reaches outside. The terms of the contraction are the channels and the positions of a window, each an
axis of its own, so no element is copied once for each window that contains it. There are two forms:

- *pixels first*: rows are output positions, and columns are output channels, with the weights in panels. Windows may
  be read in memory, line by line, even if they reach outside of the image; terms outside are skipped;
- *channels first*: rows are output channels, and columns are output positions. An axis with a stride is copied
  once for each position of the window, so that neighbours in the result are neighbours in the copy. If there
  are several spatial axes, columns continue from one row of the copy to the next, and the values that they
  compute between two rows of the result are discarded at the end.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, row_major_strides
from korch.ranges.live import count_of, limit
from korch.schedule.blocks import Blocked, Operand, cut, direct, fill, flat, is_implied, loaded
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of, in_panels
from korch.schedule.sides import can_clip, sides_of, without_units
from korch.system.alignment import round_up
from korch.tile.ir.index import ZERO, Expr, Ranges, add, bounds, constant, scale, var
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Load,
    Pass,
    Registers,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.lower.emit import Emitter, Index
from korch.tile.lower.loops import arrange, grid_for
from korch.tile.lower.staging import Machine


@dataclass(frozen=True, slots=True)
class ConvBlocking:
    """How a convolution is cut into tasks."""

    places: tuple[int, ...]  # positions of the result that a task computes, along each axis of an image
    channels: int  # channels of the result, in one group, that a task computes
    # how the contraction is computed in registers; the printer chooses if this is None
    registers: Registers | None = None
    panels: int = 0  # for pixels first, the columns of a panel of the weights; 0 for channels first
    beside: int = 1  # for pixels first, the channels that are adjacent in a copy
    is_shared: bool = False  # whether a separate stage copies all images, instead of each task its part
    # for pixels first, whether windows are read in memory although some reach outside of the image
    in_place: bool = False


class Windows(Blocked):
    """What all programs of a group with a convolution have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, machine: Machine) -> None:
        super().__init__(group, root, layouts, contraction_of(group, root, last=False))
        self.machine = machine
        at = root.attributes_as(ConvAttributes)
        (_, channels, *_), _, out = (group.body.types[value].shape for value in (*root.inputs, root.output))
        self.images, self.groups = out[0], at.groups
        self.channels, self.results = channels // at.groups, out[1] // at.groups
        self.sides = sides_of(group, root)

    def program(self, blocking: ConvBlocking) -> TileProgram:
        """Return the program of one blocking.

        Raises:
            NotFusedError: the operations around the convolution can't be fused with it.
        """
        return _WindowMaker(self, blocking).program()

    def finish(self, blocking: ConvBlocking) -> Pass:
        """Return the pass of this program that computes the results from the sums.

        Raises:
            NotFusedError: the program can't be made.
        """
        return _WindowMaker(self, blocking).finish()


class _WindowMaker:
    """The builder of one program: its axes, and the steps along them."""

    def __init__(self, windows: Windows, blocking: ConvBlocking) -> None:
        self.windows, self.blocking, self.is_first = windows, blocking, blocking.panels > 0
        sides, beside = windows.sides, blocking.beside
        outs = [side.out for side in sides]
        for d in range(len(outs)):  # rows that columns run on from are computed whole
            if not self.is_first and blocking.places[d] > 1 and any(block > 1 for block in blocking.places[:d]):
                outs[d] = int(outs[d])
        cuts = [
            cut(n, block, (f"g{d}", f"y{d}")) for d, (n, block) in enumerate(zip(outs, blocking.places, strict=True))
        ]
        results = cut(windows.results, blocking.channels, ("gj", "j"))
        self.blocks, self.places = tuple(outer for outer, _ in cuts), tuple(inner for _, inner in cuts)
        self.spots = [flat(*pair) for pair in cuts]
        self.j, self.result = results[1], add(scale(var("g"), windows.results), flat(*results))
        self.grid = (Axis("n", windows.images), Axis("g", windows.groups), *self.blocks, results[0])
        self.taps = tuple(Axis(f"t{d}", side.window, True) for d, side in enumerate(sides))
        channels = Axis("c", windows.channels // beside, True)
        self.terms = (*self.taps, channels) if self.is_first else (channels, *self.taps)
        self.channel = add(scale(var("g"), windows.channels), var("c"))
        if beside > 1:
            self.terms = (*self.terms, Axis("s", beside, True))
            self.channel = add(scale(var("g"), windows.channels), scale(var("c"), beside), var("s"))
        axes = (*self.grid, *self.places, self.j, *self.terms)
        self.ranges: Ranges = {axis.name: (0, axis.extent - 1) for axis in axes}
        self.values = {f"p{d}": spot for d, spot in enumerate(self.spots)}
        self.values |= {"x0": var("g"), "x1": flat(*results), "x3": var("n")}
        # The extent and stride of each spatial axis in a copy.
        self.is_stretched = [not self.is_first and side.stride > 1 for side in sides]
        all_places = [side.out if blocking.is_shared else n for side, n in zip(sides, blocking.places, strict=True)]
        self.extents = [
            n if is_stretched else side.reach(n)
            for side, n, is_stretched in zip(sides, all_places, self.is_stretched, strict=True)
        ]
        self.pitches = row_major_strides(tuple(self.extents))
        self.runs_on = not self.is_first and sum(axis.extent > 1 for axis in self.places) > 1

    def finish(self) -> Pass:
        """Return the pass that computes the results, if the operands can be computed."""
        self._emit_image()
        if not self.is_first:
            self._emit_weights()
        _, axes, _, sums, _ = self._sums()
        return self.windows.after(sums, axes, self.values, self.ranges)

    def program(self) -> TileProgram:
        """Return the program."""
        (image, where), weights = self._image(), self._weights()
        kept, axes, total, sums, size = self._sums()
        zero = fill(kept, total, 0.0)
        reads = (image.at, weights.at) if self.is_first else (weights.at, image.at)
        a, b = (At(at.buffer, without_units(at.index, self.ranges)) for at in reads)
        registers, product = self.blocking.registers, self.windows.product
        loops = self.terms
        if self.blocking.in_place:  # the positions of a window along a line are innermost
            loops = (*(axis for axis in loops if axis is not self.taps[-1]), self.taps[-1])
        contract = Contract((*kept, *loops), total, a, b, product, registers=registers, where=where)
        after = self.windows.after(sums, axes, self.values, self.ranges)
        copies: tuple[Step, ...] = () if image.packing is None else (image.packing,)
        before = (read.stage for read in (image, weights) if read.stage is not None)
        own = (read.buffer for read in (image, weights) if read.buffer is not None)
        tile = Buffer("t", Level.TILE, DType.F32, size)
        terms = math.prod(axis.extent for axis in self.terms)
        packed = in_panels(terms, self._columns(), self.blocking.panels) if self.is_first else None
        memory = self.windows.memory(packed)
        return TileProgram((*memory, tile, *own), (*before, Stage(self.grid, (*copies, zero, contract, after))))

    def _sums(self) -> tuple[tuple[Axis, ...], tuple[Axis, ...], At, At, int]:
        """Return the axes of the sums and of the results, an element of each, and the tile's size."""
        if self.is_first:
            steps = row_major_strides((*(axis.extent for axis in self.places), self._whole(self.j.extent)))
            kept = (*self.places, self.j)
            place = add(*(scale(var(axis.name), n) for axis, n in zip(kept, steps, strict=True)))
            return kept, kept, At("t", place), At("t", place), steps[0] * kept[0].extent
        if not self.runs_on:
            long = max(self.places, key=lambda axis: (axis.extent > 1, axis.name))
            kept = (self.j, *(axis for axis in self.places if axis is not long), long)
            row = self._whole(long.extent)
            place = add(scale(var("j"), row), var(long.name))
            return kept, kept, At("t", place), At("t", place), row * self.j.extent
        row = self._run()
        spots = (scale(var(axis.name), n) for axis, n in zip(self.places, self.pitches, strict=True))
        sums = At("t", add(scale(var("j"), row), *spots))
        kept = (self.j, Axis("i", row))
        return kept, (self.j, *self.places), At("t", add(scale(var("j"), row), var("i"))), sums, row * self.j.extent

    def _run(self) -> int:
        """Return the number of a task's columns if they continue from row to row of the copy."""
        ends = ((axis.extent - 1) * n for axis, n in zip(self.places, self.pitches, strict=True))
        return self._whole(sum(ends) + 1)

    def _whole(self, columns: int) -> int:
        return round_up(columns, self.windows.machine.lanes)

    def _image(self) -> tuple[Operand, tuple[Inside, ...]]:
        """Return where the windows are read, in memory or in a copy, and the guards for being inside of the image."""
        emitter = self._emit_image()
        load = loaded(emitter.ops, can_widen=False)
        if self.blocking.in_place:
            axes = (*self.places, *self.terms)
            is_even = load is not None and all(load.index.coefficient(axis.name) is not None for axis in axes)
            if load is None or not is_even or not can_clip(load.guards, self.taps, self.places[-1].name):
                raise NotFusedError("the image is not read where it lies")
            where = (replace(guard, expr=without_units(guard.expr, self.ranges)) for guard in load.guards)
            return Operand(At(load.buffer, load.index)), tuple(where)
        ops = [self._in_image(op) if isinstance(op, Load) and self.is_first else op for op in emitter.ops]
        at = direct(ops, (*self.places, *self.terms), can_widen=not self.is_first)
        if (
            at is not None
            and not self.runs_on
            and (self.is_first or at.index.coefficient(self._sums()[0][-1].name) == 1)
        ):
            return Operand(at), ()
        return self._copied(), ()

    def _in_image(self, load: Load) -> Load:
        """Return a load without the guards that always hold because the last task has fewer positions."""
        return replace(load, guards=tuple(g for g in load.guards if not is_implied(g, self.places, self.ranges)))

    def _emit_image(self) -> Emitter:
        """Return the operations that compute an image element that a window reads."""
        windows = self.windows
        spots = zip(windows.sides, self.spots, self.taps, strict=True)
        index = [side.met(spot, var(tap.name)) for side, spot, tap in spots]
        emitter = windows.fusion.emitter(self.ranges)
        _ = windows.fusion.argument(emitter, windows.root.inputs[0], (var("n"), self.channel, *index))
        return emitter

    def _copied(self) -> Operand:
        """Return where the windows are read in a copy, and the pass that makes it."""
        windows, blocking = self.windows, self.blocking
        beside, is_shared = blocking.beside, blocking.is_shared
        stretched = [d for d, is_stretched in enumerate(self.is_stretched) if is_stretched]
        windows_of = tuple(windows.sides[d].window for d in stretched)
        area = math.prod(self.extents)
        own_steps = dict(zip(stretched, (n * area for n in row_major_strides(windows_of)), strict=True))
        step = area * math.prod(windows_of) * beside
        axes = [Axis("c", windows.channels // beside), *(Axis(f"t{d}", windows.sides[d].window) for d in stretched)]
        axes += [Axis(f"u{d}", self._reach(d)) for d in range(len(self.extents))]
        axes += [Axis("s", beside)] if beside > 1 else []
        reads, writes, coordinates = [scale(var("c"), step)], [scale(var("c"), step)], []
        if beside > 1:
            reads, writes = [*reads, var("s")], [*writes, var("s")]
        for d, side in enumerate(windows.sides):
            pitch, base = self.pitches[d] * beside, scale(var(f"g{d}"), blocking.places[d])
            place, tap = (1, own_steps[d]) if d in own_steps else (side.stride, side.dilation * pitch)
            reads += [scale(var(f"t{d}"), tap)] + [scale(base, place * pitch)] * is_shared
            reads += [] if self.runs_on else [scale(var(f"y{d}"), place * pitch)]
            writes += [scale(var(f"u{d}"), pitch)] + [scale(var(f"t{d}"), tap)] * (d in own_steps)
            from_ = add(scale(base, 0 if is_shared else side.stride), constant(-side.pad))
            inside = add(scale(var(f"u{d}"), side.stride), scale(var(f"t{d}"), side.dilation))
            coordinates.append(add(from_, inside if d in own_steps else var(f"u{d}")))
        reads += [var("i")] if self.runs_on else []
        number = add(scale(var("n"), windows.groups), var("g"))
        whole = [scale(number, windows.channels // beside * step)] if is_shared else []
        found = add(*reads, *whole)
        end = {**self.ranges, "i": (0, self._run() - 1)} if self.runs_on else self.ranges
        size = bounds(found, end)[1] + 1
        copies = math.prod(axis.extent for axis in axes) * (windows.images * windows.groups if is_shared else 1)
        buffer = Buffer("p", Level.WORKSPACE if is_shared else Level.TILE, windows.dtype, max(size, copies))
        index = (var("n"), self.channel, *coordinates)
        return replace(self._copy(axes, index, add(*writes, *whole), buffer), at=At("p", found))

    def _copy(self, axes: list[Axis], index: Index, place: Expr, buffer: Buffer) -> Operand:
        """Return the pass over some axes that writes the image to a buffer, or a stage with this pass."""
        windows, is_shared = self.windows, self.blocking.is_shared
        around = self.grid[:2] if is_shared else ()
        own = tuple(axis for axis in (*around, *axes) if axis.extent > 1) or tuple(axes[:1])
        grid = {} if is_shared else {axis.name: (0, axis.extent - 1) for axis in self.grid}
        ranges = {**grid, **{axis.name: (0, axis.extent - 1) for axis in (*around, *axes)}}
        emitter = windows.fusion.emitter(ranges)
        moved = tuple(without_units(expr, ranges) for expr in index)
        value = windows.fusion.argument(emitter, windows.root.inputs[0], moved)
        sink = Store(buffer.name, without_units(place, ranges), value)
        sizes = {b.name: b.size for b in (*windows.memory(), buffer)}
        copy = Pass(own, own[-1].name, tuple(emitter.ops), (sink,))
        pass_ = arrange(copy, windows.machine.lanes, sizes, grid)
        where = tuple(guard for guard in self._reached() if not guard.expr.variables & {pass_.vector, pass_.across})
        guarded = arrange(replace(copy, where=where), windows.machine.lanes, sizes, grid)
        if not any(
            guard.expr.variables & {guarded.vector, guarded.across} for guard in guarded.where
        ):  # of merged axes
            pass_ = guarded
        nowhere = At(buffer.name, place)
        if is_shared:
            return Operand(nowhere, buffer, grid_for(pass_, windows.machine.threads, windows.machine.lanes))
        return Operand(nowhere, buffer, None, pass_)

    def _reach(self, d: int) -> int:
        """Return the extent of a copy along an axis; if a task has the whole axis, as much as a size needs."""
        side, block = self.windows.sides[d], self.blocking.places[d]
        return side.reaches if block == side.out and not self.is_stretched[d] else self.extents[d]

    def _reached(self) -> Iterator[Inside]:
        """Yield the guards of the rows of a copy that a size needs, where it needs only a part."""
        for d, (side, block) in enumerate(zip(self.windows.sides, self.blocking.places, strict=True)):
            if count_of(side.reaches) and block < side.out and not self.is_stretched[d]:
                base = ZERO if self.blocking.is_shared else scale(var(f"g{d}"), block * side.stride)
                yield Inside(without_units(add(base, var(f"u{d}")), self.ranges), 0, limit(side.reaches))

    def _weights(self) -> Operand:
        """Return where the weights are read: in panels, in their own memory, or in a copy."""
        windows = self.windows
        steps = row_major_strides(tuple(axis.extent for axis in self.terms))
        term = add(*(scale(var(axis.name), n) for axis, n in zip(self.terms, steps, strict=True)))
        if self.is_first:
            return Operand(At(windows.name_of(1), add(scale(term, self._columns()), self.result)))
        value = windows.root.inputs[1]
        at = direct(self._emit_weights().ops, (self.j, *self.terms), can_widen=False)
        if at is not None:
            return Operand(at)
        own = (Axis("o", windows.groups * windows.results), *(replace(a, is_reduced=False) for a in self.terms))
        emitter = windows.fusion.emitter({axis.name: (0, axis.extent - 1) for axis in own})
        name = emitter.value(value, (var("o"), var("c"), *(var(axis.name) for axis in self.taps)))
        row = math.prod(axis.extent for axis in self.terms)
        sink = Store("w", add(scale(var("o"), row), term), name)
        buffer = Buffer("w", Level.WORKSPACE, windows.dtype, own[0].extent * row)
        sizes = {b.name: b.size for b in (*windows.memory(), buffer)}
        pass_ = arrange(Pass(own, own[-1].name, tuple(emitter.ops), (sink,)), windows.machine.lanes, sizes, {})
        stage = grid_for(pass_, windows.machine.threads, windows.machine.lanes)
        return Operand(At("w", add(scale(self.result, row), term)), buffer, stage)

    def _emit_weights(self) -> Emitter:
        """Return the operations that compute an element of the weights."""
        emitter = self.windows.fusion.emitter(self.ranges)
        taps = (var(axis.name) for axis in self.taps)
        _ = emitter.value(self.windows.root.inputs[1], (self.result, var("c"), *taps))
        return emitter

    def _columns(self) -> int:
        """Return the number of columns of the weights, rounded up to whole panels."""
        panels = self.blocking.panels
        return round_up(self.windows.results * self.windows.groups, panels)
