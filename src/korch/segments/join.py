"""Segments with their alternatives -> one graph of the whole model.

A value that one segment writes and another reads becomes one value; so do equal constants. If saturation
found that a segment's output equals its input, the readers of the output read the input instead.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from korch.candidate.candidate import Candidate
from korch.primitive.graph import Constant, Primitive, PrimitiveGraph
from korch.primitive.types import ValueType
from korch.segments.block import BlockInstance, Partition


@dataclass(frozen=True)
class Joined:
    """The whole model."""

    graph: PrimitiveGraph  # all segments' primitives, alternatives included
    values: tuple[tuple[int, ...], ...]  # per segment, the whole graph's value for each value of its graph
    first_primitives: tuple[int, ...]  # per segment, where its primitives begin in the whole graph

    def place(self, instance: int, candidate: Candidate) -> Candidate:
        """Return a block's candidate as a candidate of one of its segments in the whole graph."""
        values, first = self.values[instance], self.first_primitives[instance]
        group = candidate.group
        moved = replace(
            group,
            primitives=tuple(first + p for p in group.primitives),
            inputs=tuple(values[v] for v in group.inputs),
            outputs=tuple(values[v] for v in group.outputs),
        )
        return replace(candidate, group=moved)


def with_constants_of(graph: PrimitiveGraph, plans: Iterable[Sequence[Candidate]]) -> PrimitiveGraph:
    """Return a graph that keeps only the constants that some plan reads, that are outputs, or that are uniform."""
    wanted = {value for steps in plans for step in steps for value in step.group.inputs}
    wanted |= {value for _, value in graph.outputs}
    kept = {value: c for value, c in graph.constants.items() if value in wanted or c.is_uniform}
    return replace(graph, constants=kept)


def held_values(partition: Partition, joined: Joined) -> tuple[frozenset[int], ...]:
    """Return, per block, the values whose memory its kernels must not make a part of a concatenation.

    These are the model's inputs, outputs and constants, and values between segments that another segment
    concatenates too: each segment is searched separately, so two of them could claim the same memory. The
    instances of a block share one plan, so a restriction of one instance holds for all.
    """
    ends = {value for _, value in (*joined.graph.inputs, *joined.graph.outputs)}
    ends |= joined.graph.constants.keys()
    claims: dict[int, set[int]] = {}
    for i, (instance, values) in enumerate(zip(partition.instances, joined.values, strict=True)):
        for primitive in instance.graph.primitives:
            if primitive.op == "concat":
                for value in primitive.inputs:
                    claims.setdefault(values[value], set()).add(i)
    found = []
    for block in partition.blocks:
        held: set[int] = set()
        edge = {value for _, value in (*block.graph.inputs, *block.graph.outputs)}
        for i in block.instances:
            values = joined.values[i]
            names = [values[value] for value in edge]
            held |= {
                value
                for value in edge
                if values[value] in ends or claims.get(values[value], set()) - {i} or names.count(values[value]) > 1
            }
        found.append(frozenset(held))
    return tuple(found)


def join(partition: Partition) -> Joined:
    """Return the graph of a whole model."""
    if partition.is_whole:
        graph = partition.instances[0].graph
        return Joined(graph, (tuple(range(len(graph.types))),), (0,))
    joiner = _Joiner(partition.source)
    for instance in partition.instances:
        joiner.add(instance)
    return joiner.finish()


class _Joiner:
    """Builds the whole graph segment by segment."""

    def __init__(self, source: PrimitiveGraph) -> None:
        self.source = source
        self.types: list[ValueType] = []
        self.primitives: list[Primitive] = []
        self.origins: list[str] = []
        self.constants: dict[int, Constant] = {}
        self.constant_ids: dict[tuple[str, ValueType], int] = {}
        self.values: list[tuple[int, ...]] = []
        self.firsts: list[int] = []
        self.of_model: dict[int, int] = {}
        for _, value in source.inputs:
            if value not in self.of_model:
                self.of_model[value] = self.new(source.types[value])
        self.inputs = tuple((name, self.of_model[value]) for name, value in source.inputs)

    def new(self, type_: ValueType) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def constant(self, constant: Constant) -> int:
        key = (constant.digest, constant.type)
        if key not in self.constant_ids:
            self.constant_ids[key] = self.new(constant.type)
            self.constants[self.constant_ids[key]] = constant
        return self.constant_ids[key]

    def add(self, instance: BlockInstance) -> None:
        graph = instance.graph
        known = {v: self.of_model[whole] for (_, v), whole in zip(graph.inputs, instance.inputs, strict=True)}
        known |= {value: self.constant(c) for value, c in graph.constants.items()}
        values = tuple(known[value] if value in known else self.new(type_) for value, type_ in enumerate(graph.types))
        self.of_model |= {whole: values[v] for (_, v), whole in zip(graph.outputs, instance.outputs, strict=True)}
        self.values.append(values)
        self.firsts.append(len(self.primitives))
        self.primitives += [
            Primitive(p.op, tuple(values[v] for v in p.inputs), p.attributes, values[p.output])
            for p in graph.primitives
        ]
        self.origins += graph.origins or [""] * len(graph.primitives)

    def finish(self) -> Joined:
        outputs: Sequence[tuple[str, int]] = [
            (name, self.of_model[value] if value in self.of_model else self.constant(self.source.constants[value]))
            for name, value in self.source.outputs
        ]
        graph = PrimitiveGraph(
            types=tuple(self.types),
            primitives=tuple(self.primitives),
            inputs=self.inputs,
            outputs=tuple(outputs),
            constants=self.constants,
            origins=tuple(self.origins),
        )
        return Joined(graph, tuple(self.values), tuple(self.firsts))
