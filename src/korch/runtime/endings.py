"""A kernel, with the reductions of a plan that may end with a size -> where its inputs have what these go through."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Candidate
from korch.candidate.layout import Layout
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.reduce import ReduceAttributes
from korch.provider.provider import Kernel
from korch.ranges.filled import sources
from korch.ranges.form import Extent, RangePlan
from korch.ranges.needed import Ends
from korch.target import Target
from korch.tile.ends import ended
from korch.tile.program import Level, TileProgram
from korch.tile.trim import Needed


@dataclass(frozen=True)
class Ending:
    """How the reductions of a kernel end.

    Attributes:
        extent: with how many elements.
        known: where inputs have these.
        reductions: their primitives, each with an axis along which it ends.
    """

    extent: Extent
    known: Mapping[str, Needed]
    reductions: frozenset[tuple[int, int]]


def ending_of(
    graph: PrimitiveGraph,
    candidate: Candidate,
    kernel: Kernel,
    found: Mapping[int, Ends],
    plan: RangePlan,
    target: Target,
) -> Ending | None:
    """Return how the reductions of a kernel can end; None if they can't.

    Args:
        graph: the plan's graph.
        candidate: what the kernel is for.
        kernel: the kernel.
        found: where reductions of the plan may end, by number.
        plan: how it serves sizes.
        target: the machine.
    """
    program, group = program_of(kernel), candidate.group
    own = {p: found[p] for p in group.primitives if p in found}
    if program is None or not own or not _is_plain(graph, group.primitives):
        return None
    for extent in dict.fromkeys(extent for some in own.values() for extent in some.values()):
        some = frozenset((p, axis) for p, of in own.items() for axis, e in of.items() if e == extent)
        known = _known(graph, candidate, program, some)
        if known and plan.size_inputs.get(extent.dimension) and ended(program, known, target.lanes):
            return Ending(extent, known, some)
    return None


def _is_plain(graph: PrimitiveGraph, primitives: Sequence[int]) -> bool:
    """Return whether all primitives are elementwise, move elements, or are reductions or products of matrices."""
    plain = (Category.ELEMENTWISE, Category.BROADCAST, Category.LAYOUT)
    rows = [graph.primitives[p] for p in primitives]
    return all(p.row.category in plain or isinstance(p.attributes, ReduceAttributes) or p.op == "matmul" for p in rows)


def _operands(graph: PrimitiveGraph, reduction: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the operands of a reduction, each with the axis that it goes along."""
    number, axis = reduction
    primitive = graph.primitives[number]
    if primitive.op != "matmul":
        return [(primitive.inputs[0], axis)]
    return [(value, axis - k) for k, value in enumerate(primitive.inputs)]


def _reductions(graph: PrimitiveGraph, number: int) -> list[tuple[int, int]]:
    """Return the axes that a primitive reduces, each with its number."""
    primitive = graph.primitives[number]
    if isinstance(primitive.attributes, ReduceAttributes):
        return [(number, axis) for axis in primitive.attributes.axes]
    rank = len(graph.types[primitive.inputs[0]].shape)
    return [(number, rank - 1)] if primitive.op == "matmul" else []


def _known(
    graph: PrimitiveGraph, candidate: Candidate, program: TileProgram, own: Collection[tuple[int, int]]
) -> dict[str, Needed]:
    """Return where inputs have the elements that some reductions go through; nothing if others do, too."""
    group, offer = candidate.group, candidate.offer
    along = sources(graph, group.primitives, [place for some in own for place in _operands(graph, some)])
    if not along:
        return {}
    for other in {reduction for p in group.primitives for reduction in _reductions(graph, p)} - {*own}:
        others = sources(graph, group.primitives, _operands(graph, other))
        if others is None or any(along.get(value) == axis for value, axis in others.items()):
            return {}
    buffers = [buffer.name for buffer in program.buffers if buffer.level is Level.INPUT]
    found = {}
    for name, value, type_, layout in zip(buffers, group.inputs, group.input_types, offer.inputs, strict=True):
        if value in along:
            needed = place_of(layout, type_.shape, along[value])
            if needed is None:
                return {}
            found[name] = needed
    return found if len({needed.extent for needed in found.values()}) == 1 else {}


def program_of(kernel: Kernel) -> TileProgram | None:
    """Return the program of a kernel that can be trimmed."""
    return None if kernel.has_state or kernel.libraries else kernel.program


def place_of(layout: Layout, shape: tuple[int, ...], axis: int) -> Needed | None:
    """Return where a buffer has the elements along an axis; None if these are in blocks."""
    if layout.block(axis) != 1:
        return None
    physical = layout.physical_shape(shape)
    return Needed(math.prod(physical[layout.order.index(axis) + 1 :]), shape[axis])
