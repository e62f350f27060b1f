"""Dense convolutions on matrix units -> tile programs that read operand rows directly from the image's components.

A task computes some rows and some channels of the result. The weights and the part of the image that the task reads are
split into components. Those of one stay in the cache while blocks of the other are streamed. The rows of the image are
contiguous, each with the zeros at its left, so windows at the end of a row continue into the zeros of the next row.
"""

from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.blocks import Blocked, cut, fill, flat, store
from korch.schedule.contraction import Layouts, Packed, contraction_of
from korch.schedule.sides import Side, sides_of, without_units
from korch.schedule.split_products import operand_components, split_into
from korch.system.alignment import ceil_div, round_up
from korch.target import EDGE
from korch.tile.ir.index import Expr, add, constant, quotient, remainder, scale, var
from korch.tile.ir.program import (
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Panels,
    Pass,
    Product,
    Registers,
    Stage,
    Store,
    TileOp,
    TileProgram,
)


@dataclass(frozen=True, slots=True)
class SplitWindowBlocking:
    """How a convolution on matrix units is cut into tasks."""

    rows: int  # rows of the result that a task computes
    channels: int  # channels of the result that a task computes
    block: int  # rows of the result for which components of the image are computed together
    units: int  # steps of terms for which components of the weights are computed together, if weights are streamed
    rows_pass: bool  # whether rows are streamed while the weights stay in the cache


class Kept:
    """An axis of an image of which only the elements that windows read are kept.

    Attributes:
        side: the axis.
        keep: one of this many elements of the image is kept.
        stride: kept elements from a window to the next one.
        dilation: kept elements from a position of a window to the next one.
    """

    def __init__(self, side: Side) -> None:
        self.side = side
        self.keep = side.stride if side.window == 1 or side.dilation % side.stride == 0 else 1
        self.stride, self.dilation = side.stride // self.keep, side.dilation // self.keep

    def met(self, places: int) -> int:
        """Return how many kept elements some adjacent results read."""
        return (places - 1) * self.stride + (self.side.window - 1) * self.dilation + 1

    @property
    def reach(self) -> int:
        """How many kept elements all results along the axis read."""
        return self.met(self.side.out)

    @property
    def pitch(self) -> int:
        """The row stride: kept elements of a row and the zeros at its left, which are also the zeros right of a row."""
        left, end = ceil_div(self.side.pad, self.keep), (self.side.size - 1 + self.side.pad) // self.keep + 1
        pitch = max(min(end, self.reach), self.reach - left, self.side.out * self.stride)
        return round_up(pitch, self.stride)

    def place(self, kept: Expr) -> Expr:
        """Return where a kept element is in the image."""
        return add(scale(kept, self.keep), constant(-self.side.pad))


class SplitWindows(Blocked):
    """What all programs of a convolution on matrix units have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts) -> None:
        super().__init__(group, root, layouts, contraction_of(group, root, last=False))
        (self.images, self.channels, *_), (self.results, *_) = (group.body.types[v].shape for v in root.inputs)
        self.components = operand_components(group.body, root)
        self.down, self.across = (Kept(side) for side in sides_of(group, root))

    def program(self, blocking: SplitWindowBlocking) -> TileProgram:
        """Return the program of one blocking.

        Raises:
            NotFusedError: the operations around the convolution can't be fused with it.
        """
        down, across = self.down, self.across
        gy, y = cut(down.side.out, min(blocking.rows, down.side.out), ("gy", "y"))
        gj, j = cut(self.results, min(blocking.channels, self.results), ("gj", "j"))
        x = Axis("x", int(across.side.out))  # rows of components follow each other in memory
        taps = (Axis("t0", down.side.window, True), Axis("t1", across.side.window, True))
        terms, grid = (*taps, Axis("c", self.channels, True)), (Axis("n", self.images), gj, gy)
        axes = (*grid, y, x, j, *terms)
        ranges = {axis.name: (0, axis.extent - 1) for axis in axes}
        values = {"p0": flat(gy, y), "p1": var("x"), "x1": flat(gj, j), "x3": var("n")}
        row = round_up(j.extent, EDGE)
        total = At("t", add(scale(var("y"), x.extent * row), scale(var("x"), row), var("j")))
        zero = fill((y, x, j), total, 0.0)
        tile = Buffer("t", Level.TILE, DType.F32, y.extent * x.extent * row)
        image, own_image = self._image(y.extent, scale(var("gy"), y.extent * down.stride), grid)
        weights, own_weights = self._weights(j, flat(gj, j), grid)
        pixel = add(
            scale(add(scale(var("y"), down.stride), scale(var("t0"), down.dilation)), across.pitch),
            scale(var("x"), across.stride),
            scale(var("t1"), across.dilation),
        )
        a = add(scale(pixel, round_up(self.channels, EDGE)), var("c"))
        term = add(scale(var("t0"), taps[1].extent * self.channels), scale(var("t1"), self.channels), var("c"))
        reads = (At("sa", without_units(a, ranges)), At("sb", without_units(add(scale(term, row), var("j")), ranges)))
        registers = Registers(min(blocking.block, y.extent), blocking.units)
        contract = Contract((y, x, j, *terms), total, *reads, Product.SPLIT, registers=registers)
        after = self.after(total, (y, x, j), values, ranges)
        made = (weights, image) if blocking.rows_pass else (image, weights)
        strips = Packed(self._terms * round_up(self.results, EDGE))
        buffers = (*self.memory(strips), tile, own_image, own_weights)
        return TileProgram(buffers, (Stage(grid, (*made, zero, contract, after)),))

    @property
    def _terms(self) -> int:
        return self.channels * self.down.side.window * self.across.side.window

    def _image(self, rows: int, first: Expr, grid: tuple[Axis, ...]) -> tuple[Pass, Buffer]:
        """Return the pass that splits the part of the image that a task reads, and its tile."""
        is_longer = self.across.reach > self.across.pitch  # the last windows continue into one more row
        axes = (Axis("u", self.down.met(rows) + is_longer), Axis("v", self.across.pitch), Axis("c", self.channels))
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, *axes)}
        index = (var("n"), var("c"), self.down.place(add(first, var("u"))), self.across.place(var("v")))
        emitter = self.fusion.emitter(ranges)
        moved = tuple(without_units(expr, ranges) for expr in index)
        value = self.fusion.argument(emitter, self.root.inputs[0], moved)
        row = round_up(self.channels, EDGE)
        place = add(scale(add(scale(var("u"), self.across.pitch), var("v")), row), var("c"))
        sink = Store("sa", without_units(place, ranges), value)
        elements = axes[0].extent * axes[1].extent * row
        buffer = Buffer("sa", Level.TILE, DType.F32, elements, (Panels(row, EDGE), split_into(self.components[0])))
        return Pass(axes, "c", tuple(emitter.ops), (sink,)), buffer

    def _weights(self, j: Axis, result: Expr, grid: tuple[Axis, ...]) -> tuple[Pass, Buffer]:
        """Return the pass that splits a task's strips of the weights, and their tile."""
        axes, name = (Axis("p", self._terms), j), self.name_of(1)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, *axes)}
        strip = scale(quotient(result, EDGE, ranges), self._terms * EDGE)
        place = add(strip, scale(var("p"), EDGE), remainder(result, EDGE, ranges))
        stored = next(buffer.dtype for buffer in self.memory() if buffer.name == name)
        ops: tuple[TileOp, ...] = (Load("x0", stored, name, without_units(place, ranges)),)
        if stored is not DType.F32:
            ops = (*ops, Apply("x1", DType.F32, "cast", ("x0",)))
        row, rows = round_up(j.extent, EDGE), round_up(self._terms, EDGE)
        at = At("sb", without_units(add(scale(var("p"), row), var("j")), ranges))
        buffer = Buffer("sb", Level.TILE, DType.F32, rows * row, (Panels(row, EDGE, 2), split_into(self.components[1])))
        return Pass(axes, "j", ops, (store(at, ops[-1].name),)), buffer
