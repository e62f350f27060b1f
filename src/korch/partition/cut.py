"""Primitive graph -> where to cut it into segments.

A segment is a run of primitives in the graph's order, so segments are convex and each reads only
earlier ones. A cut forbids every kernel that would lie on both sides; what that may cost is the
price of the values that leave the segment: the bytes that such kernels would not have moved. What
no kernel could do anyway is cheap: a linear primitive reads what another kernel wrote, unless a
layout primitive is before it.

Dynamic programming finds the cuts with the least sum of prices and of search effort. Effort grows
with a segment's size, and a segment whose like is elsewhere in the model costs little, as it is
solved once. Nothing in the sum depends on how often a block is repeated, so a deeper model is cut
as a shallower one is. Time: primitives x limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category

EFFORT = 0.06
"""What searching a model in segments of the limit's size weighs against moving each value once."""

REPEATED = 0.1
"""The share of its effort that a segment counts whose like is elsewhere in the model."""

BLOCK_EFFORT = 40
"""What a segment more takes to search, in primitives: many small ones are not faster."""

LINEAR_SHARE = 0.5
"""The share of its bytes that a value costs which only linear primitives read: it may have to be
in another layout, and rules don't look across."""

KERNEL_BYTES = 8192
"""What a kernel more costs, in bytes that could be moved meanwhile."""

PASSES = 4
"""How often it is looked again which segments are repeated."""

_FAR = float("inf")
_BASE = 1_000_003
_MODULUS = (1 << 61) - 1


@dataclass(frozen=True)
class Cuts:
    """Where a graph is cut.

    Attributes:
        segments: the primitives of each segment; those of constants alone are in none.
        prices_bytes: per segment, the price of the values that leave it.
    """

    segments: tuple[tuple[int, ...], ...]
    prices_bytes: tuple[int, ...]


def constant_primitives(graph: PrimitiveGraph) -> frozenset[int]:
    """Return the primitives that depend on constants alone: each segment has its own copy."""
    known = set(graph.constants)
    found = set()
    for p, primitive in enumerate(graph.primitives):
        if primitive.inputs and known.issuperset(primitive.inputs):
            known.add(primitive.output)
            found.add(p)
    return frozenset(found)


def choose_cuts(graph: PrimitiveGraph, limit: int) -> Cuts:
    """Return the segments of a graph without alternatives.

    Args:
        graph: numbered so that each primitive comes after those that it reads, as fission does.
        limit: most primitives in a segment.
    """
    line = _Line(graph)
    ends = line.best_ends(limit, line.eligible()) or line.best_ends(limit, range(line.count + 1))
    segments, prices = [], []
    for start, end in zip([0, *ends], ends, strict=False):
        segments.append(tuple(line.order[start:end]))
        prices.append(line.shared[end] + sum(line.price(i, end) for i in range(start, end)))
    return Cuts(tuple(segments), tuple(prices))


class _Line:
    """The primitives in order, with what a cut between two of them costs."""

    def __init__(self, graph: PrimitiveGraph) -> None:
        self.graph = graph
        constant = constant_primitives(graph)
        self.order = [p for p in range(len(graph.primitives)) if p not in constant]
        self.count = len(self.order)
        place = {p: i for i, p in enumerate(self.order)}
        self.place_of_value = {graph.primitives[p].output: i for p, i in place.items()}
        self.readers = [
            [place[r] for r in graph.consumers[graph.primitives[p].output]] for p in self.order
        ]
        self.last = [max(found, default=-1) for found in self.readers]
        self.outputs = {value for _, value in graph.outputs}
        sizes = (graph.types[graph.primitives[p].output].size_bytes for p in self.order)
        self.sizes_bytes = list(sizes)
        self.total_bytes = max(1, sum(self.sizes_bytes))
        self.walled = self._walled()
        self.shared = self._shared(place)

    def category(self, place: int) -> Category:
        return self.graph.primitives[self.order[place]].row.category

    def is_wall(self, place: int) -> bool:
        """Whether no kernel goes on beyond a primitive from one that it depends on."""
        return self.category(place) in (Category.LINEAR, Category.OPAQUE)

    def _walled(self) -> list[int]:
        """Return, per place, a bitset of those that it reaches through a wall between."""
        reached, walled = [0] * self.count, [0] * self.count
        for i in reversed(range(self.count)):
            for r in self.readers[i]:
                reached[i] |= reached[r] | 1 << r
                walled[i] |= reached[r] if self.is_wall(r) else walled[r]
        return walled

    def _shared(self, place: dict[int, int]) -> list[int]:
        """Return, per place, the bytes that a cut there makes two kernels read instead of one."""
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
        """Whether a kernel may hold both of two readers of a value."""
        is_walled = self.is_wall(first) or self.is_wall(second)
        return not is_walled and not self.walled[first] >> second & 1

    def _may_fuse(self, i: int, reader: int) -> bool:
        """Whether a kernel may hold both a primitive and its reader."""
        before, after = self.category(i), self.category(reader)
        if Category.OPAQUE in (before, after) or self.walled[i] >> reader & 1:
            return False
        if after is Category.LINEAR:
            return before is Category.LAYOUT
        return before is not Category.LINEAR or after is not Category.REDUCE

    def price(self, i: int, end: int) -> int:
        """Return what it costs that a value is read beyond `end`, but written before it."""
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
        stays = (
            inside or len(fusable) < len(outside)
            or self.graph.primitives[self.order[i]].output in self.outputs
        )  # fmt: skip
        return (0 if is_shared else 1 if stays else 2) * size_bytes + KERNEL_BYTES

    def eligible(self) -> list[int]:
        """Return the places to cut that are no dearer than those beside them."""
        crossing = list(self.shared)
        for i in range(self.count):
            for end in range(i + 1, self.last[i] + 1):
                crossing[end] += self.price(i, end)
        banned = self._between_siblings()
        return [
            end
            for end in range(self.count + 1)
            if end in (0, self.count)
            or (end not in banned
                and crossing[end] <= min(crossing[end - 1] or _FAR, crossing[end + 1] or _FAR))
        ]  # fmt: skip

    def _between_siblings(self) -> set[int]:
        """Return the places between the outputs of one opaque operator, which is run once."""
        first: dict[object, int] = {}
        banned: set[int] = set()
        for i, p in enumerate(self.order):
            primitive = self.graph.primitives[p]
            if primitive.row.category is Category.OPAQUE:
                start = first.setdefault(primitive.inputs, i)
                banned.update(range(start + 1, i + 1))
        return banned

    def best_ends(self, limit: int, places: Sequence[int]) -> list[int]:
        """Return the ends of the cheapest segments among these places; none if there is no way.

        A window of primitives counts as repeated at first if there is another like it, and then
        only if the segments chosen before have it more than once.
        """
        spans = self._spans(limit, places)
        seen = Counter(key for found in spans.values() for _, _, key in found)
        ends: list[int] = []
        for _ in range(PASSES):
            found = self._cheapest(limit, spans, seen)
            if found == ends:
                break
            ends = found
            chosen = set(zip([0, *ends], ends, strict=False))
            seen = Counter(
                key for end in ends for start, _, key in spans[end] if (start, end) in chosen
            )
        return ends

    def _spans(
        self, limit: int, places: Sequence[int]
    ) -> dict[int, list[tuple[int, float, tuple[int, int]]]]:
        """Return, per end, the starts of segments, longest last, with their prices and keys."""
        keys = self._window_keys()
        power = [1]
        for _ in range(limit):
            power.append(power[-1] * _BASE % _MODULUS)
        spans: dict[int, list[tuple[int, float, tuple[int, int]]]] = {}
        for j, end in enumerate(places):
            spans[end] = []
            price, at = self.shared[end], end
            for start in reversed(places[:j]):
                size = end - start
                if size > limit:
                    break
                while at > start:
                    at -= 1
                    price += self.price(at, end)
                key = (size, (keys[end] - keys[start] * power[size]) % _MODULUS)
                spans[end].append((start, price / self.total_bytes, key))
        return spans

    def _cheapest(
        self,
        limit: int,
        spans: dict[int, list[tuple[int, float, tuple[int, int]]]],
        seen: Counter[tuple[int, int]],
    ) -> list[int]:
        best = {0: (0.0, -1)}
        for end, found in spans.items():
            costs = [
                (best[start][0] + price + self._effort(end - start, limit, seen[key] > 1), start)
                for start, price, key in found
                if start in best
            ]
            if costs:
                best[end] = min(costs)
        ends, at = [], self.count
        while at > 0:
            if at not in best:
                return []
            ends.append(at)
            at = best[at][1]
        return ends[::-1]

    def _effort(self, size: int, limit: int, is_repeated: bool) -> float:
        share = REPEATED if is_repeated else 1.0
        search = BLOCK_EFFORT + size * (0.5 + size / limit)
        return EFFORT * share * search / max(1, self.count)

    def _window_keys(self) -> list[int]:
        """Return prefix hashes of what each primitive does and how far off its inputs are."""
        keys = [0]
        for i, p in enumerate(self.order):
            primitive = self.graph.primitives[p]
            inputs = tuple(
                i - self.place_of_value.get(v, -1) if v not in self.graph.constants
                else (self.graph.types[v], self.graph.constants[v].is_uniform)
                for v in primitive.inputs
            )  # fmt: skip
            own = hash((primitive.op, primitive.attributes,
                        self.graph.types[primitive.output], inputs))  # fmt: skip
            keys.append((keys[-1] * _BASE + own) % _MODULUS)
        return keys
