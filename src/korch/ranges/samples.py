"""A model and the ranges of its dimensions -> its primitives at several sizes."""

import itertools
from collections.abc import Callable, Collection, Sequence

from korch.primitive.graph import PrimitiveGraph
from korch.ranges.form import Dimension, Sizes
from korch.ranges.lockstep import Samples

FEW, MANY = 3, 12
"""The numbers of smaller sizes that are compared with the largest; MANY is used if FEW leave an ambiguity."""

LEAST_PLANNED = 3

MOST_SWEPT = 64
"""The most sizes of a dimension for each of which a table has the elements of a constant."""

MOST_NEAR = 32
"""The most sizes at which numbers that are computed from sizes are compared again."""


def upper_sizes(dimension: Dimension, factor: int, least: int) -> list[int]:
    """Return the upper sizes of a dimension's plans, the largest first; each is the one before divided by `factor`.

    The largest is at least 3, so that a smaller size other than 1 can be compared with it.
    """
    found = [max(dimension.high, LEAST_PLANNED)]
    while (smaller := -(-found[-1] // factor)) >= max(least, dimension.low) and smaller < found[-1]:
        found.append(smaller)
    return found


def sample(
    dimensions: tuple[Dimension, ...], largest: Sizes, primitives: Callable[[Sizes], PrimitiveGraph], count: int = FEW
) -> Samples:
    """Return the primitives at the largest sizes and at a few smaller ones.

    The smaller sizes are odd and even. They differ from the sizes of all axes at the largest size, if possible, so
    that no sizes are equal by chance. Size 1 is not a sample, since an axis of size 1 broadcasts; executables are
    compared with the model at size 1, too. With several dimensions, each has a sample in which only it is smaller, so
    that no two dimensions always change together.
    """
    graph = primitives(largest)
    taken = {n for type_ in graph.types for n in type_.shape}
    columns = []
    for d, size in zip(dimensions, largest, strict=True):
        chosen = _smaller_sizes(max(d.low, 2), size, taken, count)
        taken |= set(chosen)
        columns.append([size, *chosen])
    most = max(map(len, columns))
    rows = [tuple(column[min(i, len(column) - 1)] for column in columns) for i in range(most)]
    for i, column in enumerate(columns):
        rows.append(tuple(column[-1] if k == i else size for k, size in enumerate(largest)))
    rows = list(dict.fromkeys(rows))
    return Samples(dimensions, tuple(rows), (graph, *(primitives(row) for row in rows[1:])))


def sweep(
    dimensions: tuple[Dimension, ...], largest: Sizes, primitives: Callable[[Sizes], PrimitiveGraph]
) -> Samples | None:
    """Return the primitives at each size of each dimension, with the largest of the others; None if sizes are many."""
    rows = [largest]
    for i, d in enumerate(dimensions):
        if largest[i] - d.low >= MOST_SWEPT:
            return None
        rows += [(*largest[:i], n, *largest[i + 1 :]) for n in range(largest[i] - 1, d.low - 1, -1)]
    return Samples(dimensions, tuple(rows), tuple(map(primitives, rows)))


def sizes_near(dimensions: Sequence[Dimension], largest: Sizes, numbers: Collection[int]) -> list[Sizes]:
    """Return sizes at some numbers and beside them; no more than `MOST_NEAR`, of which the first are nearest to 0."""
    near = sorted({number + more for number in numbers for more in (-1, 0, 1)})
    columns = [
        [most, *(n for n in map(d.steps_of, near) if n is not None and n < most)]
        for d, most in zip(dimensions, largest, strict=True)
    ]
    return list(itertools.islice(itertools.product(*columns), 1, 1 + MOST_NEAR))


def _smaller_sizes(low: int, high: int, taken: Collection[int], count: int) -> list[int]:
    """Return a few sizes from `low` to less than `high`, not in `taken` if possible, alternately odd and even."""
    wanted = [low + i * (high - low) // count for i in range(count)]
    chosen: list[int] = []
    for i, size in enumerate(wanted):
        left = [n for n in range(low, high) if n not in chosen]
        chosen += sorted(left, key=lambda n: (n in taken, n % 2 == i % 2, abs(n - size)))[:1]
    return chosen
