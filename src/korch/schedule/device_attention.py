"""Attention -> tile programs for GPUs: softmax(f(q k)) v, a block of queries at a time.

A task loops over blocks of keys and keeps the largest score so far. When a block has a larger score, the task
rescales its sums. So the scores are never written to memory. Rows of heads that share keys and values are rows
of one block.

Source: Dao et al., "FlashAttention" (2022).
"""

import math
from dataclasses import replace

from korch.primitive.types import DType
from korch.schedule.attention import Attentions
from korch.schedule.blocks import Blocked, cut, fill, flat, store
from korch.schedule.heads import emit_score
from korch.schedule.softmax import SoftmaxRows
from korch.tile.ir.index import Expr, Ranges, add, scale, var
from korch.tile.ir.program import (
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Pass,
    Product,
    Stage,
    Step,
    Store,
    TileProgram,
)
from korch.tile.lower.emit import Emitter


class DeviceAttention(Attentions):
    """Programs of a group for GPUs.

    Raises:
        NotFusedError: from any method, if the operations around the products can't be fused with them.
    """

    def program(self, rows: int, keys: int, product: Product) -> TileProgram:
        """Return the program of blocks of some rows and keys."""
        return _DeviceAttentionBuilder(self, rows, keys, product).program()


class _DeviceAttentionBuilder:
    """The builder of one program: its axes, and the tiles that its steps need."""

    def __init__(self, given: DeviceAttention, rows: int, keys: int, product: Product) -> None:
        self.given, self.product = given, product
        self.gm, self.i = cut(given.rows, rows, ("gm", "i"))
        self.h, self.j = cut(given.keys, keys, ("h", "j"))
        self.d, self.c = Axis("d", given.terms), Axis("c", given.columns)
        self.softmax = SoftmaxRows(self.i, given.found.is_guarded, is_in_parts=True)
        self.made: dict[str, Buffer] = {}
        axes = (*given.scores.batch, self.gm, self.i, self.h, self.j, self.d, self.c)
        self.ranges: Ranges = {axis.name: (0, axis.extent - 1) for axis in axes}

    def program(self) -> TileProgram:
        """Return the program."""
        scores, mixed = self.given.scores, self.given.mixed
        sums, top, total = self.tile("y", self.i, self.c), self.of_row("top"), self.of_row("total")
        queries, load = self.operand(scores, 0, "pq", (self.i, self.d))
        body = [*self.weigh(queries), *self.mix(sums)]
        steps: list[Step] = [load, fill((self.i,), top, -math.inf), fill((self.i,), total, 0.0)]
        steps += [fill((self.i, self.c), sums, 0.0), Loop(self.h, ("top", "total", "y"), tuple(body))]
        inverse = self.of_row("inverse")
        steps.append(self.softmax.inverted(total, inverse))
        steps.append(mixed.after(sums, (self.i, self.c), self.values(mixed), self.ranges, inverse))
        return TileProgram((*scores.memory(), *self.made.values()), (Stage((*scores.batch, self.gm), tuple(steps)),))

    def values(self, blocked: Blocked) -> dict[str, Expr]:
        """Return the variables of a contraction, expressed in the variables of the program."""
        row, key = flat(self.gm, self.i), flat(self.h, self.j)
        flats = (row, key, var("d")) if blocked is self.given.scores else (row, var("c"), key)
        return blocked.values(flats, self.ranges)

    def tile(self, name: str, rows: Axis, columns: Axis, dtype: DType = DType.F32) -> At:
        """Return the element of a tile of rows and columns."""
        self.made.setdefault(name, Buffer(name, Level.TILE, dtype, rows.extent * columns.extent))
        return At(name, add(scale(var(rows.name), columns.extent), var(columns.name)))

    def of_row(self, name: str) -> At:
        """Return the element of a row in a tile with one number per row."""
        self.made.setdefault(name, Buffer(name, Level.TILE, DType.F32, self.i.extent))
        return At(name, var("i"))

    def operand(self, blocked: Blocked, side: int, name: str, axes: tuple[Axis, Axis]) -> tuple[At, Pass]:
        """Return a tile of an operand, and the pass that computes it."""
        emitter = blocked.fusion.emitter(self.ranges)
        value = blocked.argument(emitter, side, self.values(blocked))
        at = self.tile(name, *axes, self.given.scores.dtype)
        return at, Pass(axes, axes[1].name, tuple(emitter.ops), (store(at, value),))

    def weigh(self, queries: At) -> list[Step]:
        """Return the steps that compute the weights of a block of keys, and the factors that rescale earlier sums."""
        scores, found, axes = self.given.scores, self.given.found, (self.i, self.j)
        keys, load = self.operand(scores, 1, "pk", (self.d, self.j))
        products, score = self.tile("t", *axes), self.tile("s", *axes)
        contract = Contract((*axes, replace(self.d, is_reduced=True)), products, queries, keys, self.product)

        def weighed(emitter: Emitter, result: str) -> list[Store]:
            return [store(score, emit_score(emitter, found, scores.contraction, result))]

        softmax = self.softmax
        return [
            load,
            fill(axes, products, 0.0),
            contract,
            scores.following(products, axes, (self.values(scores), self.ranges), weighed),
            softmax.largest(score, self.j, self.of_row("most")),
            *softmax.rescaled(self.of_row),
            softmax.weights(score, self.j, self.of_row("base")),
            softmax.sums(score, self.j, self.of_row("part")),
            *softmax.carried(self.of_row),
        ]

    def mix(self, sums: At) -> list[Step]:
        """Return the steps that add the products of the weights and the values to the sums."""
        weights, steps = self.tile("s", self.i, self.j), list[Step]()
        if self.given.scores.dtype is not DType.F32:
            narrow = self.tile("w", self.i, self.j, self.given.scores.dtype)
            ops = (Load("x0", DType.F32, "s", weights.index), Apply("x1", self.given.scores.dtype, "cast", ("x0",)))
            steps, weights = [Pass((self.i, self.j), "j", ops, (store(narrow, "x1"),))], narrow
        elif self.product is Product.TF32:
            ops = (Load("x0", DType.F32, "s", weights.index), Apply("x1", DType.F32, "round_tf32", ("x0",)))
            steps = [Pass((self.i, self.j), "j", ops, (store(weights, "x1"),))]
        values, load = self.operand(self.given.mixed, 1, "pv", (self.j, self.c))
        axes = (self.i, self.c, replace(self.j, is_reduced=True))
        return [*steps, load, Contract(axes, sums, weights, values, self.product, rescale=self.of_row("factor"))]
