"""The offer and the tile program for a group with an opaque `CumSum` or `CumProd`.

Elements along the axis form sequences, and a loop over the elements carries the running results. Along an outer axis a
task computes adjacent sequences as vectors. Along the last axis a task computes as many rows as a vector has lanes:
squares of elements are transposed in registers before and after. If there are fewer tasks than threads, or fewer rows
than lanes, sequences of sums are cut into parts: a stage computes the sum of each part, and the last one begins each
part with the sums of those before it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from korch.candidate.candidate import Group, Offer, Refusal
from korch.primitive.types import DType
from korch.provider.opaque import attributes_of, node_of
from korch.schedule.blocks import arranged, cut, flat
from korch.system.alignment import ceil_div, round_up
from korch.target import Target
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, scale, var
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Inside,
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
from korch.tile.llvm.arithmetic import KIND
from korch.tile.lower.loops import LINE_ELEMENTS, PAGE_ELEMENTS, TASK_POINTS
from korch.tile.lower.staging import Machine

COLUMNS = 8192
"""The most sequences along an outer axis that a task computes: their results stay in the level-2 cache. With fewer, a
task reads short parts of rows, which takes longer, also on several threads."""

TOGETHER = 4
"""The rows that one pass adds if a row is longer than a page, so that it reads and writes the results less often.
Shorter rows are read one after another, since the hardware prefetches within pages."""

SQUARE = 64
"""The elements of rows that a task transposes at a time."""

PART_POINTS = 4 * TASK_POINTS
"""The least elements of a part of sequences along an outer axis, as the elements of most parts are read twice."""

PART = 256
"""The most elements of a part of a row."""

WHOLE = "whole"
"""The variant whose sequences are not cut."""

COMBINES = {"CumSum": ("add", 0), "CumProd": ("mul", 1)}
"""By operator: the operation and the first result."""


@dataclass(frozen=True)
class _Running:
    """The operator of a group."""

    x: str  # the buffer of the elements
    dtype: DType  # the elements' type
    op: str  # the operation
    first: int  # the result of no elements
    own: int  # 0 if a result leaves out the element at its own place, else 1
    is_reverse: bool  # whether it begins at the end of the axis

    def begin(self, axes: tuple[Axis, ...], at: At) -> Pass:
        """Return the pass that stores the result of no elements."""
        return Pass(axes, axes[-1].name if axes else "", (Literal("x0", self.dtype, self.first),), (_store(at, "x0"),))

    def step(self, axes: tuple[Axis, ...], total: At, elements: Sequence[At], *results: tuple[At, int]) -> Pass:
        """Return the pass that combines a result with elements after it.

        `results` has where results are stored, each with the number of elements that it is combined with.
        """
        ops: list[TileOp] = [self._load("r0", total)]
        for n, x in enumerate(elements):
            ops += [self._load(f"x{n}", x), Apply(f"r{n + 1}", self.dtype, self.op, (f"r{n}", f"x{n}"))]
        return Pass(axes, axes[-1].name if axes else "", tuple(ops), tuple(_store(at, f"r{n}") for at, n in results))

    def copy(self, axes: tuple[Axis, ...], x: At, out: At) -> Pass:
        """Return the pass that copies elements."""
        return Pass(axes, axes[-1].name if axes else "", (self._load("x0", x),), (_store(out, "x0"),))

    def reduce(self, axes: tuple[Axis, ...], x: At, out: At) -> Pass:
        """Return the pass that adds the elements along the last axis, which is reduced."""
        sink = Accumulate(out.buffer, out.index, "x0", "sum")
        return Pass(axes, axes[-1].name, (self._load("x0", x),), (sink,))

    def _load(self, name: str, at: At) -> Load:
        return Load(name, self.dtype, at.buffer, at.index)


def _store(at: At, value: str) -> Store:
    return Store(at.buffer, at.index, value)


def offer_running(group: Group, target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer a `CumSum` or `CumProd` in plain layouts, and in one part where it would be cut along an outer axis.

    Cut sequences are read one and a half times, which takes longer if another process uses one of the cores.
    """
    data, axis = group.body.primitives[0].inputs
    if data not in group.position or axis not in group.body.constants:
        return Refusal("the elements are constants, or the axis is none")
    type_ = group.body.types[data]
    if type_.dtype not in KIND or not type_.size:
        return Refusal("there are no elements, or of a type that is not generated")
    offer = Offer(*group.plain_layouts)
    is_cut = len(running_program(group, Machine.of(target)).stages) == 2
    return (offer, replace(offer, variant=WHOLE)) if is_cut else (offer,)


def running_program(group: Group, machine: Machine, variant: str = "") -> TileProgram:
    """Return the program of the offer."""
    body, primitive = group.body, group.body.primitives[0]
    data, place = primitive.inputs
    node, shape = node_of(primitive), body.types[data].shape
    axis = int(np.asarray(body.constants[place].array).reshape(-1)[0]) % len(shape)
    given = attributes_of(node)
    is_exclusive, is_reverse = (bool(given.get(name, 0)) for name in ("exclusive", "reverse"))
    x = f"i{group.position[data]}"
    running = _Running(x, body.types[data].dtype, *COMBINES[node.op_type], int(not is_exclusive), is_reverse)
    rows, size, columns = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    # Products are not cut into parts: that of a part may overflow although an element before it is 0.
    is_cut = running.op == "add" and variant != WHOLE
    part = min(PART, size // machine.lanes // SQUARE * SQUARE) if is_cut else 0
    if columns == 1 and not is_reverse and rows >= machine.lanes:
        stages, tiles = _rows(running, rows, size, machine.lanes)
    elif columns == 1 and not is_reverse and part:
        stages, tiles = _parts(running, rows, size, part, machine.lanes)
    else:
        stages, tiles = _along_outer(running, rows, size, columns, machine.threads if is_cut else 1)
    ports = [Buffer(f"i{n}", Level.INPUT, type_.dtype, type_.size) for n, type_ in enumerate(group.input_types)]
    ports.append(Buffer("o0", Level.OUTPUT, running.dtype, rows * size * columns))
    return TileProgram((*ports, *tiles), tuple(stages))


Made = tuple[list[Stage], list[Buffer]]


def _along_outer(of: _Running, rows: int, size: int, columns: int, threads: int) -> Made:
    """Return the stages, with the sequences of a task as vectors.

    If threads would be idle, the sequences are cut into parts. A stage then computes the result of each part but the
    last, and another one begins each part with the results of the parts before it.
    """
    blocks = cut(columns, min(columns, COLUMNS), ("gv", "v"))
    count = min(threads // (rows * blocks[0].extent), size * columns // PART_POINTS, size)
    parts = _OuterParts(of, rows, size, columns, max(1, count))
    tiles = [Buffer("total", Level.TILE, of.dtype, blocks[1].extent)]
    if count <= 1:
        return [parts.results(*blocks)], tiles
    width = round_up(ceil_div(columns, ceil_div(threads, rows * (count - 1))), LINE_ELEMENTS)
    tiles.append(Buffer("whole", Level.WORKSPACE, of.dtype, rows * (count - 1) * columns))
    return [parts.sums(*cut(columns, min(columns, width), ("gv", "v"))), parts.results(*blocks)], tiles


@dataclass(frozen=True)
class _OuterParts:
    """Sequences along an outer axis, `rows` times `columns` of them, in `count` parts; the last has the remainder."""

    of: _Running
    rows: int
    size: int
    columns: int
    count: int

    def sums(self, outer: Axis, v: Axis) -> Stage:
        """Return the stage that stores the result of each part but the last in `whole`."""
        column = flat(outer, v)
        total = self._whole(var("p"), column)
        steps: list[Step] = [self.of.begin((v,), total)]
        for e, places in _passes(0, self.size // self.count, v.extent):
            xs = [self._at(self.of.x, place, column) for place in places]
            steps.append(Loop(e, (), (self.of.step((v,), total, xs, (total, len(xs))),)))
        return Stage((Axis("g", self.rows), Axis("p", self.count - 1), outer), tuple(steps))

    def results(self, outer: Axis, v: Axis) -> Stage:
        """Return the stage that stores the results of all elements."""
        of, column, total, length = self.of, flat(outer, v), At("total", var("v")), self.size // self.count
        steps: list[Step] = [of.begin((v,), total)]
        if self.count > 1:
            step = of.step((v,), total, [self._whole(var("q"), column)], (total, 1))
            is_before = Inside(add(var("p"), scale(var("q"), -1)), 1, self.count)
            steps.append(Loop(Axis("q", self.count - 1), ("total",), (replace(step, where=(is_before,)),)))
        is_last = Inside(var("p"), self.count - 1, self.count)
        for begin, end, where in ((0, length, ()), (length, length + self.size % self.count, (is_last,))):
            for e, places in _passes(begin, end, v.extent):
                xs = [self._at(of.x, place, column) for place in places]
                out = [(self._at("o0", place, column), n + of.own) for n, place in enumerate(places)]
                step = of.step((v,), total, xs, *out, (total, len(xs)))
                steps.append(Loop(e, ("total",), (replace(step, where=where),)))
        return Stage((Axis("g", self.rows), Axis("p", self.count), outer), tuple(steps))

    def _at(self, buffer: str, place: Expr, column: Expr) -> At:
        """Return an element of a part by its place."""
        place = add(scale(var("p"), self.size // self.count), place)
        place = add(constant(self.size - 1), scale(place, -1)) if self.of.is_reverse else place
        return At(buffer, add(scale(var("g"), self.size * self.columns), scale(place, self.columns), column))

    def _whole(self, part: Expr, column: Expr) -> At:
        return At("whole", add(scale(add(scale(var("g"), self.count - 1), part), self.columns), column))


def _passes(first: int, end: int, width: int) -> Iterator[tuple[Axis, list[Expr]]]:
    """Yield the loops over some places, with those that a pass combines."""
    number = TOGETHER if width > PAGE_ELEMENTS else 1
    middle = first + (end - first) // number * number
    for begin, after, n in ((first, middle, number), (middle, end, 1)):
        if after > begin:
            yield Axis("e", (after - begin) // n), [add(scale(var("e"), n), constant(begin + k)) for k in range(n)]


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
    own, total = At("square", square), At("total", var("r"))
    step = of.step((r,), total, [own], (own, of.own), (total, 1))
    tiles = [
        Buffer("square", Level.TILE, of.dtype, c.extent * r.extent),
        Buffer("total", Level.TILE, of.dtype, r.extent),
    ]
    return [Loop(outer, ("total",), (into, Loop(c, ("square", "total"), (step,)), back))], tiles


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
    carry: list[Step] = [
        of.begin((), total),
        Loop(part, ("sum",), (of.step((), total, [whole], (before, 0), (total, 1)),)),
    ]
    if rest.extent:
        last = of.step((), total, [At(of.x, at)], (At("o0", at), of.own), (total, 1))
        carry.append(Loop(rest, ("sum",), (last,)))
    outer, r = cut(count, lanes, ("gr", "r"))
    own = flat(outer, r)
    begin = of.copy((r,), At("before", add(scale(var("g"), count), own)), At("total", var("r")))
    steps, tiles = _squares(of, (row, outer), r, add(scale(var("g"), size), scale(own, length)), length)
    tiles.append(Buffer("sum", Level.TILE, of.dtype, 1))
    tiles += [Buffer(name, Level.WORKSPACE, of.dtype, rows * count) for name in ("whole", "before")]
    return [sums, Stage((row,), tuple(carry)), Stage((row, outer), (begin, *steps))], tiles
