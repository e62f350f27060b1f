"""Builds tile programs of products and convolutions in several blockings, with and without packed operands."""

import itertools
from collections.abc import Iterator

from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.schedule.contraction import Contraction, Layouts, contraction_of, extent
from korch.schedule.products import ProductBlocking, Products
from korch.tile.ir.program import TileProgram
from korch.tile.lower.staging import Machine

ROWS = (6, 24, 96)
"""Numbers of rows in a block."""

VECTORS = (2, 8)
"""Numbers of columns in a block, in vectors."""

TERMS = (64, 512)
"""Numbers of terms in a block."""


def products(group: Group, root: Primitive, layouts: Layouts, machine: Machine) -> list[TileProgram]:
    """Return programs of several blockings for a group with one product or convolution."""
    contraction = contraction_of(group, root, last=False)
    schedule = Products(group, root, layouts, contraction, machine)
    return [*dict.fromkeys(schedule.program(blocking) for blocking in blockings(contraction, machine))]


def blockings(contraction: Contraction, machine: Machine) -> Iterator[ProductBlocking]:
    """Yield blockings whose blocks are not larger than the product, for each choice of packed operands."""
    sizes = [extent(axes) for axes in (contraction.rows, contraction.columns, contraction.terms)]
    columns = tuple(machine.lanes * n for n in VECTORS)
    blocks = [[min(b, n) for b in side] for side, n in zip((ROWS, columns, TERMS), sizes, strict=True)]
    for rows, width, terms in dict.fromkeys(itertools.product(*blocks)):
        for left, right in itertools.product((True, False), repeat=2):
            yield ProductBlocking(rows, width, terms, (left, right))
