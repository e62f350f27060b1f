"""Products on matrix units: the blocking of their tile program."""

from __future__ import annotations

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.provider.gemm.blocking import Blocking as Sizes
from korch.provider.gemm.vectors import require_rows, stays_in_cache
from korch.provider.matrix_units import TOGETHER, pieces_layout
from korch.schedule.contraction import Layouts, contraction_of, extent
from korch.schedule.pieces import SplitProducts
from korch.schedule.products import Blocking
from korch.target import Target
from korch.tile.program import Registers, TileProgram
from korch.tile.staging import Machine


def right_in_pieces(rank: int, is_split: bool) -> Layout:
    """Return the layout of a right operand in pieces, whose elements are float32 if these are split, else bfloat16."""
    columns, terms = rank - 1, rank - 2
    return pieces_layout((*range(terms), columns, terms), columns, terms, is_split)


def is_in_pieces(layout: Layout) -> bool:
    """Return whether a right operand has such a layout."""
    return layout == right_in_pieces(len(layout.order), layout.is_split)


def split_program_of(
    group: Group, root: Primitive, layouts: Layouts, target: Target, packed: Layout | None, position: int
) -> TileProgram:
    """Return the program of a product on matrix units.

    Args:
        group: the group.
        root: its product.
        layouts: of inputs and outputs; that of a packed operand counts as plain.
        target: the machine.
        packed: the layout of a second operand that is packed when the kernel is built, or None.
        position: which input this is.

    Raises:
        NotFusedError: the product, or what stands around it, does not fit.
    """
    contraction = contraction_of(group, root, last=False)
    has_pieces = packed is not None and is_in_pieces(packed)
    if packed is not None and not has_pieces:
        inputs = tuple(packed if i == position else layout for i, layout in enumerate(layouts[0]))
        layouts = (inputs, layouts[1])
    schedule = SplitProducts(group, root, layouts, contraction, Machine(target.lanes, target.threads))
    axes = (contraction.batch, contraction.rows, contraction.columns, contraction.terms)
    batch, m, n, terms = (extent(some) for some in axes)
    sizes = Sizes.split((batch, m, n, terms), schedule.pieces, target, has_pieces)
    strips = -(-n // TOGETHER)
    columns = min(n, (sizes.group or -(-strips // sizes.parts)) * TOGETHER)
    steps = schedule.second_steps() if packed is None else None
    packs = steps is not None and not stays_in_cache(steps[0], m, sizes.rows)
    blocking = Blocking(
        sizes.block,
        columns,
        sizes.chunk,
        (False, packs),
        registers=Registers(TOGETHER, TOGETHER // target.lanes, fetches_b=True) if has_pieces else None,
        panels=TOGETHER if has_pieces else 0,
        rows_pass=sizes.group > 0,
    )
    program = schedule.program(blocking)
    require_rows(program, target.lanes)
    return program
