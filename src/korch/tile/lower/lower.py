"""Lowers a group with the layouts of its inputs and outputs to a tile program.

A value that must be in memory (an output, or the result of a reduction) becomes a *member*, which has
a loop nest. All other values are recomputed where they are read. `korch.tile.lower.staging` places members
in stages, so that a softmax or a normalization is one stage whose tasks run several passes over a row
that stays in cache. This module assigns memory to the members and passes to the stages.
"""

import math
from collections.abc import Sequence
from functools import reduce

from korch.candidate.layout import Layout
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.reduce import PoolAttributes, identity
from korch.primitive.types import row_major_strides
from korch.ranges.live import blocks, count_of, joined, rows_apart
from korch.tile.ir.index import ZERO, Expr, Ranges, add, remainder, scale, var
from korch.tile.ir.program import Accumulate, Axis, Buffer, Inside, Level, Pass, Sink, Stage, Store, TileProgram
from korch.tile.lower.buffers import ports
from korch.tile.lower.emit import Emitter, Index, physical_offset
from korch.tile.lower.loops import arrange, grid_for
from korch.tile.lower.parts import cut_pass
from korch.tile.lower.staging import Machine, Member, StageDraft, Staging

TILE_LIMIT_BYTES = 128 << 10
"""The maximum bytes per task of a member that is a tile; larger ones are in the workspace."""


def lower(body: PrimitiveGraph, inputs: Sequence[Layout], outputs: Sequence[Layout], machine: Machine) -> TileProgram:
    """Lower a group without linear or opaque primitives."""
    return _Lowering(body, inputs, outputs, machine).run()


class _Lowering(Staging):
    """Adds memory and loop nests to the stages."""

    def __init__(
        self, body: PrimitiveGraph, inputs: Sequence[Layout], outputs: Sequence[Layout], machine: Machine
    ) -> None:
        super().__init__(body, inputs, outputs, machine)
        self.level: dict[int, Level] = {}

    def run(self) -> TileProgram:
        for member in self._find_members():
            self._place(member)
        for value in self.members:
            own = self.stage_of[value]
            readers = [m for m in self.members.values() if value in m.reads]
            is_tile = all(self.stage_of[m.value] == own for m in readers)
            is_tile = is_tile and self._tile_bytes(value) <= TILE_LIMIT_BYTES
            if value in self.out_buffer:
                self.level[value] = Level.OUTPUT
            else:
                self.level[value] = Level.TILE if is_tile else Level.WORKSPACE
        stages = tuple(each for stage in self.stages for each in self._stages(stage))
        return TileProgram(self._buffers(), stages)

    def _address(self, value: int, index: Index, ranges: Ranges) -> tuple[str, Expr]:
        """Return the buffer (an output, the workspace or a tile) and the index of a member's element."""
        if value not in self.level:
            return super()._address(value, index, ranges)
        shape = self.body.types[value].shape
        if self.level[value] is Level.OUTPUT:
            name = self.out_buffer[value]
            return name, physical_offset(self.layouts[name], shape, index, ranges)
        if self.level[value] is Level.WORKSPACE:
            layout = self._layout(self.members[value])
            return f"t{value}", physical_offset(layout, shape, index, ranges)
        sizes, parts = self._tile_shape(value), []
        grid = {axis: g for g, axis in self.members[value].grid_axis.items()}
        stage = self.stages[self.stage_of[value]]
        for axis, expr in enumerate(index):
            block = stage.grid[grid[axis]][1] if axis in grid else 0
            parts.append(expr if axis not in grid else remainder(expr, block, ranges))
        strides = row_major_strides(sizes)
        return f"t{value}", add(ZERO, *(scale(e, s) for e, s in zip(parts, strides, strict=True)))

    def _tile_shape(self, value: int) -> tuple[int, ...]:
        """Return the shape of the part of a member that one task holds."""
        member = self.members[value]
        grid = {axis: g for g, axis in member.grid_axis.items()}
        stage = self.stages[self.stage_of[value]]
        return tuple(stage.grid[grid[axis]][1] if axis in grid else n for axis, n in enumerate(member.type.shape))

    def _tile_bytes(self, value: int) -> int:
        size = math.prod(self._tile_shape(value))
        return size * self.members[value].type.dtype.size_bytes

    def _stages(self, stage: StageDraft) -> list[Stage]:
        """Return a draft as a stage; as one stage for each part if a concatenation is cut."""
        threads, lanes = self.machine.threads, self.machine.lanes
        if stage.is_free:
            pass_ = self._pass(stage, stage.members)
            if self.machine.is_device:
                return [Stage((), (self._arranged(pass_, {}),))]
            parts = cut_pass(pass_, lanes, self._sizes())
            return [grid_for(part, threads, lanes) for part in parts]
        grid = tuple(Axis(f"g{g}", blocks(size, block)) for g, (size, block) in enumerate(stage.grid))
        groups: list[list[Member]] = []
        for member in stage.members:
            last = groups[-1] if groups else []
            fits = last and self._loops_of(last[0]) == self._loops_of(member)
            if fits and not member.reads & {m.value for m in last}:
                last.append(member)
            else:
                groups.append([member])
        ranges = {axis.name: (0, axis.extent - 1) for axis in grid}
        return [Stage(grid, tuple(self._arranged(self._pass(stage, group), ranges) for group in groups))]

    def _arranged(self, pass_: Pass, grid: Ranges) -> Pass:
        return arrange(pass_, self.machine.lanes, self._sizes(), grid)

    def _sizes(self) -> dict[str, int]:
        return {buffer.name: buffer.size for buffer in self._buffers()}

    def _loops_of(self, member: Member) -> object:
        """Return a key that is equal for members that one loop nest can compute."""
        reduction = member.reduction
        reduced = reduction and (reduction.attributes, reduction.op[:4], self._reduced(member))
        return member.type.shape, member.grid_axis, reduced

    def _pass(self, stage: StageDraft, members: list[Member]) -> Pass:
        first = members[0]
        index, axes = self._axes(stage, members)
        axes += [Axis(name, size, True) for name, size in self._reduced(first).items()]
        ranges = {axis.name: (0, max(axis.extent - 1, 0)) for axis in axes}
        grid = {f"g{g}": (0, n // block - 1) for g, (n, block) in enumerate(stage.grid)}
        ranges |= grid
        sinks: list[Sink] = []
        emitter = Emitter(self.body, self._home(first, None), ranges)
        for member in members:
            emitter.home = self._home(member, None)
            sinks.append(self._sink(emitter, member, index, ranges))
        return Pass(tuple(axes), "", tuple(emitter.ops), tuple(sinks))

    def _sink(self, emitter: Emitter, member: Member, index: Index, ranges: Ranges) -> Sink:
        buffer, address = self._address(member.value, index, ranges)
        source = self._source_index(member, index)
        reduction = member.reduction
        if reduction is None:
            return Store(buffer, address, emitter.value(member.source, source))
        op, guards = reduction.op.split("_")[1], list[Inside]()
        if isinstance(reduction.attributes, PoolAttributes):  # windows may reach beyond the border
            shape = self.body.types[member.source].shape
            guards = [guard for e, n in zip(source, shape, strict=True) for guard in emitter.inside(e, 0, n)]
        value, dtype = emitter.value(member.source, source, tuple(guards)), member.type.dtype
        if guards:
            value = emitter.select(dtype, tuple(guards), value, emitter.literal(dtype, identity(op, dtype)))
        return Accumulate(buffer, address, value, op)

    def _axes(self, stage: StageDraft, members: Sequence[Member]) -> tuple[Index, list[Axis]]:
        """Return the index of members of one shape in loop variables, and their loops."""
        member = members[0]
        shape = [reduce(joined, sizes) for sizes in zip(*(own.type.shape for own in members), strict=True)]
        grid = {axis: g for g, axis in member.grid_axis.items()}
        cut = self._free_blocks(member) if stage.is_free else {}
        index, axes = [], []
        for a, n in enumerate(shape):
            if n == 1:
                index.append(ZERO)
            elif a in grid:
                size, block = stage.grid[grid[a]]
                outer = scale(var(f"g{grid[a]}"), block) if block < n else ZERO
                index.append(add(outer, var(f"v{a}")) if block > 1 else outer)
                if block > 1:
                    axes.append(Axis(f"v{a}", block, ragged=(f"g{grid[a]}", size) if count_of(size) else None))
            elif a in cut and cut[a] < n:
                index.append(add(scale(var(f"d{a}"), cut[a]), var(f"v{a}")))
                axes += [Axis(f"d{a}", blocks(n, cut[a])), Axis(f"v{a}", cut[a])]
            elif apart := rows_apart(n):
                index.append(add(scale(var(f"d{a}"), apart[1]), var(f"v{a}")))
                axes += [Axis(f"d{a}", apart[0]), Axis(f"v{a}", apart[1])]
            else:
                index.append(var(f"d{a}"))
                axes.append(Axis(f"d{a}", n))
        return tuple(index), axes

    def _free_blocks(self, member: Member) -> dict[int, int]:
        """Return the blocks, by axis, of any layout that fits the member's axes, so that blocks become loops."""
        blocks: dict[int, int] = {}
        for layout in (self._layout(member), *self.layouts.values()):
            for axis, size in layout.blocks:
                is_fit = axis < member.type.rank and member.type.shape[axis] % size == 0
                if is_fit and len(layout.order) == member.type.rank:
                    blocks[axis] = size
        return blocks

    def _buffers(self) -> tuple[Buffer, ...]:
        buffers = [*ports(self.body, self.layouts)]
        for value, level in self.level.items():
            type_ = self.body.types[value]
            if level is Level.WORKSPACE:
                buffers.append(Buffer(f"t{value}", level, type_.dtype, type_.size))
            elif level is Level.TILE:
                size = math.prod(self._tile_shape(value))
                buffers.append(Buffer(f"t{value}", level, type_.dtype, size))
        return tuple(buffers)
