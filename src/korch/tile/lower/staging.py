"""Finds the members of a group and the stages that they run in: the first half of lowering.

A member is a value that is in memory: an output, the result of a reduction, or a value that each element of a row would
compute again (`row_values`). A reduction opens a stage whose grid consists of its kept axes. A later member joins the
stage if it reads results of the stage at its own grid point only; otherwise it opens a new stage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.reduce import PoolAttributes, ReduceAttributes
from korch.primitive.types import ValueType
from korch.ranges.live import joined
from korch.target import Target
from korch.tile.ir.index import ZERO, Expr, Ranges, add, constant, scale, var
from korch.tile.ir.program import Load
from korch.tile.lower.emit import Emitter, Home, Index, physical_offset
from korch.tile.lower.loops import beside

WIDEST_BLOCK = 1024
STARVED_ELEMENTS = 4096

ROW_POINTS = 2048
"""The maximum elements of all inputs and outputs that a task which reduces several short rows reads and writes: the
rows overlap in time and stay in the L1 cache."""

WINDOW_POINTS = 8192
"""The maximum points of a task that reduces several windows, whose elements are not stored."""

TASKS_PER_THREAD = 8
"""A task takes several rows only if this many tasks are left for each thread."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of the target that lowering needs."""

    lanes: int  # elements of a vector
    threads: int  # the number of threads
    # whether each point is a task, as on a GPU: then every kept axis of a reduction is a grid axis, and a stage without
    # reductions is one loop nest
    is_device: bool = False

    @classmethod
    def of(cls, target: Target) -> Machine:
        """Return the machine of a CPU."""
        return cls(target.lanes, target.threads)


DEVICE = Machine(lanes=1, threads=1, is_device=True)


def row_values(body: PrimitiveGraph) -> frozenset[int]:
    """Return the values after reductions that are computed once for each row, as all elements of the row read them."""
    after, found = set[int](), set[int]()
    for p in body.primitives:
        is_reduction = p.row.category is Category.REDUCE
        if is_reduction or not after.isdisjoint(p.inputs):
            after.add(p.output)
        is_computed = p.row.category is Category.ELEMENTWISE and p.output in after
        if is_computed and any(reader.op == "broadcast" for reader in body.reading(p.output)):
            found.add(p.output)
    return frozenset(found)


@dataclass
class Member:
    """A value that is stored in memory: the result of an elementwise expression, or of a reduction."""

    value: int
    source: int
    type: ValueType
    reduction: Primitive | None
    grid_axis: dict[int, int] = field(default_factory=dict)  # stage's grid axis -> own axis
    reads: frozenset[int] = frozenset()


@dataclass
class StageDraft:
    """A stage under construction; `grid` holds (elements, block) per grid axis."""

    grid: list[tuple[int, int]]
    is_free: bool
    members: list[Member] = field(default_factory=list)


class Staging:
    """Finds the members of a group and places them in stages."""

    def __init__(
        self, body: PrimitiveGraph, inputs: Sequence[Layout], outputs: Sequence[Layout], machine: Machine
    ) -> None:
        self.body = body
        self.machine = machine
        self.in_buffer = {value: name for name, value in body.inputs}
        self.out_buffer = {value: name for name, value in body.outputs}
        self.layouts = {
            name: layout for (name, _), layout in zip((*body.inputs, *body.outputs), (*inputs, *outputs), strict=True)
        }
        self.members: dict[int, Member] = {}
        self.stage_of: dict[int, int] = {}
        self.stages: list[StageDraft] = []

    def _find_members(self) -> list[Member]:
        found: list[Member] = []
        kept = frozenset() if self.machine.is_device else row_values(self.body)
        for primitive in self.body.primitives:
            value = primitive.output
            reduction = primitive if self._is_reduction(primitive) else None
            if value in self.out_buffer or reduction is not None or value in kept:
                source = primitive.inputs[0] if reduction else value
                found.append(Member(value, source, self.body.types[value], reduction))
        copies = [v for v in self.out_buffer if not self.body.producers[v]]
        found += [Member(v, v, self.body.types[v], None) for v in copies]
        found = [member for member in found if member.type.size]
        self.members = {member.value: member for member in found}
        return found

    def _is_reduction(self, primitive: Primitive) -> bool:
        match primitive.attributes:
            case ReduceAttributes(axes):
                shape = self.body.types[primitive.inputs[0]].shape
                return math.prod(shape[axis] for axis in axes) != 1
            case PoolAttributes():
                return True
        return False

    def _place(self, member: Member) -> None:
        loads = self._trace(member)
        member.reads = frozenset(value for value, _ in loads)
        stage = self.stages[-1] if self.stages else None
        if stage is None or not self._join(stage, member, loads):
            if member.reduction is None and member.value not in self.out_buffer:
                del self.members[member.value]  # each reader computes it
                return
            stage = self._open(member)
            self.stages.append(stage)
        stage.members.append(member)
        self.stage_of[member.value] = len(self.stages) - 1

    def _join(self, stage: StageDraft, member: Member, loads: list[tuple[int, Index]]) -> bool:
        local = [(v, i) for v, i in loads if self.stage_of.get(v) == len(self.stages) - 1]
        if stage.is_free:
            first = stage.members[0]
            same = member.type.shape == first.type.shape and not member.reduction
            return same and not local and self._layout(member) == self._layout(first)
        grid_axis = self._align(stage, member, local)
        tasks = math.prod(size // block for size, block in stage.grid)
        is_starved = tasks < self.machine.threads and member.type.size > STARVED_ELEMENTS
        if grid_axis is None or (is_starved and member.reduction is None):
            return False
        member.grid_axis = grid_axis
        for grid, axis in grid_axis.items():
            size, block = stage.grid[grid]
            stage.grid[grid] = joined(size, member.type.shape[axis]), block
        return True

    def _align(self, stage: StageDraft, member: Member, local: list[tuple[int, Index]]) -> dict[int, int] | None:
        """Return the map of grid axes to the member's axes if it reads `local` at its own task only, else None."""
        if not local:
            kept = [a for a, n in enumerate(member.type.shape) if n > 1]
            sizes = [member.type.shape[a] for a in kept]
            if member.reduction and sizes == [n for n, _ in stage.grid]:
                return dict(enumerate(kept))
            return None
        found: dict[int, int] = {}
        for value, index in local:
            for grid, axis in self.members[value].grid_axis.items():
                axes = (a for a, n in enumerate(member.type.shape) if n == stage.grid[grid][0])
                own = next((a for a in axes if index[axis] == var(f"d{a}")), None)
                if own is None or found.setdefault(grid, own) != own:
                    return None
        return found if len(found) == len(stage.grid) else None

    def _open(self, member: Member) -> StageDraft:
        if member.reduction is None:
            return StageDraft([], is_free=True)
        kept = [a for a, n in enumerate(member.type.shape) if n > 1]
        member.grid_axis = dict(enumerate(kept))
        split_axis, block = self._vector_split(member, kept)
        blocks = {split_axis: block} if split_axis is not None else {}
        if not self.machine.is_device:
            blocks |= self._rows(member, [a for a in kept if a != split_axis], block)
        return StageDraft([(member.type.shape[a], blocks.get(a, 1)) for a in kept], is_free=False)

    def _rows(self, member: Member, axes: list[int], block: int) -> dict[int, int]:
        """Return, by axis, how many elements of the kept axes `axes` a task takes so that it is not too short."""
        is_window = isinstance(member.reduction and member.reduction.attributes, PoolAttributes)
        points = block * math.prod(self._reduced(member).values())
        room = (WINDOW_POINTS if is_window else ROW_POINTS // self._arrays(member)) // max(1, points)
        tasks = member.type.size // block
        blocks: dict[int, int] = {}
        for axis in reversed(axes):
            size = member.type.shape[axis]
            wanted = min(room, tasks // (TASKS_PER_THREAD * self.machine.threads))
            rows = max((n for n in range(1, min(size, wanted) + 1) if size % n == 0), default=1)
            blocks[axis] = rows
            room, tasks = room // rows, tasks // rows
        return blocks

    def _arrays(self, member: Member) -> int:
        """Return how many inputs and outputs are as large as what a member is reduced from."""
        size = self.body.types[member.source].size
        return max(1, sum(self.body.types[v].size >= size for _, v in (*self.body.inputs, *self.body.outputs)))

    def _vector_split(self, member: Member, kept: list[int]) -> tuple[int | None, int]:
        """Choose the vector axis: a reduced axis (None, 1), or a kept axis and its block per task."""
        along = self._contiguity(member, {}, None)
        if isinstance(member.reduction and member.reduction.attributes, PoolAttributes):
            along = max(0, along - 1)  # windows overlap: on a tie, vectorize across windows
        best: tuple[int, int | None, int] = (along, None, 1)
        for axis in kept:
            size = member.type.shape[axis]
            others = math.prod(member.type.shape) // size
            is_wide = size <= WIDEST_BLOCK and others >= 4 * self.machine.threads
            wide = [size] if is_wide and not self.machine.is_device else []
            narrow = [self.machine.lanes] if size % self.machine.lanes == 0 else [size]
            for block in (*wide, *narrow):
                split = add(scale(var("outer"), block), var("inner"))
                index = {axis: split if block < size else var("inner")}
                score = self._contiguity(member, index, (size // block, block))
                if score > best[0]:
                    best = (score, axis, block)
                    break
        return best[1], best[2]

    def _contiguity(self, member: Member, replaced: dict[int, Expr], split: tuple[int, int] | None) -> int:
        """Return how many elements are read with vectors along the vector axis, times the lanes in use."""
        index, ranges, reduced = self._naive(member)
        index = tuple(replaced.get(a, e) for a, e in enumerate(index))
        if split is not None:
            ranges = {**ranges, "outer": (0, split[0] - 1), "inner": (0, split[1] - 1)}
        emitter = Emitter(self.body, self._home(member, None), ranges)
        emitter.value(member.source, self._source_index(member, index))
        names = ["inner"] if split is not None else list(reduced)
        sizes = {name: self.body.types[v].size for name, v in self.body.inputs}
        sizes |= {f"t{v}": m.type.size for v, m in self.members.items()}
        loads = [op for op in emitter.ops if isinstance(op, Load)]
        lengths = reduced | ({"inner": split[1]} if split is not None else {})
        lanes = self.machine.lanes
        scores = (sum(beside(op, name, sizes) for op in loads) * min(lengths[name], lanes) for name in names)
        return max(scores, default=0)

    def _trace(self, member: Member) -> list[tuple[int, Index]]:
        """Return the members that a member reads, each with the index, in terms of the reader's own axes."""
        index, ranges, _ = self._naive(member)
        reads: list[tuple[int, Index]] = []
        emitter = Emitter(self.body, self._home(member, reads), ranges)
        emitter.value(member.source, self._source_index(member, index))
        return reads

    def _naive(self, member: Member) -> tuple[Index, dict[str, tuple[int, int]], dict[str, int]]:
        """Return an index with one variable per axis, the ranges of all variables, and the reduced axes' sizes."""
        index = tuple(ZERO if n == 1 else var(f"d{a}") for a, n in enumerate(member.type.shape))
        ranges = {f"d{a}": (0, n - 1) for a, n in enumerate(member.type.shape)}
        reduced = self._reduced(member)
        ranges |= {name: (0, max(n - 1, 0)) for name, n in reduced.items()}
        return index, ranges, reduced

    def _home(self, member: Member, reads: list[tuple[int, Index]] | None) -> Home:
        def home(value: int, index: Index, ranges: Ranges) -> tuple[str, Expr] | None:
            if value in self.in_buffer:
                name = self.in_buffer[value]
                shape = self.body.types[value].shape
                return name, physical_offset(self.layouts[name], shape, index, ranges)
            if value not in self.members or value == member.value:
                return None
            if reads is not None:
                reads.append((value, index))
                return f"t{value}", add(ZERO, *index)
            return self._address(value, index, ranges)

        return home

    def _reduced(self, member: Member) -> dict[str, int]:
        """Return the reduced axes' variables and sizes."""
        if member.reduction is None:
            return {}
        match member.reduction.attributes:
            case ReduceAttributes(axes):
                shape = self.body.types[member.source].shape
                return {f"r{a}": shape[a] for a in axes if shape[a] != 1}
            case PoolAttributes(kernel=kernel):
                return {f"r{i}": n for i, n in enumerate(kernel) if n != 1}
        raise AssertionError(f"{member.reduction.op} is no reduction")

    def _source_index(self, member: Member, index: Index) -> Index:
        """Return the index into the reduction's input for an output index; that index if there is no reduction."""
        reduced = self._reduced(member)
        match member.reduction and member.reduction.attributes:
            case ReduceAttributes(axes):
                return tuple(
                    (var(f"r{a}") if f"r{a}" in reduced else ZERO) if a in axes else e for a, e in enumerate(index)
                )
            case PoolAttributes(kernel, strides, begin, _, dilations):
                lead = len(index) - len(kernel)
                taps = [var(f"r{i}") if f"r{i}" in reduced else ZERO for i in range(len(kernel))]
                return (
                    *index[:lead],
                    *(
                        add(scale(index[lead + i], strides[i]), scale(taps[i], dilations[i]), constant(-begin[i]))
                        for i in range(len(kernel))
                    ),
                )
        return index

    def _layout(self, member: Member) -> Layout:
        """Return a member's layout: its own if it is an output, else that of a fitting port of its rank, else plain."""
        name = self.out_buffer.get(member.value)
        if name:
            return self.layouts[name]
        ports = [(self.layouts[name], value) for name, value in (*self.body.outputs, *self.body.inputs)]
        for layout, value in ports:
            type_ = self.body.types[value]
            fits = all(member.type.shape[a] % size == 0 for a, size in layout.blocks)
            if type_.rank == member.type.rank > 0 and type_.size > 1 and fits:
                return layout
        return Layout.plain(member.type.rank)

    def _address(self, value: int, index: Index, ranges: Ranges) -> tuple[str, Expr]:
        """Return a member's element as a workspace element; a subclass overrides this once levels are chosen."""
        layout = self._layout(self.members[value])
        return f"t{value}", physical_offset(layout, self.body.types[value].shape, index, ranges)
