"""An oracle for the enumeration of groups, which tests every subset and shares no code with it."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from korch.options import Options
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.primitive.types import DType
from tests.support.random_graph import random_graph

CLOSED = (Category.LINEAR, Category.OPAQUE)


def small_graph(seed: int, primitives: int = 9, linear: bool = False, merges: int = 0) -> PrimitiveGraph:
    """Return a random graph; `merges` pairs of values become one, with two alternatives.

    What the merged values mean does not matter to enumeration.
    """
    rng = np.random.default_rng(seed)
    while True:
        graph = random_graph(rng, int(rng.integers(2, primitives - 1)), linear)
        builder = GraphBuilder.from_graph(graph)
        for _ in range(merges):
            pairs = [
                (p.output, q.output)
                for p, q in itertools.combinations(graph.primitives, 2)
                if graph.types[p.output] == graph.types[q.output]
            ]
            if pairs:
                builder.merge(*pairs[int(rng.integers(len(pairs)))])
        graph = builder.freeze()
        if 2 <= len(graph.primitives) <= primitives and is_computable(graph):
            return graph


def with_operator(graph: PrimitiveGraph, seed: int, parts: int = 3) -> PrimitiveGraph:
    """Return a graph with an opaque operator of several outputs behind one of its values."""
    builder = GraphBuilder.from_graph(graph)
    rng = np.random.default_rng(seed)
    values = [p.output for p in graph.primitives if graph.types[p.output].dtype is DType.F32]
    value = values[int(rng.integers(len(values)))]
    type_ = str(graph.types[value])
    row = OpaqueAttributes("Any", "", 11, "00", (type_,), (type_,) * parts, 0)
    own = [builder.add("opaque", [value], replace(row, output=i)) for i in range(parts)]
    builder.output("parts", builder.add("add", own[:2]))
    builder.output("part", builder.add("neg", [own[-1]]))
    return builder.freeze()


def is_computable(graph: PrimitiveGraph) -> bool:
    known, before = set(graph.given), -1
    while len(known) != before:
        before = len(known)
        known |= {p.output for p in graph.primitives if known.issuperset(p.inputs)}
    return known.issuperset(value for _, value in graph.outputs)


class Oracle:
    """Every group that the limits allow, without contracted chains."""

    def __init__(self, graph: PrimitiveGraph, options: Options) -> None:
        self.graph = graph
        self.options = options
        self.results = {value for _, value in graph.outputs}
        count = range(len(graph.primitives))
        self.free = {p for p in count if self._is_free(p)}
        self.solid = [p for p in count if p not in self.free]
        self.sources = {p: set(self._sources(p)) for p in count}

    def groups(self) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        found = set()
        for size in range(1, min(len(self.solid), self.options.search.max_primitives) + 1):
            for chosen in itertools.combinations(self.solid, size):
                if self._is_legal(set(chosen)):
                    found |= set(self._with_outputs(set(chosen)))
        for p, primitive in enumerate(self.graph.primitives):
            found.add(((p,), (primitive.output,)))
        operator = [p for p in self.solid if self.graph.primitives[p].row.category is Category.OPAQUE]
        if len(operator) > 1:  # outputs of the one operator of several outputs
            found.add((tuple(operator), tuple(sorted(self.graph.primitives[p].output for p in operator))))
        return found

    def _is_free(self, p: int) -> bool:
        """A broadcast or a slice that only others read is part of each of them."""
        primitive = self.graph.primitives[p]
        readers = [self.graph.primitives[r] for r in self.graph.consumers[primitive.output]]
        return (
            primitive.op in ("broadcast", "slice")
            and primitive.output not in self.results
            and len(self.graph.producers[primitive.output]) == 1
            and not any(reader.row.category in CLOSED for reader in readers)
        )

    def _sources(self, p: int) -> Iterator[int]:
        for value in self.graph.primitives[p].inputs:
            for q in self.graph.producers[value]:
                yield from self._sources(q) if q in self.free else (q,)

    def _is_legal(self, chosen: set[int]) -> bool:
        graph = self.graph
        values = [graph.primitives[p].output for p in chosen]
        if len(set(values)) < len(values) or not self._is_connected(chosen):
            return False
        if len(chosen) > 1 and not (self._is_convex(chosen) and self._is_acyclic(chosen)):
            return False
        if len(self._ends(chosen)) > self.options.search.max_outputs:
            return False
        categories = {p: graph.primitives[p].row.category for p in chosen}
        linear = [p for p in chosen if categories[p] is Category.LINEAR]
        if Category.OPAQUE in categories.values() and len(chosen) > 1:
            return False
        if linear and Category.REDUCE in categories.values():
            return False
        above = self._reach(linear, self.sources) if linear else set()
        return len(linear) <= 1 and all(categories[p] is Category.LAYOUT for p in chosen & above - set(linear))

    def _reach(self, start: Iterable[int], step: dict[int, set[int]]) -> set[int]:
        """Return what is reached in one or more steps."""
        found: set[int] = set()
        todo = list(start)
        while todo:
            for q in step[todo.pop()]:
                if q not in found:
                    found.add(q)
                    todo.append(q)
        return found

    def _is_connected(self, chosen: set[int]) -> bool:
        both = {p: self.sources[p] & chosen for p in chosen}
        for p in chosen:
            for q in self.sources[p] & chosen:
                both[q] = both[q] | {p}
        start = next(iter(chosen))
        return self._reach([start], both) | {start} == chosen

    def _is_convex(self, chosen: set[int]) -> bool:
        """No path leaves the set and comes back through a value that the set does not compute."""
        own = {self.graph.primitives[p].output for p in chosen}
        before = {
            p: {q for q in sources if p not in chosen or q in chosen or self.graph.primitives[q].output not in own}
            for p, sources in self.sources.items()
        }
        above = self._reach(chosen, before)
        readers: dict[int, set[int]] = {p: set() for p in before}
        for p, sources in before.items():
            for q in sources:
                readers[q].add(p)
        below = self._reach(chosen, readers)
        return (above & below) - self.free <= chosen

    def _is_acyclic(self, chosen: set[int]) -> bool:
        inside = {p: self.sources[p] & chosen for p in chosen}
        return not any(p in self._reach([p], inside) for p in chosen)

    def _ends(self, chosen: set[int]) -> set[int]:
        return {p for p in chosen if not any(p in self.sources[q] for q in chosen)}

    def _with_outputs(self, chosen: set[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        graph = self.graph
        whole = set(chosen)
        for p in chosen:
            whole |= set(self._absorbed(p))
        must = {graph.primitives[p].output for p in self._ends(chosen)}
        may = {
            graph.primitives[p].output
            for p in chosen - self._ends(chosen)
            if graph.primitives[p].output in self.results
            or any(p in self.sources[q] for q in self.solid if q not in chosen)
        }
        primitives = tuple(sorted(whole))
        for size in range(len(may) + 1):
            for extra in itertools.combinations(sorted(may), size):
                outputs = tuple(sorted({*must, *extra}))
                inputs = self._inputs(whole)
                is_wide = len(inputs) > self.options.search.max_inputs and len(primitives) > 1
                if len(outputs) <= self.options.search.max_outputs and not is_wide:
                    yield primitives, outputs

    def _absorbed(self, p: int) -> Iterator[int]:
        for value in self.graph.primitives[p].inputs:
            for q in self.graph.producers[value]:
                if q in self.free:
                    yield q
                    yield from self._absorbed(q)

    def _inputs(self, whole: set[int]) -> set[int]:
        graph = self.graph
        made = {graph.primitives[p].output for p in whole}
        read = {value for p in whole for value in graph.primitives[p].inputs} - made
        return {v for v in read if v not in graph.constants or not graph.constants[v].is_uniform}
