"""Primitives of a graph -> a segment: a separate graph in canonical numbering.

Values are numbered depth first from the outputs, with operands in their order, and outputs are ordered
by a hash of all that they depend on. So segments that differ only in names, in the order in which
the model lists them, or in the elements of their weights get the same numbering. Whether segments are
equal is decided by comparison, in `block.py`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.body import number_body
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.text import format_attributes
from korch.primitive.walks import depth_first


@dataclass(frozen=True)
class Segment:
    """A part of a model."""

    graph: PrimitiveGraph  # its primitives as a separate graph
    values: tuple[int, ...]  # the model's value for each value of `graph`
    price_bytes: int = 0  # the price of the cut after it, in bytes moved


def whole_segment(graph: PrimitiveGraph) -> Segment:
    """Return the segment that is the whole model, with the model's numbering."""
    return Segment(graph, tuple(range(len(graph.types))))


def extract(graph: PrimitiveGraph, primitives: Iterable[int], outputs: Sequence[int], price_bytes: int = 0) -> Segment:
    """Return the part of a graph that computes some values with some primitives.

    `primitives`: the primitives that may be used; other values that they read are inputs. `outputs`: the values, each
    computed by one of the primitives.
    """
    members = tuple(primitives)
    digests = _digests(graph, {(p := graph.primitives[n]).output: p for n in members}, outputs)
    ordered = sorted(outputs, key=digests.__getitem__)  # equal ones stay in the model's order
    return Segment(*number_body(graph, members, ordered), price_bytes)


def _digests(graph: PrimitiveGraph, makers: Mapping[int, Primitive], outputs: Sequence[int]) -> dict[int, bytes]:
    """Return hashes of all that values depend on within a segment, except for the elements of weights."""

    def operands(value: int) -> Sequence[int]:
        return makers[value].inputs if value in makers else ()

    found: dict[int, bytes] = {}
    for value in depth_first(outputs, operands):
        constant, kind = graph.constants.get(value), "input"
        if value in makers:
            kind = f"{makers[value].op}{format_attributes(makers[value].attributes)}"
        elif constant is not None:
            kind = constant.digest if constant.is_uniform else "constant"
        parts = [f"{graph.types[value]} {kind}".encode(), *(found[v] for v in operands(value))]
        found[value] = hashlib.sha256(b"|".join(parts)).digest()
    return found
