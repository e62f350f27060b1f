"""Products and convolutions of bytes on matrix units -> tile programs that read rows in place.

Terms are processed in equal steps of up to 64. If the terms of a product do not fill whole steps, its rows are copied
with room for the missing terms, for which the panels of the second operand hold 0. For a convolution, a task copies
the lines of the image that its windows cover, with the padding around them, and reads each row of a window in this
copy; or it reads the image itself.
"""

from dataclasses import dataclass

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.blocks import Blocked, Operand, cut, direct, fill, flat, store, zero_of
from korch.schedule.contraction import Contraction, Layouts, NotFusedError, contraction_of, extent, in_panels
from korch.schedule.products import Products
from korch.schedule.sides import sides_of, without_units
from korch.system.alignment import ceil_div, round_up
from korch.tile.analysis.registers import STRIP, steps_of, whole_quads
from korch.tile.ir.index import Expr, Ranges, add, constant, scale, var
from korch.tile.ir.program import QUAD, At, Axis, Buffer, Contract, Level, Pass, Registers, Stage, Step, TileProgram
from korch.tile.lower.emit import Emitter
from korch.tile.lower.staging import Machine


def unit_of(terms: int) -> int:
    """Return how many terms a step has if some terms are divided into as few equal steps as possible."""
    quads = whole_quads(ceil_div(terms, QUAD))
    return QUAD * (quads // steps_of(quads))


def tile_registers(lanes: int, strips_pass: bool) -> Registers:
    """Return how a contraction is computed in tiles: strips of columns are streamed while rows stay, or the reverse."""
    return Registers(STRIP, STRIP // lanes, fetches_b=strips_pass, in_tiles=True)


class TiledProducts(Products):
    """What all programs of a group on matrix units have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction, machine)
        self.unit = unit_of(extent(self.terms))


@dataclass(frozen=True, slots=True)
class WindowBlocking:
    """How a convolution is cut into tasks: lines and channels of the result; are strips of channels streamed?"""

    lines: int
    channels: int
    strips_pass: bool


class ByteWindows(Blocked):
    """What all programs of a group with a convolution of bytes on matrix units have in common.

    Attributes:
        images: the number of images.
        channels: channels of an image.
        results: channels of the result.
        down: the vertical axis: lines of the image, and the window along it.
        along: the horizontal axis: pixels of a line, and the window along it.
        pixel: the bytes of a pixel in a copy, and the terms of the weights for each pixel of a window.
    """

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, machine: Machine) -> None:
        """Prepare what the programs share.

        Raises:
            NotFusedError: the convolution has groups, or not two spatial axes.
        """
        super().__init__(group, root, layouts, contraction_of(group, root, last=True))
        self.images, self.channels, *sizes = group.body.types[root.inputs[0]].shape
        if root.attributes_as(ConvAttributes).groups != 1 or len(sizes) != 2:
            raise NotFusedError("it is no convolution of images without groups")
        self.results = group.body.types[root.output].shape[1]
        self.down, self.along = sides_of(group, root)
        self.lanes, self.pixel = machine.lanes, QUAD * pixel_quads(group, root)

    @property
    def terms(self) -> int:
        """The number of terms of a result."""
        return self.down.window * self.along.window * self.pixel

    def copied_bytes(self, lines: int) -> int:
        """Return the size of a copy of the part of the image that some lines of the result are computed from."""
        return self.down.reach(lines) * self.along.reach(self.along.out) * self.pixel

    def program(self, blocking: WindowBlocking) -> TileProgram:
        """Return the program of one blocking.

        Raises:
            NotFusedError: the operations around the convolution can't be fused with it.
        """
        gy, y = cut(self.down.out, blocking.lines, ("gy", "y"))
        gj, j = cut(self.results, blocking.channels, ("gj", "j"))
        x, grid = Axis("x", self.along.out), (gj, Axis("n", self.images), gy)
        taps = Axis("t0", self.down.window, True), Axis("t1", self.along.window, True)
        terms = (*taps, Axis("c", self.pixel, True))
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, y, x, j, *terms)}
        row = round_up(j.extent, self.lanes)
        total = At("t", add(scale(add(scale(var("y"), x.extent), var("x")), row), var("j")))
        zero = fill((y, x, j), total, zero_of(self.sum_type), self.sum_type)
        image = self._image((gy, y), ranges)
        term = add(scale(add(scale(var("t0"), self.along.window), var("t1")), self.pixel), var("c"))
        b = At(self.name_of(1), add(scale(term, self._columns), flat(gj, j)))
        a, b = (At(at.buffer, without_units(at.index, ranges)) for at in (image.at, b))
        registers = tile_registers(self.lanes, blocking.strips_pass)
        contract = Contract((y, x, j, *terms), total, a, b, self.product, registers=registers)
        values: dict[str, Expr] = {"x1": flat(gj, j), "x3": var("n"), "p0": flat(gy, y), "p1": var("x")}
        after = self.after(total, (y, x, j), values, ranges)
        tile = Buffer("t", Level.TILE, self.sum_type, y.extent * x.extent * row)
        steps: tuple[Step, ...] = (*image.passes, zero, contract, after)
        memory = self.memory(in_panels(self.terms, self._columns, STRIP, QUAD))
        return TileProgram((*memory, tile, *image.buffers), (Stage(grid, steps),))

    def _image(self, lines: tuple[Axis, Axis], ranges: Ranges) -> Operand:
        """Return where windows are read: in the image, if neither it nor its pixels need padding, or in a copy."""
        place = self.down.met(flat(*lines), var("t0")), self.along.met(var("x"), var("t1"))
        emitter = self.fusion.emitter(ranges)
        _ = self._element(emitter, place)
        axes = (lines[1], *(Axis(name, ranges[name][1] + 1) for name in ("x", "t0", "t1", "c")))
        found = direct(emitter.ops, axes, can_widen=False) if self.pixel == self.channels else None
        if found is not None and found.index.coefficient("c") in (1, None if self.channels > 1 else 0):
            return Operand(found)
        row = self.along.reach(self.along.out) * self.pixel
        own = Axis("u0", self.down.reach(lines[1].extent)), Axis("u1", row // self.pixel), Axis("c", self.channels)
        emitter = self.fusion.emitter({**ranges, **{axis.name: (0, axis.extent - 1) for axis in own}})
        first = add(scale(var("gy"), lines[1].extent * self.down.stride), constant(-self.down.pad))
        value = self._element(emitter, (add(first, var("u0")), add(var("u1"), constant(-self.along.pad))))
        to = At("pa", add(scale(var("u0"), row), scale(var("u1"), self.pixel), var("c")))
        packing = Pass(own, "c", tuple(emitter.ops), (store(to, value),))
        line = add(scale(var(lines[1].name), self.down.stride), scale(var("t0"), self.down.dilation))
        pixel = add(scale(var("x"), self.along.stride), scale(var("t1"), self.along.dilation))
        at = At("pa", add(scale(line, row), scale(pixel, self.pixel), var("c")))
        return Operand(at, Buffer("pa", Level.TILE, self.dtype, own[0].extent * row), None, packing)

    def _element(self, emitter: Emitter, place: tuple[Expr, Expr]) -> str:
        """Return the name of an element of the image; 0 outside of it."""
        index = tuple(without_units(expr, emitter.ranges) for expr in (var("n"), var("c"), *place))
        return self.fusion.argument(emitter, self.root.inputs[0], index)

    @property
    def _columns(self) -> int:
        return round_up(self.results, STRIP)


def pixel_quads(group: Group, root: Primitive) -> int:
    """Return how many groups of 4 channels a pixel is padded to, so that a window's row makes few equal steps."""
    _, channels, *window = group.body.types[root.inputs[1]].shape
    is_joined = root.attributes_as(ConvAttributes).dilations[-1] == 1
    beside, quads = window[-1] if is_joined else 1, ceil_div(channels, QUAD)
    return min(range(quads, quads + QUAD), key=lambda count: (steps_of(beside * count), count))
