"""Segments -> blocks: segments that differ only in their weights are searched once.

Rules add alternatives to each segment separately, since they may compute with its weights. Then the graphs
are compared number by number: two segments are the same block if and only if all primitives, attributes,
types, connections, inputs and outputs are equal, and all constants on whose content a kernel's code could
depend are equal. So a kernel made for one segment of a block is correct for every other one, given that
one's weights. Graphs are compared in full, not by a hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from korch.equivalence.saturate import SaturationReport, merge_reports
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.segments.segment import Segment
from korch.segments.spill import Spill


@dataclass(frozen=True)
class BlockInstance:
    """A segment with its alternatives."""

    graph: PrimitiveGraph  # its graph with alternatives
    inputs: tuple[int, ...]  # the model's value for each input of the graph
    outputs: tuple[int, ...]  # the same for each output
    price_bytes: int = 0  # the price of the cut after it, in bytes moved


@dataclass(frozen=True)
class Block:
    """Segments that are equal except for their weights."""

    instances: tuple[int, ...]  # positions of the segments in the model's order
    graph: PrimitiveGraph  # the first segment's graph with alternatives, which represents all of them


@dataclass(frozen=True)
class Partition:
    """A model in segments."""

    source: PrimitiveGraph  # the graph that the segments are parts of
    instances: tuple[BlockInstance, ...]  # the segments in an order in which they can run
    blocks: tuple[Block, ...]  # which of them are equal
    rules: SaturationReport  # the report of saturation, before the cut and in all segments together

    @staticmethod
    def of(source: PrimitiveGraph, instances: Sequence[BlockInstance], rules: SaturationReport) -> Partition:
        """Return the model in segments, with equal segments as one block."""
        members: dict[tuple[object, ...], list[int]] = {}
        for number, instance in enumerate(instances):
            members.setdefault(form(instance.graph), []).append(number)
        blocks = tuple(Block(tuple(numbers), instances[numbers[0]].graph) for numbers in members.values())
        return Partition(source, tuple(instances), blocks, rules)

    @property
    def is_whole(self) -> bool:
        """Whether the model is one segment, numbered as the model is."""
        return len(self.instances) == 1


Rewrite = Callable[[PrimitiveGraph], tuple[PrimitiveGraph, SaturationReport]]
"""Adds alternatives to a graph."""


def find_blocks(
    graph: PrimitiveGraph, segments: Iterable[Segment], rewrite: Rewrite, spill: Spill | None = None
) -> Partition:
    """Add alternatives to each segment, and find the equal segments."""
    instances, reports, spill = [], [], spill or Spill()
    for segment in segments:
        found, report = rewrite(segment.graph)
        found = spill.take(found, segment.graph)
        own = dict((*segment.graph.inputs, *segment.graph.outputs))
        inputs, outputs = (
            tuple(segment.values[own[name]] for name, _ in side) for side in (found.inputs, found.outputs)
        )
        instances.append(BlockInstance(found, inputs, outputs, segment.price_bytes))
        reports.append((report, segment.values))
    return Partition.of(graph, instances, merge_reports(reports))


def form(graph: PrimitiveGraph) -> tuple[object, ...]:
    """Return a graph's structure without the elements of its weights: equal for segments of one block.

    Constants are compared by content if they are uniform (they are literals in the code), or if an opaque
    operator reads them (they may be sizes); others by type alone. If a rule depended on elements, the
    primitives that it built differ. Equal constants of a graph are one value, so the connections of the
    graph also show which weights are shared.
    """
    opaque = {value for p in graph.primitives if p.row.category is Category.OPAQUE for value in p.inputs}
    constants = tuple(
        (value, c.digest if c.is_uniform or value in opaque else "") for value, c in sorted(graph.constants.items())
    )
    return (graph.types, graph.primitives, graph.inputs, graph.outputs, constants)
