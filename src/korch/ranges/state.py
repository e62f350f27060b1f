"""A graph whose outputs are inputs with rows appended -> one that writes the rows into these inputs.

Such a pair of an input and an output is a *state*: the keys and values of a language model's attention, for example.
With `past` rows before a step that appends `new` ones, the input has past + new rows afterwards, of which the last
`new` ones are written. So the size of a state's input is the number of rows after the step, and the memory of the input
is that of the output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.layout import ConcatAttributes, SliceAttributes
from korch.primitive.ops.state import WRITE_ROWS, WriteAttributes
from korch.primitive.quantized import dequantize
from korch.primitive.types import DType, ValueId, ValueType
from korch.primitive.verbs import Verbs, lit

PAST, ROWS, TOTAL = "past", "rows", "total"
"""What an axis or an input counts: the rows before a run, those of the run, and both together."""

LAST, ONES, PLACES = "last", "ones", "places"
"""What else an input has: the last place of all rows, ones (a mask that is true), and the places of the new rows."""

LARGEST_BYTE = 127
"""The byte that stands for the largest element of a row whose other elements are kept as multiples of a scale."""

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


def kept_type(dtype: DType, rank: int, axis: int, kept: DType | None) -> DType:
    """Return the type in which a state is kept; int8 has a scale for the elements along the last axis.

    `kept`: the type in which states of float32 are kept if possible; None for their own.
    """
    if dtype is not DType.F32 or kept is None or (kept is DType.I8 and axis == rank - 1):
        return dtype
    return kept


def quantized(rows: Array) -> tuple[Array, Array]:
    """Return rows as int8 along the last axis, and the float32 scale of each row, by which these are multiplied."""
    scale = (np.abs(rows).max(-1, keepdims=True, initial=0.0) * (1 / LARGEST_BYTE)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.nan_to_num(np.rint(rows / scale), posinf=0.0, neginf=0.0).astype(np.int8), scale


def with_states(graph: PrimitiveGraph, states: Sequence[State], kept: DType | None = None) -> PrimitiveGraph:
    """Return a graph whose states are written in place; what reads only the rows before a step takes a part of them.

    A state that is kept as bytes is an input and an output of int8; its scales are another input, after the graph's
    own, and another output, after the graph's own, both in the order of the states.

    `kept`: the type in which states of float32 are kept; None for their own.
    """
    builder = _StateBuilder(graph, states, kept)
    for p, origin in zip(graph.primitives, graph.origins or [""] * len(graph.primitives), strict=True):
        builder.add(p, origin)
    return builder.finished()


def with_kept_rows(graph: PrimitiveGraph, states: Sequence[State], kept: DType) -> PrimitiveGraph:
    """Return a graph of first rows whose states, all of them new, are of the types in which they are kept.

    The scales of those that are kept as bytes are further outputs, as those of `with_states`.
    """
    builder = GraphBuilder.from_graph(graph)
    v = Verbs(builder, "")
    for state in states:
        name, value = graph.outputs[state.output]
        type_ = graph.types[value]
        dtype = kept_type(type_.dtype, type_.rank, state.axis, kept)
        rows = ValueId(value)
        if dtype is DType.I8 is not type_.dtype:
            rows, scale = _quantize(v, rows)
            builder.output(f"{name} scales", scale)
        builder.output(name, v.cast(rows, dtype))
    return builder.freeze()


def _quantize(v: Verbs, rows: ValueId) -> tuple[ValueId, ValueId]:
    """Add `quantized`."""
    scale = v.elementwise("mul", v.reduce("max", v.add("abs", rows), [v.rank(rows) - 1]), lit(1 / LARGEST_BYTE))
    return v.cast(v.add("round", v.elementwise("div", rows, scale)), DType.I8), scale  # 0 / 0 becomes 0


class _StateBuilder:
    """Builds a graph whose states are written in place.

    Attributes:
        v: adds primitives. What follows from sizes is computed by the same ones at each size.
        axes: the axis of the rows of each state's input.
        written: the concatenation that appends rows to each state's input.
        known: the new value of each value.
        scales: the scales of each state's input that is kept as bytes, later those of its output.
        ends: the new value of each state's output.
    """

    def __init__(self, graph: PrimitiveGraph, states: Sequence[State], kept: DType | None) -> None:
        self.graph, self.states = graph, states
        self.v = Verbs(GraphBuilder(folds=False), "")
        self.axes = {graph.inputs[state.input][1]: state.axis for state in states}
        outputs = {graph.outputs[state.output][1] for state in states}
        writes = [p for value in outputs for p in graph.producing(value, "concat") if p.inputs[0] in self.axes]
        self.written = {p.inputs[0]: p for p in writes}
        self.known: dict[int, ValueId] = {}
        self.scales: dict[int, ValueId] = {}
        self.ends: dict[int, ValueId] = {}
        builder = self.v.builder
        for name, value in graph.inputs:
            type_ = graph.types[self.written[value].output if value in self.written else value]
            if value in self.written:
                type_ = ValueType(type_.shape, kept_type(type_.dtype, type_.rank, self.axes[value], kept))
            self.known[value] = builder.input(name, type_)
        for name, value in (graph.inputs[state.input] for state in states):
            own = builder.type(self.known[value])
            if own.dtype is DType.I8 is not graph.types[value].dtype:
                self.scales[value] = builder.input(f"{name} scales", ValueType((*own.shape[:-1], 1), DType.F32))
        for value, constant in graph.constants.items():
            self.known[value] = builder.constant(constant.array)

    def add(self, p: Primitive, origin: str) -> None:
        """Add a primitive of the graph; one that appends rows to a state writes them into its memory."""
        v, value = self.v, p.inputs[0] if p.inputs else -1
        v.origin = origin
        if self.written.get(value) is not p:
            self.known[p.output] = v.builder.add(p.op, [self._before(x) for x in p.inputs], p.attributes, origin=origin)
            return
        memory, rows, dtype = self.known[value], self._before(p.inputs[1]), self.graph.types[p.output].dtype
        if value not in self.scales:
            self.ends[p.output] = self._write(value, memory, v.cast(rows, v.dtype(memory)))
            self.known[p.output] = v.cast(self.ends[p.output], dtype)
            return
        bytes_, scale = _quantize(v, rows)
        self.ends[p.output] = self._write(value, memory, bytes_)
        self.scales[value] = self._write(value, self.scales[value], scale)
        self.known[p.output] = dequantize(v, self.ends[p.output], self.scales[value], None)

    def finished(self) -> PrimitiveGraph:
        """Return the graph."""
        graph, builder = self.graph, self.v.builder
        for name, value in graph.outputs:
            builder.output(name, self.ends.get(value, self.known[value]))
        for state in self.states:
            value = graph.inputs[state.input][1]
            if value in self.scales:
                builder.output(f"{graph.outputs[state.output][0]} scales", self.scales[value])
        return builder.freeze()

    def _before(self, value: int) -> ValueId:
        """Return the new value of a value; of a state, the rows before a step."""
        if value not in self.written:
            return self.known[value]
        type_ = self.graph.types[value]
        own = self._first(self.known[value], type_.shape)
        if value not in self.scales:
            return self.v.cast(own, type_.dtype)
        return dequantize(self.v, own, self._first(self.scales[value], (*type_.shape[:-1], 1)), None)

    def _first(self, value: ValueId, shape: Sequence[int]) -> ValueId:
        attributes = SliceAttributes((0,) * len(shape), tuple(shape), (1,) * len(shape))
        return self.v.add("slice", value, attributes=attributes)

    def _write(self, value: int, memory: ValueId, rows: ValueId) -> ValueId:
        axis, v = self.axes[value], self.v
        begin, end = self.graph.types[value].shape[axis], v.shape(memory)[axis]
        places = v.constant(np.arange(begin, end))
        return v.add(WRITE_ROWS, memory, rows, places, attributes=WriteAttributes(axis, is_state=True))
