"""A loop with a fixed number of iterations, whose body is a primitive graph.

Its inputs are the initial states, then tensors of which each iteration reads one slice along the first axis, then
values that all iterations read. Its outputs are the final states, then tensors of which each iteration writes one slice
along the first axis. A loop with several outputs becomes several primitives that differ only in `output`. If its
iterations are counted at run time, their number is a last input; the first slices are then read and written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from korch.primitive.op import Array, Attributes, Category, Op, OutputOfSeveral, require
from korch.primitive.types import ValueType

COUNT = "i64[1]"
"""The type of the number of iterations."""


@dataclass(frozen=True, slots=True)
class LoopAttributes(OutputOfSeveral, Attributes):
    """The body of a loop and how it is applied."""

    # the text form of the graph of one iteration. Its inputs are the states, the slices and the other values; its
    # outputs are the next states and the slices of the results. All of its constants are written out.
    body: str
    trips: int  # the number of iterations, at least 1; the largest one if they are counted
    states: int  # the number of states
    reads_backward: tuple[bool, ...]  # for each input with slices, whether the first iteration reads the last slice
    writes_backward: tuple[bool, ...]  # the same for each output with slices
    inputs: tuple[str, ...]  # the types of the loop's inputs, as text
    outputs: tuple[str, ...]  # the types of all of its outputs, as text
    output: int  # the position of the output that this primitive computes
    is_counted: bool = False  # whether the last input, i64[1], is the number of iterations

    def body_types(self) -> tuple[tuple[ValueType, ...], tuple[ValueType, ...]]:
        """Return the types of the inputs and the outputs of one iteration."""
        sliced = range(self.states, self.states + len(self.reads_backward))
        given = self.inputs[:-1] if self.is_counted else self.inputs
        inputs = [_slice(text) if i in sliced else ValueType.parse(text) for i, text in enumerate(given)]
        outputs = [_slice(t) if i >= self.states else ValueType.parse(t) for i, t in enumerate(self.outputs)]
        return tuple(inputs), tuple(outputs)


def _slice(text: str) -> ValueType:
    whole = ValueType.parse(text)
    return ValueType(whole.shape[1:], whole.dtype)


def _infer(inputs: Sequence[ValueType], attributes: LoopAttributes) -> ValueType:
    given, states, trips = tuple(map(str, inputs)), attributes.states, attributes.trips
    require(given == attributes.inputs, f"loop: inputs are {given}, not {attributes.inputs}")
    require(0 <= attributes.output < len(attributes.outputs), f"loop: there is no output {attributes.output}")
    require(given[:states] == attributes.outputs[:states], "loop: a state changes its type")
    require(not attributes.is_counted or given[-1] == COUNT, "loop: the number of iterations has another type")
    require(len(attributes.outputs) == states + len(attributes.writes_backward), "loop: outputs and slices differ")
    read = attributes.inputs[states : states + len(attributes.reads_backward)]
    lengths = {ValueType.parse(text).shape[:1] for text in (*read, *attributes.outputs[states:])}
    require(trips > 0 and lengths <= {(trips,)}, f"loop: {trips} iterations over axes of {sorted(lengths)}")
    return ValueType.parse(attributes.outputs[attributes.output])


def _reference(inputs: Sequence[Array], attributes: LoopAttributes) -> Array:
    from korch.primitive.reference import run_loop  # the interpreter of graphs uses this table

    return run_loop(inputs, attributes)[attributes.output]


def _flop(inputs: Sequence[ValueType], attributes: LoopAttributes, output: ValueType) -> int:
    """Return the operations of all iterations, which compute all outputs together."""
    from korch.primitive.reference import body_of

    return attributes.trips * body_of(attributes.body).total_flop


ROWS: tuple[Op, ...] = (
    Op(
        name="loop",
        category=Category.OPAQUE,
        arity=None,
        attributes=LoopAttributes,
        infer=_infer,
        reference=_reference,
        work_flop=_flop,
        source="ONNX Scan, opset 9; ONNX Loop with a fixed number of iterations",
    ),
)
