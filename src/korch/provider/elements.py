"""The offers and tile programs for an opaque `Gather` or `GatherElements`: any axis, any element type.

A task computes some rows of the result. For each index a loop runs the one iteration that it chooses. An index out of
range is replaced by the nearest position.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, replaced
from korch.primitive.types import row_major_strides
from korch.provider.opaque import attributes_of, node_of
from korch.schedule.blocks import cut, flat
from korch.target import Target
from korch.tile.ir.index import ZERO, Expr, add, scale, var
from korch.tile.ir.program import At, Axis, Buffer, Level, Load, Loop, Pass, Stage, Store, TileProgram
from korch.tile.llvm.arithmetic import KIND
from korch.tile.lower.emit import physical_offset
from korch.tile.lower.staging import Machine

NO_SIZES: Mapping[int, int] = MappingProxyType({})

COLUMNS = 1024
"""The most elements of a row that a task computes."""

ELEMENTS = 256
"""A task takes several rows up to this number of elements."""


def offer_elements(group: Group, _target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer a `Gather` or a `GatherElements` in plain layouts."""
    if any(value not in group.position for value in group.body.primitives[0].inputs):
        return Refusal("the elements or the indices are constants")
    types = (*group.input_types, *group.output_types)
    if any(type_.dtype not in KIND for type_ in types) or not all(type_.size for type_ in types):
        return Refusal("there are no elements, or of a type that is not generated")
    return (Offer(*group.plain_layouts),)


def in_layout(group: Group, layout: Layout) -> Offer | None:
    """Return the offer of a `Gather` of rows of a constant matrix in a layout, in which it is stored anyway."""
    node, (data, _) = node_of(group.body.primitives[0]), group.body.primitives[0].inputs
    place, (inputs, outputs) = group.position[data], group.plain_layouts
    if len(group.body.types[data].shape) != 2 or attributes_of(node).get("axis", 0) not in (0, -2):
        return None
    return Offer(replaced(inputs, place, layout), outputs, str(layout))


def gather_program(group: Group, machine: Machine, variant: str = "") -> TileProgram:
    """Return the program for a `Gather`: a task copies a part of one row, or some short rows.

    `variant`: the layout of the data, if it is not plain.
    """
    body, (data, index) = group.body, group.body.primitives[0].inputs
    given, count = body.types[data].shape, body.types[index].size
    axis = attributes_of(node_of(body.primitives[0])).get("axis", 0) % len(given)
    size, row = given[axis], math.prod(given[axis + 1 :])
    v_outer, v = cut(row, min(row, COLUMNS), ("gv", "v"))
    c_outer, c = cut(count, min(count, max(1, ELEMENTS // row)), ("gc", "c"))
    number, column = flat(c_outer, c), flat(v_outer, v) if row > 1 else ZERO
    lead = Axis("g", math.prod(given[:axis]))
    source = add(scale(add(scale(var("g"), size), var("k")), row), column)
    place = add(scale(add(scale(var("g"), count), number), row), column)
    layout = Layout.parse(variant) if variant else Layout.plain(len(given))
    if not layout.is_plain:
        ranges = {part.name: (0, part.extent - 1) for part in (v_outer, v, Axis("k", size))}
        source = physical_offset(layout, given, (var("k"), column), ranges)
    load = Load("x0", body.types[data].dtype, f"i{group.position[data]}", source)
    copied = Pass((v,) if row > 1 else (), "v" if row > 1 else "", (load,), (Store("o0", place, "x0"),))
    one = Loop(Axis("k", size), (), (copied,), At(f"i{group.position[index]}", number), is_nearest=True)
    sizes = {group.position[data]: layout.stored_type(body.types[data]).size}
    return TileProgram(_buffers(group, sizes), (Stage((lead, c_outer, v_outer), (Loop(c, (), (one,)),)),))


def elements_program(group: Group, machine: Machine, _variant: str = "") -> TileProgram:
    """Return the program for a `GatherElements`."""
    body = group.body
    data, index = body.primitives[0].inputs
    x, i = (f"i{group.position[value]}" for value in (data, index))
    given, shape = body.types[data].shape, body.types[index].shape
    rank = len(shape)
    axis = attributes_of(node_of(body.primitives[0])).get("axis", 0) % rank
    last, before = shape[-1], shape[-2] if rank > 1 else 1
    v_outer, v = cut(last, min(last, COLUMNS), ("gv", "v"))
    r_outer, r = cut(before, min(before, max(1, ELEMENTS // last)), ("gr", "r"))
    grid = (*(Axis(f"g{d}", n) for d, n in enumerate(shape[:-2])), r_outer, v_outer)
    where = (*(var(f"g{d}") for d in range(rank - 2)), *([flat(r_outer, r)] if rank > 1 else []), flat(v_outer, v))

    def offset(position: tuple[Expr, ...], sizes: tuple[int, ...]) -> Expr:
        return add(ZERO, *(scale(e, step) for e, step in zip(position, row_major_strides(sizes), strict=True)))

    chosen = offset((*where[:axis], var("k"), *where[axis + 1 :]), given)
    copied = Pass((), "", (Load("x0", body.types[data].dtype, x, chosen),), (Store("o0", offset(where, shape), "x0"),))
    one = Loop(Axis("k", given[axis]), (), (copied,), At(i, offset(where, shape)), is_nearest=True)
    return TileProgram(_buffers(group), (Stage(grid, (Loop(r, (), (Loop(v, (), (one,)),)),)),))


def _buffers(group: Group, sizes: Mapping[int, int] = NO_SIZES) -> tuple[Buffer, ...]:
    """Return the buffers; `sizes` has the elements of inputs that are not plain."""
    types = enumerate(group.input_types)
    inputs = (Buffer(f"i{n}", Level.INPUT, type_.dtype, sizes.get(n, type_.size)) for n, type_ in types)
    (out,) = group.output_types
    return (*inputs, Buffer("o0", Level.OUTPUT, out.dtype, out.size))
