"""Runs a bound plan in NumPy: each kernel is computed by the reference, in buffers placed as in the program."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from korch.candidate.layout import Layout
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.types import ValueType
from korch.runtime.bind import PlanStep, Program, Slot, SlotPlace

GARBAGE = 0xA5


def simulate(
    graph: PrimitiveGraph, steps: Sequence[PlanStep[Any]], program: Program[Any], arrays: Sequence[Array]
) -> list[Array]:
    """Return the outputs; workspaces are filled with garbage, which destroys values in buffers that overlap them.

    Args:
        graph: the graph of the plan.
        steps: the kernels of the plan in order.
        program: the places of their buffers.
        arrays: the inputs.
    """
    arena = np.full(program.arena.size_bytes, GARBAGE, np.uint8)
    outputs = [np.full(type_.size_bytes, GARBAGE, np.uint8) for _, type_ in program.outputs]
    inputs = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    constants = [
        np.ascontiguousarray(layout.pack(graph.constants[value].array)).reshape(-1).view(np.uint8)
        for value, layout in program.constants
    ]

    def memory(slot: Slot, size_bytes: int) -> Array:
        if slot.place is SlotPlace.ARENA:
            found = arena[slot.at : slot.at + size_bytes]
        else:
            lists = {SlotPlace.INPUT: inputs, SlotPlace.OUTPUT: outputs, SlotPlace.CONSTANT: constants}
            found = lists[slot.place][slot.at][slot.offset : slot.offset + size_bytes]
        assert found.size == size_bytes
        return found

    def read(slot: Slot, layout: Layout, type_: ValueType) -> Array:
        packed = memory(slot, layout.size_bytes(type_)).view(type_.dtype.numpy)
        return layout.unpack(packed, type_.shape)

    for step, slots in zip(steps, program.slots, strict=True):
        if not step.kernel.symbol:
            continue
        group, offer = step.candidate.group, step.candidate.offer
        ends = len(group.inputs), len(group.inputs) + len(group.outputs)
        feeds = {
            name: read(slot, layout, group.body.types[value])
            for (name, value), layout, slot in zip(group.body.inputs, offer.inputs, slots[: ends[0]], strict=True)
        }
        found = reference.run(group.body, feeds, exact=False)
        if step.kernel.workspace_bytes:
            memory(slots[-1], step.kernel.workspace_bytes)[:] = GARBAGE
        for (name, value), layout, slot in zip(
            group.body.outputs, offer.outputs, slots[ends[0] : ends[1]], strict=True
        ):
            type_ = group.body.types[value]
            packed = np.ascontiguousarray(layout.pack(found[name].astype(type_.dtype.numpy)))
            memory(slot, layout.size_bytes(type_))[:] = packed.reshape(-1).view(np.uint8)
    for output, slot in program.copies:
        outputs[output][:] = memory(slot, outputs[output].size)
    return [
        found.view(type_.dtype.numpy).reshape(type_.shape)
        for found, (_, type_) in zip(outputs, program.outputs, strict=True)
    ]
