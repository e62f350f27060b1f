"""A tile program and the graph that it should compute -> whether it computes the graph.

First both are computed in two finite fields (`korch.superopt.field`) for random inputs, where nothing
is rounded: programs that are equal by the laws of sums, products, quotients, exponentials and orders
give equal elements there. A different program of degree d gives an equal element with a probability of
at most d / 2^25 (Schwartz and Zippel, JACM 1980); every element of every output is compared. Then
the program runs in floating point, where signs and magnitudes matter: on small, usual and large numbers,
its error must not exceed a tolerance, or a multiple of the error of the graph in its own types.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import InvalidGraphError
from korch.numerics import FACTOR, TOLERANCE, difference
from korch.primitive import reference
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops.reduce import ReduceAttributes
from korch.superopt.field import NotProvableError, PairField
from korch.tile.check.arithmetic import Float64, Typed
from korch.tile.check.check import check_program
from korch.tile.check.reference import run_program
from korch.tile.ir.program import Product, TileProgram

ROUNDS = 4
"""Computations in the fields, in pairs: the two of a pair have the same inputs and opposite orders, so they take both
sides of each branch; the next pair has other inputs, exponentials and functions."""


@dataclass(frozen=True, slots=True)
class NumberTrial:
    """Numbers that are tried: their size, and which inputs have a mean above or below zero."""

    scale: float  # the size
    # the inputs whose position has this bit set have a mean of 2 times the size, the others of -2 times: for any two
    # inputs, there is a trial whose products are all negative. None if all means are 0.
    bit: int | None = None
    # if it is not negative, all numbers are positive, and those whose index along an axis equals it modulo `PEAKS` are
    # larger, so that each element of a row is the greatest in one trial
    peak: int = -1


PEAKS, PEAK = 9, 4.0
"""The distance from a larger element to the next one, and the factor by which they are larger."""

TRIALS = (
    NumberTrial(1.0),
    NumberTrial(1e-3),
    NumberTrial(30.0),
    NumberTrial(30.0, 0),
    NumberTrial(30.0, 1),
    NumberTrial(30.0, 2),
    *(NumberTrial(10.0, peak=peak) for peak in range(PEAKS)),
)
"""The trials, which run in the program's types; the first one also runs in float64."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a program computes a graph."""

    is_equal: bool  # whether it does
    reason: str = ""  # why it was refused; "" if it was not


def verify(program: TileProgram, graph: PrimitiveGraph, seed: int = 0) -> Verdict:
    """Return whether a program computes a graph, inputs and outputs row-major and in order.

    `graph`: the graph that it should compute, with one alternative for each value.
    """
    try:
        check_program(program)
        for number in range(ROUNDS):
            if reason := _differs_in_fields(program, graph, PairField(ROUNDS * seed + number // 2, number % 2 == 1)):
                return Verdict(False, reason)
        for number, trial in enumerate(TRIALS):
            if reason := _differs_in_floats(program, graph, trial, seed + number):
                return Verdict(False, reason)
    except (InvalidGraphError, NotProvableError, IndexError) as error:
        return Verdict(False, str(error))
    return Verdict(True)


def compute(graph: PrimitiveGraph, inputs: Sequence[Array], field: PairField) -> list[Array]:
    """Return the outputs of a graph in the fields.

    Raises:
        NotProvableError: a primitive has no meaning there.
    """
    values = dict(zip((value for _, value in graph.inputs), inputs, strict=True))
    for value, constant in graph.constants.items():
        if not constant.is_uniform:
            raise NotProvableError("a constant of several numbers")
        type_ = graph.types[value]
        values[value] = np.broadcast_to(field.literal(type_.dtype, constant.scalar.item()), type_.shape)
    for primitive in reference.first_alternatives(graph):
        values[primitive.output] = _apply(graph, primitive, [values[v] for v in primitive.inputs], field)
    return [values[value] for _, value in graph.outputs]


def _apply(graph: PrimitiveGraph, primitive: Primitive, inputs: Sequence[Array], field: PairField) -> Array:
    dtype, category = graph.types[primitive.output].dtype, primitive.row.category
    if category is Category.ELEMENTWISE:
        return field.apply(primitive.op, dtype, inputs)
    if category in (Category.LAYOUT, Category.BROADCAST):
        return np.asarray(primitive.row.reference(inputs, primitive.attributes))
    if isinstance(primitive.attributes, ReduceAttributes):
        op, alive = primitive.op.removeprefix("reduce_"), np.ones((), bool)
        return field.collect(op, dtype, inputs[0], primitive.attributes.axes, alive)
    if primitive.op == "matmul" and dtype.is_float:
        a, b = inputs
        products = field.product(Product.F64, a[..., :, :, None], b[..., None, :, :])
        return field.collect("sum", dtype, products, (-2,), np.ones((), bool))[..., 0, :]
    raise NotProvableError(primitive.op)


def _differs_in_fields(program: TileProgram, graph: PrimitiveGraph, field: PairField) -> str:
    inputs = [field.random(graph.types[v].shape, graph.types[v].dtype) for _, v in graph.inputs]
    wanted = compute(graph, inputs, field)
    found = run_program(program, inputs, field.seed, field)
    for (name, _), right, given in zip(graph.outputs, wanted, found, strict=True):
        right = right.reshape(-1)
        if np.isnan(right.real).any():
            return f"output {name} is undefined in the fields"
        if given.shape != right.shape or not np.array_equal(given.real, right.real):
            return f"output {name} differs in the fields"
    return ""


def _differs_in_floats(program: TileProgram, graph: PrimitiveGraph, trial: NumberTrial, seed: int) -> str:
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    for position, (name, value) in enumerate(graph.inputs):
        type_ = graph.types[value]
        mean = 0 if trial.bit is None else 2 if position >> trial.bit & 1 else -2
        drawn = (
            (rng.standard_normal(type_.shape) + mean) * trial.scale
            if type_.dtype.is_float
            else rng.integers(0, 2, type_.shape)
        )
        if trial.peak >= 0 and type_.dtype.is_float:
            drawn = np.abs(drawn)
            for index in np.indices(type_.shape):
                drawn = np.where(index % PEAKS == trial.peak, PEAK * drawn, drawn)
        feeds[name] = drawn.astype(type_.dtype.numpy)
    exact, own = (_flat(reference.run(graph, feeds, exact=way)) for way in (True, False))
    ways: list[tuple[Typed, str]] = [(Typed(), "its own types")]
    if trial == TRIALS[0]:
        ways.append((Float64(), "float64"))
    for arithmetic, kind in ways:
        found = run_program(program, [*feeds.values()], seed, arithmetic)
        for (name, right), given in zip(exact.items(), found, strict=True):
            allowed = max(TOLERANCE, FACTOR * difference(own[name], right).of_largest)
            if not difference(given, right, own[name]).of_largest <= allowed:
                return f"output {name} differs in {kind}"
    return ""


def _flat(arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {name: array.reshape(-1) for name, array in arrays.items()}
