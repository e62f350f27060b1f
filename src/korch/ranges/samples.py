"""A model and the ranges of its dimensions -> its primitives at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from korch.errors import OptionError
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.form import Dimension, Sizes
from korch.ranges.lockstep import Samples

FEW, MANY = 3, 12
"""Smaller sizes that are compared with the largest; many if few do not tell what the model does at others."""

LEAST_PLANNED = 3

Bound = int | range
"""A size, or all sizes of a range."""

NAME_WITH_STEP = "size=320..640:32"
"""An example of a range with a step."""


def dimensions_of(shapes: Mapping[str, Sequence[Bound]]) -> tuple[Dimension, ...]:
    """Return the dimensions that a binding leaves free.

    Raises:
        OptionError: a range has sizes that are no multiples of its step.
    """
    found = []
    for name, shape in shapes.items():
        for axis, bound in enumerate(shape):
            if isinstance(bound, range):
                step = bound.step
                if step < 1 or bound.start % step:
                    raise OptionError(
                        f"{name!r} has sizes that are no multiples of {step}",
                        where="option --shape",
                        expected=f"a range that begins at a multiple, as {NAME_WITH_STEP}",
                    )
                own = axis if len(shape) > 1 else None
                found.append(Dimension(name, own, bound.start // step, bound[-1] // step, step))
    return tuple(found)


def binding_of(shapes: Mapping[str, Sequence[Bound]], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Return the binding with a size, in steps, for each dimension that is free."""
    left = list(reversed(sizes))
    return {
        name: tuple(left.pop() * bound.step if isinstance(bound, range) else bound for bound in shape)
        for name, shape in shapes.items()
    }


def static(shapes: Mapping[str, Sequence[Bound]]) -> dict[str, tuple[int, ...]]:
    """Return a binding that has no ranges.

    Raises:
        OptionError: it has one.
    """
    found = {name: tuple(n for n in shape if isinstance(n, int)) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if len(shape) > len(found[name]):
            raise OptionError(f"{name!r} is a range of sizes", where="option --shape", expected="one size here")
    return found


def upper_sizes(dimension: Dimension, factor: int, least: int) -> list[int]:
    """Return the sizes for which a dimension has plans, largest first: each is a part of the one before.

    The largest is at least 3, so that a smaller one that is not 1 can be compared with it.
    """
    found = [max(dimension.high, LEAST_PLANNED)]
    while (smaller := -(-found[-1] // factor)) >= max(least, dimension.low) and smaller < found[-1]:
        found.append(smaller)
    return found


def sample(
    dimensions: tuple[Dimension, ...], largest: Sizes, primitives: Callable[[Sizes], PrimitiveGraph], count: int = FEW
) -> Samples:
    """Return the primitives at the largest sizes and at a few smaller ones.

    Smaller sizes are odd and even, and no sizes of axes that do not depend on them, so that none is equal by chance.
    Size 1 is no sample: what broadcasts from it is another model. Executables are compared with the model at it, too.
    Of several dimensions each is smaller alone in one sample, so that no two change in the same way.
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


def _smaller_sizes(low: int, high: int, taken: Collection[int], count: int) -> list[int]:
    """Return a few sizes from `low` to less than `high`, not taken where there are such, odd and even in turn."""
    wanted = [low + i * (high - low) // count for i in range(count)]
    chosen: list[int] = []
    for i, size in enumerate(wanted):
        left = [n for n in range(low, high) if n not in chosen]
        chosen += sorted(left, key=lambda n: (n in taken, n % 2 == i % 2, abs(n - size)))[:1]
    return chosen
