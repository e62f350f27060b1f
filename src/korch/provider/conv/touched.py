"""The sizes of a kernel of `native/korch_conv.h` -> a tile program that says which elements its tasks touch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group, Offer
from korch.candidate.layout import channels_last
from korch.primitive.types import DType
from korch.provider.conv.match import ConvChain
from korch.provider.conv.shape import Shape
from korch.target import Target
from korch.tile.index import Entry, Expr, add, constant, scale, var
from korch.tile.program import Axis, Buffer, Inside, Level, Load, Pass, Stage, Store, TileProgram

Parts = Sequence[tuple[int, int]]
"""The first row or channel of each task along an axis, and the one after its last."""

UNLIMITED = 1 << 40


@dataclass(frozen=True, slots=True)
class _Image:
    """How rows and channels of an image lie: how many channels are neighbours, and the sizes."""

    channels: int
    rows: int
    width: int
    pixel: int

    def axes(self, rows: Parts, channels: Parts) -> tuple[tuple[Axis, ...], Expr, tuple[Inside, ...]]:
        """Return the loops, the index and the guards of what each task touches."""
        blocks = -(-self.channels // self.pixel)
        parts = [(begin // self.pixel, -(-end // self.pixel)) for begin, end in channels]
        inner = self.pixel
        guards = [_before("r", "chunk", rows)]
        axes = [Axis("k", max(end - begin for begin, end in parts)), Axis("r", max(end - begin for begin, end in rows))]
        block = add(var("k"), _entry([begin for begin, _ in parts], "part"))
        first = constant(0)
        if blocks == 1 and len(channels) > 1:
            inner, first = max(end - begin for begin, end in channels), _entry([begin for begin, _ in channels], "part")
            guards.append(_before("c", "part", channels))
        elif len(channels) > 1:
            guards.append(_before("k", "part", parts))
        axes += [Axis("x", self.width), Axis("c", inner)]
        row = add(var("r"), _entry([begin for begin, _ in rows], "chunk"))
        line = self.width * self.pixel
        index = add(
            scale(var("n"), blocks * self.rows * line),
            scale(block, self.rows * line),
            scale(row, line),
            scale(var("x"), self.pixel),
            var("c"),
            first,
        )
        return tuple(axes), index, tuple(guards)


def touched_program(group: Group, match: ConvChain, shape: Shape, offer: Offer, target: Target) -> TileProgram:
    """Return a program of one stage whose tasks are those of the kernel; its values mean nothing."""
    position, out = match.image.position, group.output_types[0].shape
    rows = [(out[2] * i // shape.chunks, out[2] * (i + 1) // shape.chunks) for i in range(shape.chunks)]
    units = -(-out[1] // shape.unit)
    ends = [min(units * i // shape.parts * shape.unit, out[1]) for i in range(shape.parts + 1)]
    channels: Parts = list(itertools.pairwise(ends))
    image = _image(group.input_types[position].shape, offer.inputs[position].is_plain, offer, position, target)
    is_apart = all(layer.kind == "DEPTHWISE" for layer in shape.layers)
    read = channels if is_apart else [(0, image.channels)] * len(channels)
    result = _image(out, False, offer, None, target)
    passes: list[Pass] = []
    for i, type_ in enumerate(group.input_types):
        if i == position:
            passes.append(_load(i, image.axes([_rows_read(match, shape, *own) for own in rows], read)))
        elif i in match.full:
            passes.append(_load(i, result.axes(rows, channels)))
        elif i not in group.constant_inputs:
            size = offer.inputs[i].size_bytes(type_) // type_.dtype.size_bytes
            passes.append(_load(i, ((Axis("i", size),), var("i"), ())))
    for i in range(len(group.outputs)):
        axes, index, guards = result.axes(rows, channels)
        passes.append(Pass(axes, "", (), (Store(f"o{i}", index, "v"),), where=guards))
    grid = (Axis("n", out[0]), Axis("chunk", shape.chunks), Axis("part", shape.parts))
    tile = Buffer("t", Level.TILE, DType.F32, 1)
    return TileProgram((*_buffers(group, offer), tile), (Stage(grid, tuple(passes)),))


def _buffers(group: Group, offer: Offer) -> Sequence[Buffer]:
    found = []
    for level, letter, types, layouts in (
        (Level.INPUT, "i", group.input_types, offer.inputs),
        (Level.OUTPUT, "o", group.output_types, offer.outputs),
    ):
        for i, (type_, layout) in enumerate(zip(types, layouts, strict=True)):
            size = layout.size_bytes(type_) // type_.dtype.size_bytes
            found.append(Buffer(f"{letter}{i}", level, type_.dtype, size))
    return found


def _image(shape: tuple[int, ...], is_plain: bool, offer: Offer, position: int | None, target: Target) -> _Image:
    layout = offer.outputs[0] if position is None else offer.inputs[position]
    if layout == channels_last(4).normalized(shape):
        return _Image(shape[1], shape[2], shape[3], shape[1])
    return _Image(shape[1], shape[2], shape[3], 1 if is_plain else target.lanes)


def _rows_read(match: ConvChain, shape: Shape, begin: int, end: int) -> tuple[int, int]:
    """Return the rows of the image that are read for some rows of the result."""
    for layer in reversed(shape.layers):
        if layer.kind == "COPY":
            rows = [row for row in match.image.rows[begin:end] if row >= 0] or [0]
            return min(rows), max(rows) + 1
        top, reach = layer.pads[0], (layer.window[0] - 1) * layer.dilations[0] + 1
        begin, end = max(0, begin * layer.strides[0] - top), (end - 1) * layer.strides[0] - top + reach
        begin, end = min(begin, layer.size[0] - 1), max(1, min(end, layer.size[0]))
    return begin, max(begin + 1, end)


def _load(position: int, access: tuple[tuple[Axis, ...], Expr, tuple[Inside, ...]]) -> Pass:
    axes, index, guards = access
    return Pass(axes, "", (Load("v", DType.F32, f"i{position}", index, guards),), (Store("t", constant(0), "v"),))


def _entry(table: Sequence[int], name: str) -> Expr:
    return Expr(0, ((Entry(tuple(table), var(name)), 1),))


def _before(name: str, task: str, parts: Parts) -> Inside:
    """Return the condition that a loop has not passed the end of its task's part."""
    return Inside(add(var(name), _entry([begin - end for begin, end in parts], task)), -UNLIMITED, 0)
