"""A NumPy interpreter, which defines the meaning of a primitive graph.

It runs any graph, also one with alternatives: for each value it computes the first alternative whose
inputs can be computed. In float64 it represents exact arithmetic. In the graph's own types it has the
rounding errors of a program that runs operator by operator, and with a random generator those of a
program that rounds differently.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np

from korch.errors import InputError, InvalidGraphError
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.ops.linear import MatmulAttributes
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.ops.stored import rounded
from korch.primitive.text import parse_graph
from korch.primitive.types import UNIT_ROUNDOFF, DType

NOISE = 4
"""The size of random errors in unit roundoffs of the type. It is above 1 so that rare effects of rounding, for
example which of two quantized numbers is nearer, show up within a few runs."""

EXACT = frozenset(
    {
        "neg",
        "abs",
        "sign",
        "floor",
        "ceil",
        "round",
        "max",
        "min",
        "where",
        "cast",
        "round_tf32",
        "reduce_max",
        "reduce_min",
        "pool_max",
    }
)
"""Operations that compute without rounding."""

IN_PLACE: Mapping[str, np.ufunc] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
"""Operations whose result may overwrite an input."""


def run(
    graph: PrimitiveGraph,
    inputs: Mapping[str, Array],
    *,
    exact: bool = True,
    roundings: np.random.Generator | None = None,
    factors: Callable[[Array], Array] | None = None,
    watch: Callable[[Primitive, Mapping[int, Array]], None] | None = None,
) -> dict[str, Array]:
    """Compute the model's outputs.

    Args:
        graph: the graph.
        inputs: an array for each of its inputs, of the input's shape and type.
        exact: compute floats in float64, not in their own types.
        roundings: the generator of random rounding errors to add to each result; None for no such errors.
        factors: rounds the operands of linear primitives; not used if `roundings` is given.
        watch: called after each primitive, with the values that are in memory at this point.

    Returns:
        An array for each output; floats are float64 if `exact`.

    Raises:
        InputError: an input is missing, or has another shape.
        InvalidGraphError: an output can't be computed.
    """
    order = first_alternatives(graph)
    outputs = {value for _, value in graph.outputs}
    last = {value: i for i, primitive in enumerate(order) for value in primitive.inputs}
    values = _given(graph, inputs, exact, outputs)
    places = {} if roundings or watch else _places(graph, order, outputs)
    loops: dict[object, list[Array]] = {}  # all outputs of a loop, until the last of the primitives that compute one
    ends = {p.operator: i for i, p in enumerate(order) if isinstance(p.attributes, LoopAttributes)}
    for i, primitive in enumerate(order):
        for value in primitive.inputs:
            if value not in values:  # a constant is widened when it is first needed
                values[value] = _constant(graph, value, exact)
        if isinstance(primitive.attributes, LoopAttributes):
            loop = primitive.operator
            if loop not in loops:
                loops[loop] = run_loop([values[v] for v in primitive.inputs], primitive.attributes, roundings)
            values[primitive.output] = loops[loop][primitive.attributes.output]
            if ends[loop] == i:
                del loops[loop]
        elif roundings is None:
            given: Mapping[int, Array] = values
            if factors is not None and primitive.row.category is Category.LINEAR:
                given = {value: factors(values[value]) for value in primitive.inputs}
            place = values[places[primitive.output]] if primitive.output in places else None
            values[primitive.output] = apply(graph, primitive, given, exact=exact, place=place)
        else:
            values[primitive.output] = _apply_rounded(graph, primitive, values, roundings)
        if watch is not None:
            watch(primitive, values)
        for value in primitive.inputs:  # all values of a large model together don't fit in memory
            if last[value] == i and value not in outputs:
                values.pop(value, None)
    return {name: values[value] for name, value in graph.outputs}


def _places(graph: PrimitiveGraph, order: Sequence[Primitive], outputs: Container[int]) -> dict[int, int]:
    """Return, for results that may overwrite an input, this input: weights in float64 take much memory.

    It was computed into memory of its own, and nothing else reads it.
    """
    uses = Counter(value for primitive in order for value in primitive.inputs)
    own: set[int] = set()
    found: dict[int, int] = {}
    for primitive in order:
        if primitive.op in IN_PLACE:
            free = (v for v in primitive.inputs if v in own and uses[v] == 1 and v not in outputs)
            found.update((primitive.output, v) for v in free)
        is_widened = primitive.op == "cast" and not graph.types[primitive.inputs[0]].dtype.is_float
        if primitive.op in IN_PLACE or (is_widened and graph.types[primitive.output].dtype.is_float):
            own.add(primitive.output)
    return found


def apply(
    graph: PrimitiveGraph, primitive: Primitive, values: Mapping[int, Array], *, exact: bool, place: Array | None = None
) -> Array:
    """Compute one primitive from the values of its inputs; products of 16-bit floats are summed in float32.

    `place`: an input that may be overwritten.
    """
    given = [values[v] for v in primitive.inputs]
    if isinstance(place, np.ndarray) and _fits_in(place, given, graph.types[primitive.output].shape):
        with np.errstate(all="ignore"):
            return np.asarray(IN_PLACE[primitive.op](*given, out=place))
    if not exact and primitive.row.category is Category.LINEAR:
        given = [_summable(array) for array in given]
        if isinstance(primitive.attributes, MatmulAttributes) and primitive.attributes.rounded_block:
            given[0] = rounded(given[0], primitive.attributes.rounded_block)
    result = primitive.row.reference(given, primitive.attributes)
    type_ = graph.types[primitive.output]
    if result.shape != type_.shape:
        raise InvalidGraphError(f"{primitive.op} gave shape {result.shape}, not {type_}")
    if exact and type_.dtype.is_float:
        return result
    with np.errstate(all="ignore"):
        return result.astype(type_.dtype.numpy, copy=False)


def _fits_in(place: Array, given: Sequence[Array], shape: tuple[int, ...]) -> bool:
    """Return whether a result of this shape that is computed from arrays fits in the memory of one of them."""
    return (
        place.shape == shape and place.dtype in (np.float32, np.float64) and {a.dtype for a in given} == {place.dtype}
    )


def run_loop(
    inputs: Sequence[Array], loop: LoopAttributes, roundings: np.random.Generator | None = None
) -> list[Array]:
    """Compute all outputs of a loop.

    `inputs`: the loop's inputs; floats that are wider than their types are computed exactly.
    """
    body = body_of(loop.body)
    trips = loop.trips
    if loop.is_counted:
        *inputs, count = inputs
        trips = int(count[0])
    end = loop.states + len(loop.reads_backward)
    states, sliced, others = list(inputs[: loop.states]), inputs[loop.states : end], inputs[end:]
    exact = any(
        array.dtype != body.types[value].dtype.numpy for array, (_, value) in zip(inputs, body.inputs, strict=True)
    )
    stacks: list[list[Array]] = [[] for _ in loop.writes_backward]
    for trip in range(trips):
        slices = [
            array[trips - 1 - trip if is_backward else trip]
            for array, is_backward in zip(sliced, loop.reads_backward, strict=True)
        ]
        given = {name: array for (name, _), array in zip(body.inputs, (*states, *slices, *others), strict=True)}
        found = list(run(body, given, exact=exact, roundings=roundings).values())
        states, written = found[: loop.states], found[loop.states :]
        for own, array in zip(stacks, written, strict=True):
            own.append(array)
    for own, is_backward in zip(stacks, loop.writes_backward, strict=True):
        stack = np.stack(own[:: -1 if is_backward else 1])
        states.append(np.concatenate([stack, np.zeros((loop.trips - trips, *stack.shape[1:]), stack.dtype)]))
    return states


@lru_cache(64)
def body_of(text: str) -> PrimitiveGraph:
    """Return the graph of one iteration of a loop from its text form."""
    return parse_graph(text)


def _apply_rounded(
    graph: PrimitiveGraph, primitive: Primitive, values: Mapping[int, Array], rng: np.random.Generator
) -> Array:
    """Compute one primitive in its own types, with random errors of the size of rounding errors.

    The error of a sum of n terms is sqrt(n) times the error of one term.
    """
    category, result_type = primitive.row.category, graph.types[primitive.output]
    is_rounded = result_type.dtype.is_float and primitive.op not in EXACT
    if not is_rounded or category in (Category.LAYOUT, Category.BROADCAST, Category.OPAQUE):
        return apply(graph, primitive, values, exact=False)
    given = {value: values[value] for value in primitive.inputs}
    if primitive.op == "reduce_prod" and isinstance(primitive.attributes, ReduceAttributes):
        undetermined = _depends_on_order(values[primitive.inputs[0]], primitive.attributes.axes)
        if undetermined.any():
            return np.where(undetermined, np.nan, apply(graph, primitive, given, exact=False))
    if category in (Category.REDUCE, Category.LINEAR):
        terms = graph.work_flop(primitive) / max(1, result_type.size)
        for value, array in given.items():
            array = _summable(array) if category is Category.LINEAR else array
            given[value] = _disturbed(array, max(1.0, terms) ** 0.5, rng)
    return _disturbed(apply(graph, primitive, given, exact=False), 1.0, rng)


def _depends_on_order(x: Array, axes: tuple[int, ...]) -> Array:
    """Return where a product of floats may overflow before it meets 0, or underflow before it meets infinity."""
    is_zero, is_infinite = x == 0, np.isinf(x)
    with np.errstate(all="ignore"):
        others = np.prod(np.where(is_zero | is_infinite, 1, x), axis=axes, keepdims=True, dtype=x.dtype)
    overflows = np.isinf(others) & is_zero.any(axis=axes, keepdims=True)
    return np.asarray(overflows | ((others == 0) & is_infinite.any(axis=axes, keepdims=True)))


def _summable(array: Array) -> Array:
    """Return factors cast to the type in which their products are summed."""
    return array.astype(np.float32) if DType.of(array.dtype) in (DType.F16, DType.BF16) else array


def _disturbed(array: Array, factor: float, rng: np.random.Generator) -> Array:
    """Return floats with random relative errors of `factor` roundings; integral numbers are left exact."""
    dtype = DType.of(array.dtype)
    if not dtype.is_float:
        return array
    unit = factor * NOISE * UNIT_ROUNDOFF[dtype]
    with np.errstate(all="ignore"):
        wide = array.astype(np.float64)
        changed = wide * (1 + unit * rng.uniform(-1, 1, array.shape))
        return np.where(wide == np.rint(wide), wide, changed).astype(array.dtype)


def first_alternatives(graph: PrimitiveGraph) -> list[Primitive]:
    """Return one primitive per value that the outputs need, in an order that can be run.

    Raises:
        InvalidGraphError: an output has no producer, or only cyclic ones.
    """
    rank: dict[int, Primitive] = {}
    known = set(graph.given)
    waiting = list(graph.primitives)
    order: list[Primitive] = []
    while waiting:
        rest = []
        for primitive in waiting:
            if primitive.output in known:
                continue
            if known.issuperset(primitive.inputs):
                known.add(primitive.output)
                rank[primitive.output] = primitive
                order.append(primitive)
            else:
                rest.append(primitive)
        if len(rest) == len(waiting):
            break
        waiting = rest
    for name, value in graph.outputs:
        if value not in known:
            raise InvalidGraphError(f"output {name!r} (%{value}) can't be computed")
    needed = {value for _, value in graph.outputs}
    for primitive in reversed(order):
        if primitive.output in needed:
            needed.update(primitive.inputs)
    return [primitive for primitive in order if primitive.output in needed]


def _given(graph: PrimitiveGraph, inputs: Mapping[str, Array], exact: bool, wanted: Iterable[int]) -> dict[int, Array]:
    """Return the model inputs, and the constants among the wanted values."""
    values: dict[int, Array] = {}
    for name, value in graph.inputs:
        if name not in inputs:
            raise InputError(f"input {name!r} is missing")
        if tuple(inputs[name].shape) != graph.types[value].shape:
            raise InputError(f"input {name!r} has shape {tuple(inputs[name].shape)}", expected=str(graph.types[value]))
        values[value] = _widen(inputs[name], graph.types[value].dtype, exact)
    for value in wanted:
        if value in graph.constants:
            values[value] = _constant(graph, value, exact)
    return values


def _constant(graph: PrimitiveGraph, value: int, exact: bool) -> Array:
    return _widen(graph.constants[value].array, graph.types[value].dtype, exact)


def _widen(array: Array, dtype: DType, exact: bool) -> Array:
    return array.astype(np.float64 if exact and dtype.is_float else dtype.numpy, copy=False)
