"""The bindings of `--shape`: a size, or a range of sizes, for each unknown dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from korch.errors import OptionError
from korch.ranges.form import Dimension, Sizes

Bound = int | range
"""A size, or all sizes of a range."""

NAME_WITH_STEP = "size=320..640:32"
"""An example of a range with a step."""


def dimensions_of(shapes: Mapping[str, Sequence[Bound]]) -> tuple[Dimension, ...]:
    """Return the dimensions that a binding leaves free.

    Raises:
        OptionError: a range has sizes that are not multiples of its step.
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
    """Return the binding with a fixed size for each free dimension; `sizes` are in steps."""
    left = list(reversed(sizes))
    return {
        name: tuple(left.pop() * bound.step if isinstance(bound, range) else bound for bound in shape)
        for name, shape in shapes.items()
    }


def static(shapes: Mapping[str, Sequence[Bound]]) -> dict[str, tuple[int, ...]]:
    """Return a binding that has no ranges.

    Raises:
        OptionError: it has a range.
    """
    found = {name: tuple(n for n in shape if isinstance(n, int)) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if len(shape) > len(found[name]):
            raise OptionError(f"{name!r} is a range of sizes", where="option --shape", expected="one size here")
    return found
