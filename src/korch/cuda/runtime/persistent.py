"""Consecutive steps of a plan that consist only of launches -> persistent kernels that run them.

A segment ends at a library call, an engine, or a part that runs on the host. All kernels of a segment are
compiled for the largest of their numbers of warps, and the largest kernel determines the registers and shared memory
of a program. There is one program for each multiprocessor.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from korch.cuda.compile import Cubin, CubinCompiler, CubinFailure
from korch.cuda.kernel import CudaKernel
from korch.cuda.persistent import print_persistent, resident_programs
from korch.cuda.runtime.record import BufferRecord, CudaProgram, LaunchRecord, PersistentRecord
from korch.cuda.target import CudaTarget
from korch.events.kernels import Place
from korch.events.launches import LaunchUse, check_table, schedule_launches, table_of
from korch.runtime.bind import PlanStep

logger = logging.getLogger("korch.cuda")

MOST_LAUNCHES = 64
"""The most launches of a segment: the proof of its order compares all pairs of them."""

MOST_FUNCTIONS = 24
"""The most different kernels of a segment: the compile time grows with their number."""

LEAST_WARPS = 4
"""Hopper's matrix units need groups of four warps. No kernel gets fewer warps than it was made for, because its tiles
need the registers."""

MOST_SPILL_BYTES = 256
"""The most bytes by which a thread's stack in a persistent kernel may exceed the largest in its separate kernels."""


def with_persistent(
    program: CudaProgram, steps: Sequence[PlanStep[CudaKernel]], target: CudaTarget, compiler: CubinCompiler, parts: int
) -> CudaProgram:
    """Return a program in which persistent kernels run the segments that can be compiled.

    Args:
        program: the program of the same steps, each with its own launches.
        steps: the kernels.
        target: the device.
        compiler: compiles the persistent kernels.
        parts: the most tasks into which a launch is cut for each program of a persistent kernel.

    Raises:
        InvalidGraphError: the proof of an order fails.
    """
    for first, end in segments_of(steps):
        uses = [use for number in range(first, end) for use in _uses(steps[number], program.steps[number].buffers)]
        functions = list({use.launch.symbol: use.launch for use in uses}.values())
        launch = print_persistent(functions, max(LEAST_WARPS, *(function.warps for function in functions)))
        cubins = compiler.compile([launch, *functions])
        cubin = cubins.pop(launch.symbol)
        refusal = _refusal(cubin, [own for own in cubins.values() if isinstance(own, Cubin)], launch.warps, target)
        if isinstance(cubin, CubinFailure) or refusal:
            logger.warning("steps %d to %d are launched one by one: %s", first, end - 1, refusal)
            continue
        segment = schedule_launches(uses, target.processors, parts)
        table = table_of(segment)
        check_table(table, segment)
        record = LaunchRecord(
            launch.symbol,
            target.processors,
            target.processors,
            launch.warps,
            cubin.shared_bytes,
            cubin.descriptor_bytes,
            tuple(d.value for d in launch.signature),
            (),
        )
        events = len(segment.counted.counts)
        logger.info(
            "steps %d to %d are %d tasks of a persistent kernel of %d programs, with %d events: %d registers, "
            "%d bytes on the stack, %d of shared memory",
            first,
            end - 1,
            len(list(segment.graph.tasks)),
            target.processors,
            events,
            cubin.registers,
            cubin.spill_bytes,
            cubin.shared_bytes,
        )
        program = replace(
            program,
            persistent=(*program.persistent, PersistentRecord(first, end, record, len(program.tables), events)),
            tables=(*program.tables, table),
            cubins={**program.cubins, launch.symbol: cubin.image},
            sources={**program.sources, launch.symbol: launch.source},
        )
    return program


def segments_of(steps: Sequence[PlanStep[CudaKernel]]) -> list[tuple[int, int]]:
    """Return the maximal sequences of steps with at least two launches, as pairs of first step and end (exclusive)."""
    found: list[tuple[int, int]] = []
    begin, launches, functions = 0, 0, set[str]()

    def end(number: int) -> None:
        if launches > 1:
            found.append((begin, number))

    for number, step in enumerate(steps):
        own = step.kernel.launches
        is_fit = len(own) == len(step.kernel.steps) and (step.kernel.program is not None or not own)
        symbols = {launch.symbol for launch in own}
        if not is_fit or launches + len(own) > MOST_LAUNCHES or len(functions | symbols) > MOST_FUNCTIONS:
            end(number)
            begin, launches, functions = number + (not is_fit), 0, set()
        if is_fit:
            launches, functions = launches + len(own), functions | symbols
    end(len(steps))
    return found


def _refusal(cubin: Cubin | CubinFailure, separate: Sequence[Cubin], warps: int, target: CudaTarget) -> str:
    """Return why a persistent kernel is not used; "" if it is."""
    if isinstance(cubin, CubinFailure):
        return cubin.message
    if not resident_programs(cubin, warps, target.shared_bytes):
        return "no multiprocessor has the registers and shared memory for a program of their persistent kernel"
    if cubin.spill_bytes > max(own.spill_bytes for own in separate) + MOST_SPILL_BYTES:
        return f"their persistent kernel needs {cubin.spill_bytes} bytes of a thread's stack"
    return ""


def _uses(step: PlanStep[CudaKernel], buffers: Sequence[BufferRecord]) -> list[LaunchUse]:
    places = tuple(map(_place, buffers))
    count = len(step.kernel.launches)
    return [LaunchUse(step.kernel, number, places, step.cost_ns / count) for number in range(count)]


def _place(buffer: BufferRecord) -> Place | None:
    """Return the memory of a buffer that kernels write, and its offset; None for other buffers."""
    if buffer.memory == "arena":
        return "arena", buffer.at
    return (f"output {buffer.at}", 0) if buffer.memory == "output" else None
