"""Primitive graph with alternatives -> one alternative for each value: the graph that is cut.

A rewrite that needs primitives on both sides of a cut is lost. So the graph is cut in the form that it has
after the rewrites that save most, and none of these is lost. The choice minimizes a cheap estimate: the
operations and bytes moved, summed over all needed primitives. Kernels are chosen later, by measured cost,
among all alternatives that a segment has.

The search starts with the model's own primitives. It switches to another alternative of a value, or of all
values that are computed from a value, as long as that reduces the sum. It visits the graph in order, so it
makes the same choice in equal parts (a solver need not do this), and the layers of a model remain equal.
Time: number of alternatives x the primitives that a switch adds and removes.
"""

import heapq
from dataclasses import replace

from korch.equivalence.rule import rule_of
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.walks import depth_first, reached

SWEEPS = 8  # how often the choice of one alternative per value is repeated over all values

BYTE_COST = 8
"""The cost of a byte that a primitive reads or writes, in floating-point operations."""


def estimated_cost(graph: PrimitiveGraph, p: int) -> int:
    """Return the cost of a primitive that runs as a separate kernel, in floating-point operations."""
    primitive = graph.primitives[p]
    values = (*dict.fromkeys(primitive.inputs), primitive.output)
    size_bytes = sum(graph.types[value].size_bytes for value in values)
    return 1 + graph.work_flop(primitive) + BYTE_COST * size_bytes


def choose(graph: PrimitiveGraph, sweeps: int = SWEEPS) -> PrimitiveGraph:
    """Return the graph with one alternative for each value, in an order in which it can run.

    Values keep their numbers, so some values have neither a producer nor a reader.

    `sweeps`: the most passes over all values; the last ones hardly ever find an improvement.
    """
    if not graph.alternatives:
        return graph
    search = _Search(graph)
    for _ in range(sweeps):
        if not search.sweep():
            break
        search.choose_for_unused()
    kept = search.in_order()
    origins = tuple(graph.origins[p] for p in kept) if graph.origins else ()
    return replace(graph, primitives=tuple(graph.primitives[p] for p in kept), origins=origins)


class _Search:
    """The choice so far, and how many chosen primitives and outputs need each value."""

    def __init__(self, graph: PrimitiveGraph) -> None:
        self.graph = graph
        self.costs = [estimated_cost(graph, p) for p in range(len(graph.primitives))]
        self.reads = [tuple(dict.fromkeys(p.inputs)) for p in graph.primitives]
        self.needed = [0] * len(graph.types)
        everything = [True] * len(graph.primitives)
        self.chosen: dict[int, int] = {}
        self._choose_known([not rule_of(origin) for origin in graph.origins] or everything)
        self._choose_known(everything)
        for value in dict.fromkeys(value for _, value in graph.outputs):
            self._count(value, 1)
        self.choose_for_unused()

    def _choose_known(self, allowed: list[bool]) -> None:
        """Choose for each value that has no choice yet the allowed primitive that can run first."""
        waits = [len(reads) for reads in self.reads]
        ready = [*sorted(self.graph.given), *self.chosen]
        ready += [self._take(p) for p, reads in enumerate(self.reads) if not reads and allowed[p]]
        for value in ready:
            for p in self.graph.consumers[value]:
                waits[p] -= 1
                output = self.graph.primitives[p].output
                if not waits[p] and allowed[p] and not self._is_known(output):
                    ready.append(self._take(p))

    def _take(self, p: int) -> int:
        output = self.graph.primitives[p].output
        self.chosen[output] = p
        return output

    def _is_known(self, value: int) -> bool:
        return value in self.chosen or value in self.graph.given

    def choose_for_unused(self) -> None:
        """Choose for each unneeded value the alternative of least cost, given the values in use."""
        known = {v: 0 for v in (*sorted(self.graph.given), *self.chosen) if v in self.graph.given or self.needed[v]}
        waits = [len(reads) for reads in self.reads]
        queue = [(0, -1, v) for v in known]
        heapq.heapify(queue)
        settled: set[int] = set()
        while queue:
            cost, maker, value = heapq.heappop(queue)
            if value in settled:
                continue
            settled.add(value)
            if maker >= 0:
                self.chosen[value] = maker
            known[value] = cost
            for p in self.graph.consumers[value]:
                waits[p] -= 1
                output = self.graph.primitives[p].output
                if not waits[p] and output not in settled:
                    total = self.costs[p] + sum(known[v] for v in self.reads[p])
                    heapq.heappush(queue, (total, p, output))

    def sweep(self) -> bool:
        """Make the switches that reduce the sum, value by value; return whether there was any."""
        is_better = False
        for value, makers in enumerate(self.graph.producers):
            if len(makers) > 1 and self.needed[value] and self._best(value):
                is_better = True
        for value, readers in enumerate(self.graph.consumers):
            if len(readers) > 1 and self.needed[value] and self._without(value):
                is_better = True
        return is_better

    def _best(self, value: int) -> bool:
        """Choose a value's cheapest alternative; return whether the choice changed."""
        found = False
        for p in self.graph.producers[value]:
            before = self.chosen[value]
            if p == before or not all(map(self._is_known, self.reads[p])):
                continue
            if self._switch(value, p) < 0 and self._is_sound(value):
                found = True
            else:
                self._switch(value, before)
        return found

    def _without(self, value: int) -> bool:
        """Switch all values that are computed from a value to alternatives without it, if that reduces the sum."""
        outputs = [
            self.graph.primitives[p].output
            for p in self.graph.consumers[value]
            if self.chosen.get(self.graph.primitives[p].output) == p and self.needed[self.graph.primitives[p].output]
        ]
        if len(outputs) < 2 or any(len(self.graph.producers[v]) < 2 for v in outputs):
            return False
        done: list[tuple[int, int]] = []
        total = 0
        for output in outputs:
            before = self.chosen[output]
            costs = []
            for p in self.graph.producers[output]:
                if value in self.reads[p] or not all(map(self._is_known, self.reads[p])):
                    continue
                costs.append((self._switch(output, p), p))
                if not self._is_sound(output):
                    costs.pop()
                self._switch(output, before)
            if not costs:
                break
            total += self._switch(output, min(costs)[1])
            done.append((output, before))
        if len(done) == len(outputs) and total < 0:
            return True
        for output, before in reversed(done):
            self._switch(output, before)
        return False

    def _switch(self, value: int, p: int) -> int:
        """Choose another alternative for a value in use; return the change of the sum."""
        before, self.chosen[value] = self.chosen[value], p
        added = self.costs[p] - self.costs[before]
        added += sum(self._count(v, 1) for v in self.reads[p])
        return added - sum(self._count(v, -1) for v in self.reads[before])

    def _count(self, root: int, change: int) -> int:
        """Count one reader more (1) or less (-1) of a value; return what is then needed, or needed no more."""
        total, waiting = 0, [root]
        while waiting:
            value = waiting.pop()
            self.needed[value] += change
            if self.needed[value] == max(change, 0) and value not in self.graph.given:
                total += self.costs[self.chosen[value]]
                waiting += self.reads[self.chosen[value]]
        return total

    def _is_sound(self, value: int) -> bool:
        """Whether the chosen computation of a value does not depend on the value itself."""
        return value not in reached(self._operands(value), self._operands)

    def _operands(self, value: int) -> list[int]:
        """Return what the chosen computation of a value reads, without the inputs and constants of the model."""
        return [v for v in self.reads[self.chosen[value]] if v not in self.graph.given]

    def in_order(self) -> list[int]:
        """Return the chosen primitives that are needed, in running order; new ones come right before their reader."""
        roots = (value for value in sorted(self.chosen) if self.needed[value])
        return [self.chosen[value] for value in depth_first(roots, self._operands)]
