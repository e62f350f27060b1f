"""Chosen kernels in order -> a program: compile, pack constants, plan the arena."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx

from korch.cuda.compile import Cubin, CubinCompiler
from korch.cuda.engine import build_engine, maker
from korch.cuda.kernel import CudaKernel, Network, TorchCall, aligned
from korch.cuda.measure.lock import device_lock
from korch.cuda.measure.meter import failure_of
from korch.cuda.network import with_constants
from korch.cuda.runtime.record import BufferRecord, CudaProgram, LaunchRecord, StepProgram
from korch.cuda.target import CudaTarget
from korch.errors import CompileError
from korch.primitive.graph import PrimitiveGraph
from korch.records import plain
from korch.runtime.bind import PlanStep, Slot, bind_steps
from korch.runtime.build import UNKNOWN, Origin, pack_constants, plan_record
from korch.runtime.weights import Weights
from korch.system.content_name import content_name


def build_cuda(
    graph: PrimitiveGraph,
    steps: Sequence[PlanStep[CudaKernel]],
    target: CudaTarget,
    compiler: CubinCompiler,
    origin: Origin = UNKNOWN,
) -> CudaProgram:
    """Build a plan.

    Raises:
        CompileError: a kernel does not compile.
        InvalidGraphError: the steps are not a plan for the graph.
    """
    bound = bind_steps(graph, steps)
    cubins = compiler.compile([launch for step in steps for launch in step.kernel.launches])
    for step in steps:
        failure = failure_of(step.kernel, cubins)
        if failure is not None:
            raise CompileError(failure, where=f"kernel {step.kernel.symbol}")
    tables: list[tuple[int, ...]] = []
    weights = pack_constants(graph, bound)
    engines: dict[str, bytes] = {}
    programs = tuple(
        _program(graph, step, slots, cubins, tables, _engine(step, slots, weights, target.allow_tf32, engines))
        for step, slots in zip(steps, bound.slots, strict=True)
    )
    plan = plan_record(graph, steps, bound, weights, origin)
    return CudaProgram(
        plan=replace(plan, target=plain(target) | {"cpu": target.name, "isa": target.isa}),
        arch=target.arch,
        allow_tf32=target.allow_tf32,
        steps=programs,
        copies=tuple(
            (output, BufferRecord(slot.place.value.lower(), slot.at, graph.types[value].size_bytes))
            for (output, slot) in bound.copies
            for value in (graph.outputs[output][1],)
        ),
        tables=tuple(tables),
        weights=weights,
        cubins={s: c.image for s, c in sorted(cubins.items()) if isinstance(c, Cubin)},
        engines=engines,
        engine_maker=maker(target.name, target.arch) if engines else "",
        sources={part.symbol: part.source for step in steps for part in step.kernel.steps},
    )


def add_table(tables: list[tuple[int, ...]], table: tuple[int, ...]) -> int:
    """Return the number of a table, which is added if it is new, or zeros: kernels that run together count in these."""
    if not any(table) or table not in tables:
        tables.append(table)
        return len(tables) - 1
    return tables.index(table)


def _program(
    graph: PrimitiveGraph,
    step: PlanStep[CudaKernel],
    slots: Sequence[Slot],
    cubins: Mapping[str, Any],
    tables: list[tuple[int, ...]],
    engine: str,
) -> StepProgram:
    group, offer, kernel = step.candidate.group, step.candidate.offer, step.kernel
    ports = list(zip((*group.inputs, *group.outputs), (*offer.inputs, *offer.outputs), slots, strict=False))
    buffers = [
        BufferRecord(
            slot.place.value.lower(),
            slot.at,
            layout.size_bytes(graph.types[value]),
            graph.types[value].dtype.value,
            graph.types[value].shape,
            str(layout),
        )
        for value, layout, slot in ports
    ]
    offset = slots[-1].at if kernel.scratch else 0
    for dtype, size in kernel.scratch:
        buffers.append(BufferRecord("arena", offset, size * dtype.size_bytes, dtype.value))
        offset += aligned(size * dtype.size_bytes)
    for table in kernel.tables:
        buffers.append(BufferRecord("table", add_table(tables, table), 4 * len(table), "i32"))
    launches = tuple(
        LaunchRecord(
            launch.symbol,
            launch.grid,
            launch.warps,
            cubins[launch.symbol].shared_bytes,
            tuple(d.value for d in launch.signature),
            launch.arguments,
        )
        for launch in kernel.launches
    )
    calls = [part.symbol for part in kernel.steps if isinstance(part, TorchCall)]
    known = kernel.network.constants if kernel.network else ()
    return StepProgram(
        tuple(buffers), len(group.inputs), len(group.outputs), launches, calls[0] if calls else "", engine, known
    )


def _engine(
    step: PlanStep[CudaKernel], slots: Sequence[Slot], weights: Weights, allow_tf32: bool, engines: dict[str, bytes]
) -> str:
    """Build the engine of a network with its weights; return its name, "" if there is no network.

    Raises:
        CompileError: TensorRT does not accept the network.
    """
    network: Network | None = step.kernel.network
    if network is None:
        return ""
    types = step.candidate.group.input_types
    constants = {f"i{i}": weights.array(slots[i].at).reshape(types[i].shape) for i in network.constants}
    model = with_constants(onnx.ModelProto.FromString(network.model), constants)
    with device_lock():  # TensorRT times kernels
        image = build_engine(model.SerializeToString(deterministic=True), allow_tf32)
    symbol = content_name("e", network.symbol + hashlib.sha256(image).hexdigest())
    engines[symbol] = image
    return symbol
