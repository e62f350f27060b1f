"""Primitive graph -> groups: every convex set of primitives, within stated limits.

A set of primitives is convex if no path leaves it and comes back. This holds exactly if the set is
the difference of two execution states, which are sets closed under predecessors (Korch, section 4, theorem
1). Sets are bitsets. Let P be the set and A its ancestors minus P. The two states are A + P and A, so P is
convex if no member of A has an ancestor in P.

Sets are grown from single primitives, each set once: by one neighbour at a time, with all primitives on
paths between it and the set. Every connected convex set is reached (see `_Space.sinks`). So the work is
proportional to the number of sets found, not to the number of states, which is exponential in the width.

The following rules keep the number of sets small:

- A set has one of the shapes that providers ask for (`shape.py`), or consists of one output, or all outputs, of
  an opaque operator. So a set has at most one linear primitive; `Compose` functions combine groups
  into larger ones.
- A broadcast or a slice costs nothing inside a kernel, so it is attached to each primitive that reads it: it
  is in every set with that primitive, and is not added as a neighbour (`attach.py`). Unless
  `attach_chains` is off, also attached are an elementwise primitive all of whose readers (a few) are
  elementwise and of its shape, and a layout primitive whose only reader is a layout primitive: a kernel that
  ends between the two only moves the tensor one more time. A chain that begins at a linear primitive is not
  attached, as a kernel may fuse a part of it, unless it ends with a cast to bytes.
  A chain that would read more than `max_inputs` values is cut.
- At most `MAX_POOLS` reductions over windows are in one set, and at most `max_byte_casts` casts to bytes, whose
  results are stored and read at a quarter of the cost of floats.
- Options limit sets, inputs and outputs; the report names the limits that were reached.

Alternatives: a set has at most one primitive per value. Paths are those of the whole graph, over all
alternatives, except alternatives for values that the set computes itself. A set that is convex only for some
choice of alternatives outside it is not found.
Each primitive alone is always a group, so that a plan exists for any limits. Also found after the deadline
are a primitive with all primitives attached to it, and a product with the cast of its sums to bytes, or with a cast
that widens an operand (a plan that stores 16-bit weights as float32 takes twice the time for a few rows).
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from korch.candidate.attach import Attachment
from korch.candidate.candidate import Group, make_group
from korch.candidate.shape import COMMON, Compose, GroupShape
from korch.options import Options
from korch.primitive.bitset import bits
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category, OutputOfSeveral
from korch.primitive.walks import depth_first
from korch.system.deadline import Deadline

MAX_POOLS = 2  # largest number of reductions over windows in a candidate

BUDGET = "budget"
"""The name of the deadline among the limits in reports."""

MOST_NEEDED = 2
"""The most primitives, not counting attached ones, of a group that is found even after the deadline."""

Key = tuple[tuple[int, ...], tuple[int, ...]]
"""A group's primitives and outputs."""


@dataclass(frozen=True, slots=True)
class EnumerationReport:
    """How many convex sets were found, and which limits were reached.

    Attributes:
        sets: the number of convex sets.
        groups: the number of groups.
        limits_hit: the names of the limits that were reached.
        needed: groups that suffice for an acceptable plan; they are found even after the deadline.
    """

    sets: int
    groups: int
    limits_hit: tuple[str, ...]
    needed: frozenset[Key] = frozenset()


def enumerate_groups(
    graph: PrimitiveGraph,
    options: Options,
    most_groups: int | None = None,
    deadline: Deadline | None = None,
    shapes: Sequence[GroupShape | Compose] = COMMON,
) -> tuple[tuple[Group, ...], EnumerationReport]:
    """Return every group of a graph within the limits, in a deterministic order.

    `most_groups`: if there are more, no group is returned, and the report counts those found so far. `deadline`: when
    to stop looking for more groups; the report then names the limit "budget".

    Source:
        "Optimal Kernel Orchestration for Tensor Programs with Korch" (ASPLOS 2024), section 4 and
        algorithm 1. Differences: bitsets, an iterative search, each set once, several outputs.
    """
    space = _Space(graph, options, [shape for shape in shapes if isinstance(shape, GroupShape)])
    hit: set[str] = set()
    keys: dict[Key, None] = {}
    needed: set[Key] = {((p,), (row.output,)) for p, row in enumerate(graph.primitives)}
    sets = 0
    most = sys.maxsize if most_groups is None else most_groups
    deadline = deadline or Deadline()
    for mask in space.grow(options, hit):
        sets += 1
        is_needed = space.is_needed(mask)
        if deadline.is_over and not is_needed:
            hit.add(BUDGET)
            if mask.bit_count() > MOST_NEEDED:
                break
            continue
        whole = space.with_attached(mask)
        if whole.bit_count() > 1 and space.input_count(whole) > options.search.max_inputs:
            hit.add("max_inputs")
            continue
        members = tuple(bits(whole))
        found = [(members, each) for each in space.output_sets(mask, options, hit)]
        keys |= dict.fromkeys(found)
        needed.update(found if is_needed else ())
        if len(keys) > most:
            return (), EnumerationReport(sets, len(keys), tuple(sorted(hit)))
    keys |= dict.fromkeys(((p,), (row.output,)) for p, row in enumerate(graph.primitives))
    operators = _whole(graph)
    keys |= dict.fromkeys(operators)
    needed.update(operators)
    groups: dict[Key, Group] = {}
    if len(keys) <= most:
        is_late = deadline.is_over
        groups = {key: make_group(graph, *key) for key in keys if not is_late or key in needed}
    compose = [shape for shape in shapes if not isinstance(shape, GroupShape)]
    needed.update(_add_composed(graph, groups, compose, most, deadline))
    if deadline.is_over and compose:
        hit.add(BUDGET)
    report = EnumerationReport(sets, max(len(keys), len(groups)), tuple(sorted(hit)), frozenset(needed))
    return (tuple(groups.values()) if report.groups <= most else ()), report


def _whole(graph: PrimitiveGraph) -> list[Key]:
    """Return the groups of all outputs of an operator or loop that several primitives compute, whatever the limits."""
    found: dict[object, dict[int, int]] = {}
    for p, primitive in enumerate(graph.primitives):
        if isinstance(primitive.attributes, OutputOfSeveral):
            found.setdefault(primitive.operator, {}).setdefault(primitive.output, p)
    return [(tuple(sorted(own.values())), tuple(sorted(own))) for own in found.values() if len(own) > 1]


def _add_composed(
    graph: PrimitiveGraph, groups: dict[Key, Group], compose: Sequence[Compose], most: int, deadline: Deadline
) -> Iterator[Key]:
    """Add the groups that providers compose, until there are more than `most`; yield those that a plan may need.

    These are the largest ones around the same products: a plan without them may be several times slower, because it
    stores the scores of attention. Only they are added after the deadline.
    """
    single, largest = tuple(groups.values()), dict[tuple[int, ...], Group]()
    for group in itertools.chain.from_iterable(each(graph, single) for each in compose):
        products = tuple(p for p in group.primitives if graph.primitives[p].row.category is Category.LINEAR)
        if products not in largest or len(group.primitives) > len(largest[products].primitives):
            largest[products] = group
        if not deadline.is_over:
            groups.setdefault((group.primitives, group.outputs), group)
        if len(groups) > most:
            return
    for group in largest.values():
        groups.setdefault((group.primitives, group.outputs), group)
        yield group.primitives, group.outputs


class _Space:
    """The graph as bitsets over primitives, with attached primitives counted to their readers."""

    def __init__(self, graph: PrimitiveGraph, options: Options, shapes: Sequence[GroupShape]) -> None:
        self.graph, self.limits = graph, options.search
        attach_chains = options.ablation.attach_chains
        count = len(graph.primitives)
        self.outputs = {value for _, value in graph.outputs}
        self.attachment = Attachment(graph, attach_chains)
        self.is_attached = [self.attachment.is_attached(p) for p in range(count)]
        self.reads = [self._values_read(p) for p in range(count)]
        # Per primitive: its nearest producers that are not attached; and the primitives that are attached to it.
        self.feeds, self.attached_to = self._producers()
        while (cut := self._too_long(options.search.max_inputs)) is not None:
            self.is_attached[cut] = False
            self.feeds, self.attached_to = self._producers()
        self.read_by = [0] * count
        for p, sources in enumerate(self.feeds):
            for q in bits(0 if self.is_attached[p] else sources):
                self.read_by[q] |= 1 << p
        self.ancestors = self._closure(self.feeds)
        self.descendants = self._closure(self.read_by)
        self.cyclic = sum(1 << p for p, found in enumerate(self.ancestors) if found >> p & 1)
        self.rivals = [0] * count  # other alternatives for the same value
        for producers in graph.producers:
            together = sum(1 << p for p in producers)
            for p in producers:
                self.rivals[p] = together & ~(1 << p)
        pools = (p for p, primitive in enumerate(graph.primitives) if "pool" in primitive.op)
        self.pools = sum(1 << p for p in pools) if attach_chains else 0
        casts = (p for p in range(count) if self.attachment.is_byte_cast(p))
        self.byte_casts = sum(1 << p for p in casts) if attach_chains else 0
        self.linear = self._of(Category.LINEAR)
        self.opaque, self.widening = self._of(Category.OPAQUE), self._widening()
        # By linear operation ("" for none): per shape, the primitives allowed before it and beside it.
        self.shapes: dict[str, list[tuple[int, int]]] = {}
        for shape in shapes:
            before = self._of(*shape.before) | (self.widening if shape.widens else 0)
            allowed = before, self._of(*shape.beside)
            for op in shape.anchors:
                self.shapes.setdefault(op, []).append(allowed)
            # Sets with an anchor are also reached through sets without it.
            self.shapes.setdefault("", []).append((0, allowed[0] | allowed[1]))

    def _of(self, *categories: Category) -> int:
        found = enumerate(self.graph.primitives)
        return sum(1 << p for p, primitive in found if primitive.row.category in categories)

    def _widening(self) -> int:
        """Return the casts from 16-bit floats, and from constants of bytes, to float32."""
        graph = self.graph
        casts = ((p, primitive) for p, primitive in enumerate(graph.primitives) if primitive.op == "cast")
        return sum(1 << p for p, cast in casts if graph.is_widening(cast, cast.inputs[0] in graph.constants))

    def _producers(self) -> tuple[list[int], list[int]]:
        """Return each primitive's nearest producers that are not attached, and the attached ones between them and it.

        Each primitive is visited after the attached ones that it reads, and only once: chains of attached
        primitives are long, and have exponentially many paths if they branch and join.
        """
        count = len(self.graph.primitives)
        solid, attached = [0] * count, [0] * count
        for p in depth_first(range(count), lambda p: filter(self.is_attached.__getitem__, self.attachment.makers(p))):
            for q in self.attachment.makers(p):
                solid[p] |= solid[q] if self.is_attached[q] else 1 << q
                attached[p] |= 1 << q | attached[q] if self.is_attached[q] else 0
        return solid, attached

    def _too_long(self, max_inputs: int) -> int | None:
        """Return a primitive at which to cut a chain that reads too many values, None if there is no such chain.

        A group contains all primitives attached to its own. If these read too many values, there is no group of
        several primitives. The result is the direct producer that reads most, at the end of the shortest such chain.
        """
        links = sum(
            1 << p for p, is_one in enumerate(self.is_attached) if is_one and not self.attachment.costs_nothing(p)
        )
        for p in sorted(range(len(self.attached_to)), key=lambda p: (self.attached_to[p].bit_count(), p)):
            direct = [q for q in self.attachment.makers(p) if links >> q & 1]
            if direct and self.input_count(1 << p | self.attached_to[p]) > max_inputs:
                return max(direct, key=lambda q: self.input_count(1 << q | self.attached_to[q]))
        return None

    def _values_read(self, p: int) -> int:
        """Return the values that a primitive reads, except uniform constants."""
        primitive = self.graph.primitives[p]
        is_linear = primitive.row.category is Category.LINEAR
        found = 0
        for value in primitive.inputs:
            constant = self.graph.constants.get(value)
            if is_linear or constant is None or not constant.is_uniform:
                found |= 1 << value
        return found

    @staticmethod
    def _closure(steps: Sequence[int]) -> list[int]:
        """Return the primitives that each primitive reaches, over all alternatives; cycles are allowed."""
        reached = list(steps)
        changed = True
        while changed:
            changed = False
            for p in range(len(reached)):
                grown = reached[p]
                for q in bits(reached[p]):
                    grown |= reached[q]
                if grown != reached[p]:
                    reached[p], changed = grown, True
        return reached

    def _hull(self, mask: int, between: int, rivals: int) -> int:
        """Return the least convex set that contains a set: the set and all primitives on paths between its members.

        `between`: the primitives outside the set that have an ancestor and a descendant in it.
        """
        if between & rivals:
            between = self._on_paths(mask, between & ~rivals)
        return mask | between

    def _on_paths(self, mask: int, allowed: int) -> int:
        """Return the allowed primitives that are on paths from a set back to it.

        A set does not read a value that it computes itself from another kernel, so no path comes back
        through another alternative for one of its values: these must not be in `allowed`.
        """
        members = bits(allowed)
        reached = mask
        for steps in (self.feeds, self.read_by):
            # Producers mostly come before their readers, so one pass in that order finds nearly all.
            left, members, reached = members, [], mask
            while left:
                rest = []
                for p in left:
                    if steps[p] & reached:
                        reached |= 1 << p
                        members.append(p)
                    else:
                        rest.append(p)
                if len(rest) == len(left):
                    break
                left = rest
            members.reverse()
        return reached & ~mask

    def is_legal(self, mask: int, added: int) -> bool:
        """Return whether a set can be a kernel, apart from the limits on its size."""
        linear, opaque = mask & self.linear, mask & self.opaque
        if linear & (linear - 1) or (opaque and mask & ~opaque):
            return False
        if (mask & self.pools).bit_count() > MAX_POOLS:
            return False
        if (mask & self.byte_casts).bit_count() > self.limits.max_byte_casts:
            return False
        if not opaque and not self._has_shape(mask, linear):
            return False
        if any(self.rivals[p] & mask for p in bits(added)):
            return False
        return not mask & self.cyclic or self._is_acyclic(mask)

    def _is_acyclic(self, mask: int) -> bool:
        """Return whether a set can be computed in some order; alternatives may depend on each other."""
        left = mask
        while left:
            ready = sum(1 << p for p in bits(left) if not self.feeds[p] & left)
            if not ready:
                return False
            left &= ~ready
        return True

    def grow(self, options: Options, hit: set[str]) -> Iterator[int]:
        """Yield every connected convex set within the limits, once."""
        seen: set[int] = set()
        illegal: set[int] = set()
        frontier = [1 << p for p, is_one in enumerate(self.is_attached) if not is_one]
        seen.update(frontier)
        while frontier:
            following: list[int] = []
            for mask in frontier:
                yield mask
                if mask.bit_count() >= options.search.max_primitives:
                    hit.add("max_primitives")
                    continue
                for grown in self._neighbours(mask):
                    if grown in seen or grown in illegal:
                        continue
                    if not self.is_legal(grown, grown & ~mask):
                        illegal.add(grown)
                        continue
                    if grown.bit_count() > options.search.max_primitives:
                        hit.add("max_primitives")
                        continue
                    if len(seen) >= options.search.max_candidates:
                        hit.add("max_candidates")
                        break
                    seen.add(grown)
                    if self.sinks(grown) > options.search.max_outputs:
                        hit.add("max_outputs")
                        continue
                    following.append(grown)
            frontier = following

    def is_needed(self, mask: int) -> bool:
        """Whether a set is one primitive, or a product with a cast of its sums to bytes or a widening one before it."""
        is_pair = mask.bit_count() == MOST_NEEDED and bool(mask & self.linear)
        is_byte_cast = is_pair and any(map(self.attachment.is_byte_cast, bits(mask)))
        return mask.bit_count() == 1 or is_byte_cast or (is_pair and bool(mask & self.widening))

    def sinks(self, mask: int) -> int:
        """Return the number of sinks: primitives of a set that no other member reads, so that they must be outputs.

        Every set can be reached through sets that have no more sinks than it has: first add one sink's
        cone, from the sink backwards; then follow a path from a shared primitive to the next sink, one hull
        at a time, and add that sink's cone backwards. So sets with too many sinks need not be grown.
        """
        return sum(not self.read_by[p] & mask for p in bits(mask))

    def _neighbours(self, mask: int) -> Iterator[int]:
        """Yield the hulls of a set extended by one neighbouring primitive."""
        if mask & self.opaque:
            return
        around = rivals = above = below = 0
        for p in bits(mask):
            around |= self.feeds[p] | self.read_by[p]
            rivals |= self.rivals[p]
            above |= self.ancestors[p]
            below |= self.descendants[p]
        around &= ~(mask | rivals | self.opaque)
        if mask & self.linear:
            around &= ~self.linear
        for p in bits(around):
            wider = mask | 1 << p
            between = (above | self.ancestors[p]) & (below | self.descendants[p]) & ~wider
            yield self._hull(wider, between, rivals | self.rivals[p])

    def _has_shape(self, mask: int, linear: int) -> bool:
        """Return whether a set with at most one linear primitive has one of the shapes."""
        op, before = "", 0
        if linear:
            anchor = linear.bit_length() - 1
            op = self.graph.primitives[anchor].op
            before = mask & self.ancestors[anchor] & ~linear
        beside = mask & ~(before | linear)
        return any(not before & ~first and not beside & ~second for first, second in self.shapes.get(op, ()))

    def input_count(self, mask: int) -> int:
        """Return how many tensors some primitives read, not counting uniform constants."""
        own = read = 0
        for p in bits(mask):
            own |= 1 << self.graph.primitives[p].output
            read |= self.reads[p]
        return (read & ~own).bit_count()

    def with_attached(self, mask: int) -> int:
        """Return a set with the primitives that are attached to its members."""
        whole = mask
        for p in bits(mask):
            whole |= self.attached_to[p]
        return whole

    def output_sets(self, mask: int, options: Options, hit: set[str]) -> Iterator[tuple[int, ...]]:
        """Yield each useful set of outputs.

        A value that no member reads must be an output, or its primitive would be useless. A value that is
        read inside and outside the set may be an output, or another kernel may compute it again.
        """
        must: list[int] = []
        may: list[int] = []
        for p in bits(mask):
            value = self.graph.primitives[p].output
            if not self.read_by[p] & mask:
                must.append(value)
            elif value in self.outputs or self.read_by[p] & ~mask:
                may.append(value)
        if len(must) > options.search.max_outputs:
            hit.add("max_outputs")
            return
        for extra in _subsets(may, options.search.max_outputs - len(must)):
            yield tuple(sorted((*must, *extra)))


def _subsets(items: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    for size in range(min(most, len(items)) + 1):
        yield from itertools.combinations(items, size)
