"""Extracts a part of a graph as a separate graph with a canonical numbering.

Values are numbered depth first from the outputs, so equal parts of one model, or of two, become
equal graphs.
"""

from collections.abc import Callable, Iterable, Sequence

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.walks import depth_first


def number_body(
    graph: PrimitiveGraph,
    primitives: Iterable[int],
    outputs: Sequence[int],
    is_inside: Callable[[int], bool] = lambda constant: True,
) -> tuple[PrimitiveGraph, tuple[int, ...]]:
    """Return a graph of the given primitives, and the original value for each of its values.

    The new graph's inputs are named i0, i1, ..., and its outputs o0, o1, ....

    `primitives`: ids of the primitives: at most one alternative per value, without cycles. `is_inside`: whether a
    constant is part of the body; otherwise it is an input.
    """
    producer = {graph.primitives[p].output: p for p in primitives}

    def operands(value: int) -> Sequence[int]:
        return graph.primitives[producer[value]].inputs if value in producer else ()

    number = {value: n for n, value in enumerate(depth_first(outputs, operands))}
    chosen = [producer[value] for value in number if value in producer]
    others = (value for value in number if value not in producer)
    inputs = [value for value in others if value not in graph.constants or not is_inside(value)]
    read = set(inputs)
    body = PrimitiveGraph(
        types=tuple(graph.types[value] for value in number),
        primitives=tuple(_renumbered(graph.primitives[p], number) for p in chosen),
        inputs=tuple((f"i{i}", number[value]) for i, value in enumerate(inputs)),
        outputs=tuple((f"o{i}", number[value]) for i, value in enumerate(outputs)),
        constants={
            n: graph.constants[value] for value, n in number.items() if value in graph.constants and value not in read
        },
        origins=tuple(graph.origins[p] for p in chosen) if graph.origins else (),
    )
    return body, tuple(number)


def _renumbered(primitive: Primitive, number: dict[int, int]) -> Primitive:
    inputs = tuple(number[value] for value in primitive.inputs)
    return Primitive(primitive.op, inputs, primitive.attributes, number[primitive.output])
