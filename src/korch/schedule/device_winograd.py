"""Winograd convolutions -> tile programs for GPUs, with three stages.

The first stage transforms the tiles of the image, the second multiplies each point of them by the weights, and the
third transforms the products back. The operations before and after the convolution are fused into the first and the
last stage. Between stages, channels are adjacent in memory if they are adjacent in the images; otherwise tiles are.
"""

import itertools

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.types import DType
from korch.schedule.blocks import flat, store
from korch.schedule.contraction import Contraction, Layouts
from korch.schedule.device import SUMS, BlockLoops, Blocks
from korch.schedule.winograd import Winograd, both_ways
from korch.tile.ir.index import ZERO, Expr, add, constant, scale, var
from korch.tile.ir.program import At, Axis, Buffer, Inside, Level, Load, Pass, Product, Stage, Store, TileProgram, holds

POINTS, PRODUCTS = "v", "w"
"""The buffers of transformed tiles, and of their products with the weights."""


class DeviceWinograd(Winograd):
    """Programs of a group with one Winograd convolution.

    Raises:
        NotFusedError: from any method, if the operations around the convolution can't be fused with it.
    """

    def __init__(self, group: Group, root: Primitive, layouts: Layouts) -> None:
        super().__init__(group, root, layouts, lanes=1)
        place = self.fusion.place.get(root.inputs[0])
        self.reads_last = place is not None and not self.fusion.layouts[place].is_plain
        self.writes_last = not layouts[1][0].is_plain

    @property
    def products(self) -> Contraction:
        """The products: [points, tiles, channels] times [points, channels, outputs]."""
        axes = (("z", self.points), ("i", self.tiles), ("o", self.outputs), ("c", self.channels))
        z, i, o, c = (self._variable(*axis) for axis in axes)
        of_z, of_i, of_o, of_c = ((axis,) if axis[1] > 1 else () for axis in axes)
        return Contraction(of_z, of_i, of_o, of_c, (z, i, c), (z, c, o), (z, i, o))

    def blocked(self, blocks: Blocks, product: Product) -> TileProgram:
        """Return the program whose products are computed in blocks."""
        multiply, tiles = self._multiply(blocks, product)
        between = [
            Buffer(name, Level.WORKSPACE, DType.F32, self.points * self.tiles * channels)
            for name, channels in ((POINTS, self.channels), (PRODUCTS, self.outputs))
        ]
        results = [Buffer(f"r{k}", Level.TILE, DType.F32, 1) for k in range(self.tile**2)]
        return TileProgram(
            (*self.fusion.memory(), *between, *tiles, *results), (self._points(), multiply, self._results())
        )

    def _between(self, point: Expr, tile: Expr, channel: Expr, channels: int, last: bool) -> Expr:
        """Return the index of an element of a transformed tensor; channels are adjacent if `last`, else tiles."""
        one = add(scale(tile, channels), channel) if last else add(scale(channel, self.tiles), tile)
        return add(scale(point, self.tiles * channels), one)

    def _axes(self, channels: int, last: bool) -> tuple[Axis, ...]:
        """Return the loops over tiles and channels, in the order of images in memory."""
        image, *place = (Axis(name, n) for name, n in (("z", self.images), ("y", self.down), ("x", self.across)))
        return (image, *place, Axis("c", channels)) if last else (image, Axis("c", channels), *place)

    @property
    def _tile(self) -> Expr:
        """The number of a tile."""
        row = add(scale(self._variable("z", self.images), self.down), self._variable("y", self.down))
        return add(scale(row, self.across), self._variable("x", self.across))

    def _points(self) -> Stage:
        """Return the stage that transforms the image."""
        emitter, channel = self._emitter({"c": self.channels}), self._variable("c", self.channels)
        tile = [[self._pixel(emitter, channel, i, j) for j in range(self.edge)] for i in range(self.edge)]
        found = itertools.chain(*both_ways(emitter, self.transforms.data, tile))
        sinks = tuple(
            Store(POINTS, self._between(constant(p), self._tile, channel, self.channels, self.reads_last), name)
            for p, name in enumerate(found)
        )
        return Stage(self._axes(self.channels, self.reads_last), (Pass((), "", tuple(emitter.ops), sinks),))

    def _multiply(self, blocks: Blocks, product: Product) -> tuple[Stage, tuple[Buffer, ...]]:
        """Return the stage of the products, and its tiles."""
        grid = BlockLoops((Axis("q", self.points),), (self.tiles, self.outputs, self.channels), blocks)
        tile, column, term = flat(*grid.rows), flat(*grid.columns), grid.term
        places = (
            At(POINTS, self._between(var("q"), tile, term, self.channels, self.reads_last)),
            At(self.weights, add(scale(add(scale(var("q"), self.channels), term), self.outputs), column)),
        )
        operands = [([Load("x0", DType.F32, at.buffer, at.index, grid.guards)], "x0") for at in places]
        out = At(PRODUCTS, self._between(var("q"), tile, column, self.outputs, self.writes_last))
        load = Load("x0", DType.F32, SUMS, grid.sums.index)
        after = Pass((grid.rows[1], grid.columns[1]), "j", (load,), (store(out, "x0"),))
        return grid.stage(product, DType.F32, operands, after)

    def _results(self) -> Stage:
        """Return the stage that transforms the products back, and computes the operations after the convolution."""
        emitter, channel = self._emitter({"c": self.outputs}), self._variable("c", self.outputs)
        sums = []
        for p in range(self.points):
            place = self._between(constant(p), self._tile, channel, self.outputs, self.writes_last)
            emitter.ops.append(Load(f"x{p}", DType.F32, PRODUCTS, place))
            sums.append(f"x{p}")
        rows = [sums[i : i + self.edge] for i in range(0, self.points, self.edge)]
        found = itertools.chain(*both_ways(emitter, self.transforms.output, rows))
        sinks = tuple(Store(f"r{k}", ZERO, name) for k, name in enumerate(found))
        back = Pass((), "", tuple(emitter.ops), sinks)
        after = (self._result(k, channel) for k in range(self.tile**2))
        return Stage(self._axes(self.outputs, self.writes_last), (back, *after))

    def _result(self, number: int, channel: Expr) -> Pass:
        """Return the pass that computes the outputs from one result of a tile, if it is inside of the image."""
        emitter = self._emitter({"c": self.outputs})
        image, row, column = self._place(*divmod(number, self.tile))
        emitter.ops.append(Load("x0", DType.F32, f"r{number}", ZERO))
        outputs = self.fusion.outputs(emitter, self.root, (image, channel, row, column), "x0")
        sinks = tuple(Store(buffer, place, value) for buffer, _, place, value in outputs)
        guards = (Inside(row, 0, self.shape[2]), Inside(column, 0, self.shape[3]))
        where = tuple(guard for guard in guards if not holds(guard, emitter.ranges))
        return Pass((), "", tuple(emitter.ops), sinks, where=where)
