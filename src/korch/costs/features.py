"""Candidate -> features: what the time of its kernel depends on, as numbers with names.

A pure function of the group, the offer, and the rates of the machine. Times are in units of the analytic guess,
sizes are logarithms, so that one model serves machines of a family. `docs/internals/costs.md` lists the names.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from korch.candidate.candidate import Candidate, Group
from korch.candidate.layout import Layout
from korch.costs.access import Traces, reduced_strides, strides
from korch.costs.analysis import Analysis
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.elementwise import TRANSCENDENTAL_OPS
from korch.primitive.ops.layout import ConcatAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import ValueType
from korch.target import Target

Features = Mapping[str, float]
"""Features by name; one that is left out is 0."""

IMAGE_RANK = 4
LEAST_ELEMENTS = 1000
"""An image (a value of rank IMAGE_RANK) with no more elements than this is ignored when layouts are compared."""

LANE_ALIGNED = 16
"""Elements after which a row of float32 begins at a cache line again."""


@dataclass(eq=False)
class GroupFacts:
    """What the features of all offers of a group have in common."""

    group: Group

    @cached_property
    def features(self) -> Features:
        """The features that do not depend on the offer."""
        return {**_body(self.group), **_linear(self.group.body)}

    @cached_property
    def traces(self) -> Traces:
        """What elements are computed from."""
        return Traces(self.group.body)


def features_of(candidates: Sequence[Candidate], analyses: Sequence[Analysis], target: Target) -> list[Features]:
    """Return the features of each candidate."""
    facts = {id(c.group): GroupFacts(c.group) for c in candidates}
    return [features(c, found, target, facts[id(c.group)]) for c, found in zip(candidates, analyses, strict=True)]


def features(candidate: Candidate, analysis: Analysis, target: Target, facts: GroupFacts | None = None) -> Features:
    """Return the features of a candidate.

    Args:
        candidate: a group with an offer.
        analysis: the analytic guess of its time.
        target: the machine: its lanes, threads and caches.
        facts: those of the group, if they may be known.
    """
    group, offer, facts = candidate.group, candidate.offer, facts or GroupFacts(candidate.group)
    found: dict[str, float] = {f"provider {candidate.provider}": 1.0}
    guess_ns = max(1.0, analysis.guess_ns)
    found["guess"] = math.log2(guess_ns)
    for name in ("near", "cold", "flop", "operations"):
        found[f"{name} share"] = getattr(analysis, f"{name}_ns") / guess_ns
    bytes_ = candidate.read_bytes + candidate.write_bytes
    found["read"], found["write"] = _log(candidate.read_bytes), _log(candidate.write_bytes)
    found["constant"] = _log(candidate.read_constant_bytes)
    found["bytes per L2"] = _log(bytes_) - _log(target.l2_bytes * target.threads)
    found["bytes per L3"] = _log(bytes_) - _log(target.l3_bytes)
    found["flop"] = _log(max(candidate.linear_flop, offer.work_flop))
    found["flop per byte"] = found["flop"] - _log(bytes_)
    found["operations"] = _log(analysis.operations)
    found["operations per byte"] = found["operations"] - _log(bytes_)
    found["work"] = offer.work_flop / max(1, candidate.linear_flop)
    found["vector work"] = offer.vector_flop / max(1, candidate.linear_flop)
    found["pairs"], found["loop nest"] = offer.pairs, float(offer.is_loop_nest)
    if candidate.served is not None:
        found["served"] = candidate.served.share(group.body)
    found |= _variant(offer.variant)
    found |= facts.features
    found |= _layouts("in", group.input_types, offer.inputs)
    found |= _layouts("out", group.output_types, offer.outputs)
    found |= _access(candidate, facts.traces)
    found["innermost axes"] = float(innermost_axes(candidate))
    return found


def _log(value: float) -> float:
    return math.log2(value + 1)


def _variant(variant: str) -> dict[str, float]:
    """Return the words of an offer's variant, and its first numbers: blockings in most providers."""
    found = {f"variant {word}": 1.0 for word in re.findall(r"[a-z][a-z0-9]*", variant)}
    numbers = re.findall(r"(?<![a-z0-9])\d+", variant)
    return found | {f"variant number {i}": _log(int(number)) for i, number in enumerate(numbers[:6])}


def _body(group: Group) -> dict[str, float]:
    """Return counts of a group's primitives, and the depth of its reductions: each level is one more pass."""
    body = group.body
    found: Counter[str] = Counter(f"op {p.op}" for p in body.primitives)
    depth: dict[int, int] = {}
    taps, elements, heavy = 1.0, 0.0, 0.0
    for p in body.primitives:
        size = body.types[p.output].size
        before = max((depth.get(value, 0) for value in p.inputs), default=0)
        depth[p.output] = before + (p.row.category is Category.REDUCE)
        if isinstance(p.attributes, PoolAttributes):
            taps = max(taps, math.prod(p.attributes.kernel))
        elements += size
        heavy += size * (p.op in TRANSCENDENTAL_OPS)
    return {
        **found,
        "primitives": float(len(body.primitives)),
        "inputs": float(len(body.inputs)),
        "outputs": float(len(body.outputs)),
        "reductions in turn": float(max(depth.values(), default=0)),
        "taps": _log(taps),
        "elements": _log(elements),
        "transcendental": heavy / max(1.0, elements),
        "reduced": _log(max((_reduced(body, p) for p in body.primitives), default=1.0)),
        "parts": float(sum(len(p.inputs) for p in body.primitives if isinstance(p.attributes, ConcatAttributes))),
    }


def _reduced(body: PrimitiveGraph, p: Primitive) -> float:
    """Return how many elements a reduction reduces to one; 1 for other primitives."""
    if p.row.category is not Category.REDUCE or isinstance(p.attributes, PoolAttributes):
        return 1.0
    return body.types[p.inputs[0]].size / max(1, body.types[p.output].size)


def _linear(body: PrimitiveGraph) -> dict[str, float]:
    """Return the shape of the first product of a group, and how many primitives surround it."""
    if not body.linear:
        return {}
    p = body.linear[0]
    x, w, y = (body.types[value] for value in (*p.inputs[:2], p.output))
    position = body.primitives.index(p)
    found = {
        "products": float(len(body.linear)),
        "before the product": float(position),
        "after the product": float(len(body.primitives) - position - 1),
        "factor bytes": float(x.dtype.size_bytes),
        "weight bytes": float(w.dtype.size_bytes),
    }
    if isinstance(p.attributes, ConvAttributes):
        groups = p.attributes.groups
        pixels, window = y.size / max(1, y.shape[1]), math.prod(w.shape[2:])
        found |= {
            "rows": _log(pixels),
            "columns": _log(y.shape[1] / groups),
            "terms": _log(w.size / max(1, w.shape[0])),
            "groups": _log(groups),
            "window": float(window),
            "strides": float(math.prod(p.attributes.strides)),
            "width": _log(y.shape[-1]),
        }
        return found | _remainders(y.shape[-1], y.shape[1] // groups, x.shape[1] // groups)
    rows, columns = (y.shape[-2] if y.rank > 1 else 1), y.shape[-1]
    terms = x.shape[-1]
    found |= {"rows": _log(rows), "columns": _log(columns), "terms": _log(terms)}
    found["groups"] = _log(y.size / max(1, rows * columns))
    return found | _remainders(rows, columns, terms)


def _remainders(rows: int, columns: int, terms: int) -> dict[str, float]:
    """Return how far extents are from whole vectors."""
    return {
        "rows over 6": float(rows % 6),
        "columns over lanes": float(columns % LANE_ALIGNED),
        "terms over lanes": float(terms % LANE_ALIGNED),
    }


def _layouts(side: str, types: Sequence[ValueType], layouts: Sequence[Layout]) -> dict[str, float]:
    """Return the layout of the largest value on one side of a kernel, and its innermost extent."""
    if not types:
        return {}
    type_, layout = max(zip(types, layouts, strict=True), key=lambda pair: pair[0].size)
    axis = layout.order[-1] if layout.order else 0
    extent = type_.shape[axis] if type_.rank else 1
    block = layout.blocks[-1][1] if layout.blocks else 0
    row = block or extent
    return {
        f"{side} rank": float(type_.rank),
        f"{side} innermost": float(type_.rank - axis),
        f"{side} block": float(block),
        f"{side} row": _log(row),
        f"{side} row over lanes": float(row % LANE_ALIGNED),
        f"{side} element": float(type_.dtype.size_bytes),
        f"{side} outer": _log(type_.size / max(1, row)),
        f"{side} channel": _log(type_.shape[1] if type_.rank > 1 else 1),
        f"{side} share": layout.size_bytes(type_)
        / max(1, sum(a.size_bytes(b) for a, b in zip(layouts, types, strict=True))),
    }


def _access(candidate: Candidate, traces: Traces) -> dict[str, float]:
    """Return how neighbouring elements of the largest output lie in the inputs, and neighbouring terms of sums."""
    group, offer = candidate.group, candidate.offer
    found: Counter[str] = Counter()
    for position, distance in strides(candidate, traces).items():
        size = offer.inputs[position].size_bytes(group.input_types[position])
        kind = ("broadcast", "contiguous")[distance] if distance < 2 else "strided"
        found[f"{kind} inputs"] += 1
        found[f"{kind} bytes"] += size
        found["largest stride"] = max(found["largest stride"], distance)
    terms = reduced_strides(candidate, traces)
    found["contiguous sums"], found["strided sums"] = terms.count(1), sum(distance > 1 for distance in terms)
    return {name: _log(value) if "bytes" in name or "stride" in name else float(value) for name, value in found.items()}


def innermost_axes(candidate: Candidate) -> int:
    """Return how many different innermost axes the candidate's large images have."""
    images = (layout for t, layout in candidate.stored if t.rank == IMAGE_RANK and t.size > LEAST_ELEMENTS)
    return len({layout.blocks[-1:] or layout.order[-1] for layout in images})
