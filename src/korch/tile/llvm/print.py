"""Prints a tile program as LLVM IR.

A kernel is one function. If threads share its work, each stage is also a function, which runs a range of the stage's
tasks. Each thread calls the kernel's function `NAME_team`, which calls the stage functions; a plan may instead run
chosen tasks of a stage through `NAME_task`. `korch_region` runs a team's function in a new parallel region.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from korch.ranges.live import Count
from korch.system.content_name import content_name
from korch.target import Target
from korch.tile.analysis.components import is_split, passing, split_of, tile_in_use
from korch.tile.analysis.panels import by_panel, panels
from korch.tile.analysis.shares import PLACE, Shares, by_rows, shares_of
from korch.tile.analysis.stages import (
    SERIAL_POINTS,
    is_large_tile,
    large_inputs,
    stages_that_wait,
    streamed_outputs,
    tile_bytes,
    tiles_of,
)
from korch.tile.analysis.sums import Sums, sums_of
from korch.tile.ir.index import ROWS, Expr
from korch.tile.ir.parameters import PART, whole
from korch.tile.ir.program import (
    Apply,
    Axis,
    Buffer,
    Contract,
    Level,
    Load,
    Loop,
    Pass,
    Stage,
    Step,
    TileProgram,
    refused,
    written_by,
)
from korch.tile.llvm.arithmetic import KIND, OPS
from korch.tile.llvm.chosen import chosen_iteration, nearest_iteration
from korch.tile.llvm.emit import Emit, SsaValue, constant
from korch.tile.llvm.index import ROW_TABLE, Env, end_of, index_of
from korch.tile.llvm.isa import ISAS, Isa
from korch.tile.llvm.memory import stored_kind
from korch.tile.llvm.nest import NestPrinter
from korch.tile.llvm.parameters import counted, placed_rows, share_of
from korch.tile.llvm.points import KernelContext
from korch.tile.llvm.sort import print_order
from korch.tile.llvm.windows import contract_printer, refused_step
from korch.tile.lower.buffers import places_in_memory

MARK = "; LLVM IR for "
"""The beginning of a module's text; the instruction set follows."""

MEMBER_THREADS, MEMBER_MEET = 8, 16
"""The offsets in bytes of the number of threads and of the barrier in a `korch_member`."""


class PrintedLlvm(NamedTuple):
    """A kernel's source."""

    symbol: str  # the name that it exports
    source: str  # the text
    workspace_bytes: int  # the size of the scratch memory that it needs
    thread_bytes: int  # the private part of it per thread, if threads share no part of it; else 0
    is_parallel: bool  # whether it has a parallel region; else it runs in the calling thread


def refusal(program: TileProgram, target: Target) -> str:
    """Return why a program is not printed as LLVM IR yet; "" if it is."""
    program = whole(program)
    if target.isa not in ISAS:
        return f"the instruction set {target.isa}"
    for buffer in program.buffers:
        is_panel = buffer.level is not Level.OUTPUT and panels(buffer) is not None
        if buffer.layout and not (is_panel and len(buffer.layout) == (2 if split_of(buffer) else 1)):
            return f"the layout of buffer {buffer.name}"
        if buffer.dtype not in KIND:
            return f"elements of type {buffer.dtype.value}"
    for stage in program.stages:
        for _, step in stage.leaves:
            if isinstance(step, Contract):
                if reason := refused_step(program, step, ISAS[target.isa]):
                    return reason
                continue
            if any(panels(program.buffer(op.buffer)) for op in step.ops if isinstance(op, Load)):
                return "passes that read panels"
            if any({step.vector, step.across} & guard.expr.variables for guard in step.where):
                return "passes that leave elements of a vector out"
            for op in step.ops:
                if isinstance(op, Apply) and op.op not in OPS:
                    return f"the operation {op.op}"
    return ""


def print_llvm(
    program: TileProgram,
    comment: str,
    target: Target,
    stream_bytes: int = sys.maxsize,
    counts: Mapping[str, Count] | None = None,
) -> PrintedLlvm:
    """Return the source of a program.

    Args:
        program: the program. Its parameters must be in `counts`.
        comment: the comment at the head of the source.
        target: the machine.
        stream_bytes: outputs of at least this size bypass the caches, and inputs of at least this size are prefetched
            from memory.
        counts: how parameters follow from the sizes, 64-bit integers in the kernel's last buffer.

    Raises:
        InvalidGraphError: the program has other parameters, or is not printed yet (`refusal`).
        TextLimitError: the source would be too long.
    """
    reason = refusal(program, target)
    if reason:
        raise refused(f"{reason} can't be printed as LLVM IR")
    counts = counts or {}
    if missing := [parameter.name for parameter in program.parameters if parameter.name not in counts]:
        raise refused(f"parameter {missing[0]} is known at run time only", "Bind the parameters first")
    return _Printer(program, comment, target, stream_bytes, counts).run()


def module(emit: Emit, isa: Isa, comment: str) -> str:
    """Return the text of printed functions as a module."""
    head = f"{MARK}{isa.name}\n" + "".join(f"; {line}\n" for line in comment.splitlines())
    features = ",".join(f"+{name}" for name in isa.features)
    attributes = f'attributes #0 = {{ nounwind "target-features"="{features}" "prefer-vector-width"="512" }}'
    return f'{head}target triple = "{isa.triple}"\n\n{emit.text}\n{attributes}\n!0 = !{{i32 1}}\n'


class _Printer:
    def __init__(
        self, program: TileProgram, comment: str, target: Target, stream_bytes: int, counts: Mapping[str, Count]
    ) -> None:
        self.parameters, self.counts = program.parameters, counts
        self.part = next((p for p in program.parameters if p.name == PART), None)
        self.grids = [stage.grid for stage in program.stages]
        self.shares = [shares_of(stage, program.parameter_ranges) for stage in program.stages]
        self.program = program = whole(program)
        self.comment, self.isa = comment, ISAS[target.isa]
        self.is_parallel = target.threads > 1 and sum(stage.work for stage in program.stages) >= SERIAL_POINTS
        self.emit = Emit()
        given = {buffer.name for buffer in program.buffers if buffer.level is Level.INPUT}
        streamed, large = streamed_outputs(program, stream_bytes), large_inputs(program, stream_bytes)
        self.context = KernelContext(self.emit, self.isa, program, target.lanes, streamed, large, given)
        self.places, self.shared_bytes = places_in_memory(program)
        sizes = (sum(tile_bytes(b) for b in self._large(stage)) for stage in program.stages)
        self.room_bytes = max(sizes, default=0)
        self.threads = target.threads if self.is_parallel else 1
        self.ports = [buffer for buffer in program.buffers if buffer.name in self.places]

    def run(self) -> PrintedLlvm:
        for i, stage in enumerate(self.program.stages):
            self._stage(i, stage)
        emit, state, buffers = self.emit, SsaValue("%state", "ptr"), SsaValue("%buffers", "ptr")
        if self.is_parallel:
            self._team(buffers)
            self._task(buffers)
        with emit.function(f"i32 @NAME_run({state.typed}, {buffers.typed}) #0"):
            if self.is_parallel:
                threads = constant("i32", self.threads)
                threads = threads if self.room_bytes else self._called("korch_max_threads", "i32")
                emit.declared["korch_region"] = "declare i32 @korch_region(i32, ptr, ptr)"
                text = f"call i32 @korch_region({threads.typed}, ptr @NAME_team, {buffers.typed})"
                emit.effect(f"ret {emit.pure('i32', 1, text, threads).typed}")
            else:
                for i in range(len(self.program.stages)):
                    self._call_stage(i, buffers, emit.index(0), self._count(i, self._live(buffers)), emit.index(0))
                emit.effect("ret i32 0")
        text = module(emit, self.isa, self.comment)
        symbol = content_name("k", text)
        workspace_bytes = self.shared_bytes + self.room_bytes * self.threads
        own_bytes = self.room_bytes if not self.shared_bytes else 0
        thread_bytes = own_bytes if self.is_parallel else workspace_bytes
        return PrintedLlvm(symbol, text.replace("NAME", symbol), workspace_bytes, thread_bytes, self.is_parallel)

    def _called(self, name: str, kind: str) -> SsaValue:
        self.emit.declare(name, kind)
        return self.emit.pure(kind, 1, f"call {kind} @{name}()")

    # Functions

    def _stage(self, i: int, stage: Stage) -> None:
        """Print the function in which a thread runs a range of a stage's tasks."""
        emit = self.emit
        arguments = []
        for buffer in self.ports:
            name = f"%p.{buffer.name}"
            self.context.bases[buffer.name] = SsaValue(name, "ptr")
            only = " readonly" if buffer.level is Level.INPUT else ""
            arguments.append(f"ptr noalias{only} {name}")
        env = {parameter.name: SsaValue(f"%n.{parameter.name}", "i64") for parameter in self.parameters}
        arguments += ["ptr noalias %room", "i64 %begin", "i64 %end", *(value.typed for value in env.values())]
        with emit.function(f"internal void @NAME_stage{i}({', '.join(arguments)}) noinline #0"):
            large, offset = self._large(stage), 0
            self.context.passing = frozenset(passing(self.program, stage.steps))
            for buffer in self._tiles(stage):
                if buffer in large:
                    room = SsaValue("%room", "ptr")
                    self.context.bases[buffer.name] = emit.place("i8", room, emit.index(offset))
                    offset += tile_bytes(buffer)
                else:
                    split = split_of(buffer)
                    size = buffer.size * (split.components if split is not None else 1)
                    self.context.bases[buffer.name] = emit.array(stored_kind(buffer), size)
            begin, end, shares = SsaValue("%begin", "i64"), SsaValue("%end", "i64"), self._shares(i)
            if shares is not None:
                self._moved(stage, shares, begin, end, env)
            else:
                emit.loop(begin, end, 1, lambda task: self._run(stage, self.grids[i], task, env))
            if self.context.streamed & written_by(stage.steps) and self.isa.is_x86:
                emit.declare("llvm.x86.sse.sfence", "void")  # others may read what was written past the caches
                emit.effect("call void @llvm.x86.sse.sfence()")
            emit.effect("ret void")

    def _run(self, stage: Stage, grid: Sequence[Axis], task: SsaValue, env: Env) -> None:
        """Print a task."""
        if stage.sort is not None:
            print_order(self.context, stage.sort, task)
        self._steps(stage.steps, stage.grid, self._grid(grid, task, env))

    def _large(self, stage: Stage) -> list[Buffer]:
        """Return the tiles of a stage that are in the workspace."""
        return [buffer for buffer in self._tiles(stage) if is_large_tile(stage, tile_bytes(buffer))]

    def _tiles(self, stage: Stage) -> list[Buffer]:
        """Return the tiles of a stage with their sizes in memory."""
        tiles = tiles_of(self.program, stage)
        on_units = not self.isa.has_pairs
        return [tile_in_use(self.program, stage, b, on_units=on_units) if split_of(b) is not None else b for b in tiles]

    def _shares(self, i: int) -> Shares | None:
        """Return how the coordinates of a stage are divided; None if only whole tasks are."""
        return self.shares[i] if self.is_parallel or self.part is not None else None

    def _grid(self, grid: Sequence[Axis], task: SsaValue, env: Env) -> Env:
        """Print a task's grid coordinates; return all variables."""
        emit, found, rest = self.emit, {**env}, task
        for place, axis in enumerate(grid, 1):
            if axis.size == 1:
                found[axis.name] = emit.index(0)
                continue
            left = self._product(grid[place:], env)
            found[axis.name] = rest if left.text == "1" else emit.op("udiv", rest, left)
            rest = emit.op("urem", task, left) if left.text != "1" else emit.index(0)
        return found

    def _product(self, axes: Sequence[Axis], env: Env) -> SsaValue:
        """Print the number of points of some axes."""
        found = self.emit.index(math.prod(axis.size for axis in axes if isinstance(axis.size, int)))
        for size in (axis.size for axis in axes if isinstance(axis.size, Expr)):
            own = index_of(self.emit, size, env)
            found = own if found.text == "1" else self.emit.op("mul nsw", own, found)
        return found

    def _count(self, i: int, env: Env) -> SsaValue:
        """Print the number of tasks of a stage, or that of the coordinates that are divided."""
        shares = self._shares(i)
        return self._product(self.grids[i], env) if shares is None else env[shares.parameter]

    def _moved(self, stage: Stage, shares: Shares, begin: SsaValue, end: SsaValue, env: Env) -> None:
        """Print the loop over a thread's coordinates: each iteration runs as the first task, with advanced pointers."""
        emit, context, name, grid = self.emit, self.context, shares.parameter, stage.grid
        if self.part is not None:
            stage = by_rows(stage, shares) or stage
            grid = (*grid, Axis(PLACE, ROWS[-1] + 1))

        def run(first: SsaValue) -> None:
            left = emit.add(emit.least(env[name], end), emit.times(first, -1))
            own, place = {**env, **{axis.name: emit.index(0) for axis in grid}}, first
            if self.part is not None:
                place, own[ROW_TABLE] = placed_rows(emit, self.part, first, shares.most, env)
                own[PLACE] = place
            bases, sizes = dict(context.bases), dict(context.sizes)
            for moved, step in shares.steps.items():
                context.bases[moved] = emit.place(context.kinds[moved], bases[moved], emit.times(place, step))
                context.sizes[moved] = 0  # unknown: nothing behind the element at an index may be read
            self._steps(stage.steps, grid, {**own, name: left})
            context.bases, context.sizes = bases, sizes

        emit.loop(begin, end, shares.most, run)

    def _live(self, buffers: SsaValue) -> Env:
        """Print the parameters."""
        if not self.parameters:
            return {}
        ports = sum(buffer.level is not Level.WORKSPACE for buffer in self.ports)
        position = ports + (self.shared_bytes + self.room_bytes > 0)
        sizes = self._pointer(buffers, position)
        high = {parameter.name: self.emit.index(parameter.high) for parameter in self.parameters}
        given = {name: self.emit.least(high[name], counted(self.emit, self.counts[name], sizes)) for name in high}
        # Divisions are unsigned: a size below the range's must not make a loop endless.
        return {name: self.emit.most(self.emit.index(0), value) for name, value in given.items()}

    def _pointer(self, buffers: SsaValue, position: int) -> SsaValue:
        return self.emit.load("ptr", 1, self.emit.place("ptr", buffers, self.emit.index(position)), 8, 0)

    def _steps(self, steps: Sequence[Step], grid: tuple[Axis, ...], env: Env) -> None:
        for step in sums_of(self.program, steps):
            if isinstance(step, Loop):
                self._loop(step, grid, env)
            elif isinstance(step, Sums):
                contract_printer(step, self.isa)(self.context, step, grid, env).run()
            elif is_split(self.program, step):
                self.context.makers[step.sinks[0].buffer] = step
            else:
                self._pass(step, grid, env)

    def _pass(self, step: Pass, grid: tuple[Axis, ...], env: Env) -> None:
        emit, found = self.emit, by_panel(self.program, step, grid)
        if found is None:
            NestPrinter(self.context, Stage(grid, (step,)), step, env).run()
            return

        def panel(i: SsaValue) -> None:
            own = {**env, found.axis.name: i}
            own[found.block] = index_of(emit, found.number, own)
            NestPrinter(self.context, Stage((*grid, found.axis), (found.pass_,)), found.pass_, own).run()

        emit.loop(emit.index(0), end_of(emit, found.axis, found.axis.extent, env), 1, panel)

    def _loop(self, step: Loop, grid: tuple[Axis, ...], env: Env) -> None:
        emit, axis = self.emit, step.axis

        def body(i: SsaValue) -> None:
            self._steps(step.body, (*grid, axis), {**env, axis.name: i})

        if step.only is None:
            emit.loop(emit.index(0), end_of(emit, axis, axis.extent, env), 1, body)
            return
        at = chosen_iteration(self.context, step.only, env)
        if step.is_nearest:
            body(nearest_iteration(self.context, at, axis.extent))
        else:
            emit.branch(emit.test("icmp ult", at, emit.index(axis.extent)), lambda: body(at))

    def _call_stage(self, i: int, buffers: SsaValue, begin: SsaValue, end: SsaValue, me: SsaValue) -> None:
        emit, given = self.emit, []
        for buffer in self.ports:
            place = self.places[buffer.name]
            base = self._pointer(buffers, place.position)
            given.append(emit.place("i8", base, emit.index(place.offset_bytes)).typed)
        room = SsaValue("null", "ptr")
        if self.room_bytes:
            position = sum(buffer.level is not Level.WORKSPACE for buffer in self.ports)
            room = self._pointer(buffers, position)
            room = emit.place("i8", room, emit.times(me, self.room_bytes))
            room = emit.place("i8", room, emit.index(self.shared_bytes))
        given += [value.typed for value in (room, begin, end, *self._live(buffers).values())]
        emit.effect(f"call void @NAME_stage{i}({', '.join(given)})")

    def _team(self, buffers: SsaValue) -> None:
        """Print the function that each thread calls."""
        emit, own = self.emit, SsaValue("%own", "ptr")
        with emit.function(f"i32 @NAME_team({buffers.typed}, {own.typed}) #0"):
            me = emit.load("i64", 1, own, 8, 0)
            threads = emit.load("i64", 1, emit.place("i8", own, emit.index(MEMBER_THREADS)), 8, 0)
            if self.room_bytes:
                threads = emit.least(threads, emit.index(self.threads))
            is_team = emit.test("icmp sgt", threads, emit.index(1))
            following = emit.add(me, emit.index(1))
            for i, waits in enumerate(stages_that_wait(self.program)):
                count, shares = self._count(i, self._live(buffers)), self._shares(i)
                unit = shares.unit if shares is not None else 1
                begin, end = (share_of(emit, count, place, threads, unit) for place in (me, following))
                self._call_stage(i, buffers, begin, end, me)
                if waits:
                    emit.branch(is_team, lambda: self._meet(own))
            emit.effect("ret i32 0")

    def _meet(self, own: SsaValue) -> None:
        meet = self.emit.load("ptr", 1, self.emit.place("i8", own, self.emit.index(MEMBER_MEET)), 8, 0)
        self.emit.effect(f"call void {meet.text}({own.typed})")

    def _task(self, buffers: SsaValue) -> None:
        """Print the function that runs tasks of one stage."""
        emit, number = self.emit, SsaValue("%stage", "i32")
        begin, end, me = (SsaValue(f"%{name}", "i64") for name in ("begin", "end", "me"))
        parameters = ", ".join(value.typed for value in (number, buffers, begin, end, me))
        with emit.function(f"void @NAME_task({parameters}) #0"):
            for i in range(len(self.program.stages)):
                is_own = emit.test("icmp eq", number, constant("i32", i))
                emit.branch(is_own, lambda i=i: self._call_stage(i, buffers, begin, end, me))  # type: ignore[misc]
            emit.effect("ret void")
