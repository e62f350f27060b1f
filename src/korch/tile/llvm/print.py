"""Prints a tile program as LLVM IR.

A kernel is one function. If threads share its work, each stage is also a function, which runs a range of the stage's
tasks. Each thread calls the kernel's function `NAME_team`, which calls the stage functions; a plan may instead run
chosen tasks of a stage through `NAME_task`. `korch_region` runs a team's function in a new parallel region.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

from korch.primitive.types import DType
from korch.system.content_name import content_name
from korch.target import Target
from korch.tile.cpp.finish import Sums, sums_of
from korch.tile.cpp.panels import panels
from korch.tile.cpp.print import SERIAL_POINTS, large_inputs, stages_that_wait, streamed_outputs
from korch.tile.cpp.steps import is_large_tile, tile_bytes, tiles_of
from korch.tile.ir.program import (
    Apply,
    At,
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
from korch.tile.llvm.arithmetic import KIND, OPS, is_signed
from korch.tile.llvm.contract import ContractPrinter, refused_contraction
from korch.tile.llvm.emit import Emit, SsaValue, constant
from korch.tile.llvm.index import Env, index_of
from korch.tile.llvm.isa import ISAS, Isa
from korch.tile.llvm.memory import stored_kind
from korch.tile.llvm.nest import NestPrinter
from korch.tile.llvm.points import KernelContext
from korch.tile.llvm.stream import end_streams
from korch.tile.lower.buffers import places_in_memory

MARK = "; LLVM IR for "
"""The beginning of a module's text; the instruction set follows."""

REGION = """#include "korch_team.h"

extern "C" __attribute__((visibility("hidden"))) int korch_region(
    int threads, int (*run)(void* const*, korch::Member&), void* const* buffers) {
  return korch::run_region(threads, run, buffers);
}
"""
"""The C++ source of the function that runs a team's function in a new parallel region."""

MEMBER_THREADS, MEMBER_MEET = 8, 16
"""The offsets in bytes of the number of threads and of the barrier in a `korch::Member`."""


class PrintedLlvm(NamedTuple):
    """A kernel's source.

    Attributes:
        symbol: the name that it exports.
        source: the text.
        workspace_bytes: the size of the scratch memory that it needs.
        thread_bytes: the private part of it per thread, if threads share no part of it; else 0.
        is_parallel: whether it has a parallel region; else it runs in the calling thread.
    """

    symbol: str
    source: str
    workspace_bytes: int
    thread_bytes: int
    is_parallel: bool


def refusal(program: TileProgram, target: Target) -> str:
    """Return why a program is not printed as LLVM IR yet; "" if it is."""
    if target.isa not in ISAS:
        return f"the instruction set {target.isa}"
    if program.parameters:
        return "parameters"
    if program.is_sorted:
        return "sorted rows"
    for buffer in program.buffers:
        if buffer.layout and not (
            buffer.level is Level.INPUT and panels(buffer) is not None and len(buffer.layout) == 1
        ):
            return f"the layout of buffer {buffer.name}"
        if buffer.dtype not in KIND:
            return f"elements of type {buffer.dtype.value}"
    for stage in program.stages:
        for _, step in stage.leaves:
            if isinstance(step, Contract):
                if reason := refused_contraction(program, step, target.lanes):
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


def print_llvm(program: TileProgram, comment: str, target: Target, stream_bytes: int = sys.maxsize) -> PrintedLlvm:
    """Return the source of a program.

    Args:
        program: the program.
        comment: the comment at the head of the source.
        target: the machine.
        stream_bytes: outputs of at least this size bypass the caches, and inputs of at least this size are prefetched
            from memory.

    Raises:
        InvalidGraphError: the program is not printed yet (`refusal`).
        TextLimitError: the source would be too long.
    """
    reason = refusal(program, target)
    if reason:
        raise refused(f"{reason} can't be printed as LLVM IR")
    return _Printer(program, comment, target, stream_bytes).run()


def module(emit: Emit, isa: Isa, comment: str) -> str:
    """Return the text of printed functions as a module."""
    head = f"{MARK}{isa.name}\n" + "".join(f"; {line}\n" for line in comment.splitlines())
    features = ",".join(f"+{name}" for name in isa.features)
    attributes = f'attributes #0 = {{ nounwind "target-features"="{features}" "prefer-vector-width"="512" }}'
    return f'{head}target triple = "{isa.triple}"\n\n{emit.text}\n{attributes}\n!0 = !{{i32 1}}\n'


class _Printer:
    def __init__(self, program: TileProgram, comment: str, target: Target, stream_bytes: int) -> None:
        self.program, self.comment, self.isa = program, comment, ISAS[target.isa]
        self.is_parallel = target.threads > 1 and sum(stage.work for stage in program.stages) >= SERIAL_POINTS
        self.emit = Emit()
        given = {buffer.name for buffer in program.buffers if buffer.level is Level.INPUT}
        streamed, large = streamed_outputs(program, stream_bytes), large_inputs(program, stream_bytes)
        self.context = KernelContext(self.emit, self.isa, program, target.lanes, streamed, large, given)
        self.places, self.shared_bytes = places_in_memory(program)
        sizes = (sum(tile_bytes(program, stage, b) for b in self._large(stage)) for stage in program.stages)
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
                threads = threads if self.room_bytes else self._called("omp_get_max_threads", "i32")
                emit.declared["korch_region"] = "declare hidden i32 @korch_region(i32, ptr, ptr)"
                text = f"call i32 @korch_region({threads.typed}, ptr @NAME_team, {buffers.typed})"
                emit.effect(f"ret {emit.pure('i32', 1, text, threads).typed}")
            else:
                for i, stage in enumerate(self.program.stages):
                    self._call_stage(i, buffers, emit.index(0), emit.index(stage.tasks), emit.index(0))
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
        arguments += ["ptr noalias %room", "i64 %begin", "i64 %end"]
        with emit.function(f"internal void @NAME_stage{i}({', '.join(arguments)}) noinline #0"):
            large, offset = self._large(stage), 0
            for buffer in tiles_of(self.program, stage):
                if buffer in large:
                    room = SsaValue("%room", "ptr")
                    self.context.bases[buffer.name] = emit.place("i8", room, emit.index(offset))
                    offset += tile_bytes(self.program, stage, buffer)
                else:
                    self.context.bases[buffer.name] = emit.array(stored_kind(buffer), buffer.size)
            begin, end = SsaValue("%begin", "i64"), SsaValue("%end", "i64")
            emit.loop(begin, end, 1, lambda task: self._steps(stage.steps, stage.grid, self._grid(stage.grid, task)))
            if self.context.streamed & written_by(stage.steps) and self.isa.is_x86:
                end_streams(emit)
            emit.effect("ret void")

    def _large(self, stage: Stage) -> list[Buffer]:
        """Return the tiles of a stage that are in the workspace."""
        return [buffer for buffer in tiles_of(self.program, stage) if is_large_tile(self.program, stage, buffer)]

    def _grid(self, grid: Sequence[Axis], task: SsaValue) -> dict[str, SsaValue]:
        """Print a task's grid coordinates."""
        emit, found, rest = self.emit, dict[str, SsaValue](), task
        for place, axis in enumerate(grid, 1):
            left = math.prod(a.extent for a in grid[place:])
            found[axis.name] = rest if left == 1 else emit.op("udiv", rest, emit.index(left))
            rest = emit.op("urem", task, emit.index(left)) if left != 1 else emit.index(0)
        return found

    def _steps(self, steps: Sequence[Step], grid: tuple[Axis, ...], env: Env) -> None:
        for step in sums_of(self.program, steps):
            if isinstance(step, Loop):
                self._loop(step, grid, env)
            elif isinstance(step, Sums):
                ContractPrinter(self.context, step, grid, env).run()
            elif isinstance(step, Pass):
                stage = next((s for s in self.program.stages if step in s.steps), Stage(grid, (step,)))
                is_plain = all(isinstance(other, Pass) for other in stage.steps)
                NestPrinter(self.context, stage if is_plain else Stage(grid, (step,)), step, env).run()

    def _loop(self, step: Loop, grid: tuple[Axis, ...], env: Env) -> None:
        emit, axis = self.emit, step.axis

        def body(i: SsaValue) -> None:
            self._steps(step.body, (*grid, axis), {**env, axis.name: i})

        if step.only is None:
            end = emit.index(axis.extent)
            if axis.ragged is not None:
                outer, total = axis.ragged
                assert isinstance(total, int)
                end = emit.least(end, emit.add(emit.index(total), emit.times(env[outer], -axis.extent)))
            emit.loop(emit.index(0), end, 1, body)
            return
        at = self._number(step.only, env)
        size = emit.index(axis.extent)
        if step.is_nearest:  # a negative number counts from the end
            at = emit.select(emit.test("icmp slt", at, emit.index(0)), emit.add(at, size), at)
            body(emit.most(emit.index(0), emit.least(at, emit.index(axis.extent - 1))))
        else:
            emit.branch(emit.test("icmp ult", at, size), lambda: body(at))

    def _number(self, at: At, env: Env) -> SsaValue:
        """Print the load of an integer."""
        emit, buffer = self.emit, self.program.buffer(at.buffer)
        kind = stored_kind(buffer)
        place = emit.place(kind, self.context.bases[at.buffer], index_of(emit, at.index, env))
        self.context.era += 1
        found = emit.load(kind, 1, place, buffer.dtype.size_bytes, emit.depth, self.context.era)
        if buffer.dtype.is_float or buffer.dtype is DType.BOOL:
            raise refused(f"the number of an iteration in buffer {buffer.name} is no integer")
        return emit.convert("sext" if is_signed(buffer.dtype) else "zext", found, "i64")

    def _call_stage(self, i: int, buffers: SsaValue, begin: SsaValue, end: SsaValue, me: SsaValue) -> None:
        emit, given = self.emit, []
        for buffer in self.ports:
            place = self.places[buffer.name]
            base = emit.load("ptr", 1, emit.place("ptr", buffers, emit.index(place.position)), 8, 0)
            given.append(emit.place("i8", base, emit.index(place.offset_bytes)).typed)
        room = SsaValue("null", "ptr")
        if self.room_bytes:
            position = sum(buffer.level is not Level.WORKSPACE for buffer in self.ports)
            room = emit.load("ptr", 1, emit.place("ptr", buffers, emit.index(position)), 8, 0)
            room = emit.place("i8", room, emit.times(me, self.room_bytes))
            room = emit.place("i8", room, emit.index(self.shared_bytes))
        emit.effect(f"call void @NAME_stage{i}({', '.join([*given, room.typed, begin.typed, end.typed])})")

    def _team(self, buffers: SsaValue) -> None:
        """Print the function that each thread calls."""
        emit, own = self.emit, SsaValue("%own", "ptr")
        with emit.function(f"i32 @NAME_team({buffers.typed}, {own.typed}) #0"):
            me = emit.load("i64", 1, own, 8, 0)
            threads = emit.load("i64", 1, emit.place("i8", own, emit.index(MEMBER_THREADS)), 8, 0)
            if self.room_bytes:
                threads = emit.least(threads, emit.index(self.threads))
            is_team = emit.test("icmp sgt", threads, emit.index(1))
            for i, (stage, waits) in enumerate(zip(self.program.stages, stages_that_wait(self.program), strict=True)):
                following = emit.add(me, emit.index(1))
                begin, end = (self._share(stage.tasks, place, threads) for place in (me, following))
                self._call_stage(i, buffers, begin, end, me)
                if waits:
                    emit.branch(is_team, lambda: self._meet(own))
            emit.effect("ret i32 0")

    def _meet(self, own: SsaValue) -> None:
        meet = self.emit.load("ptr", 1, self.emit.place("i8", own, self.emit.index(MEMBER_MEET)), 8, 0)
        self.emit.effect(f"call void {meet.text}({own.typed})")

    def _share(self, tasks: int, me: SsaValue, threads: SsaValue) -> SsaValue:
        """Print the first task of a thread; a thread beyond the others gets an empty range."""
        emit, whole = self.emit, constant("i64", tasks)
        me = emit.least(me, threads)
        each, rest = emit.op("udiv", whole, threads), emit.op("urem", whole, threads)
        return emit.add(emit.op("mul", each, me), emit.least(me, rest))

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
