"""A graph whose outputs are inputs with rows appended -> one that writes the rows into these inputs.

Such a pair of an input and an output is a *state*: the keys and values of a language model's attention, for example.
With `past` rows before a step that appends `new` ones, the input has past + new rows afterwards, of which the last
`new` ones are written. So the size of a state's input is the number of rows after the step, and the memory of the input
is that of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import CastAttributes
from korch.primitive.ops.layout import ConcatAttributes, SliceAttributes
from korch.primitive.ops.state import WRITE_ROWS, WriteAttributes
from korch.primitive.types import DType, ValueId, ValueType

PAST, ROWS, TOTAL = "past", "rows", "total"
"""What an axis or an input counts: the rows before a run, those of the run, and both together."""

LAST, ONES, PLACES = "last", "ones", "places"
"""What else an input has: the last place of all rows, ones (a mask that is true), and the places of the new rows."""

COUNTS = (PAST, ROWS, TOTAL, LAST)
"""What one number may count."""


def counted(count: str, shape: Sequence[int], past: int, rows: int) -> Array:
    """Return the elements of an input that counts rows.

    `count`: one of `COUNTS`, or ONES, or PLACES, which are along the last axis.
    """
    if count == PLACES:
        return np.broadcast_to(past + np.arange(shape[-1] if shape else 1, dtype=np.int64), shape)
    numbers = {PAST: past, ROWS: rows, TOTAL: past + rows, LAST: past + rows - 1, ONES: 1}
    return np.full(shape, numbers[count], np.int64)


@dataclass(frozen=True, slots=True)
class State:
    """An input of a model, and the output that has its rows and those of a step."""

    input: int  # the input's position
    output: int  # the output's position
    axis: int  # the axis of the rows


def states_of(graph: PrimitiveGraph) -> tuple[State, ...]:
    """Return the outputs of a graph that are inputs with rows appended."""
    place = {value: i for i, (_, value) in enumerate(graph.inputs)}
    found: dict[int, State] = {}
    for k, (_, value) in enumerate(graph.outputs):
        for primitive in graph.producing(value, "concat"):
            first = place.get(primitive.inputs[0])
            if len(primitive.inputs) == 2 and first is not None and primitive.inputs[1] not in graph.constants:
                found.setdefault(first, State(first, k, primitive.attributes_as(ConcatAttributes).axis))
    return tuple(found.values())


def with_states(graph: PrimitiveGraph, states: Sequence[State], kept: DType | None = None) -> PrimitiveGraph:
    """Return a graph whose states are written in place; what reads only the rows before a step takes a part of them.

    `kept`: the type in which states of float32 are kept; None for their own.
    """
    builder = GraphBuilder(folds=False)  # what follows from sizes is computed by the same primitives at each size
    known: dict[int, ValueId] = {}
    ends: dict[int, ValueId] = {}
    axes = {graph.inputs[state.input][1]: state.axis for state in states}
    outputs = {graph.outputs[state.output][1] for state in states}
    written = {p.inputs[0]: p for value in outputs for p in graph.producing(value, "concat") if p.inputs[0] in axes}
    for name, value in graph.inputs:
        type_ = graph.types[written[value].output if value in written else value]
        if kept is not None and value in written and type_.dtype is DType.F32:
            type_ = ValueType(type_.shape, kept)
        known[value] = builder.input(name, type_)
    for value, constant in graph.constants.items():
        known[value] = builder.constant(constant.array)

    def before(value: int) -> ValueId:
        if value not in written:
            return known[value]
        shape = graph.types[value].shape
        attributes = SliceAttributes((0,) * len(shape), shape, (1,) * len(shape))
        return cast(builder.add("slice", [known[value]], attributes), graph.types[value].dtype)

    def cast(value: ValueId, dtype: DType) -> ValueId:
        is_same = builder.type(value).dtype is dtype
        return value if is_same else builder.add("cast", [value], CastAttributes(dtype.value))

    for p, origin in zip(graph.primitives, graph.origins or [""] * len(graph.primitives), strict=True):
        if written.get(p.inputs[0]) is p:
            axis = axes[p.inputs[0]]
            first, end = graph.types[p.inputs[0]].shape[axis], graph.types[p.output].shape[axis]
            state = known[p.inputs[0]]
            rows = cast(before(p.inputs[1]), builder.type(state).dtype)
            inputs = [state, rows, builder.constant(np.arange(first, end))]
            state = builder.add(WRITE_ROWS, inputs, WriteAttributes(axis, is_state=True), origin=origin)
            ends[p.output], known[p.output] = state, cast(state, graph.types[p.output].dtype)
        else:
            known[p.output] = builder.add(p.op, [before(v) for v in p.inputs], p.attributes, origin=origin)
    for name, value in graph.outputs:
        builder.output(name, ends.get(value, known[value]))
    return builder.freeze()
