"""A model with a few sizes and a separate plan for each -> how these plans serve the sizes."""

import itertools
import math
from collections.abc import Sequence

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.ranges.form import Dimension, Sizes, extent
from korch.ranges.lockstep import Samples, refusal
from korch.ranges.plan import RangePlan
from korch.ranges.site import fit


def count_sizes(dimensions: Sequence[Dimension]) -> int:
    """Return how many sizes there are."""
    return math.prod(d.high - d.low + 1 for d in dimensions)


def all_sizes(dimensions: Sequence[Dimension]) -> list[Sizes]:
    """Return all sizes, the middle one first, the others by their distance from it."""
    found = list(itertools.product(*(range(d.low, d.high + 1) for d in dimensions)))
    middle = found[len(found) // 2]
    return sorted(found, key=lambda sizes: math.dist(sizes, middle))


def has_free_windows(samples: Samples) -> bool:
    """Return whether windows move along axes whose size depends on a dimension."""
    return len(set(map(windowed_axes, samples.graphs))) > 1


def windowed_axes(graph: PrimitiveGraph) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of the axes along which windows move."""
    windows = (p for p in graph.primitives if isinstance(p.attributes, ConvAttributes | PoolAttributes))
    return tuple(graph.types[p.inputs[0]].shape[2:] for p in windows)


def exact_plans(samples: Samples, sizes: Sequence[Sizes]) -> tuple[RangePlan, ...]:
    """Return how plans serve their own sizes.

    Raises:
        UnsupportedError: the size of an input's axis can't be computed from a dimension.
    """
    known = [extent(d) for d in range(len(samples.dimensions))]
    forms = []
    for i, (name, _) in enumerate(samples.largest.inputs):
        shapes = [graph.types[graph.inputs[i][1]].shape for graph in samples.graphs]
        found = [fit(samples, vector, known) for vector in zip(*shapes, strict=True)]
        form = tuple(factors for factors in found if factors is not None)
        if len(form) < len(found):
            raise refusal(samples, f"input {name!r}", "an axis follows from no dimension")
        forms.append(form)
    return tuple(RangePlan(own, tuple(forms), (), timed=own, is_exact=True) for own in sizes)
