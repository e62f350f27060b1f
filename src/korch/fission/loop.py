"""Fission of loops with a known number of iterations.

A primitive of an iteration that reads only constants and values from outside of the loop runs once, before the loop. A
short loop becomes its iterations, one after another; any other becomes a `loop` primitive for each output.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from korch.fission.context import Context
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.frontend.operator import Iteration, Stream
from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.reference import first_alternatives
from korch.primitive.text import format_graph, is_written_out
from korch.primitive.types import ValueId, ValueType

MOST_REPEATED = 24
"""The most primitives of all iterations together for which a loop becomes its iterations."""

FREE_OPS = ("broadcast", "reshape")
"""Primitives that cost nothing in a kernel that reads their results; before the loop they would only need memory."""


def _loop(c: Context) -> Result:
    loop, body = c.operator.iteration, c.iteration
    if loop is None or body is None:
        raise NotSplitError("its number of iterations, or a shape in it, depends on data")
    end = loop.states + len(loop.reads)
    sliced = zip(c.inputs[loop.states : end], loop.reads, strict=True)
    values = (*c.inputs[: loop.states], *(_slices(c, v, s, loop.trips) for v, s in sliced), *c.inputs[end:])
    read = [i for i in range(len(body.outputs)) if c.is_read(i)]
    stacked = [i for i in read if i >= loop.states]
    if loop.trips == 0:
        found = {i: values[i] for i in read if i < loop.states}
        found |= {i: c.full(0, c.output_type(i)) for i in stacked}
    else:
        kept = [*range(loop.states), *stacked]
        body, values = _inside(c, replace(body, outputs=tuple(body.outputs[i] for i in kept)), values, end)
        add = _repeated if _is_short(loop, body) else _primitives
        results = add(c, replace(loop, writes=_of(loop, stacked)), body, values)
        found = dict(zip(kept, results, strict=True))
        found |= {i: _unstacked(c, found[i], loop.writes[i - loop.states]) for i in stacked}
    unread = c.constant(np.zeros(()))
    return [found.get(i, unread) for i in range(loop.states + len(loop.writes))]


def _is_short(loop: Iteration, body: PrimitiveGraph) -> bool:
    each = max(1, len(body.primitives) + len(loop.reads) + len(body.outputs) - loop.states)
    return loop.trips == 1 or (loop.trips * each <= MOST_REPEATED and all(p.op != "loop" for p in body.primitives))


def _of(loop: Iteration, stacked: Sequence[int]) -> tuple[Stream, ...]:
    return tuple(loop.writes[i - loop.states] for i in stacked)


def _slices(c: Context, value: ValueId, stream: Stream, trips: int) -> ValueId:
    """Return a value with its slices along the first axis."""
    axis, value = stream.axis, c.slice_axis(value, stream.axis, 0, trips)
    shape = c.shape(value)
    if math.prod(shape[:axis]) == 1:
        return c.reshape(value, (shape[axis], *shape[:axis], *shape[axis + 1 :]))
    return c.transpose(value, (axis, *(a for a in range(len(shape)) if a != axis)))


def _unstacked(c: Context, value: ValueId, stream: Stream) -> ValueId:
    """Return a value whose slices are along the first axis with its slices along their own axis."""
    axis, (count, *shape) = stream.axis, c.shape(value)
    if math.prod(shape[:axis]) == 1:
        return c.reshape(value, (*shape[:axis], count, *shape[axis:]))
    return c.transpose(value, (*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)))


def _inside(
    c: Context, body: PrimitiveGraph, values: Sequence[ValueId], end: int
) -> tuple[PrimitiveGraph, tuple[ValueId, ...]]:
    """Return an iteration without what can run before the loop, and the values for its inputs.

    `c`: the loop, to which primitives that run before it are added.
    """
    builder = GraphBuilder()
    inside = {v: builder.input(f"i{i}", body.types[v]) for i, (_, v) in enumerate(body.inputs[:end])}
    outside = {v: value for (_, v), value in zip(body.inputs[end:], values[end:], strict=True)}
    outside |= {v: c.constant(constant.array) for v, constant in body.constants.items()}
    free: dict[int, Primitive] = {}
    more: list[ValueId] = []

    def within(value: int) -> ValueId:
        if value not in inside and value in free:
            inside[value] = builder.add(free[value].op, [within(v) for v in free[value].inputs], free[value].attributes)
        elif value not in inside:
            constant = c.builder.constant_of(outside[value])
            if constant is not None and is_written_out(constant):
                inside[value] = builder.constant(constant.array)
            else:
                inside[value] = builder.input(f"i{end + len(more)}", body.types[value])
                more.append(outside[value])
        return inside[value]

    for primitive in first_alternatives(body):
        if all(v in outside for v in primitive.inputs):
            made = [outside[v] for v in primitive.inputs]
            outside[primitive.output] = c.add(primitive.op, *made, attributes=primitive.attributes)
            if primitive.op in FREE_OPS:
                free[primitive.output] = primitive
        else:
            inside[primitive.output] = builder.add(
                primitive.op, [within(v) for v in primitive.inputs], primitive.attributes
            )
    for i, (_, value) in enumerate(body.outputs):
        builder.output(f"o{i}", within(value))
    return builder.freeze(), (*values[:end], *more)


def _primitives(c: Context, loop: Iteration, body: PrimitiveGraph, values: Sequence[ValueId]) -> list[ValueId]:
    """Add a primitive for each output of a loop."""
    types = [body.types[value] for _, value in body.outputs]
    stacks = [ValueType((loop.trips, *type_.shape), type_.dtype) for type_ in types[loop.states :]]
    attributes = LoopAttributes(
        format_graph(body),
        loop.trips,
        loop.states,
        tuple(stream.is_backward for stream in loop.reads),
        tuple(stream.is_backward for stream in loop.writes),
        tuple(str(c.builder.type(value)) for value in values),
        tuple(map(str, (*types[: loop.states], *stacks))),
        0,
    )
    return [c.add("loop", *values, attributes=replace(attributes, output=i)) for i in range(len(types))]


def _repeated(c: Context, loop: Iteration, body: PrimitiveGraph, values: Sequence[ValueId]) -> list[ValueId]:
    """Add the primitives of all iterations."""
    end = loop.states + len(loop.reads)
    states, stacks = list(values[: loop.states]), [[ValueId(0)] * loop.trips for _ in loop.writes]
    for trip in range(loop.trips):
        slices = []
        for value, stream in zip(values[loop.states : end], loop.reads, strict=True):
            place = loop.trips - 1 - trip if stream.is_backward else trip
            slices.append(c.reshape(c.slice_axis(value, 0, place, 1), c.shape(value)[1:]))
        made = {v: c.constant(constant.array) for v, constant in body.constants.items()}
        made |= zip((v for _, v in body.inputs), (*states, *slices, *values[end:]), strict=True)
        for p in first_alternatives(body):
            made[p.output] = c.add(p.op, *(made[v] for v in p.inputs), attributes=p.attributes)
        results = [made[value] for _, value in body.outputs]
        states = results[: loop.states]
        for stack, stream, value in zip(stacks, loop.writes, results[loop.states :], strict=True):
            stack[loop.trips - 1 - trip if stream.is_backward else trip] = c.reshape(value, (1, *c.shape(value)))
    return [*states, *(c.concat(stack, 0) for stack in stacks)]


RULES: tuple[FissionRule, ...] = (FissionRule("Loop", _loop), FissionRule("Scan", _loop, 9))
