"""Convolutions of bytes with few channels -> tile programs that multiply windows where they lie in copied rows.

A task copies the rows of the image that its windows meet, widened to 16 bits, with the pad around them and whole
pairs of channels. The terms of a row of a window then lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from korch.alignment import round_up
from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.blocks import Blocked, cut, fill, flat, store, zero_of
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of
from korch.schedule.products import multiplied
from korch.tile.index import ZERO, Expr, Ranges, add, constant, scale, substitute, var
from korch.tile.program import (
    PAIR,
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Loop,
    Panels,
    Pass,
    Registers,
    Stage,
    TileProgram,
)


class FewChannels(Blocked):
    """What all programs of a group with such a convolution have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, lanes: int, registers: Registers) -> None:
        """Prepare them.

        Raises:
            NotFusedError: the convolution is not of this kind.
        """
        super().__init__(group, root, layouts, contraction_of(group, root, last=True))
        image, weights, out = (group.body.types[value].shape for value in (*root.inputs, root.output))
        self.attributes = root.attributes_as(ConvAttributes)
        self.images, self.channels, self.places, self.window = image[0], image[1], out[2:], weights[2:]
        self.product, self.registers, self.strip = multiplied(self.product, lanes), registers, registers.vectors * lanes
        if self.attributes.groups != 1 or self.attributes.dilations[1] != 1:
            raise NotFusedError("the terms of a window's row do not lie side by side")
        self.outputs = group.body.types[root.output].shape[1]
        self.pixel = round_up(self.channels, PAIR)
        self.row = self.reach(1, self.places[1]) * self.pixel

    def reach(self, axis: int, places: int) -> int:
        """Return from how many neighbours along a spatial axis some places are computed."""
        at = self.attributes
        return (places - 1) * at.strides[axis] + (self.window[axis] - 1) * at.dilations[axis] + 1

    def program(self, rows: int) -> TileProgram:
        """Return the program whose tasks compute some rows of places."""
        (gy, y), x, j = cut(self.places[0], rows, ("gy", "y")), Axis("x", self.places[1]), Axis("j", self.outputs)
        grid = (Axis("n", self.images), gy)
        terms = Axis("t0", self.window[0], True), Axis("m", self.window[1] * self.pixel, True)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, y, x, j, *terms)}
        total = At("t", add(scale(var("x"), self._columns), var("j")))
        zero = fill((x, j), total, zero_of(self.sum_type), self.sum_type)
        at = self.attributes
        line = add(scale(var("y"), at.strides[0]), scale(var("t0"), at.dilations[0]))
        a = At("pa", add(scale(line, self.row), scale(var("x"), at.strides[1] * self.pixel), var("m")))
        term = add(scale(var("t0"), terms[1].extent), var("m"))
        b = At(self._weights, add(scale(term, self._columns), var("j")))
        contract = Contract((x, j, *terms), total, a, b, self.product, registers=self.registers)
        values: dict[str, Expr] = {"x1": var("j"), "x3": var("n"), "p0": flat(gy, y), "p1": var("x")}
        after = self.after(total, (x, j), values, ranges)
        size = self.reach(0, y.extent), self.reach(1, x.extent)
        copy = self._copy(size, y, ranges)
        tile = Buffer("t", Level.TILE, self.sum_type, x.extent * self._columns)
        copied = Buffer("pa", Level.TILE, self.product.types[0], size[0] * self.row)
        steps = (copy, Loop(y, (), (zero, contract, after)))
        return TileProgram((*self._memory(), tile, copied), (Stage(grid, steps),))

    def _copy(self, size: tuple[int, int], y: Axis, ranges: Ranges) -> Pass:
        """Return the pass that copies what a task reads of an image: some rows and columns."""
        at, axes = self.attributes, (Axis("u0", size[0]), Axis("u1", size[1]), Axis("c", self.channels))
        emitter = self.fusion.emitter({**ranges, **{axis.name: (0, axis.extent - 1) for axis in axes}})
        line = add(scale(var("gy"), y.extent * at.strides[0]), var("u0"), constant(-at.pads_begin[0]))
        index = (var("n"), var("c"), line, add(var("u1"), constant(-at.pads_begin[1])))
        units = {name: ZERO for name, (_, high) in emitter.ranges.items() if high == 0}
        moved = tuple(substitute(expr, units, emitter.ranges) for expr in index)
        value = self.fusion.argument(emitter, self.root.inputs[0], moved)
        wide = emitter.apply(self.product.types[0], "cast", value)
        place = add(scale(var("u0"), self.row), scale(var("u1"), self.pixel), var("c"))
        return Pass(axes, "c", tuple(emitter.ops), (store(At("pa", place), wide),))

    @property
    def _columns(self) -> int:
        return round_up(self.outputs, self.strip)

    @property
    def _weights(self) -> str:
        return self.fusion.place[self.root.inputs[1]]

    def _memory(self) -> Iterator[Buffer]:
        """Yield the buffers of inputs and outputs; weights are in panels."""
        for buffer in self.memory():
            if buffer.name == self._weights:
                elements = self.window[0] * self.window[1] * self.pixel * self._columns
                buffer = replace(buffer, elements=elements, layout=(Panels(self._columns, self.strip, PAIR),))
            yield buffer
