"""Products on matrix units -> tile programs whose operands are split into bfloat16 components.

A float32 has three components, a float16 two, and a bfloat16 or a byte one. A task computes a block of rows and
columns. The components of one operand stay in the cache while blocks of the other operand are streamed: the streamed
operand is the one that is split last, or a second operand that is stored in components. An operand whose elements are
not contiguous in memory is packed first.
"""

from collections.abc import Sequence
from dataclasses import replace

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.types import DType
from korch.schedule.blocks import Operand, store
from korch.schedule.contraction import Contraction, Layouts, Packed, extent
from korch.schedule.products import Cut, ProductBlocking, Products
from korch.system.alignment import round_up
from korch.target import EDGE
from korch.tile.ir.index import add, scale, var, vector_step
from korch.tile.ir.program import At, Axis, Buffer, Level, Load, Panels, Pass, Product, Split, TileOp
from korch.tile.lower.staging import Machine

MOST_COMPONENTS = 3
"""The components of a float32: three significands of 8 bits make one of 24 bits."""

FEWER_COMPONENTS = {DType.F16: 2, DType.BF16: 1, DType.I8: 1, DType.U8: 1, DType.BOOL: 1}
"""The components of types with fewer than 24 significant bits."""

MOVES = ("transpose", "reshape", "slice", "take", "broadcast")
"""Operations whose results are only elements of their inputs."""


def components_of(body: PrimitiveGraph, value: int) -> int:
    """Return how many bfloat16 components an element of a value has, by its type before any casts and moves."""
    while (found := FEWER_COMPONENTS.get(body.types[value].dtype)) is None:
        makers = [body.primitives[p] for p in body.producers[value]]
        if len(makers) != 1 or makers[0].op not in (*MOVES, "cast"):
            return MOST_COMPONENTS
        value = makers[0].inputs[0]
    return found


def operand_components(body: PrimitiveGraph, root: Primitive) -> tuple[int, int]:
    """Return how many components the elements of each operand of a product or convolution have."""
    first, second = root.inputs
    return components_of(body, first), components_of(body, second)


def pairs_of(a: int, b: int) -> int:
    """Return how many products of components are added up to multiply a number of `a` by one of `b` components."""
    return sum(min(b, MOST_COMPONENTS - i) for i in range(a))


def split_into(components: int) -> Split:
    """Return how an operand with some number of components is stored."""
    return Split(components, DType.BF16)


def tile_of_components(name: str, axes: tuple[Axis, Axis], components: int, *, is_second: bool) -> tuple[At, Buffer]:
    """Return where the components of an operand are in a tile, and the tile.

    `is_second`: whether it is the second operand, for which the components of two terms are adjacent.
    """
    rows, columns = (round_up(axis.extent, EDGE) for axis in axes)
    layout = (Panels(columns, EDGE, 2 if is_second else 1), split_into(components))
    at = At(name, add(scale(var(axes[0].name), columns), var(axes[1].name)))
    return at, Buffer(name, Level.TILE, DType.F32, rows * columns, layout)


def given_split(terms: int, columns: int, components: int) -> Packed:
    """Return the layout of a second operand that is stored in components, padded to whole steps of terms."""
    return Packed(round_up(terms, EDGE) * columns, (Panels(columns, EDGE, 2), split_into(components)))


def are_adjacent(ops: Sequence[TileOp], along: Axis, lanes: int) -> bool:
    """Return whether an operand is a single load without guards that is contiguous along an axis."""
    loads = [op for op in ops if isinstance(op, Load)]
    is_whole = len(loads) == 1 and not loads[0].guards
    return is_whole and (along.extent == 1 or vector_step(loads[0].index, along.name, lanes) == 1)


def copied(
    name: str, axes: tuple[Axis, Axis], row: int, ops: Sequence[TileOp], value: str
) -> tuple[Buffer, Pass, Load]:
    """Return a tile for an operand that is not contiguous, the pass that copies the operand, and a load of the copy."""
    at = At(name, add(scale(var(axes[0].name), row), var(axes[1].name)))
    packing = Pass(axes, axes[1].name, tuple(ops), (store(at, value),))
    return Buffer(name, Level.TILE, DType.F32, axes[0].extent * row), packing, Load("x0", DType.F32, name, at.index)


class SplitProducts(Products):
    """What all programs of a group on matrix units have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction, machine)
        self.product = Product.SPLIT
        self.components = operand_components(group.body, root)

    def _operand(self, position: int, blocking: ProductBlocking, cuts: Cut) -> Operand:
        """Return the components of an operand, which are stored in advance or computed from it."""
        (_, i), (_, j), (_, p) = cuts.rows, cuts.columns, cuts.terms
        axes = (p, j) if position else (i, p)
        if position and blocking.panels:
            return super()._operand(position, blocking, cuts)
        emitter = self.fusion.emitter(cuts.ranges)
        value = self.argument(emitter, position, cuts.values)
        ops: Sequence[TileOp] = tuple(emitter.ops)
        floats = Operand(At("", var("")))
        if blocking.packs[position] or not are_adjacent(ops, axes[1], self.machine.lanes):
            floats = super()._operand(position, replace(blocking, packs=(True, True)), cuts)
            ops, value = (Load("x0", DType.F32, floats.at.buffer, floats.at.index),), "x0"
        at, components = tile_of_components(
            "sb" if position else "sa", axes, self.components[position], is_second=position == 1
        )
        split = Pass(axes, axes[1].name, tuple(ops), (store(at, value),))
        return Operand(at, floats.buffer, floats.stage, floats.packing, (components, split))

    def _panels_of(self, columns: int, blocking: ProductBlocking) -> tuple[Panels, ...]:
        return ()  # the components are computed from rows, not from panels

    def _packed(self, blocking: ProductBlocking) -> Packed:
        columns = round_up(extent(self.contraction.columns), EDGE)
        return given_split(extent(self.terms), columns, self.components[1])
