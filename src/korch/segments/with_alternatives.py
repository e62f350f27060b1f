"""Primitive graph with alternatives -> segments with alternatives.

The graph is cut in the form that `choose.py` returns, with one alternative for each value, so that no rewrite
that saves much needs primitives of two segments. Then the alternatives are added to each segment.

A segment gets every primitive of the whole graph that can be computed from the segment's inputs and is useful
for its outputs: the model's own form, the rewritten form, and all combinations. Its inputs are taken as they
are. Alternatives that need other values are lost by the cut.

New values are numbered in the order in which they can be computed; values that become computable at the same
time are ordered by the primitives that compute them. So equal parts of a model get equal numbers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.text import format_attributes
from korch.primitive.walks import reached
from korch.segments.choose import choose
from korch.segments.cut import choose_cuts, constant_primitives, copied_primitives
from korch.segments.segment import Segment, extract, whole_segment

# What an alternative adds to the size of a segment, in primitives; less than 1, because it takes part in fewer
# kernels.
ALTERNATIVE_SHARE = 0.3


def split_segments(graph: PrimitiveGraph, limit: int) -> tuple[Segment, ...]:
    """Cut a graph into segments of at most `limit` primitives, in an order in which they can run.

    Primitives that depend on constants alone, and masks, do not count; every segment that reads one has its own copy.
    An alternative counts as a fraction of a primitive (`ALTERNATIVE_SHARE`).

    `graph`: a graph. If it has no alternatives, its primitives must be in an order in which they can run.
    """
    chosen = choose(graph)
    cuts = choose_cuts(chosen, limit, _sizes(graph, chosen, ALTERNATIVE_SHARE))
    if len(cuts.segments) < 2:
        return (whole_segment(graph),)
    own_of_each = constant_primitives(chosen) | copied_primitives(chosen)
    written = {chosen.primitives[p].output for p in own_of_each}
    model_outputs = {value for _, value in graph.outputs}
    regions = Regions(graph, chosen)
    segments = []
    for number, (primitives, price) in enumerate(zip(cuts.segments, cuts.prices_bytes, strict=True)):
        own = set(primitives)
        outputs = [
            value
            for p in primitives
            if (value := chosen.primitives[p].output) in model_outputs or not own.issuperset(chosen.consumers[value])
        ]
        if number == len(cuts.segments) - 1:
            outputs += sorted(model_outputs & written)
        segments.append(regions.widened(extract(chosen, own | own_of_each, outputs, price)))
    return tuple(segments)


def _sizes(graph: PrimitiveGraph, chosen: PrimitiveGraph, alternative_share: float) -> list[float]:
    """Return, per chosen primitive, 1 plus `alternative_share` for each primitive of its value's alternatives."""
    own = set(chosen.primitives)
    known = {primitive.output for primitive in own} | graph.given
    seen: set[int] = set()
    found = []
    for primitive in chosen.primitives:
        waiting, before = [primitive.output], len(seen)
        while waiting:
            for p in graph.producers[waiting.pop()]:
                if p not in seen and graph.primitives[p] not in own:
                    seen.add(p)
                    waiting += (v for v in graph.primitives[p].inputs if v not in known)
        found.append(1 + alternative_share * (len(seen) - before))
    return found


class Regions:
    """Finds the part of a graph with alternatives between the inputs and the outputs of each segment.

    Segments must be requested in an order in which they can run. Values that are computed after a segment
    are not visited, so that the time per segment depends on its size and not on the model's.
    """

    def __init__(self, graph: PrimitiveGraph, chosen: PrimitiveGraph) -> None:
        self.graph = graph
        self.chosen = {primitive.output for primitive in chosen.primitives}
        self.reads = [tuple(dict.fromkeys(p.inputs)) for p in graph.primitives]
        self.waits = {p: len(reads) for p, reads in enumerate(self.reads)}
        self.constant: set[int] = set()
        self._follow(sorted(graph.constants), self.constant, self.waits, lambda _: True)
        self.chosen -= self.constant
        self.known: set[int] = set()
        self.all_waits: dict[int, int] = {}
        self.advance([v for _, v in graph.inputs])

    def widened(self, segment: Segment) -> Segment:
        """Return a segment with its alternatives.

        `segment`: a segment without alternatives; its values are values of the graph.
        """
        self.advance([v for v in segment.values if v not in self.constant])
        inputs = [segment.values[v] for _, v in segment.graph.inputs]
        others = self.chosen.difference(segment.values)  # other segments compute them
        own: set[int] = set()
        self._follow(inputs, own, {}, lambda v: v in self.known and v not in others)
        return _widened(self.graph, segment, self._between(segment, own | self.constant))

    def advance(self, values: Sequence[int]) -> None:
        """Mark further values of the model as computed."""
        self._follow(values, self.known, self.all_waits, lambda v: v not in self.chosen)

    def _follow(
        self, values: Sequence[int], known: set[int], waits: dict[int, int], may_know: Callable[[int], bool]
    ) -> None:
        """Add values to the known ones, and those that can be computed from them and may be known.

        `waits`: the number of unknown inputs of each primitive if it differs from `self.waits`; updated.
        """
        ready = [v for v in dict.fromkeys(values) if v not in known]
        known.update(ready)
        for value in ready:
            for p in self.graph.consumers[value]:
                waits[p] = waits.get(p, self.waits[p]) - 1
                output = self.graph.primitives[p].output
                if not waits[p] and output not in known and may_know(output):
                    known.add(output)
                    ready.append(output)

    def _between(self, segment: Segment, known: set[int]) -> list[int]:
        """Return the primitives that can contribute to a segment's outputs."""
        inputs = {segment.values[v] for _, v in segment.graph.inputs}

        def computing(values: Iterable[int]) -> list[int]:
            makers = (p for value in values if value not in inputs for p in self.graph.producers[value])
            return [p for p in makers if known.issuperset(self.reads[p])]

        outputs = (segment.values[v] for _, v in segment.graph.outputs)
        return sorted(reached(computing(outputs), lambda p: computing(self.reads[p])))


def _widened(graph: PrimitiveGraph, segment: Segment, primitives: Iterable[int]) -> Segment:
    """Return a segment with further primitives of the whole graph."""
    part, number = segment.graph, {v: n for n, v in enumerate(segment.values)}
    own = {(p.op, tuple(segment.values[v] for v in p.inputs), p.attributes) for p in part.primitives}
    waiting = [p for p in primitives if (q := graph.primitives[p]) and (q.op, q.inputs, q.attributes) not in own]
    if not waiting:
        return segment
    added, origins = [], list(part.origins or [""] * len(part.primitives))
    while ready := {p for p in waiting if all(v in number or v in graph.constants for v in graph.primitives[p].inputs)}:
        for p in sorted(ready, key=lambda p: _rank(graph, p, number)):
            primitive = graph.primitives[p]
            for value in (*primitive.inputs, primitive.output):
                number.setdefault(value, len(number))
            added.append(
                Primitive(
                    primitive.op,
                    tuple(number[v] for v in primitive.inputs),
                    primitive.attributes,
                    number[primitive.output],
                )
            )
            origins.append(graph.origins[p] if graph.origins else "")
        waiting = [p for p in waiting if p not in ready]
    found = replace(
        part,
        types=tuple(graph.types[v] for v in number),
        primitives=(*part.primitives, *added),
        origins=tuple(origins),
        constants={n: graph.constants[v] for v, n in number.items() if v in graph.constants},
    )
    return replace(segment, graph=found, values=tuple(number))


def _rank(graph: PrimitiveGraph, p: int, number: Mapping[int, int]) -> tuple[object, ...]:
    """Return the sort key of a primitive among those that become computable at the same time."""
    primitive = graph.primitives[p]

    def name(value: int) -> tuple[int, str]:
        constant = graph.constants.get(value)
        if value in number or constant is None:
            return number.get(value, len(graph.types)), str(graph.types[value])
        digest = constant.digest if constant.is_uniform else ""
        return len(graph.types), f"{constant.type} {digest}"

    return (
        primitive.op,
        [name(v) for v in primitive.inputs],
        format_attributes(primitive.attributes),
        name(primitive.output),
        p,
    )
