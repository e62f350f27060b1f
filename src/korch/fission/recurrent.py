"""Fission of LSTM, GRU and RNN: the products of all steps by the input, and a loop over the steps for each direction.

A loop of its own for each direction reads half of the recurrent weights of both, which more often stay in a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from korch.fission.context import Context
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.text import format_graph
from korch.primitive.types import ValueId, ValueType
from korch.primitive.verbs import Verbs, lit

BIAS, LENGTHS, STATE, CELL, PEEPHOLES = 3, 4, 5, 6, 7
"""The positions of optional inputs."""

FUNCTIONS = ("Relu", "Sigmoid", "Tanh")
"""The functions that have a form here; with others, an operator is kept whole."""


class _Step(Verbs):
    """One step of one direction; each method returns the new states.

    Attributes:
        functions: the names of the direction's functions.
        is_reset_last: whether a GRU multiplies by its reset gate after the product.
    """

    def __init__(self, c: Context, functions: Sequence[str]) -> None:
        super().__init__(GraphBuilder(), c.origin)
        self.functions = functions
        self.is_reset_last = bool(c.attributes.integer("linear_before_reset", 0))

    def apply(self, function: int, x: ValueId) -> ValueId:
        """Return one of the functions of a value."""
        name = self.functions[function]
        return self.elementwise("max", x, lit(0.0)) if name == "Relu" else self.add(name.lower(), x)

    def gates(self, x: ValueId, count: int, first: int = 0) -> list[ValueId]:
        """Return parts of a value's columns from the part `first` of `count` on."""
        size = self.shape(x)[1] // count
        return [self.slice_axis(x, 1, i * size, size) for i in range(first, count)]

    def rnn(self, given: ValueId, h: ValueId, weights: ValueId) -> list[ValueId]:
        return [self.apply(0, self.elementwise("add", self.add("matmul", h, weights), given))]

    def lstm(self, given: ValueId, h: ValueId, cell: ValueId, weights: ValueId) -> list[ValueId]:
        gates = self.gates(self.elementwise("add", self.add("matmul", h, weights), given), 4)
        i, o, forget = (self.apply(0, x) for x in gates[:3])
        new = self.elementwise("mul", i, self.apply(1, gates[3]))
        cell = self.elementwise("add", self.elementwise("mul", forget, cell), new)
        return [self.elementwise("mul", o, self.apply(2, cell)), cell]

    def gru(self, given: ValueId, h: ValueId, weights: ValueId, *more: ValueId) -> list[ValueId]:
        """`more`: if a reset gate multiplies a product, its bias, if any; otherwise the weights after the gate."""
        *own, last = self.gates(given, 3)
        products = self.gates(self.add("matmul", h, weights), 3 if self.is_reset_last else 2)
        update, reset = (self.apply(0, self.elementwise("add", a, b)) for a, b in zip(own, products[:2], strict=True))
        if self.is_reset_last:
            state = self.elementwise("add", products[2], *more) if more else products[2]
            state = self.elementwise("mul", reset, state)
        else:
            state = self.add("matmul", self.elementwise("mul", reset, h), *more)
        new = self.apply(1, self.elementwise("add", last, state))
        # (1 - update) * new + update * h
        return [self.elementwise("add", new, self.elementwise("mul", update, self.elementwise("sub", h, new)))]


Make = Callable[..., list[ValueId]]


def _recurrent(c: Context, make: Make, usual: Sequence[str], states: int) -> Result:
    """`states`: the number of states; `usual`: the functions of a direction if none are given."""
    is_more = c.is_given(LENGTHS) or c.is_given(PEEPHOLES) or c.attributes.number("clip", 0.0)
    if is_more or c.attributes.integer("input_forget", 0):
        raise NotSplitError("it has lengths, peepholes, clipping or coupled gates")
    directions = c.shape(c.input(1))[0]
    functions = c.attributes.texts("activations", ()) or tuple(usual) * directions
    if not set(functions) <= set(FUNCTIONS):
        raise NotSplitError(f"it has other functions than {', '.join(FUNCTIONS)}")
    if not c.builder.type(c.input(0)).size:
        raise NotSplitError("it has no steps")
    count, found = len(usual), list[list[ValueId]]()
    for d in range(directions):
        is_backward = d == 1 or c.attributes.text("direction", "forward") == "reverse"
        step = _Step(c, functions[d * count : (d + 1) * count])
        found.append(_direction(c, step, partial(make, step), d, states, is_backward))
    *lasts, whole = (_joined(c, values) for values in zip(*found, strict=True))
    return [whole, *lasts]


def _joined(c: Context, values: Sequence[ValueId]) -> ValueId:
    """Return the values of all directions, joined along an axis before the batch."""
    *lead, batch, hidden = c.shape(values[0])
    return c.concat([c.reshape(value, (*lead, 1, batch, hidden)) for value in values], len(lead))


def _direction(c: Context, step: _Step, make: Make, d: int, states: int, is_backward: bool) -> list[ValueId]:
    """Return the last states of a direction, and its results of all steps."""
    x, w, r = (c.input(i) for i in range(3))
    steps, batch, width = c.shape(x)
    rows, hidden = c.shape(r)[1:]

    def own(value: ValueId) -> ValueId:
        part = c.slice_axis(value, 0, d, 1)
        return c.reshape(part, c.shape(part)[1:])

    given = c.add("matmul", x, c.reshape(c.transpose(own(w), (1, 0)), (1, width, rows)))
    weights = c.transpose(own(r), (1, 0))
    others = [weights]
    if rows == 3 * hidden and not step.is_reset_last:  # a GRU with two products
        others = [c.slice_axis(weights, 1, first, size) for first, size in ((0, 2 * hidden), (2 * hidden, hidden))]
    if c.is_given(BIAS):
        of_input, of_state = (c.slice_axis(own(c.input(BIAS)), 0, i * rows, rows) for i in (0, 1))
        if step.is_reset_last:
            others.append(c.slice_axis(of_state, 0, 2 * hidden, hidden))
            of_state = c.pad(c.slice_axis(of_state, 0, 0, 2 * hidden), (0,), (hidden,))
        given = c.elementwise("add", given, c.elementwise("add", of_input, of_state))
    type_ = ValueType((batch, hidden), c.dtype(x))
    first = [own(c.input(i)) if c.is_given(i) else c.full(0, type_) for i in range(STATE, STATE + states)]
    values = (*first, given, *others)
    types = [type_] * states + [ValueType((batch, rows), type_.dtype), *map(c.builder.type, others)]
    inner = [step.builder.input(f"i{i}", t) for i, t in enumerate(types)]
    made = make(inner[states], *inner[:states], *inner[states + 1 :])
    for i, value in enumerate((*made, made[0])):
        step.builder.output(f"o{i}", value)
    stacked = ValueType((steps, batch, hidden), type_.dtype)
    attributes = LoopAttributes(
        format_graph(step.builder.freeze()),
        steps,
        states,
        (is_backward,),
        (is_backward,),
        tuple(str(c.builder.type(value)) for value in values),
        tuple(map(str, (*[type_] * states, stacked))),
        0,
    )
    return [c.add("loop", *values, attributes=replace(attributes, output=i)) for i in range(states + 1)]


RULES: tuple[FissionRule, ...] = (
    FissionRule("GRU", partial(_recurrent, make=_Step.gru, usual=("Sigmoid", "Tanh"), states=1)),
    FissionRule("LSTM", partial(_recurrent, make=_Step.lstm, usual=("Sigmoid", "Tanh", "Tanh"), states=2)),
    FissionRule("RNN", partial(_recurrent, make=_Step.rnn, usual=("Tanh",), states=1)),
)
