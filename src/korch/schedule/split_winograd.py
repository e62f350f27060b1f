"""Winograd convolutions on matrix units -> tile programs, whose transformed weights are stored in components.

The transformed tiles of a point are split into components before they are multiplied by the weights of all channels.
Either a task computes a group of tiles from the image to the results, or all tiles are transformed first and a task
multiplies the tiles of some points, so that each thread reads only its part of the weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from korch.primitive.types import DType
from korch.schedule.blocks import cut, fill, flat, store
from korch.schedule.split_products import MOST_COMPONENTS, given_split, split_into
from korch.schedule.winograd import POINTS, RESULTS, TileLoops, Winograd, nested, spread
from korch.system.alignment import ceil_div, round_up
from korch.target import EDGE
from korch.tile.ir.index import add, constant, scale, var
from korch.tile.ir.program import (
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Panels,
    Pass,
    Product,
    Registers,
    Stage,
    Step,
    TileProgram,
)

COMPONENTS = "s"
"""The tile of the components of a point's tiles."""


@dataclass(frozen=True, slots=True)
class SplitWinogradBlocking:
    """How a convolution on matrix units is cut into tasks."""

    vectors: int  # vectors of output channels that are transformed back together
    group: int  # tiles that are transformed, multiplied and transformed back together; all tiles if `run` is given
    run: int = 0  # points that a task multiplies one after another, if all tiles are transformed first; else 0
    parts: int = 1  # the number of tasks, each with channels of its own, that multiply each of these points


class SplitWinograd(Winograd):
    """What all programs of a group on matrix units have in common."""

    def split_program(self, blocking: SplitWinogradBlocking) -> TileProgram:
        """Return the program of one blocking.

        Raises:
            NotFusedError: the operations around the convolution can't be fused with it.
        """
        run, block = blocking.run or self.points, blocking.vectors * self.lanes
        loops = self.loops(self.tiles if blocking.run else blocking.group)
        tiles = loops.slots
        step, level = spread(tiles * max(self.channels, self.outputs)), Level.WORKSPACE if blocking.run else Level.TILE
        layout = (Panels(self._terms, EDGE), split_into(MOST_COMPONENTS))
        packed = given_split(self.points * self._terms, round_up(self.outputs, EDGE), MOST_COMPONENTS)
        buffers = (
            *self.fusion.memory({self.weights: packed}),
            Buffer(POINTS, level, DType.F32, self.points // run * (run + 1) * step),
            Buffer(COMPONENTS, Level.TILE, DType.F32, round_up(tiles, EDGE) * self._terms, layout),
            Buffer(RESULTS, Level.TILE, DType.F32, self.tile * self.tile * block),
        )
        # The sums of a point overwrite the tiles of the previous point, which the same task has already multiplied.
        sums = [(point + point // run) * step for point in range(self.points)]
        starts = [start + step for start in sums]
        turns, blocks = (Axis("u", self.points // run), Axis("p", run)), Axis("o", self.outputs // block)
        if blocking.run:
            return TileProgram(buffers, self._by_points(blocking.parts, (turns, blocks), loops, (starts, sums)))
        vectors = (Axis("d", self.channels // self.wide), Axis("c", self.wide))
        there = self._there((*loops.axes, *vectors), loops, var("d"), starts)
        products = self._products(loops, turns, (Axis("j", 1), Axis("q", self.outputs)), step, (POINTS,))
        back = nested((*loops.axes, blocks), self._results(blocks, loops, sums))
        return TileProgram(buffers, (Stage(loops.groups, (there, products, back)),))

    def _by_points(
        self, parts: int, around: tuple[tuple[Axis, Axis], Axis], tiles: TileLoops, starts: tuple[list[int], list[int]]
    ) -> tuple[Stage, ...]:
        """Return the stages that transform all tiles, multiply those of some points in a task, and transform back."""
        turns, blocks = around
        part, channels = cut(self.outputs, round_up(ceil_div(self.outputs, parts), EDGE), ("j", "q"))
        products = self._products(tiles, turns, (part, channels), starts[0][0])
        there, back = self._all_points(tiles, starts[0]), self._results(blocks, tiles, starts[1])
        return there, Stage((turns[0], part), (products,)), Stage((*tiles.axes, blocks), back)

    @property
    def _terms(self) -> int:
        """The channels of the image, in whole steps."""
        return round_up(self.channels, EDGE)

    def _products(
        self,
        tiles: TileLoops,
        turns: tuple[Axis, Axis],
        channels: tuple[Axis, Axis],
        step: int,
        carried: tuple[str, ...] = (),
    ) -> Loop:
        """Return the products of tiles, point by point.

        Args:
            tiles: the loops over them.
            turns: the axis of runs of points, and the axis of a run's points.
            channels: the axis of parts of the output channels, and the axis of a part's channels.
            step: elements from a point to the next point of a run.
            carried: the tiles that the loops carry.
        """
        c, t, q, (u, p) = Axis("c", self.channels), tiles.slot, channels[1], turns
        slot = add(scale(self._variable("u", u.extent), p.extent + 1), var("p"))
        sum_ = add(scale(slot, step), scale(t, self.outputs), flat(*channels))
        number = add(scale(add(slot, constant(1)), step), scale(t, self.channels), var("c"))
        component = At(COMPONENTS, add(scale(var("t"), self._terms), var("c")))
        *lines, line = tiles.axes
        split = Pass((line, c), "c", (Load("x0", DType.F32, POINTS, number),), (store(component, "x0"),))
        out, term = At(POINTS, sum_), add(scale(flat(u, p), self._terms), var("c"))
        columns = round_up(self.outputs, EDGE)
        weights = At(self.weights, add(scale(term, columns), flat(*channels)))
        registers = Registers(EDGE, EDGE // self.lanes, fetches_b=True)
        axes = (line, q, replace(c, is_reduced=True))
        product = Contract(axes, out, component, weights, Product.SPLIT, registers=registers)
        return nested((p, *lines), (split, fill((line, q), out, 0.0), product), carried)

    def _results(self, blocks: Axis, tiles: TileLoops, starts: Sequence[int]) -> tuple[Step, ...]:
        """Return the passes that compute some channels of a tile's results from its sums."""
        block = self.outputs // blocks.extent
        channel = add(scale(self._variable("o", blocks.extent), block), var("q"))
        at = add(scale(tiles.slot, self.outputs), channel)
        places = [At(POINTS, add(constant(start), at)) for start in starts]
        return self._inverse(block, places), self._after(block // self.lanes, blocks, tiles)
