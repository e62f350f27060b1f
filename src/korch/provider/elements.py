"""The offer and the tile program for a group with an opaque `GatherElements`: any axis, any element type.

A task computes some rows of the result. For each element a loop runs the one iteration that the index chooses. An index
out of range is replaced by the nearest position.
"""

from __future__ import annotations

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.types import row_major_strides
from korch.provider.opaque import attributes_of, node_of
from korch.schedule.blocks import cut, flat
from korch.target import Target
from korch.tile.ir.index import ZERO, Expr, add, scale, var
from korch.tile.ir.program import At, Axis, Buffer, Level, Load, Loop, Pass, Stage, Store, TileProgram
from korch.tile.llvm.arithmetic import KIND
from korch.tile.lower.staging import Machine

COLUMNS = 1024
"""The most elements of a row that a task computes."""

ELEMENTS = 256
"""A task takes several rows up to this number of elements."""


def offer_elements(group: Group, _target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer a `GatherElements` in plain layouts."""
    if any(value not in group.position for value in group.body.primitives[0].inputs):
        return Refusal("the elements or the indices are constants")
    types = (*group.input_types, *group.output_types)
    if any(type_.dtype not in KIND for type_ in types) or not all(type_.size for type_ in types):
        return Refusal("there are no elements, or of a type that is not generated")
    return (Offer(*group.plain_layouts),)


def elements_program(group: Group, machine: Machine, _variant: str = "") -> TileProgram:
    """Return the program of the offer."""
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
    buffers = [Buffer(f"i{n}", Level.INPUT, type_.dtype, type_.size) for n, type_ in enumerate(group.input_types)]
    buffers.append(Buffer("o0", Level.OUTPUT, body.types[data].dtype, body.types[index].size))
    return TileProgram(tuple(buffers), (Stage(grid, (Loop(r, (), (Loop(v, (), (one,)),)),)),))
