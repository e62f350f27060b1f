"""Attention on matrix units -> tile programs that multiply bfloat16 components.

One tile holds the scores of a block of rows for all keys. Keys and values are split into components for each block; the
weights are split just before the products with the values.
"""

from korch.primitive.types import DType
from korch.schedule.attention import AttentionBlocking, AttentionBuilder, Attentions, Packing
from korch.schedule.blocks import Blocked, arranged, spaced, store
from korch.schedule.split_products import are_adjacent, copied, operand_components, tile_of_components
from korch.system.alignment import round_up
from korch.tile.ir.program import Apply, At, Axis, Load, Pass, Product, TileOp, TileProgram


def program_of(given: Attentions, blocking: AttentionBlocking) -> TileProgram:
    """Return the program of one blocking, for vector units or matrix units.

    Raises:
        NotFusedError: the operations around the products can't be fused with them.
    """
    kind = SplitAttentionBuilder if blocking.packing is Packing.SPLIT else AttentionBuilder
    return kind(given, blocking).program()


class SplitAttentionBuilder(AttentionBuilder):
    """A program that multiplies bfloat16 components on matrix units; all keys are one block."""

    product = Product.SPLIT

    def _operands(self) -> tuple[At | None, At, list[Pass]]:
        keys, _ = self._tile("sk", (self.d, self.j), self.scores, 1)
        values, _ = self._tile("sv", (self.j, self.c), self.mixed, 1)
        return keys, values, []

    def _tile(self, name: str, axes: tuple[Axis, Axis], blocked: Blocked, position: int) -> tuple[At, int]:
        """Return where an operand's components are, in a tile that is created if needed, and how many there are."""
        components = operand_components(blocked.group.body, blocked.root)[position]
        at, buffer = tile_of_components(name, axes, components, is_second=position == 1)
        self.made.setdefault(name, buffer)
        return at, components

    def _split(self, name: str, axes: tuple[Axis, Axis], blocked: Blocked, position: int) -> tuple[At, list[Pass]]:
        """Return where an operand's components are, and the passes that compute them.

        An operand whose rows are not contiguous is copied first.
        """
        at, _ = self._tile(name, axes, blocked, position)
        emitter = blocked.fusion.emitter(self.ranges)
        value, passes = blocked.argument(emitter, position, self.values(blocked, position == 1)), list[Pass]()
        ops: tuple[TileOp, ...] = tuple(emitter.ops)
        if not are_adjacent(ops, axes[1], self.lanes):
            row = spaced(round_up(axes[1].extent, self.lanes))
            tile, packing, load = copied(f"{name}f", axes, row, ops, value)
            self.made.setdefault(tile.name, tile)
            passes.append(arranged(packing, self.ranges, self.lanes))
            ops, value = (load,), load.name
        return at, [*passes, Pass(axes, axes[1].name, ops, (store(at, value),))]

    def _queries(self, keys: At | None) -> tuple[At | None, list[Pass]]:
        _, second = self._split("sk", (self.d, self.j), self.scores, 1)
        at, first = self._split("sq", (self.i, self.d), self.scores, 0)
        return at, [*second, *first]

    def _weights(self) -> tuple[At, list[Pass]]:
        _, second = self._split("sv", (self.j, self.c), self.mixed, 1)
        at, components = self._tile("sw", (self.i, self.j), self.mixed, 0)
        ops: list[TileOp] = [Load("x0", DType.F32, self.score.buffer, self.score.index)]
        if components == 1:  # a split truncates after the last component: round first
            ops += [Apply("x1", DType.BF16, "cast", ("x0",)), Apply("x2", DType.F32, "cast", ("x1",))]
        split = Pass((self.i, self.j), "j", tuple(ops), (store(at, ops[-1].name),))
        return at, [*second, split]
