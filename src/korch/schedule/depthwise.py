"""Depthwise convolutions of bytes -> tile programs in which the elements of a vector are channels.

A task copies what its windows meet to a tile, with the pad around it, channels last. The contraction
has one column for each channel, on which both operands depend, and one term for each place of a window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.blocks import Blocked, cut, fill, flat, store, zero_of
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of
from korch.tile.index import ZERO, Expr, Ranges, add, constant, scale, substitute, var
from korch.tile.program import PAIR, At, Axis, Buffer, Contract, Level, Panels, Pass, Registers, Stage, TileProgram

MOST_TAPS = 49
"""Places of a window: the loops over them are unrolled."""


class Depthwise(Blocked):
    """What all programs of a group with a depthwise convolution of bytes have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, lanes: int) -> None:
        """Prepare them.

        Raises:
            NotFusedError: the convolution is not of this kind.
        """
        super().__init__(group, root, layouts, contraction_of(group, root, last=True))
        image, weights, out = (group.body.types[value].shape for value in (*root.inputs, root.output))
        self.attributes = root.attributes_as(ConvAttributes)
        if not is_depthwise(image, weights, self.attributes):
            raise NotFusedError("the channels are in groups")
        if len(out) != 4:
            raise NotFusedError("a depthwise convolution does not have two spatial axes")
        if weights[2] * weights[3] > MOST_TAPS:
            raise NotFusedError("the window is too large")
        self.images, self.channels, self.places, self.window = image[0], image[1], out[2:], weights[2:]
        self.lanes = lanes

    def reach(self, axis: int, places: int) -> int:
        """Return from how many neighbours along a spatial axis some places are computed."""
        at = self.attributes
        return (places - 1) * at.strides[axis] + (self.window[axis] - 1) * at.dilations[axis] + 1

    def program(self, rows: int, channels: int, places: int) -> TileProgram:
        """Return the program whose tasks compute some rows of places and some channels.

        Args:
            rows: of places of a task.
            channels: of a task.
            places: of a row that are in registers at a time.

        Raises:
            NotFusedError: what stands around the convolution can't be computed with it.
        """
        (gy, y), (gj, j) = cut(self.places[0], rows, ("gy", "y")), cut(self.channels, channels, ("gj", "j"))
        x, grid = Axis("x", self.places[1]), (Axis("n", self.images), gj, gy)
        taps = tuple(Axis(f"t{axis}", n, True) for axis, n in enumerate(self.window))
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, y, x, j, *taps)}
        padded = -(-j.extent // self.lanes) * self.lanes
        total = At("t", add(scale(var("y"), x.extent * padded), scale(var("x"), padded), var("j")))
        zero = fill((y, x, j), total, zero_of(self.sum_type), self.sum_type)
        a, b = self._read(j.extent), At(self._weights, add(scale(self._term, self._columns), flat(gj, j)))
        contract = Contract((y, x, j, *taps), total, a, b, self.product, registers=Registers(places, 1))
        values: dict[str, Expr] = {"x0": flat(gj, j), "x3": var("n"), "p0": flat(gy, y), "p1": var("x")}
        after = self.after(total, (y, x, j), values, ranges)
        size = (self.reach(0, y.extent), self.reach(1, x.extent))
        copy = self._copy(size, y, (gj, j), ranges)
        tile = Buffer("t", Level.TILE, self.sum_type, y.extent * x.extent * padded)
        copied = Buffer("pa", Level.TILE, self.dtype, size[0] * size[1] * j.extent + self.lanes)
        return TileProgram((*self._memory(), tile, copied), (Stage(grid, (copy, zero, contract, after)),))

    def _copy(self, size: tuple[int, int], y: Axis, channels: tuple[Axis, Axis], ranges: Ranges) -> Pass:
        """Return the pass that copies what a task reads of an image."""
        at, (gj, j) = self.attributes, channels
        axes = (Axis("u0", size[0]), Axis("u1", size[1]), replace(j, name="c"))
        emitter = self.fusion.emitter({**ranges, **{axis.name: (0, axis.extent - 1) for axis in axes}})
        index = (
            var("n"),
            flat(gj, axes[2]),
            add(scale(var("gy"), y.extent * at.strides[0]), var("u0"), constant(-at.pads_begin[0])),
            add(var("u1"), constant(-at.pads_begin[1])),
        )
        units = {name: ZERO for name, (_, high) in emitter.ranges.items() if high == 0}
        moved = tuple(substitute(expr, units, emitter.ranges) for expr in index)
        value = self.fusion.argument(emitter, self.root.inputs[0], moved)
        place = add(scale(var("u0"), size[1] * j.extent), scale(var("u1"), j.extent), var("c"))
        return Pass(axes, "c", tuple(emitter.ops), (store(At("pa", place), value),))

    def _read(self, channels: int) -> At:
        """Return which element of the copy a product reads."""
        at, row = self.attributes, self.reach(1, self.places[1]) * channels
        steps = zip((*at.strides, *at.dilations), (row, channels) * 2, ("y", "x", "t0", "t1"), strict=True)
        return At("pa", add(*(scale(var(name), step * n) for step, n, name in steps), var("j")))

    @property
    def _columns(self) -> int:
        return -(-self.channels // self.lanes) * self.lanes

    @property
    def _pairs(self) -> int:
        """The rows of a window, in whole pairs."""
        return -(-self.window[0] // PAIR) * PAIR

    @property
    def _term(self) -> Expr:
        return add(scale(var("t1"), self._pairs), var("t0"))

    @property
    def _weights(self) -> str:
        return self.fusion.place[self.root.inputs[1]]

    def _memory(self) -> Iterator[Buffer]:
        """Yield the buffers of inputs and outputs; weights are in panels."""
        for buffer in self.memory():
            if buffer.name == self._weights:
                elements = self._pairs * self.window[1] * self._columns
                buffer = replace(buffer, elements=elements, layout=(Panels(self._columns, self.lanes, PAIR),))
            yield buffer


def is_depthwise(image: tuple[int, ...], weights: tuple[int, ...], attributes: ConvAttributes) -> bool:
    """Return whether each channel is computed from one channel of its own."""
    return attributes.groups == image[1] == weights[0] > 1


def weights_layout(lanes: int) -> Layout:
    """Return the layout of weights in panels of channels, with pairs of a window's rows side by side."""
    return Layout((0, 1, 3, 2), ((0, lanes), (2, PAIR)))
