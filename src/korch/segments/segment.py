"""Primitives of a graph -> a segment: a separate graph in canonical numbering.

Values are numbered depth first from the outputs, with operands in their order, and outputs are ordered
by a hash of all that they depend on. So segments that differ only in names, in the order in which
the model lists them, or in the elements of their weights get the same numbering. Whether segments are
equal is decided by comparison, in `block.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from korch.primitive.body import number_body
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import format_attributes


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
    colours = _Colours(graph, {graph.primitives[p].output: p for p in members})
    ordered = sorted(outputs, key=colours.of)  # equal ones stay in the model's order
    return Segment(*number_body(graph, members, ordered), price_bytes)


class _Colours:
    """Hashes of all that values depend on within a segment, except for the elements of weights."""

    def __init__(self, graph: PrimitiveGraph, producer: dict[int, int]) -> None:
        self.graph = graph
        self.producer = producer
        self.found: dict[int, bytes] = {}

    def of(self, root: int) -> bytes:
        stack = [root]
        while stack:
            value = stack[-1]
            inputs = self._inputs(value)
            if missing := [v for v in inputs if v not in self.found]:
                stack.extend(missing)
                continue
            stack.pop()
            if value not in self.found:
                parts = [self._own(value).encode(), *(self.found[v] for v in inputs)]
                self.found[value] = hashlib.sha256(b"|".join(parts)).digest()
        return self.found[root]

    def _inputs(self, value: int) -> tuple[int, ...]:
        p = self.producer.get(value)
        return () if p is None else self.graph.primitives[p].inputs

    def _own(self, value: int) -> str:
        type_ = self.graph.types[value]
        if value in self.producer:
            primitive = self.graph.primitives[self.producer[value]]
            return f"{type_} {primitive.op}{format_attributes(primitive.attributes)}"
        constant = self.graph.constants.get(value)
        if constant is None:
            return f"{type_} input"
        return f"{type_} {constant.digest if constant.is_uniform else 'constant'}"
