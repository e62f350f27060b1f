"""The invariants of a primitive graph, as small named checks that are run between stages."""

from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import TypeMismatchError, require_arity
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.reference import body_of, first_alternatives
from korch.primitive.text import format_primitive, is_written_out


def no_unbound_value(graph: PrimitiveGraph) -> None:
    """Check that every value id is in range."""
    count = len(graph.types)
    for p, primitive in enumerate(graph.primitives):
        if not all(0 <= v < count for v in (*primitive.inputs, primitive.output)):
            _fail(graph, p, "it names a value that is not in the graph")
    for name, value in (*graph.inputs, *graph.outputs):
        if not 0 <= value < count:
            raise InvalidGraphError(f"{name!r} is value %{value}, which is not in the graph")


def given_values_have_no_producer(graph: PrimitiveGraph) -> None:
    """Check that no primitive computes a model input or a constant."""
    for p, primitive in enumerate(graph.primitives):
        if primitive.output in graph.given:
            _fail(graph, p, "it computes a model input or a constant")


def types_agree(graph: PrimitiveGraph) -> None:
    """Check that the output of each primitive, alternatives included, has the type that its operation infers."""
    for p, primitive in enumerate(graph.primitives):
        try:
            require_arity(primitive.op, primitive.row.arity, len(primitive.inputs))
            found = primitive.row.infer(graph.input_types(primitive), primitive.attributes)
        except TypeMismatchError as error:
            _fail(graph, p, str(error))
        expected = graph.types[primitive.output]
        if found != expected:
            _fail(graph, p, f"it computes {found}, its value is {expected}")
    for value, constant in graph.constants.items():
        if constant.type != graph.types[value]:
            raise InvalidGraphError(f"constant %{value} holds {constant.type}, its value is {graph.types[value]}")


def no_equal_primitives(graph: PrimitiveGraph) -> None:
    """Check that no two primitives are equal, so hash-consing and congruence hold."""
    seen: dict[object, int] = {}
    for p, primitive in enumerate(graph.primitives):
        key = (primitive.op, primitive.inputs, primitive.attributes)
        if key in seen:
            _fail(graph, p, f"it equals primitive {seen[key]}")
        seen[key] = p


def outputs_computable(graph: PrimitiveGraph) -> None:
    """Check that every model output can be computed from the inputs and constants."""
    first_alternatives(graph)


def loop_bodies_agree(graph: PrimitiveGraph) -> None:
    """Check that the body of each loop is a valid graph of the types that the loop gives it, with its own constants."""
    for p, primitive in enumerate(graph.primitives):
        if not isinstance(primitive.attributes, LoopAttributes):
            continue
        body = body_of(primitive.attributes.body)
        check_graph(body)
        ends = tuple(tuple(body.types[value] for _, value in side) for side in (body.inputs, body.outputs))
        if ends != primitive.attributes.body_types():
            _fail(graph, p, "its body has other inputs or outputs")
        if any(not is_written_out(constant) for constant in body.constants.values()):
            _fail(graph, p, "its body has a constant whose elements are not written out")


CHECKS = (
    no_unbound_value,
    given_values_have_no_producer,
    types_agree,
    no_equal_primitives,
    outputs_computable,
    loop_bodies_agree,
)


def check_graph(graph: PrimitiveGraph) -> None:
    """Run all checks.

    Raises:
        InvalidGraphError: a check fails.
    """
    for check in CHECKS:
        check(graph)


def _fail(graph: PrimitiveGraph, p: int, text: str) -> None:
    primitive = graph.primitives[p]
    line = f"%{primitive.output} = {format_primitive(primitive)}"
    origin = graph.origins[p] if graph.origins else ""
    raise InvalidGraphError(text, where=f"primitive {p} `{line}`" + (f" from {origin}" * bool(origin)))
