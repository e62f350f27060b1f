"""Primitive graph -> the positions at which it is cut into segments.

A segment is a sequence of consecutive primitives in the graph's order, so segments are convex and each reads
only earlier ones. A cut forbids every kernel that would have primitives on both sides. The possible loss is
the price of the values that leave the segment: the bytes that such kernels would not have moved. A cut where
no kernel could fuse anyway is cheap: a linear primitive reads the result of another kernel, unless a layout
primitive, or one that widens numbers, comes before it.

If the same sequence of primitives repeats (the layers of a model), each repetition is a separate segment, cut
at the cheapest position of the period, and all repetitions are searched once. The rest is cut by dynamic
programming, which minimizes the sum of prices and of search effort; the effort grows with a segment's size.
Nothing depends on the number of repetitions, so a deep model is cut like a shallow one. Time: primitives x
limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.elementwise import TRANSCENDENTAL_OPS

LEAST_PERIOD = 8  # least number of primitives in one period of a repetition
LEAST_REPETITION = 40  # shorter periods are combined into one unit, up to about this size
NEAR_CUT = 1.6  # a period is cut at a place that costs at most this many times the cheapest place

EFFORT = 0.06
"""The weight of searching the model in segments of the largest size, relative to moving each value once."""

BLOCK_EFFORT = 40
"""The search effort of one more segment, in primitives: many small segments are not faster to search."""

LINEAR_SHARE = 1.0
"""The price of a value that no kernel could fuse with its readers across the cut, as a fraction of its bytes:
it may need another layout, and rules don't apply across a cut."""

KERNEL_BYTES = 8192
"""The cost of one more kernel, in bytes that could be moved in the same time."""

STEPS = (Category.ELEMENTWISE, Category.LAYOUT, Category.BROADCAST)
"""The categories that compute each element of the result from one element of each operand."""

GROWTH = 2
"""The least enlargement by a broadcast for which each segment gets its own copy of the broadcast."""

_FAR = float("inf")


@dataclass(frozen=True)
class Cuts:
    """Where a graph is cut."""

    # the primitives of each segment. Primitives of constants alone, and copied ones, are in none.
    segments: tuple[tuple[int, ...], ...]
    prices_bytes: tuple[int, ...]  # per segment, the price of the values that leave it


def constant_primitives(graph: PrimitiveGraph) -> frozenset[int]:
    """Return the primitives that depend on constants alone: each segment that uses one has its own copy."""
    known = set(graph.constants)
    found = set()
    for p, primitive in enumerate(graph.primitives):
        if primitive.inputs and known.issuperset(primitive.inputs):
            known.add(primitive.output)
            found.add(p)
    return frozenset(found)


def copied_primitives(graph: PrimitiveGraph) -> frozenset[int]:
    """Return the primitives that compute large values from small ones by cheap elementwise steps, such as masks.

    The small values depend on the inputs through such steps only. Each segment that reads such a value has its own
    copy of the primitives. Otherwise all segments would read the large value from memory.
    """
    simple, grown, found = {value for _, value in graph.inputs}, set[int](), set[int]()
    for p, primitive in enumerate(graph.primitives):
        operands = [value for value in primitive.inputs if value not in graph.constants]
        is_step = primitive.row.category in STEPS and primitive.op not in TRANSCENDENTAL_OPS
        if not operands or not is_step or not simple.issuperset(operands):
            continue
        simple.add(primitive.output)
        before_bytes = sum(graph.types[value].size_bytes for value in operands)
        grows = primitive.op == "broadcast" and graph.types[primitive.output].size_bytes >= GROWTH * before_bytes
        if grows or grown.issuperset(operands):
            grown.add(primitive.output)
            found.add(p)
    return frozenset(found)


def choose_cuts(graph: PrimitiveGraph, limit: int, sizes: Sequence[float] | None = None) -> Cuts:
    """Return the segments of a graph without alternatives.

    `graph`: a graph in which each primitive comes after those that it reads, as fission numbers them. `sizes`: per
    primitive, its contribution to a segment's size; 1 if not given.
    """
    line = _Line(graph, [min(limit, size) for size in sizes or [1.0] * len(graph.primitives)])
    ends = _Cutter(line, limit).ends(0, line.count)
    segments, prices = [], []
    for start, end in zip([0, *ends], ends, strict=False):
        segments.append(tuple(line.order[start:end]))
        prices.append(line.shared[end] + sum(line.price(i, end) for i in range(start, end)))
    return Cuts(tuple(segments), tuple(prices))


class _Line:
    """The primitives in order, with the costs of cuts between them."""

    def __init__(self, graph: PrimitiveGraph, sizes: Sequence[float]) -> None:
        self.graph = graph
        left_out = constant_primitives(graph) | copied_primitives(graph)
        self.order = [p for p in range(len(graph.primitives)) if p not in left_out]
        self.count = len(self.order)
        self.upto = [0.0, *accumulate(sizes[p] for p in self.order)]
        place = {p: i for i, p in enumerate(self.order)}
        self.place_of_value = {graph.primitives[p].output: i for p, i in place.items()}
        self.readers = [
            [place[r] for r in graph.consumers[graph.primitives[p].output] if r in place] for p in self.order
        ]
        self.last = [max(found, default=-1) for found in self.readers]
        self.outputs = {value for _, value in graph.outputs}
        outputs = (graph.primitives[p].output for p in self.order)
        self.sizes_bytes = [graph.types[value].size_bytes for value in outputs]
        self.total_bytes = max(1, self._moved_bytes())
        self.walled = self._walled()
        self.shared = self._shared(place)

    def size(self, low: int, high: int) -> float:
        """Return the size of a segment of the places from `low` (inclusive) to `high` (exclusive)."""
        return round(self.upto[high] - self.upto[low], 6)

    def category(self, place: int) -> Category:
        return self.graph.primitives[self.order[place]].row.category

    def is_wall(self, place: int) -> bool:
        """Whether cuts assume that no kernel contains both a producer before this primitive and a reader after it."""
        return self.category(place) in (Category.LINEAR, Category.OPAQUE)

    def _moved_bytes(self) -> int:
        """Return the bytes that any plan must write: values at linear and opaque primitives, and final results."""
        return sum(
            size_bytes
            for i, size_bytes in enumerate(self.sizes_bytes)
            if self.is_wall(i) or any(map(self.is_wall, self.readers[i])) or self.last[i] < 0
        )

    def _walled(self) -> list[int]:
        """Return, per place, the bitset of the places that it reaches through a wall between them."""
        reached, walled = [0] * self.count, [0] * self.count
        for i in reversed(range(self.count)):
            for r in self.readers[i]:
                reached[i] |= reached[r] | 1 << r
                walled[i] |= reached[r] if self.is_wall(r) else walled[r]
        return walled

    def _shared(self, place: dict[int, int]) -> list[int]:
        """Return, per place, the bytes that two kernels instead of one must read if there is a cut."""
        found = [0] * (self.count + 1)
        for value, consumers in enumerate(self.graph.consumers):
            if value in self.graph.constants:
                continue
            readers = sorted(place[p] for p in consumers if p in place)
            for first, second in pairwise(readers):
                if self._may_share(first, second):
                    for end in range(first + 1, second + 1):
                        found[end] += self.graph.types[value].size_bytes
        return found

    def _may_share(self, first: int, second: int) -> bool:
        """Whether one kernel may contain both of two readers of a value."""
        is_walled = self.is_wall(first) or self.is_wall(second)
        return not is_walled and not self.walled[first] >> second & 1

    def _may_fuse(self, i: int, reader: int) -> bool:
        """Whether one kernel may contain both a primitive and its reader."""
        before, after = self.category(i), self.category(reader)
        if Category.OPAQUE in (before, after) or self.walled[i] >> reader & 1:
            return False
        if after is Category.LINEAR:
            return before is Category.LAYOUT or self.graph.is_widening(self.graph.primitives[self.order[i]])
        return before is not Category.LINEAR or after is not Category.REDUCE

    def price(self, i: int, end: int) -> int:
        """Return the price of the cut at `end` for the value of place `i`; 0 if it is not read after the cut."""
        if self.last[i] < end:
            return 0
        size_bytes = self.sizes_bytes[i]
        outside = [r for r in self.readers[i] if r >= end]
        fusable = [r for r in outside if self._may_fuse(i, r)]
        if not fusable:
            is_near = not all(self.walled[i] >> r & 1 for r in outside)
            return int(LINEAR_SHARE * size_bytes) if is_near else 0
        inside = [r for r in self.readers[i] if r < end]
        is_shared = any(self._may_share(r, min(outside)) for r in inside)
        stays = inside or len(fusable) < len(outside) or self.graph.primitives[self.order[i]].output in self.outputs
        return (0 if is_shared else 1 if stays else 2) * size_bytes + KERNEL_BYTES

    def crossing(self) -> list[float]:
        """Return the cost of a cut at each place; infinity between the outputs of one opaque operator."""
        crossed = np.array(self.shared, np.float64)
        for i in range(self.count):
            start = i + 1
            for reader in sorted(self.readers[i]):  # between two readers the price is the same
                if start <= reader:
                    crossed[start : reader + 1] += self.price(i, start)
                    start = reader + 1
        found: list[float] = crossed.tolist()
        first: dict[object, int] = {}
        for i, p in enumerate(self.order):
            primitive = self.graph.primitives[p]
            if primitive.row.category is Category.OPAQUE:
                start = first.setdefault(primitive.inputs, i)
                found[start + 1 : i + 1] = [_FAR] * (i - start)
        return found

    def signatures(self) -> _Signatures:
        """Return what tells whether two primitives are the same step of two repetitions."""
        numbers: dict[object, int] = {}
        # Each repetition may have inputs of its own, such as its states; all may read the same other ones.
        shared = {value for _, value in self.graph.inputs if len(self.graph.consumers[value]) > 1}
        most = max((len(p.inputs) for p in self.graph.primitives), default=0)
        own = np.zeros(self.count, np.int64)
        near, same = np.zeros((self.count, most), np.int64), np.zeros((self.count, most), np.int64)
        for i, p in enumerate(self.order):
            primitive = self.graph.primitives[p]
            for k, v in enumerate(primitive.inputs):
                if v in self.place_of_value:
                    near[i, k], same[i, k] = i - self.place_of_value[v], v
                else:
                    near[i, k] = same[i, k] = -1 - v if v in shared else 0
            types = tuple(self.graph.types[v] for v in (primitive.output, *primitive.inputs))
            own[i] = numbers.setdefault((primitive.op, primitive.attributes, types), len(numbers))
        return _Signatures(own, near, same)


@dataclass(frozen=True, slots=True)
class _Signatures:
    """A number per primitive that encodes its operation and types, and two for each operand, by place."""

    own: npt.NDArray[np.int64]
    near: npt.NDArray[np.int64]  # the distance to the operand
    same: npt.NDArray[np.int64]  # the operand itself, which all repetitions may read

    def repeat(self, low: int, high: int, period: int) -> npt.NDArray[np.bool_]:
        """Return, for the places from `low` to `high` - `period`, whether the place a period later is the same step."""
        first, second = slice(low, high - period), slice(low + period, high)
        reads = (self.near[first] == self.near[second]) | (self.same[first] == self.same[second])
        found: npt.NDArray[np.bool_] = (self.own[first] == self.own[second]) & reads.all(1)
        return found


@dataclass(frozen=True, slots=True)
class _Run:
    """A repetition of primitives from `start` on: `units` times, with `period` primitives each."""

    start: int
    period: int
    units: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.units


class _Cutter:
    """Finds the ends of the segments in a part of the line."""

    def __init__(self, line: _Line, limit: int) -> None:
        self.line, self.limit = line, limit
        self.crossing = line.crossing()
        self.signatures = line.signatures()

    def ends(self, low: int, high: int) -> list[int]:
        """Return the ends of the segments of the places from `low` (inclusive) to `high` (exclusive)."""
        if low >= high:
            return []
        run = self.longest_run(low, high)
        if run is None or self.line.size(low, high) <= self.limit:
            return self.rest(low, high)
        unit = [run.start + run.period]
        if self.line.size(run.start, run.start + run.period) > self.limit:
            unit = self.rest(run.start, run.start + run.period)
        repeated = [end + k * run.period for k in range(run.units) for end in unit]
        return [*self.ends(low, run.start), *repeated, *self.ends(run.end, high)]

    def longest_run(self, low: int, high: int) -> _Run | None:
        """Return the repetition that saves most primitives; among equal ones, that of the least period."""
        best: tuple[int, int, int] = (0, 0, 0)  # saved, -period, start
        for period in range(LEAST_PERIOD, (high - low) // 2 + 1):
            same = self.signatures.repeat(low, high, period)
            edges = np.flatnonzero(np.diff(np.concatenate(([0], same, [0]))))
            units = (edges[1::2] - edges[::2] + period) // period
            if len(units):
                at = int(np.argmax(units))
                saved = (int(units[at]) - 1) * period
                best = max(best, (saved, -period, low + int(edges[2 * at])))
        if not best[0]:
            return None
        period, start = -best[1], best[2]
        return self.in_phase(start, period, self.run_end(start, period, high))

    def run_end(self, start: int, period: int, high: int) -> int:
        """Return the end of the repetition that begins at `start`."""
        same = self.signatures.repeat(start, high, period)
        different = np.flatnonzero(~same)
        return start + period + (int(different[0]) if len(different) else len(same))

    def in_phase(self, start: int, period: int, end: int) -> _Run | None:
        """Return the repetition moved to a cheap place of its period: most repetitions first, then least price.

        A unit has as many periods as fit into the size `least_repetition`, but at least one.
        """
        size = self.line.size(start, start + period)
        most = period * max(1, int(LEAST_REPETITION // size))
        places = range(start, min(start + period, end - period + 1))
        prices = {place: self.crossing[place + period] for place in places}
        least = min(prices.values(), default=_FAR)
        if least == _FAR:
            return None
        near = [place for place in places if prices[place] <= NEAR_CUT * least]
        place = min(near, key=lambda at: (-((end - at) // most), prices[at], at))
        units = (end - place) // most
        return _Run(place, most, units) if units >= 2 else None

    def rest(self, low: int, high: int) -> list[int]:
        """Return the ends of the cheapest segments of a part that does not repeat."""
        crossing = self.crossing
        places = [
            end for end in range(low + 1, high) if crossing[end] <= min(crossing[end - 1], crossing[end + 1]) < _FAR
        ]
        found = self.cheapest([low, *places, high])
        return found or self.cheapest(range(low, high + 1))

    def cheapest(self, places: Sequence[int]) -> list[int]:
        best = {places[0]: (0.0, -1)}
        for j, end in enumerate(places):
            price, at = self.line.shared[end], end
            costs = []
            for start in reversed(places[:j]):
                if self.line.size(start, end) > self.limit:
                    break
                while at > start:
                    at -= 1
                    price += self.line.price(at, end)
                if start in best:
                    share = price / self.line.total_bytes + self.effort(self.line.size(start, end))
                    costs.append((best[start][0] + share, start))
            if costs:
                best[end] = min(costs)
        ends, at = [], places[-1]
        while at != places[0]:
            if at not in best:
                return []
            ends.append(at)
            at = best[at][1]
        return ends[::-1]

    def effort(self, size: float) -> float:
        search = BLOCK_EFFORT + size * (0.5 + size / self.limit)
        return EFFORT * search / max(1.0, self.line.upto[-1])
