"""Winograd convolutions -> tile programs, with the operations before and after them.

A task transforms a group of tiles of the image, multiplies each point of them by the weights of one
block of output channels after another, transforms the sums back, and computes the operations after the
convolution. If there are many weights, all tiles are transformed first, and a task computes a block of channels.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.winograd import TRANSFORMS, WinogradAttributes
from korch.primitive.types import DType
from korch.ranges.live import blocks, count_of, flattened
from korch.schedule.blocks import cut, digits, fill, flat, require_adjacent, zero_of
from korch.schedule.contraction import Fusion, Layouts, in_panels, is_of_bytes
from korch.tile.ir.index import ZERO, Expr, add, constant, scale, substitute, var
from korch.tile.ir.passes import map_indices
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Level,
    Load,
    Loop,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    Store,
    TileProgram,
    holds,
)
from korch.tile.lower.emit import Emitter, Index

LINE_FLOATS = 16
"""The size of a line of the L1 cache, in floats."""

POINTS, SUMS, RESULTS = "v", "m", "r"
"""The buffers of transformed tiles, of their products with the weights, and of a tile's results."""

TASK_VECTORS = 4
"""The most vectors of channels that a task transforms if all tiles are transformed first."""


@dataclass(frozen=True, slots=True)
class WinogradBlocking:
    """How a convolution is cut into tasks."""

    vectors: int  # vectors of output channels that are computed together
    rows: int  # tiles that are computed together in registers
    group: int  # tiles that are transformed, multiplied and transformed back together; all tiles if `is_shared`
    is_shared: bool = False  # whether all tiles are transformed first, and a task computes a block of channels


@dataclass(frozen=True, slots=True)
class TileLoops:
    """The loops over tiles."""

    groups: tuple[Axis, ...]  # the loops over groups
    axes: tuple[Axis, ...]  # the loops over the tiles of a group
    slot: Expr  # the position of a tile in memory for a group
    slots: int  # the number of these positions
    # the number of a tile among all; the number of its line, and its number in the line, if lines are cut
    numbers: tuple[Expr, ...]


class Winograd:
    """What all programs of a group have in common."""

    def __init__(self, group: Group, root: Primitive, layouts: Layouts, lanes: int) -> None:
        """Prepare what the programs share; input channels and output channels must fill whole vectors."""
        body = group.body
        self.group, self.root, self.lanes = group, root, lanes
        self.product = Product.S16S16 if is_of_bytes(body, root) else Product.F32
        self.dtype, _, self.sum_type = self.product.types
        self.wide = elements_of(self.product, lanes)
        self.fusion = Fusion(group, layouts, root)
        self.weights = self.fusion.place[root.inputs[1]]
        self.attributes = root.attributes_as(WinogradAttributes)
        self.channels = body.types[root.inputs[0]].shape[1]
        self.shape = body.types[root.output].shape
        self.images, self.outputs = self.shape[:2]
        self.tile, self.edge = self.attributes.tile, self.attributes.tile + 2
        self.points = self.edge * self.edge
        self.down, self.across = (blocks(n, self.tile) for n in self.shape[2:])
        places = (("z", self.images), ("y", self.down), ("x", self.across))
        # An axis of which a size may need a part only is the outermost one, or is not merged with the others.
        order = sorted((place for place in places if place[1] > 1), key=lambda p: count_of(p[1]) is None)
        cut = next((p for p in reversed(order[1:]) if count_of(p[1])), None)
        self.places = (tuple(p for p in order if p is not cut), *(((cut,),) if cut else ()))
        self.tiles = flattened([n for _, n in order])
        self.transforms = TRANSFORMS[self.tile]

    def program(self, blocking: WinogradBlocking) -> TileProgram:
        """Return the program of one blocking.

        Raises:
            NotFusedError: the operations around the convolution can't be fused with it.
        """
        block = blocking.vectors * self.lanes
        level = Level.WORKSPACE if blocking.is_shared else Level.TILE
        tiles = self.loops(self.tiles if blocking.is_shared else blocking.group)
        steps = spread(tiles.slots * self.channels), spread(tiles.slots * block)
        starts = [point * steps[0] for point in range(self.points)]
        points = Buffer(POINTS, level, self.dtype, self.points * steps[0])
        sums = Buffer(SUMS, Level.TILE, self.sum_type, self.points * steps[1])
        results = Buffer(RESULTS, Level.TILE, self.sum_type, self.tile * self.tile * block)
        packed = in_panels(self.points * self.channels, self.outputs, block, self.product.group)
        buffers = (*self.fusion.memory({self.weights: packed}), points, sums, results)
        blocks = Axis("o", self.outputs // block)
        if blocking.is_shared:
            back = self._back(blocking, blocks, tiles, steps)
            return TileProgram(buffers, (self._all_points(tiles, starts), Stage((blocks,), back)))
        vectors = (Axis("d", self.channels // self.wide), Axis("c", self.wide))
        there = self._there((*tiles.axes, *vectors), tiles, var("d"), starts)
        back = self._back(blocking, blocks, tiles, steps)
        turns: tuple[Step, ...] = back if blocks.extent == 1 else (Loop(blocks, (), back),)
        return TileProgram(buffers, (Stage(tiles.groups, (there, *turns)),))

    def loops(self, group: int) -> TileLoops:
        """Return the loops over groups of tiles, and over those of a group."""
        extents = [flattened([n for _, n in part]) for part in self.places]
        if len(extents) == 1:
            tiles = cut(extents[0], group, ("g", "t"))
            return TileLoops(tiles[:1], tiles[1:], var("t"), group, (flat(*tiles),))
        across = min(group, int(extents[1]))
        down = max(1, min(group // across, int(extents[0])))
        rows, tiles = cut(extents[0], down, ("gy", "ty")), cut(extents[1], across, ("g", "t"))
        slot = add(scale(var("ty"), across), var("t"))
        return TileLoops((rows[0], tiles[0]), (rows[1], tiles[1]), slot, down * across, (flat(*rows), flat(*tiles)))

    def check(self) -> None:
        """Raise an error if the operations around the convolution can't be fused, whatever the blocking is.

        Raises:
            NotFusedError: they can't be computed, or their channels are not adjacent in memory.
        """
        emitter, channel = self._image_emitter()
        value = self._pixel(emitter, channel, *self.attributes.pads_begin)
        sink = Store(POINTS, channel, value)
        require_adjacent(Pass((Axis("c", self.wide),), "c", tuple(emitter.ops), (sink,)), self.wide)
        require_adjacent(self._after(1, Axis("o", self.outputs // self.lanes), self.loops(self.tiles)), self.lanes)

    def _all_points(self, tiles: TileLoops, starts: Sequence[int]) -> Stage:
        """Return the stage that transforms all tiles, a few channels in a task."""
        depth = self.channels // self.wide
        parts, vector = cut(depth, math.gcd(depth, TASK_VECTORS), ("e", "d"))
        there = self._there((vector, Axis("c", self.wide)), tiles, flat(parts, vector), starts)
        return Stage((*tiles.axes, parts), (there,))

    def _there(self, axes: tuple[Axis, ...], tiles: TileLoops, vector: Expr, starts: Sequence[int]) -> Pass:
        """Return the pass that transforms tiles of the image."""
        emitter, channel = self._image_emitter()
        tile = [[self._pixel(emitter, channel, i, j) for j in range(self.edge)] for i in range(self.edge)]
        found = both_ways(emitter, self.transforms.data, tile, self.dtype)
        at = add(scale(tiles.slot, self.channels), channel)
        sinks = tuple(
            Store(POINTS, add(constant(start), at), name)
            for start, name in zip(starts, itertools.chain(*found), strict=True)
        )
        return self._located(Pass(axes, "c", tuple(emitter.ops), sinks), tiles, {"k": vector})

    def _image_emitter(self) -> tuple[Emitter, Expr]:
        """Return an emitter for elements of the image, and the channel of an element."""
        depth = self.channels // self.wide
        emitter = self._emitter({"k": depth, "c": self.wide})
        return emitter, add(scale(self._variable("k", depth), self.wide), var("c"))

    def _pixel(self, emitter: Emitter, channel: Expr, i: int, j: int) -> str:
        """Return the name of an element of a tile of the padded image."""
        top, left = self.attributes.pads_begin
        image, row, column = self._place(i - top, j - left)
        found = self.fusion.argument(emitter, self.root.inputs[0], (image, channel, row, column))
        return found if self.dtype.is_float else emitter.apply(self.dtype, "cast", found)

    def _back(
        self, blocking: WinogradBlocking, blocks: Axis, tiles: TileLoops, steps: tuple[int, int]
    ) -> tuple[Step, ...]:
        """Return the steps that multiply a group by a block of channels and transform the products back.

        `steps`: elements between points of tiles, and of sums.
        """
        block = blocking.vectors * self.lanes
        p, q, c = Axis("p", self.points), Axis("q", block), Axis("c", self.channels, is_reduced=True)
        out = At(SUMS, add(scale(var("p"), steps[1]), scale(tiles.slot, block), var("q")))
        a = At(POINTS, add(scale(var("p"), steps[0]), scale(tiles.slot, self.channels), var("c")))
        row = add(scale(var("p"), self.channels), var("c"))
        column = add(scale(self._variable("o", blocks.extent), block), var("q"))
        b = At(self.weights, add(scale(row, self.outputs), column))
        zero = fill((p, *tiles.axes, q), out, zero_of(self.sum_type), self.sum_type)
        registers = Registers(blocking.rows, blocking.vectors, fetches_b=True)
        product = Contract((p, *tiles.axes, q, c), out, a, b, self.product, registers=registers)
        at = add(scale(tiles.slot, block), var("q"))
        sums = [At(SUMS, add(constant(point * steps[1]), at)) for point in range(self.points)]
        after = self._after(blocking.vectors, blocks, tiles)
        return zero, product, nested(tiles.axes, (self._inverse(block, sums), after))

    def _inverse(self, block: int, places: Sequence[At]) -> Pass:
        """Return the pass that transforms the sums of a tile back."""
        emitter = self._emitter({})
        names = [emitter.load(self.sum_type, at.buffer, at.index) for at in places]
        sums = [names[first : first + self.edge] for first in range(0, self.points, self.edge)]
        found = both_ways(emitter, self.transforms.output, sums, self.sum_type)
        sinks = (
            Store(RESULTS, add(constant(number * block), var("q")), name)
            for number, name in enumerate(itertools.chain(*found))
        )
        return Pass((Axis("q", block),), "q", tuple(emitter.ops), tuple(sinks))

    def _after(self, vectors: int, blocks: Axis, tiles: TileLoops) -> Pass:
        """Return the pass that computes the outputs from those results of a tile that are inside of the image."""
        lanes = self.lanes
        sizes = {"i": self.tile, "j": self.tile, "o": blocks.extent, "w": vectors, "l": lanes}
        emitter = self._emitter(sizes)
        image, row, column = self._place(0, 0)
        row, column = add(row, var("i")), add(column, var("j"))
        within = add(scale(self._variable("w", vectors), lanes), var("l"))
        channel = add(scale(self._variable("o", blocks.extent), vectors * lanes), within)
        place = add(scale(add(scale(var("i"), self.tile), var("j")), vectors * lanes), within)
        emitter.ops.append(Load("x0", self.sum_type, RESULTS, place))
        outputs = self.fusion.outputs(emitter, self.root, (image, channel, row, column), "x0")
        sinks = tuple(Store(buffer, at, value) for buffer, _, at, value in outputs)
        guards = (Inside(row, 0, self.shape[2]), Inside(column, 0, self.shape[3]))
        where = tuple(guard for guard in guards if not holds(guard, emitter.ranges))
        axes = (Axis("i", self.tile), Axis("j", self.tile), Axis("w", vectors), Axis("l", lanes))
        return self._located(Pass(axes, "l", tuple(emitter.ops), sinks, where=where), tiles, {})

    def _emitter(self, sizes: dict[str, int]) -> Emitter:
        """Return an emitter under the ranges of some variables and of a tile's place."""
        sizes = {"z": self.images, "y": self.down, "x": self.across, **sizes}
        return self.fusion.emitter({name: (0, n - 1) for name, n in sizes.items()})

    def _variable(self, name: str, size: int) -> Expr:
        return var(name) if size > 1 else ZERO

    def _place(self, i: int, j: int) -> Index:
        """Return the image, and the row and column at offsets i and j from the first ones of a tile."""
        return (
            self._variable("z", self.images),
            add(scale(self._variable("y", self.down), self.tile), constant(i)),
            add(scale(self._variable("x", self.across), self.tile), constant(j)),
        )

    def _located(self, pass_: Pass, tiles: TileLoops, values: dict[str, Expr]) -> Pass:
        """Return a pass with a tile's place computed from its number."""
        most = max(self.tiles, self.channels, self.outputs)
        ranges = dict.fromkeys(("gy", "ty", "g", "t", "o", "d", "e"), (0, most))
        ranges |= {axis.name: (0, axis.extent - 1) for axis in pass_.axes}
        for number, part in zip(tiles.numbers, self.places, strict=True):
            values = {**values, **digits(number, part, ranges)}
        return map_indices(pass_, lambda expr: substitute(expr, values, ranges))


def nested(axes: Sequence[Axis], body: tuple[Step, ...], carried: tuple[str, ...] = ()) -> Loop:
    """Return nested loops that carry some tiles."""
    first, *others = axes
    return Loop(first, carried, (nested(others, body, carried),) if others else body)


def elements_of(product: Product, lanes: int) -> int:
    """Return how many elements of an image's channels a vector register has for a product."""
    return lanes * 4 // product.types[0].size_bytes


def both_ways(
    emitter: Emitter, matrix: Array, tile: Sequence[Sequence[str]], dtype: DType = DType.F32
) -> list[list[str]]:
    """Return the names of M T M', where T has the elements `tile`, computed in a type."""
    columns = [transformed(emitter, matrix, column, dtype) for column in zip(*tile, strict=True)]
    return [transformed(emitter, matrix, row, dtype) for row in zip(*columns, strict=True)]


def transformed(emitter: Emitter, matrix: Array, values: Sequence[str], dtype: DType) -> list[str]:
    """Return the names of the elements of a matrix times some values; terms that two rows share are computed once."""
    matrix, values = _with_sums(emitter, matrix, list(values), dtype)
    found: dict[int, str] = {}
    for first, second in itertools.combinations(range(len(matrix)), 2):
        even, odd = (matrix[first] + matrix[second]) / 2, (matrix[first] - matrix[second]) / 2
        few = np.count_nonzero(even) + np.count_nonzero(odd)
        if not {first, second} & found.keys() and few <= np.count_nonzero(matrix[[first, second]]) // 2:
            both = _weighted(emitter, even, values, dtype), _weighted(emitter, odd, values, dtype)
            found[first] = emitter.apply(dtype, "add", *both)
            found[second] = emitter.apply(dtype, "sub", *both)
    return [found[i] if i in found else _weighted(emitter, row, values, dtype) for i, row in enumerate(matrix)]


def _with_sums(emitter: Emitter, matrix: Array, values: list[str], dtype: DType) -> tuple[Array, list[str]]:
    """Replace pairs of values whose factors differ in sign at most by their sums and differences."""
    matrix = matrix.copy()
    for first, second in itertools.combinations(range(len(values)), 2):
        one, other = matrix[:, first], matrix[:, second]
        is_pair = np.array_equal(np.abs(one), np.abs(other)) and np.any(one + other) and np.any(one - other)
        if is_pair:
            pair = (values[first], values[second])
            values[first] = emitter.apply(dtype, "add", *pair)
            values[second] = emitter.apply(dtype, "sub", *pair)
            matrix[:, first], matrix[:, second] = (one + other) / 2, (one - other) / 2
    return matrix, values


def _weighted(emitter: Emitter, factors: Array, values: Sequence[str], dtype: DType) -> str:
    """Return the name of a sum of values times factors, of which not all are 0."""
    used = [(float(factor), value) for factor, value in zip(factors, values, strict=True) if factor]
    sizes = {abs(factor) for factor, _ in used}
    if len(used) > 1 and len(sizes) == 1 and sizes != {1.0}:
        (size,) = sizes
        return _times(emitter, size, _weighted(emitter, factors / size, values, dtype), dtype)
    used.sort(key=lambda term: term[0] != 1)  # begin with a term that is only added
    total = _times(emitter, *used[0], dtype)
    for factor, value in used[1:]:
        term = _times(emitter, abs(factor), value, dtype)
        total = emitter.apply(dtype, "add" if factor > 0 else "sub", total, term)
    return total


def _times(emitter: Emitter, factor: float, value: str, dtype: DType) -> str:
    if factor == 1:
        return value
    return emitter.apply(dtype, "mul", emitter.literal(dtype, factor if dtype.is_float else int(factor)), value)


def spread(floats: int) -> int:
    """Return the floats in the least odd number of cache lines that holds some: points don't share an L1 cache set."""
    return (-(-floats // LINE_FLOATS) | 1) * LINE_FLOATS
