"""A whole program for a CUDA device in Triton's interpreter: its arena, weights, tables and copies.

Calls of PyTorch are not interpreted: leave their providers out of the search.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from korch.cuda.interpret import Memory, run_launches
from korch.primitive.op import Array
from korch.runtime.cuda.program import CudaProgram, Place


def run_program(program: CudaProgram, inputs: Sequence[Array]) -> list[Array]:
    """Run a program on arrays, one for each input of the model; return its outputs.

    Raises:
        ValueError: a step is a call or an engine.
    """
    plan = program.plan
    arena = np.full(max(1, plan.arena_bytes), 0xFF, np.uint8)
    given = [np.ascontiguousarray(array) for array in inputs]
    outputs = [np.full(t.type.size_bytes, 0xFF, np.uint8) for t in plan.outputs]
    tables = [np.array(table, np.int32) for table in program.tables]

    def find(place: Place) -> Memory:
        match place.memory:
            case "arena":
                if place.at + place.size_bytes > arena.size:
                    raise ValueError(f"a buffer ends beyond the arena: {place}")
                return Memory(arena, place.at)
            case "constant":
                return Memory(program.weights.block, program.weights.offsets[place.at])
            case "input":
                return Memory(given[place.at])
            case "output":
                return Memory(outputs[place.at])
        return Memory(tables[place.at])

    for step in program.steps:
        if step.call or step.engine:
            raise ValueError("calls of PyTorch and engines are not interpreted")
        launches = [la.launch(program.sources) for la in step.launches]
        memory = [[find(step.buffers[i]) for i in la.arguments] for la in launches]
        run_launches(launches, memory)
    for output, place in program.copies:
        source = find(place)
        size = outputs[output].size
        flat = source.array.reshape(-1).view(np.uint8)
        outputs[output][:] = flat[source.offset : source.offset + size]
    return [flat.view(t.type.dtype.numpy).reshape(t.shape) for flat, t in zip(outputs, plan.outputs, strict=True)]
