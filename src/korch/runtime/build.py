"""Chosen kernels in order -> artifact: pack constants, plan the arena, print the plan's tables, compile."""

import hashlib
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from korch import __version__
from korch.errors import InvalidGraphError, ModelError
from korch.events.kernels import Use, segments_of
from korch.events.schedule import TaskSegment, schedule_segment
from korch.measure.compiler import Builder
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.state import WRITE_ROWS
from korch.provider.provider import Kernel
from korch.records import plain
from korch.runtime.artifact import Artifact
from korch.runtime.bind import PlanStep, Program, Slot, SlotPlace, bind_steps
from korch.runtime.machine import Requirements
from korch.runtime.record import ModelRecord, PlanRecord, PortRecord, StepRecord, TensorRecord
from korch.runtime.source import print_list, print_plan
from korch.runtime.waiting import waiting_of
from korch.runtime.weights import Weights
from korch.segments.spill import forget
from korch.system.content_name import content_name
from korch.system.files import open_file
from korch.target import REQUIRED_FLAGS, Target
from korch.tile.ir.text import format_program

logger = logging.getLogger("korch.runtime")
LIST = "plans.ll"
"""The file name of the list of plans."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a plan, which is stored in the artifact."""

    model: ModelRecord | None = None  # the model that the plan was built from
    certificate: object = None  # what the solver proved: a record or a mapping
    options: object = None  # the options of the build: a record or a mapping


UNKNOWN = Origin()


def build(
    graph: PrimitiveGraph,
    steps: Sequence[PlanStep[Kernel]],
    target: Target,
    builder: Builder,
    origin: Origin = UNKNOWN,
    parts: int = 0,
) -> Artifact:
    """Build a plan.

    `builder`: compiles; its cache has the objects of kernels that were measured. `parts`: the number of tasks into
    which the grid points of each thread are cut; 0 for joins after each kernel.

    Raises:
        CompileError: a source does not compile, or a library is missing.
        InvalidGraphError: the steps are not a plan for the graph.
    """
    program = bind_steps(graph, steps, target.threads)
    check_symbols(program)
    sources = {f"{k.symbol}.ll": k.source for k in program.kernels if k.symbol}
    programs = {f"{k.symbol}.tile": format_program(k.program) for k in program.kernels if k.program is not None}
    units = {text for kernel in program.kernels for text in kernel.units} - {*sources.values()}
    sources |= {f"{content_name('unit', text)}.ll": text for text in sorted(units)}
    uses = uses_of(program, steps)
    segments = _segments(uses, target, parts)
    name, tables = print_plan(graph, program, target, segments)
    sources |= {f"{name}.ll": tables, LIST: print_list([name], target.isa)}
    objects = builder.objects(list(sources.values()))
    opens = sorted({name for kernel in program.kernels for name in kernel.opens})
    weights = pack_constants(graph, program)
    plan = plan_record(graph, steps, program, weights, origin)
    return Artifact(
        objects={target.isa: objects},
        weights=weights,
        plan=replace(
            plan,
            threads=target.threads,
            opens=tuple(opens),
            target=plain(target),
            waiting=waiting_of(uses, segments, target),
        ),
        requirements=Requirements.here(REQUIRED_FLAGS[target.isa]),
        sources=sources | programs,
    )


def uses_of(program: Program[Kernel], steps: Sequence[PlanStep[Kernel]]) -> list[Use]:
    """Return the kernels, each with the places of its buffers."""
    return [
        Use(i, step.kernel, tuple(map(_place, slots)), step.cost_ns)
        for i, (step, slots) in enumerate(zip(steps, program.slots, strict=True))
    ]


def _segments(uses: Sequence[Use], target: Target, parts: int) -> Sequence[TaskSegment]:
    """Return the kernels that run as tasks."""
    if parts == 0 or target.threads == 1:
        return ()
    found = [schedule_segment(segment, target, parts) for segment in segments_of(uses)]
    for segment in found:
        last, simulated_us = segment.steps[1] - 1, segment.simulated.total_ns / 1e3
        logger.info("steps %d to %d are tasks, %.1f us in a simulated run", segment.steps[0], last, simulated_us)
    return found


def _place(slot: Slot) -> tuple[str, int] | None:
    """Return the memory of a buffer that kernels write and threads share, and its offset; None for others."""
    if slot.place is SlotPlace.ARENA and slot.offset:
        return None
    if slot.place is SlotPlace.ARENA:
        return "arena", slot.at
    return (f"output {slot.at}", slot.offset) if slot.place is SlotPlace.OUTPUT else None


def plan_record(
    graph: PrimitiveGraph, steps: Sequence[PlanStep[Any]], program: Program[Any], weights: Weights, origin: Origin
) -> PlanRecord:
    """Return the record of a plan with one thread and no target; the caller replaces these."""
    return PlanRecord(
        korch_version=__version__,
        model=origin.model or ModelRecord(),
        inputs=tuple(TensorRecord.of(name, type_) for name, type_ in program.inputs),
        outputs=tuple(TensorRecord.of(name, type_) for name, type_ in program.outputs),
        threads=1,
        steps=tuple(step_record(graph, step, slots) for step, slots in zip(steps, program.slots, strict=True)),
        arena_bytes=program.arena.size_bytes,
        arena_bound_bytes=program.arena.lower_bound_bytes,
        weights_bytes=weights.size_bytes,
        certificate=plain(origin.certificate or {}),
        options=plain(origin.options or {}),
        target={},
        in_place=tuple(_in_place(steps, program)),
        extended=tuple(_extended(steps, program)),
    )


def _extended(steps: Sequence[PlanStep[Any]], program: Program[Any]) -> Iterator[tuple[int, int]]:
    """Yield each output that is an input in whose memory a kernel has written, with this input."""
    written = {slots[0] for step, slots in zip(steps, program.slots, strict=True) if step.candidate.offer.updates}
    for output, slot in program.copies:
        if slot.place is SlotPlace.INPUT and slot in written:
            yield output, slot.at


def _in_place(steps: Sequence[PlanStep[Any]], program: Program[Any]) -> Iterator[tuple[int, int]]:
    """Yield each output that may lie in the memory of an input, with this input.

    One kernel writes rows of the output, with the other ones of the input; nothing else reads the input.
    """
    inputs = [slot for slots in program.slots for slot in slots if slot.place is SlotPlace.INPUT]
    inputs += [slot for _, slot in program.copies]
    for step, (before, *slots) in zip(steps, program.slots, strict=True):
        group = step.candidate.group
        is_write = [p.op for p in group.body.primitives] == [WRITE_ROWS]
        if is_write and before.place is SlotPlace.INPUT and inputs.count(before) == 1:
            after = slots[len(group.inputs) - 1]
            if after.place is SlotPlace.OUTPUT and not after.offset:
                yield after.at, before.at


HASHED_BYTES = 64 << 20
"""The bytes of a file that are hashed at a time: a thread beside the search waits for its turn after each part."""


def model_record(path: str | Path) -> ModelRecord:
    """Return the record of a model file.

    Raises:
        ModelError: the file can't be read.
    """
    found = Path(path).resolve()
    try:
        digest = hashlib.sha256()
        with open_file(found) as stream:
            while chunk := stream.read(HASHED_BYTES):
                digest.update(chunk)
        return ModelRecord(str(found), digest.hexdigest())
    except OSError as error:
        raise ModelError(f"it can't be read: {error.strerror}", where=str(path)) from error


def pack_constants(graph: PrimitiveGraph, program: Program[Any]) -> Weights:
    """Return the constants, packed in the layouts that the steps require."""
    types = []
    for value, layout in program.constants:
        type_ = graph.types[value]
        types.append(layout.stored_type(type_))
    weights = Weights.allocate(types)
    for i, (value, layout) in enumerate(program.constants):
        np.copyto(weights.array(i), layout.pack(graph.constants[value].array))
        forget(graph.constants[value].array)
    return weights


def check_symbols(program: Program[Kernel]) -> None:
    """Check that kernels with equal symbols are equal, and that each symbol is a C identifier or empty.

    Raises:
        InvalidGraphError: a symbol is invalid, or has two different kernels.
    """
    seen: dict[str, str] = {}
    for kernel in program.kernels:
        if not re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)?", kernel.symbol):
            raise InvalidGraphError("its symbol is no C identifier", where=f"kernel {kernel.symbol!r}")
        if seen.setdefault(kernel.symbol, kernel.source) != kernel.source:
            raise InvalidGraphError(
                "two kernels with different sources have this symbol", where=f"kernel {kernel.symbol}"
            )


def step_record(graph: PrimitiveGraph, step: PlanStep[Any], slots: Sequence[Slot]) -> StepRecord:
    """Return the record of a kernel and the places of its buffers."""
    group, offer = step.candidate.group, step.candidate.offer
    ports = [
        PortRecord(value, str(graph.types[value]), str(layout), slot.place.value, slot.at, slot.offset)
        for value, layout, slot in zip(
            (*group.inputs, *group.outputs), (*offer.inputs, *offer.outputs), slots, strict=False
        )  # the workspace, if there is one, comes last
    ]
    origins = (graph.origins[p] for p in group.primitives) if graph.origins else ()
    return StepRecord(
        symbol=step.kernel.symbol,
        provider=step.candidate.provider,
        variant=offer.variant,
        candidate=step.candidate.key,
        primitives=group.text,
        origins=tuple(dict.fromkeys(origin for origin in origins if origin)),
        inputs=tuple(ports[: len(group.inputs)]),
        outputs=tuple(ports[len(group.inputs) :]),
        cost_ns=float(step.cost_ns),
        bound_ns=float(step.bound_ns),
        is_measured=step.is_measured,
        size_bytes=step.candidate.size_bytes,
        work_flop=group.body.total_flop,
        workspace_bytes=step.kernel.workspace_bytes,
    )
