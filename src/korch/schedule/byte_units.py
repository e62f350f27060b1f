"""Products of bytes on matrix units -> tile programs that read rows of the first operand where they lie.

Terms come in equal steps of up to 64. Rows whose terms are no whole steps are copied, with room for them; the panels
of the second operand are 0 there.
"""

from __future__ import annotations

from korch.alignment import ceil_div
from korch.candidate.candidate import Group
from korch.primitive.graph import Primitive
from korch.schedule.contraction import Contraction, Layouts, extent
from korch.schedule.products import Products
from korch.tile.cpp_tiles import STRIP, steps_of, whole_quads
from korch.tile.program import QUAD, Registers
from korch.tile.staging import Machine


def unit_of(terms: int) -> int:
    """Return how many terms a step has, of so few equal steps as some terms need."""
    quads = whole_quads(ceil_div(terms, QUAD))
    return QUAD * (quads // steps_of(quads))


def tile_registers(lanes: int, strips_pass: bool) -> Registers:
    """Return how a contraction is computed in tiles: whether strips of columns go by, or rows."""
    return Registers(STRIP, STRIP // lanes, fetches_b=strips_pass, in_tiles=True)


class TiledProducts(Products):
    """What all programs of a group on matrix units have in common."""

    def __init__(
        self, group: Group, root: Primitive, layouts: Layouts, contraction: Contraction, machine: Machine
    ) -> None:
        super().__init__(group, root, layouts, contraction, machine)
        self.unit = unit_of(extent(self.terms))
