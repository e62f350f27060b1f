"""Winograd convolutions as Triton: transform, matrix products, and the way back, in three launches.

Elementwise and layout primitives before the convolution are computed while its input is read, those
after it on the results. The transformed tensors are float32 and go through the level-2 cache, or
through memory where they are larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.winograd import TRANSFORMS, WinogradAttributes, tile_counts
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.provider.triton.printer import KernelPrinter
from korch.provider.triton.product import Tile, product_layouts, tiles_for
from korch.schedule.contraction import Contraction, NotFusedError, root_of
from korch.tile.index import ZERO, Expr, add, constant, scale, var
from korch.tile.triton_text import COLUMNS, Coordinate, Text

TILES_OFFERED = 2

BLOCK = 128
"""Tiles of the image, times channels, that a program transforms."""


class TritonWinogradProvider:
    """Makes kernels for groups with one Winograd convolution."""

    name = "triton-winograd"
    version = content_version("provider/triton", "cuda")
    group_shapes = (around("winograd"),)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer tiles of the products in each layout."""
        root = root_of(group, "winograd")
        if isinstance(root, Refusal):
            return root
        if group.body.types[root.output].dtype is not DType.F32:
            return Refusal("the transforms would lose the bits of a half type")
        offers = []
        places = group.position
        weights = places.get(root.inputs[1])
        if weights is None:
            return Refusal("the transformed weights are computed in the group")
        for inputs, outputs in product_layouts(group):
            inputs = (*inputs[:weights], Layout.plain(4), *inputs[weights + 1 :])
            printer = _Printer(group, Offer(inputs, outputs), root, target)
            try:
                printer.check()
            except NotFusedError as error:
                return Refusal(str(error))
            tiles = [t for t in tiles_for(printer.products, DType.F32, target) if t.parts == 1]
            offers += [Offer(inputs, outputs, str(tile), group.body.work_flop(root)) for tile in tiles[:TILES_OFFERED]]
        return offers or Refusal("the products are too small for a tile")

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the kernel."""
        root = root_of(group, "winograd")
        if isinstance(root, Refusal):
            return root
        try:
            return _Printer(group, offer, root, target).print(Tile.parse(offer.variant))
        except NotFusedError as error:
            return Refusal(str(error))


class _Printer(KernelPrinter):
    def __init__(self, group: Group, offer: Offer, root: Primitive, target: CudaTarget) -> None:
        super().__init__(group, offer, target, root)
        if not isinstance(root.attributes, WinogradAttributes):
            raise AssertionError("winograd without its attributes")
        self.root = root
        self.attributes = root.attributes
        self.m = root.attributes.tile
        self.points = (self.m + 2) ** 2
        types = self.body.types
        self.images, self.channels = types[root.inputs[0]].shape[:2]
        self.shape = types[root.output].shape
        self.down, self.across = tile_counts(self.shape, self.m)
        self.tiles = self.images * self.down * self.across
        layouts = dict(zip((v for _, v in self.body.inputs), offer.inputs, strict=True))
        plain = layouts.get(root.inputs[0])
        self.reads_last = plain is not None and not plain.is_plain
        self.writes_last = not offer.outputs[0].is_plain
        axes = (("z", self.points), ("i", self.tiles), ("o", self.shape[1]), ("c", self.channels))
        z, i, o, c = (ZERO if n == 1 else var(name) for name, n in axes)
        of = {name: ((name, n),) if n > 1 else () for name, n in axes}
        # V is [points, tiles, channels], U [points, channels, outputs].
        self.products = Contraction(of["z"], of["i"], of["o"], of["c"], (z, i, c), (z, c, o), (z, i, o))

    def check(self) -> None:
        """Raise NotFusedError if something around the convolution does not fit."""
        emitter = self.fusion.emitter(self._ranges(self.channels))
        self.fusion.argument(emitter, self.root.inputs[0], self._source(0, 0))
        emitter = self.fusion.emitter(self._ranges(self.shape[1]))
        self.fusion.outputs(emitter, self.root, self._target(0, 0), "result")

    def print(self, tile: Tile) -> CudaKernel:
        """Print the three launches."""
        outputs = self.shape[1]
        self.scratch["v"] = (DType.F32, self.points * self.tiles * self.channels)
        self.scratch["w"] = (DType.F32, self.points * self.tiles * outputs)
        self._there()
        self._products(tile)
        self._back()
        return self.kernel()

    def _ranges(self, channels: int) -> dict[str, tuple[int, int]]:
        return {"n": (0, self.images - 1), "y": (0, self.down - 1), "x": (0, self.across - 1), "c": (0, channels - 1)}

    def _variable(self, name: str, size: int) -> Expr:
        return var(name) if size > 1 else ZERO

    def _source(self, i: int, j: int) -> tuple[Expr, ...]:
        """Return the index of a tile's input at row i and column j."""
        top, left = self.attributes.pads_begin
        return (
            self._variable("n", self.images),
            self._variable("c", self.channels),
            add(scale(self._variable("y", self.down), self.m), constant(i - top)),
            add(scale(self._variable("x", self.across), self.m), constant(j - left)),
        )

    def _target(self, i: int, j: int) -> tuple[Expr, ...]:
        """Return the index of a tile's result at row i and column j."""
        return (
            self._variable("n", self.images),
            self._variable("c", self.shape[1]),
            add(scale(self._variable("y", self.down), self.m), constant(i)),
            add(scale(self._variable("x", self.across), self.m), constant(j)),
        )

    def _flat(self, text: Text, channels: int, last: bool) -> tuple[dict[str, Coordinate], str]:
        """Write the coordinates of tiles and channels, side by side as in memory."""
        size = self.tiles * channels
        text.line(f"f0 = tl.program_id(0) * {BLOCK} + tl.arange(0, {BLOCK})[None, :]")
        mask = f"(f0 < {size})" if size % BLOCK else ""
        axes = [("n", self.images), ("y", self.down), ("x", self.across)]
        axes = [*axes, ("c", channels)] if last else [axes[0], ("c", channels), *axes[1:]]
        at = text.split("f0", axes, COLUMNS)
        text.line(f"tile = ({at['n'].text} * {self.down} + {at['y'].text}) * {self.across} + {at['x'].text}")
        return at, mask

    def _there(self) -> None:
        """Print the transform of the input: V = B d B'."""
        text, size = Text(), self.m + 2
        at, mask = self._flat(text, self.channels, self.reads_last)
        masks = {1: mask} if mask else {}
        emitter = self.fusion.emitter(self._ranges(self.channels))
        names = [
            [self.fusion.argument(emitter, self.root.inputs[0], self._source(i, j)) for j in range(size)]
            for i in range(size)
        ]
        values: dict[str, str] = {}
        text.ops(emitter.ops, at, masks, values, {})
        d = [[values[name] for name in row] for row in names]
        found = self._transform(text, TRANSFORMS[self.m].data, d)
        stored = f", mask={mask}" if mask else ""
        for i in range(size):
            for j in range(size):
                base = (i * size + j) * self.tiles * self.channels
                text.line(
                    f"tl.store({text.pointer('v')} + (tile * {self.channels} + {at['c'].text} + "
                    f"{base}), tl.broadcast_to({found[i][j]}, [1, {BLOCK}]){stored})"
                )
        self.finish(text, -(-self.tiles * self.channels // BLOCK), 4, 2)

    def _transform(self, text: Text, matrix: Array, d: Sequence[Sequence[str]]) -> list[list[str]]:
        """Write matrix d matrix' of named tiles; return the names of the results."""
        half = [[self._sum(text, row, [d[k][j] for k in range(len(d))]) for j in range(len(d[0]))] for row in matrix]
        return [[self._sum(text, row, line) for row in matrix] for line in half]

    def _sum(self, text: Text, factors: Array, names: Sequence[str]) -> str:
        """Write a sum of products with constants; return its name."""
        parts = []
        for factor, name in zip(np.asarray(factors).tolist(), names, strict=True):
            if factor:
                part = name if abs(factor) == 1 else f"{name} * {abs(factor)!r}"
                parts.append(("-" if factor < 0 else "+", part))
        parts.sort(key=lambda part: part[0] == "-")
        first = parts[0][1] if parts[0][0] == "+" else f"-{parts[0][1]}"
        name = text.fresh()
        text.line(f"{name} = " + " ".join([first, *(f"{sign} {p}" for sign, p in parts[1:])]))
        return name

    def _products(self, tile: Tile) -> None:
        """Print the matrix products, one for each point of a transformed tile."""
        text, outputs = Text(), self.shape[1]
        down, across = -(-self.tiles // tile.rows), -(-outputs // tile.columns)
        text.line("pid = tl.program_id(0)")
        text.line(f"z = pid // {down * across}")
        text.line(f"m = ((pid % {down * across}) // {across}) * {tile.rows} + tl.arange(0, {tile.rows})[:, None]")
        text.line(f"n = (pid % {across}) * {tile.columns} + tl.arange(0, {tile.columns})[None, :]")
        text.line(f"acc = tl.zeros([{tile.rows}, {tile.columns}], tl.float32)")
        text.line(f"for k in range(0, {self.channels}, {tile.terms}):")
        text.depth += 1
        text.line(f"ka = k + tl.arange(0, {tile.terms})[None, :]")
        text.line(f"kb = k + tl.arange(0, {tile.terms})[:, None]")
        v, u = text.pointer("v"), text.pointer(self.fusion.place[self.root.inputs[1]])
        text.line(
            f"a = tl.load({v} + ((z * {self.tiles} + m) * {self.channels} + ka), "
            f"mask=(m < {self.tiles}) & (ka < {self.channels}), other=0)"
        )
        text.line(
            f"b = tl.load({u} + ((z * {self.channels} + kb) * {outputs} + n), "
            f"mask=(kb < {self.channels}) & (n < {outputs}), other=0)"
        )
        text.line(f'acc = tl.dot(a, b, acc, input_precision="{self.precision}")')
        text.depth -= 1
        text.line(
            f"tl.store({text.pointer('w')} + ((z * {self.tiles} + m) * {outputs} + n), acc, "
            f"mask=(m < {self.tiles}) & (n < {outputs}))"
        )
        self.finish(text, self.points * down * across, tile.warps, tile.stages)

    def _back(self) -> None:
        """Print the transform of the products, and what follows: Y = A M A'."""
        text, size, outputs = Text(), self.m + 2, self.shape[1]
        at, mask = self._flat(text, outputs, self.writes_last)
        loaded = f", mask={mask}, other=0" if mask else ""
        names = []
        for i in range(size):
            names.append([text.fresh() for _ in range(size)])
            for j in range(size):
                base = (i * size + j) * self.tiles * outputs
                text.line(
                    f"{names[i][j]} = tl.load({text.pointer('w')} + (tile * {outputs} + "
                    f"{at['c'].text} + {base}){loaded})"
                )
        found = self._transform(text, TRANSFORMS[self.m].output, names)
        height, width = self.shape[2:]
        for i in range(self.m):
            for j in range(self.m):
                conditions = [mask] if mask else []
                if height % self.m and i >= height % self.m:
                    conditions.append(f"({at['y'].text} * {self.m} + {i} < {height})")
                if width % self.m and j >= width % self.m:
                    conditions.append(f"({at['x'].text} * {self.m} + {j} < {width})")
                masks = {1: " & ".join(conditions)} if conditions else {}
                emitter = self.fusion.emitter(self._ranges(outputs))
                stores = self.fusion.outputs(emitter, self.root, self._target(i, j), "result")
                self.write(text, emitter.ops, stores, {"result": (found[i][j], DType.F32)}, at, masks, f"[1, {BLOCK}]")
        self.finish(text, -(-self.tiles * outputs // BLOCK), 4, 2)
