"""Convolutions of bytes with few channels -> tile programs that read windows directly from copied rows.

A task copies the rows of the image that its windows cover, with the padding around them. Channels are padded to
whole groups of terms, perhaps widened to 16 bits. The terms of a window's row are then contiguous.
"""

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.schedule.blocks import Blocked, cut, fill, flat, store, zero_of
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of, in_panels
from korch.schedule.products import multiplied
from korch.schedule.sides import sides_of, without_units
from korch.system.alignment import round_up
from korch.tile.ir.index import Expr, Ranges, add, constant, scale, var
from korch.tile.ir.program import At, Axis, Buffer, Contract, Level, Loop, Pass, Registers, Stage, TileProgram


class FewChannels(Blocked):
    """What all programs of a group with a convolution of this kind have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, lanes: int, registers: Registers) -> None:
        """Prepare what the programs share.

        Raises:
            NotFusedError: the convolution is not of this kind.
        """
        super().__init__(group, root, layouts, contraction_of(group, root, last=True))
        self.images, self.channels, *_ = group.body.types[root.inputs[0]].shape
        self.down, self.along = sides_of(group, root)
        self.product, self.registers, self.strip = multiplied(self.product, lanes), registers, registers.vectors * lanes
        if root.attributes_as(ConvAttributes).groups != 1 or self.along.dilation != 1:
            raise NotFusedError("the terms of a window's row do not lie side by side")
        self.outputs = group.body.types[root.output].shape[1]
        self.pixel = round_up(self.channels, self.product.group)
        self.row = self.along.reach(self.along.out) * self.pixel

    def program(self, rows: int) -> TileProgram:
        """Return the program in which a task computes `rows` rows of the result."""
        (gy, y), x, j = cut(self.down.out, rows, ("gy", "y")), Axis("x", self.along.out), Axis("j", self.outputs)
        grid = (Axis("n", self.images), gy)
        terms = Axis("t0", self.down.window, True), Axis("m", self.along.window * self.pixel, True)
        ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, y, x, j, *terms)}
        total = At("t", add(scale(var("x"), self._columns), var("j")))
        zero = fill((x, j), total, zero_of(self.sum_type), self.sum_type)
        line = add(scale(var("y"), self.down.stride), scale(var("t0"), self.down.dilation))
        a = At("pa", add(scale(line, self.row), scale(var("x"), self.along.stride * self.pixel), var("m")))
        term = add(scale(var("t0"), terms[1].extent), var("m"))
        b = At(self.name_of(1), add(scale(term, self._columns), var("j")))
        contract = Contract((x, j, *terms), total, a, b, self.product, registers=self.registers)
        values: dict[str, Expr] = {"x1": var("j"), "x3": var("n"), "p0": flat(gy, y), "p1": var("x")}
        after = self.after(total, (x, j), values, ranges)
        size = self.down.reach(y.extent), self.along.reach(x.extent)
        copy = self._copy(size, y, ranges)
        tile = Buffer("t", Level.TILE, self.sum_type, x.extent * self._columns)
        copied = Buffer("pa", Level.TILE, self.product.types[0], size[0] * self.row)
        steps = (copy, Loop(y, (), (zero, contract, after)))
        count, group = terms[0].extent * terms[1].extent, self.product.group
        memory = self.memory(in_panels(count, self._columns, self.strip, group))
        return TileProgram((*memory, tile, copied), (Stage(grid, steps),))

    def _copy(self, size: tuple[int, int], y: Axis, ranges: Ranges) -> Pass:
        """Return the pass that copies the rows and columns of an image that a task reads."""
        axes = (Axis("u0", size[0]), Axis("u1", size[1]), Axis("c", self.channels))
        emitter = self.fusion.emitter({**ranges, **{axis.name: (0, axis.extent - 1) for axis in axes}})
        line = add(scale(var("gy"), y.extent * self.down.stride), var("u0"), constant(-self.down.pad))
        index = (var("n"), var("c"), line, add(var("u1"), constant(-self.along.pad)))
        moved = tuple(without_units(expr, emitter.ranges) for expr in index)
        value = self.fusion.argument(emitter, self.root.inputs[0], moved)
        wide = emitter.apply(self.product.types[0], "cast", value)
        place = add(scale(var("u0"), self.row), scale(var("u1"), self.pixel), var("c"))
        return Pass(axes, "c", tuple(emitter.ops), (store(At("pa", place), wide),))

    @property
    def _columns(self) -> int:
        return round_up(self.outputs, self.strip)
