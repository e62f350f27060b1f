"""The bindings of `--shape`: a size, or a range of sizes, for each unknown dimension."""

from collections.abc import Mapping, Sequence

from korch.errors import OptionError
from korch.ranges.form import Dimension, Sizes

Bound = int | range | str
"""A size, all sizes of a range, or the name of another dimension, which always has the same size."""

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
    """Return the binding with a fixed size for each free dimension; `sizes` are in steps.

    Raises:
        OptionError: a dimension is to have the size of one that has none.
    """
    left = list(reversed(sizes))
    found = {
        name: tuple(left.pop() * bound.step if isinstance(bound, range) else int(bound) for bound in shape)
        for name, shape in shapes.items()
        if _other(shape) is None
    }
    for name in shapes.keys() - found.keys():
        found[name] = _size_of(name, shapes, found)
    return found


def has_range(shapes: Mapping[str, Sequence[Bound]]) -> bool:
    """Return whether a dimension has all sizes of a range."""
    return any(isinstance(bound, range) for shape in shapes.values() for bound in shape)


def is_open(shapes: Mapping[str, Sequence[Bound]]) -> bool:
    """Return whether a dimension is to have the size of one that is not given."""
    return not shapes.keys() >= {other for shape in shapes.values() if (other := _other(shape)) is not None}


def _other(shape: Sequence[Bound]) -> str | None:
    """Return the name of the dimension that gives a dimension its size, if there is one."""
    return shape[0] if len(shape) == 1 and isinstance(shape[0], str) else None


def _size_of(name: str, shapes: Mapping[str, Sequence[Bound]], found: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the size of the dimension that gives another one its size."""
    seen, other = {name}, _other(shapes[name])
    while other is not None and other in shapes and other not in found and other not in seen:
        seen.add(other)
        other = _other(shapes[other])
    if other is None or len(found.get(other, ())) != 1:
        raise OptionError(
            f"{name!r} is to have the size of {other!r}, which has none",
            where="option --shape",
            expected="the name of a dimension with a size or a range of sizes",
        )
    return found[other]


def static(shapes: Mapping[str, Sequence[Bound]]) -> dict[str, tuple[int, ...]]:
    """Return a binding that has no ranges.

    Raises:
        OptionError: it has a range, or a dimension is to have the size of one that has none.
    """
    for name, shape in shapes.items():
        if any(isinstance(bound, range) for bound in shape):
            raise OptionError(f"{name!r} is a range of sizes", where="option --shape", expected="one size here")
    return binding_of(shapes, ())
