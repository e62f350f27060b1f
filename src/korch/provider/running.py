"""The offer and the tile program for a group with an opaque `CumSum` or `CumProd`.

Elements along the axis form sequences, and a loop over the elements carries the running results. Along an outer axis a
task computes adjacent sequences as vectors. Along the last axis a task computes as many rows as a vector has lanes:
squares of elements are transposed in registers before and after. If there are fewer rows, they are cut into parts: a
stage computes the result of each part, another the running results of the parts, and the last one adds them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.types import DType
from korch.provider.opaque import attributes_of, node_of
from korch.schedule.blocks import arranged, cut, flat
from korch.tile.cpp.text import C_TYPE
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, scale, var
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Level,
    Literal,
    Load,
    Loop,
    Pass,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
)
from korch.tile.lower.loops import PAGE_ELEMENTS
from korch.tile.lower.staging import Machine

COLUMNS = 8192
"""The most sequences along an outer axis that a task computes: their results stay in the level-2 cache. With fewer, a
task reads short parts of rows, which takes longer, also on several threads."""

TOGETHER = 4
"""The rows that one pass adds if a row is longer than a page, so that it reads and writes the results less often.
Shorter rows are read one after another, since the hardware prefetches within pages."""

SQUARE = 64
"""The elements of rows that a task transposes at a time."""

PART = 256
"""The most elements of a part of a row."""

COMBINES = {"CumSum": ("add", "sum", 0), "CumProd": ("mul", "prod", 1)}
"""By operator: the operation, the reduction and the first result."""


@dataclass(frozen=True)
class _Running:
    """The operator of a group.

    Attributes:
        x: the buffer of the elements.
        dtype: the elements' type.
        op: the operation.
        reduction: its name as a reduction.
        first: the result of no elements.
        is_exclusive: whether a result leaves out the element at its own place.
        is_reverse: whether it begins at the end of the axis.
    """

    x: str
    dtype: DType
    op: str
    reduction: str
    first: int
    is_exclusive: bool
    is_reverse: bool

    def begin(self, axes: tuple[Axis, ...], at: At) -> Pass:
        """Return the pass that stores the result of no elements."""
        return Pass(axes, axes[-1].name if axes else "", (Literal("x0", self.dtype, self.first),), (_store(at, "x0"),))

    def step(self, axes: tuple[Axis, ...], total: At, places: Sequence[tuple[At, At]], is_exclusive: bool) -> Pass:
        """Return the pass that combines elements with the carried results, and stores these.

        `places` has each element and where its result is stored, in the order in which elements are combined.
        """
        ops: list[TileOp] = [self._load("x0", total)]
        sinks: list[Store] = []
        for x, out in places:
            n = len(ops)
            ops.append(self._load(f"x{n}", x))
            ops.append(Apply(f"x{n + 1}", self.dtype, self.op, (f"x{n - 1}", f"x{n}")))
            sinks.append(_store(out, f"x{n - 1}" if is_exclusive else f"x{n + 1}"))
        return Pass(axes, axes[-1].name if axes else "", tuple(ops), (*sinks, _store(total, f"x{len(ops) - 1}")))

    def copy(self, axes: tuple[Axis, ...], x: At, out: At) -> Pass:
        """Return the pass that copies elements."""
        return Pass(axes, axes[-1].name if axes else "", (self._load("x0", x),), (_store(out, "x0"),))

    def reduce(self, axes: tuple[Axis, ...], x: At, out: At) -> Pass:
        """Return the pass that combines the elements along the last axis, which is reduced."""
        sink = Accumulate(out.buffer, out.index, "x0", self.reduction)
        return Pass(axes, axes[-1].name, (self._load("x0", x),), (sink,))

    def _load(self, name: str, at: At) -> Load:
        return Load(name, self.dtype, at.buffer, at.index)


def _store(at: At, value: str) -> Store:
    return Store(at.buffer, at.index, value)


def offer_running(group: Group) -> tuple[Offer, ...] | Refusal:
    """Offer a `CumSum` or `CumProd` in plain layouts."""
    data, axis = group.body.primitives[0].inputs
    if data not in group.position or axis not in group.body.constants:
        return Refusal("the elements are constants, or the axis is none")
    type_ = group.body.types[data]
    if type_.dtype not in C_TYPE or not type_.size:
        return Refusal("there are no elements, or of a type that is not generated")
    return (Offer(*group.plain_layouts),)


def running_program(group: Group, machine: Machine) -> TileProgram:
    """Return the program of the offer."""
    body, primitive = group.body, group.body.primitives[0]
    data, place = primitive.inputs
    node, shape = node_of(primitive), body.types[data].shape
    axis = int(np.asarray(body.constants[place].array).reshape(-1)[0]) % len(shape)
    given = attributes_of(node)
    is_exclusive, is_reverse = (bool(given.get(name, 0)) for name in ("exclusive", "reverse"))
    x = f"i{group.position[data]}"
    running = _Running(x, body.types[data].dtype, *COMBINES[node.op_type], is_exclusive, is_reverse)
    rows, size, columns = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    part = min(PART, size // machine.lanes // SQUARE * SQUARE)
    if columns == 1 and not is_reverse and rows >= machine.lanes:
        stages, tiles = _rows(running, rows, size, machine.lanes)
    elif columns == 1 and not is_reverse and part:
        stages, tiles = _parts(running, rows, size, part, machine.lanes)
    else:
        stages, tiles = _along_outer(running, rows, size, columns)
    ports = [Buffer(f"i{n}", Level.INPUT, type_.dtype, type_.size) for n, type_ in enumerate(group.input_types)]
    ports.append(Buffer("o0", Level.OUTPUT, running.dtype, rows * size * columns))
    return TileProgram((*ports, *tiles), tuple(stages))


Made = tuple[list[Stage], list[Buffer]]


def _along_outer(of: _Running, rows: int, size: int, columns: int) -> Made:
    """Return the stage, with the sequences of a task as vectors."""
    outer, v = cut(columns, min(columns, COLUMNS), ("gv", "v"))
    row, total = Axis("g", rows), At("total", var("v"))
    count = TOGETHER if v.extent > PAGE_ELEMENTS else 1
    steps: list[Step] = [of.begin((v,), total)]
    for e, first, number in ((Axis("e", size // count), 0, count), (Axis("e", size % count), size - size % count, 1)):
        places = [add(scale(var("e"), number), constant(first + k)) for k in range(number)]
        if of.is_reverse:
            places = [add(constant(size - 1), scale(place, -1)) for place in places]
        at = [add(scale(var("g"), size * columns), scale(place, columns), flat(outer, v)) for place in places]
        step = of.step((v,), total, [(At(of.x, i), At("o0", i)) for i in at], of.is_exclusive)
        steps += [Loop(e, ("total",), (step,))] if e.extent else []
    return [Stage((row, outer), tuple(steps))], [Buffer("total", Level.TILE, of.dtype, v.extent)]


def _rows(of: _Running, rows: int, size: int, lanes: int) -> Made:
    """Return the stage whose tasks compute as many rows as a vector has lanes."""
    outer, r = cut(rows, lanes, ("gr", "r"))
    begin = of.begin((r,), At("total", var("r")))
    steps, tiles = _squares(of, (outer,), r, scale(flat(outer, r), size), size)
    return [Stage((outer,), (begin, *steps))], tiles


def _squares(of: _Running, grid: tuple[Axis, ...], r: Axis, first: Expr, size: int) -> tuple[list[Step], list[Buffer]]:
    """Return the steps that compute rows which begin at `first`, and their tiles; `total` has the first results."""
    outer, c = cut(size, min(size, SQUARE), ("h", "c"))
    at = add(first, flat(outer, c))
    square = add(scale(var("c"), r.extent), var("r"))
    ranges: Ranges = {axis.name: (0, axis.extent - 1) for axis in (*grid, outer, r, c)}
    into = arranged(of.copy((c, r), At(of.x, at), At("square", square)), ranges, r.extent)
    back = arranged(of.copy((r, c), At("square", square), At("o0", at)), ranges, r.extent)
    own = At("square", square)
    step = Loop(c, ("square", "total"), (of.step((r,), At("total", var("r")), [(own, own)], of.is_exclusive),))
    tiles = [
        Buffer("square", Level.TILE, of.dtype, c.extent * r.extent),
        Buffer("total", Level.TILE, of.dtype, r.extent),
    ]
    return [Loop(outer, ("total",), (into, step, back))], tiles


def _parts(of: _Running, rows: int, size: int, length: int, lanes: int) -> Made:
    """Return the stages for few long rows, each of which is cut into parts of some length."""
    count = size // length
    row, part, e = Axis("g", rows), Axis("p", count), Axis("e", length, is_reduced=True)
    first = add(scale(var("g"), size), scale(var("p"), length))
    number = add(scale(var("g"), count), var("p"))
    whole, before = At("whole", number), At("before", number)
    sums = Stage((row, part), (of.reduce((e,), At(of.x, add(first, var("e"))), whole),))
    total, rest = At("sum", ZERO), Axis("q", size - count * length)
    at = add(scale(var("g"), size), constant(count * length), var("q"))
    carry: list[Step] = [of.begin((), total), Loop(part, ("sum",), (of.step((), total, [(whole, before)], True),))]
    if rest.extent:
        carry.append(Loop(rest, ("sum",), (of.step((), total, [(At(of.x, at), At("o0", at))], of.is_exclusive),)))
    outer, r = cut(count, lanes, ("gr", "r"))
    own = flat(outer, r)
    begin = of.copy((r,), At("before", add(scale(var("g"), count), own)), At("total", var("r")))
    steps, tiles = _squares(of, (row, outer), r, add(scale(var("g"), size), scale(own, length)), length)
    tiles.append(Buffer("sum", Level.TILE, of.dtype, 1))
    tiles += [Buffer(name, Level.WORKSPACE, of.dtype, rows * count) for name in ("whole", "before")]
    return [sums, Stage((row,), tuple(carry)), Stage((row, outer), (begin, *steps))], tiles
