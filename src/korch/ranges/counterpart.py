"""The graphs of one model at two sizes -> the correspondence of their values and primitives.

Both graphs have the same alternatives, but constants and values computed from them may be numbered differently.
"""

from collections import defaultdict
from dataclasses import dataclass

from korch.primitive.graph import Constant, PrimitiveGraph


@dataclass(frozen=True)
class Counterparts:
    """The counterparts, in another graph, of a graph's values and primitives; some may have none."""

    values: dict[int, int]
    primitives: dict[int, int]


def counterparts(graph: PrimitiveGraph, other: PrimitiveGraph) -> Counterparts:
    """Return the counterparts of a graph's values and primitives."""
    names = dict(other.inputs)
    values = {value: names[name] for name, value in graph.inputs if name in names}
    values |= _constants(graph, other)
    readers: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    for number, primitive in enumerate(other.primitives):
        readers[primitive.op, primitive.inputs].append(number)
    primitives: dict[int, int] = {}
    todo, before = list(range(len(graph.primitives))), -1
    while before != len(todo):  # an alternative may be numbered before its operands
        before, waiting = len(todo), []
        for number in todo:
            primitive = graph.primitives[number]
            if not all(value in values for value in primitive.inputs):
                waiting.append(number)
                continue
            same = readers[primitive.op, tuple(values[value] for value in primitive.inputs)]
            same = [
                k
                for k in same
                if values.get(primitive.output, other.primitives[k].output) == other.primitives[k].output
            ]
            chosen = next((k for k in same if other.primitives[k].attributes == primitive.attributes), None)
            if chosen is None and same:
                chosen = same[0]  # such as slices of one value: the first is the counterpart of the first
            if chosen is not None:
                primitives[number] = chosen
                values[primitive.output] = other.primitives[chosen].output
                readers[primitive.op, other.primitives[chosen].inputs].remove(chosen)
        todo = waiting
    return Counterparts(values, primitives)


def _constants(graph: PrimitiveGraph, other: PrimitiveGraph) -> dict[int, int]:
    """Match constants with the same elements, then those with the same first element, then the rest in their order."""
    found: dict[int, int] = {}
    left, taken = dict(graph.constants), dict(other.constants)
    for key in (_content, _beginning, _kind):
        places: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for value, constant in taken.items():
            places[key(constant)].append(value)
        for value, constant in list(left.items()):
            if places[key(constant)]:
                found[value] = places[key(constant)].pop(0)
                del left[value], taken[found[value]]
    return found


def _content(constant: Constant) -> tuple[object, ...]:
    return constant.digest, constant.type


def _beginning(constant: Constant) -> tuple[object, ...]:
    return *_kind(constant), constant.array.reshape(-1)[:1].tobytes()


def _kind(constant: Constant) -> tuple[object, ...]:
    return constant.type.dtype, constant.type.rank, constant.is_uniform
