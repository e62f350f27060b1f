"""Depthwise convolutions -> tile programs in which the elements of a vector are channels.

The contraction has one column for each channel, on which both operands depend, and one term for each
position of the window. Floats are read in place, and terms outside of the image are skipped. If the image
is computed or rearranged first, and for bytes, a task copies the part of the image that its windows cover
to a tile, with the padding around it, channels last.
"""

import math
from dataclasses import dataclass, replace

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import row_major_strides
from korch.schedule.blocks import Blocked, Operand, cut, fill, flat, loaded, zero_of
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of, in_panels
from korch.schedule.sides import can_clip, sides_of, without_units
from korch.system.alignment import round_up
from korch.tile.ir.index import ZERO, Expr, Ranges, add, scale, substitute, var
from korch.tile.ir.passes import map_indices
from korch.tile.ir.program import (
    PAIR,
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Pass,
    Registers,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.lower.emit import Index

MOST_TAPS = 49
"""The most positions in a window of bytes: the loops over them are unrolled."""


@dataclass(frozen=True, slots=True)
class DepthwiseBlocking:
    """How a depthwise convolution is cut into tasks."""

    rows: int  # rows of the result that a task computes, along the last axis but one
    channels: int  # adjacent channels that a task computes
    places: int  # positions of a row whose sums are in registers at a time
    is_by_rows: bool = False  # whether consecutive tasks have the same rows; else they have the same channels
    # whether the next inputs, and the lines that results are stored to, are prefetched into the cache
    fetches: bool = False


class Depthwise(Blocked):
    """What all programs of a group with a depthwise convolution have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, lanes: int) -> None:
        """Prepare what the programs share.

        Raises:
            NotFusedError: the convolution is not of this kind.
        """
        super().__init__(group, root, layouts, contraction_of(group, root, last=True))
        image, weights = (group.body.types[value].shape for value in root.inputs)
        if not is_depthwise(image, weights, root.attributes_as(ConvAttributes)):
            raise NotFusedError("the channels are in groups")
        self.images, self.channels, self.lanes = image[0], image[1], lanes
        self.sides, self.is_of_bytes = sides_of(group, root), self.product.is_of_bytes
        if len(self.sides) != 2 and (self.is_of_bytes or len(self.sides) < 2):
            raise NotFusedError("a depthwise convolution does not have two spatial axes")
        if self.is_of_bytes and math.prod(weights[2:]) > MOST_TAPS:
            raise NotFusedError("the window is too large")

    def program(self, blocking: DepthwiseBlocking) -> TileProgram:
        """Return the program of a blocking.

        Raises:
            NotFusedError: the operations around the convolution can't be fused with it.
        """
        return _DepthwiseMaker(self, blocking).program()

    def finish(self, blocking: DepthwiseBlocking) -> Pass:
        """Return the pass of this program that computes the results from the sums.

        Raises:
            NotFusedError: the program can't be made.
        """
        return _DepthwiseMaker(self, blocking).finish()


class _DepthwiseMaker:
    """The builder of one program: its axes, and the steps along them."""

    def __init__(self, depthwise: Depthwise, blocking: DepthwiseBlocking) -> None:
        self.depthwise, self.blocking = depthwise, blocking
        *outer, last = depthwise.sides
        sizes = [side.out for side in outer[:-1]] + [blocking.rows]
        cuts = [cut(side.out, n, (f"g{d}", f"y{d}")) for d, (side, n) in enumerate(zip(outer, sizes, strict=True))]
        self.rows, self.x = tuple(inner for _, inner in cuts), Axis("x", last.out)
        self.spots = [*(flat(*pair) for pair in cuts), var("x")]
        blocks, self.j = cut(depthwise.channels, blocking.channels, ("gj", "j"))
        self.channel, rows = flat(blocks, self.j), tuple(outer for outer, _ in cuts)
        inner = (*rows, blocks) if blocking.is_by_rows else (blocks, *rows)
        self.grid = (Axis("n", depthwise.images), *inner)
        self.taps = tuple(Axis(f"t{d}", side.window, True) for d, side in enumerate(depthwise.sides))
        axes = (*self.grid, *self.rows, self.x, self.j, *self.taps)
        self.ranges: Ranges = {axis.name: (0, axis.extent - 1) for axis in axes}

    def finish(self) -> Pass:
        """Return the pass that computes the results, if the operands can be computed."""
        self._image()
        kept, total, _ = self._sums()
        return self._after(kept, total)

    def _sums(self) -> tuple[tuple[Axis, ...], At, int]:
        """Return the axes of the sums, the element of a sum, and the size of their tile."""
        kept = (*self.rows, self.x, self.j)
        padded = round_up(self.j.extent, self.depthwise.lanes)
        steps = row_major_strides((*(axis.extent for axis in kept[:-1]), padded))
        place = add(*(scale(var(axis.name), n) for axis, n in zip(kept, steps, strict=True)))
        return kept, At("t", place), kept[0].extent * steps[0]

    def _after(self, kept: tuple[Axis, ...], total: At) -> Pass:
        values = {"x0": self.channel, "x3": var("n")} | {f"p{d}": spot for d, spot in enumerate(self.spots)}
        return self.depthwise.after(total, kept, values, self.ranges)

    def program(self) -> TileProgram:
        """Return the program."""
        depthwise = self.depthwise
        image, where = self._image()
        kept, total, size = self._sums()
        zero = fill(kept, total, zero_of(depthwise.sum_type), depthwise.sum_type)
        weights = At(depthwise.name_of(1), add(scale(self._term, self._columns), self.channel))
        registers = Registers(self.blocking.places, 1, fetches_out=self.blocking.fetches and image.packing is None)
        contract = Contract(
            (*kept, *self.taps), total, image.at, weights, depthwise.product, registers=registers, where=where
        )
        tile = Buffer("t", Level.TILE, depthwise.sum_type, size)
        copy: tuple[Step, ...] = () if image.packing is None else (image.packing,)
        own = () if image.buffer is None else (image.buffer,)
        stage = Stage(self.grid, (*copy, zero, contract, self._after(kept, total)))
        group = PAIR if depthwise.is_of_bytes else 1
        packed = in_panels(math.prod(self._windows), self._columns, depthwise.lanes, group)
        return TileProgram((*depthwise.memory(packed), tile, *own), (stage,))

    def _image(self) -> tuple[Operand, tuple[Inside, ...]]:
        """Return where the windows are read, in memory or in a copy, and the guards for being inside of the image."""
        spots = zip(self.depthwise.sides, self.spots, self.taps, strict=True)
        index = (var("n"), *(side.met(spot, var(tap.name)) for side, spot, tap in spots))
        read = self._read(index, self.channel, self.ranges)
        load = None if self.depthwise.is_of_bytes else loaded(read.ops, can_widen=True)
        axes = (*self.rows, self.x, self.j, *self.taps)
        if load is None or not load.dtype.is_float or any(load.index.coefficient(axis.name) is None for axis in axes):
            return self._copied(), ()
        if load.index.coefficient("j") != 1 or not can_clip(load.guards, self.taps, self.x.name):
            return self._copied(), ()
        return Operand(At(load.buffer, load.index)), load.guards

    def _read(self, index: Index, channel: Expr, ranges: Ranges) -> Pass:
        """Return the pass that reads an element of the image at an index (without the channel) and a channel."""
        depthwise, images, *sides = self.depthwise, *index
        emitter = depthwise.fusion.emitter({**ranges, "k": (0, depthwise.channels - 1)})  # a block may reach beyond
        value = depthwise.fusion.argument(emitter, depthwise.root.inputs[0], (images, var("k"), *sides))
        pass_ = Pass((), "", tuple(emitter.ops), (Store("pa", ZERO, value),))
        return map_indices(pass_, lambda expr: substitute(expr, {"k": channel}, ranges))

    def _copied(self) -> Operand:
        """Return where the windows are read in a copy, and the pass that makes it."""
        sides, spots = self.depthwise.sides, (*self.rows, self.x)
        size = [side.reach(spot.extent) for side, spot in zip(sides, spots, strict=True)]
        axes = (*(Axis(f"u{d}", n) for d, n in enumerate(size)), replace(self.j, name="s"))
        steps = row_major_strides((*size, self.j.extent))
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*self.grid, *axes)}
        bases = [*(scale(var(f"g{d}"), axis.extent) for d, axis in enumerate(self.rows)), ZERO]
        index = [
            add(side.met(base, ZERO), var(f"u{d}")) for d, (side, base) in enumerate(zip(sides, bases, strict=True))
        ]
        moved = tuple(without_units(expr, ranges) for expr in (var("n"), *index))
        pass_ = self._read(moved, substitute(self.channel, {"j": var("s")}, ranges), ranges)
        place = add(*(scale(var(axis.name), n) for axis, n in zip(axes, steps, strict=True)))
        pass_ = replace(pass_, axes=axes, vector="s", sinks=(replace(pass_.sinks[0], index=place),))
        read = [var("j")]
        for d, (side, spot) in enumerate(zip(sides, spots, strict=True)):
            read += [scale(var(spot.name), side.stride * steps[d]), scale(var(f"t{d}"), side.dilation * steps[d])]
        buffer = Buffer("pa", Level.TILE, self.depthwise.dtype, steps[0] * size[0] + self.depthwise.lanes)
        return Operand(At("pa", add(*read)), buffer, None, pass_)

    @property
    def _columns(self) -> int:
        return round_up(self.depthwise.channels, self.depthwise.lanes)

    @property
    def _windows(self) -> tuple[int, ...]:
        """The size of the window along each axis; for bytes, the rows are rounded up to whole pairs."""
        sizes = tuple(tap.extent for tap in self.taps)
        return (round_up(sizes[0], PAIR), *sizes[1:]) if self.depthwise.is_of_bytes else sizes

    @property
    def _term(self) -> Expr:
        """The number of a term; for bytes, the rows of a window are the fastest axis."""
        if self.depthwise.is_of_bytes:
            return add(scale(var("t1"), self._windows[0]), var("t0"))
        return add(
            *(scale(var(tap.name), n) for tap, n in zip(self.taps, row_major_strides(self._windows), strict=True))
        )


def is_depthwise(image: tuple[int, ...], weights: tuple[int, ...], attributes: ConvAttributes) -> bool:
    """Return whether each output channel is computed from one input channel of its own."""
    return attributes.groups == image[1] == weights[0] > 1


def weights_layout(lanes: int, rank: int, is_of_bytes: bool) -> Layout:
    """Return the layout of weights in panels of channels; for bytes, pairs of a window's rows are adjacent."""
    if is_of_bytes:
        return Layout((0, 1, 3, 2), ((0, lanes), (2, PAIR)))
    return Layout((0, *range(2, rank), 1), ((0, lanes),))
