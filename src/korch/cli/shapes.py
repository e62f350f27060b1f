"""Texts of the option --shape -> bindings of a model's dimensions to sizes or ranges of sizes."""

import re
from collections.abc import Sequence

from korch.errors import OptionError
from korch.ranges.binding import Bound, static

_SIZE = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18})(?::([1-9][0-9]{0,17}))?)?").fullmatch
"""Matches a size, or a range of sizes with an optional step. It accepts only ASCII digits, unlike `str.isdigit`."""


def parse_bindings(texts: Sequence[str]) -> list[dict[str, tuple[Bound, ...]]]:
    """Return bindings of shapes from texts like `image=1x3x224x224`, `length=128,256`, `size=320..640:32` or `w=h`.

    A name is the name of an input or of a dimension; `w=h` gives `w` the size of `h`. Shapes that are separated by
    commas are alternatives: the first shapes of all names make up the first binding, the second shapes the second
    binding, and so on. A name with only one shape has this shape in all bindings.

    Raises:
        OptionError: a text has another form, or names have different numbers of alternatives.
    """
    found: dict[str, list[tuple[Bound, ...]]] = {}
    names = {text.rpartition("=")[0] for text in texts}
    for text in texts:
        name, equals, sizes = text.rpartition("=")
        if name and (sizes in names - {name, ""} or (equals and sizes.isidentifier())) and name not in found:
            found[name] = [(sizes,)]
            continue
        shapes = [part.split("x") if part else [] for part in sizes.split(",")]
        if not equals or not name or not all(_SIZE(n) for shape in shapes for n in shape):
            raise OptionError(
                f"can't read {text!r}",
                where="option --shape",
                expected="NAME=1x3x224x224, NAME=128,256 for two bindings, or NAME=1..512 for a range of sizes, "
                "NAME=320..640:32 for multiples of 32, or NAME=OTHER for the size of a dimension that is given, too",
            )
        if name in found:
            raise OptionError(
                f"{name!r} is given twice",
                where="option --shape",
                expected=f"alternatives separated by commas: {name}=1,2",
            )
        found[name] = [tuple(_bound(size, text) for size in shape) for shape in shapes]
    counts = {len(shapes) for shapes in found.values() if len(shapes) > 1}
    if len(counts) > 1:
        raise OptionError(
            "the names have different numbers of alternatives: "
            + ", ".join(f"{name} {len(shapes)}" for name, shapes in found.items()),
            where="option --shape",
            expected="as many for each, or one",
        )
    return [
        {name: shapes[min(i, len(shapes) - 1)] for name, shapes in found.items()} for i in range(max(counts, default=1))
    ]


def _bound(text: str, where: str) -> Bound:
    """Return a size, or a range of sizes that is not empty."""
    low, _, rest = text.partition("..")
    high, _, step = rest.partition(":")
    sizes = range(int(low), int(high or low) + 1, int(step or 1))
    if not sizes:
        raise OptionError(f"the range {text} is empty", where=f"option --shape {where}", expected="as 1..512")
    return sizes if len(sizes) > 1 else sizes[0]


def parse_shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the single binding from texts.

    Raises:
        OptionError: a text has another form, or there are several bindings.
    """
    bindings = parse_bindings(texts)
    if len(bindings) > 1:
        raise OptionError("there are several bindings", where="option --shape", expected="one here")
    return static(bindings[0])
