"""Turns printed text with marked numbers into the source for one size, or into one source shared by several sizes.

Most kernels of a model at two sizes differ only in extents, strides and offsets. The printer marks these numbers.
Texts that are equal except for marked numbers have the same form, so one text can serve all of them: it reads the
numbers that differ from a table. The other numbers stay literals, so that compilers unroll the same loops.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MARKED = re.compile("\x01([^\x02]*)\x02([^\x02]*)\x02")
"""A mark: the text for one size, then the text for several sizes."""

NUMBER, ARGUMENT, TAILS, ENTRIES = "\x03", "\x04", "\x05", "\x06"
"""The kinds of marks in a text for several sizes: a number; a number as a template argument; the last arguments of a
template, whose count may vary; and the declarations of the numbers that a function reads."""

GAP = re.compile(f"([{NUMBER}{ARGUMENT}{TAILS}])([^;]*);")


def _either(alone: str, shared: str) -> str:
    return f"\x01{alone}\x02{shared}\x02"


PARAMETER = _either("", "[[maybe_unused]] const long* const numbers, ")
"""The first parameter of each function of a kernel: the table."""

PASSED = _either("", "numbers, ")
"""The argument that passes the table on to another function."""

TABLE = _either("", "korch::Numbers{numbers}, ")
"""The first argument of a micro-kernel whose type has arguments from the table."""

TEAM_PARAMETER = _either("void*", "int (*team)(void* const*, korch::Member&)")
"""The first parameter of a kernel's main function: the function that each thread runs, with the table of one size."""

TEAM = _either("NAME_team", "team")
"""The function that each thread runs."""

BEGIN = _either("", ENTRIES)
"""The mark after the first line of each function that uses numbers."""


def number(n: int) -> str:
    """Return the marked text of an extent, a step or an offset."""
    sign = "-" if n < 0 else ""
    return sign + _either(str(abs(n)), f"{NUMBER}{abs(n)};")


def argument(n: int) -> str:
    """Return the marked text of such a number as a template argument whose template also accepts `korch::At`."""
    return _either(str(n), f"{ARGUMENT}{n};")


def tails(counts: Sequence[int]) -> str:
    """Return the marked text of the last arguments of a template that accepts any number of them."""
    text = ", ".join(map(str, counts))
    return _either(f", {text}" if counts else "", f"{TAILS}{text};")


def alone(marked: str) -> str:
    """Return the text for one size."""
    return MARKED.sub(r"\1", marked)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A text with gaps for numbers.

    Attributes:
        parts: the text between the gaps, each part preceded by the kind of the gap before it.
        numbers: the contents of each gap: one number, or several that are the last arguments of a template.
    """

    parts: tuple[str, ...]
    numbers: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(marked: str) -> Numbered:
        """Return a marked text in this form."""
        first, *rest = GAP.split(MARKED.sub(r"\2", marked))
        kinds, fillings, texts = rest[::3], rest[1::3], rest[2::3]
        parts = (first, *(kind + text for kind, text in zip(kinds, texts, strict=True)))
        return Numbered(parts, tuple(tuple(map(int, filter(None, text.split(", ")))) for text in fillings))


def table_of(members: Sequence[Numbered]) -> list[tuple[int, ...]]:
    """Return the table of the numbers in which texts of one form differ: for each, its value in every text."""
    kinds = [part[0] for part in members[0].parts[1:]]
    columns = zip(kinds, zip(*(member.numbers for member in members), strict=True), strict=True)
    single = (tuple(n for (n,) in column) for kind, column in columns if kind != TAILS)
    return list(dict.fromkeys(column for column in single if len(set(column)) > 1))


def shared_text(members: Sequence[Numbered]) -> str:
    """Return one text that serves all the given texts of one form, each with its own column of the table."""
    places = {column: i for i, column in enumerate(table_of(members))}
    filled = [members[0].parts[0]]
    for part, *column in zip(members[0].parts[1:], *(member.numbers for member in members), strict=True):
        filled += [_filling(part[0], column, places), part[1:]]
    head, *functions = "".join(filled).split(ENTRIES)
    return head + "".join(map(_with_entries, functions))


def _filling(kind: str, column: Sequence[tuple[int, ...]], places: Mapping[tuple[int, ...], int]) -> str:
    """Return the text of a gap, given its contents in each text."""
    if kind == TAILS:
        return "".join(f", {n}" for n in sorted({n for own in column for n in own}))
    at = places.get(tuple(n for (n,) in column))
    if at is None:
        return str(column[0][0])
    return f"korch::At<{at}>{{}}" if kind == ARGUMENT else f"number{at}"


def _with_entries(body: str) -> str:
    """Return the text of a function with the declarations of the numbers that it reads from the table."""
    used = sorted(set(map(int, re.findall(r"\bnumber(\d+)\b", body))))
    return "".join(f"\n  const long number{i} = numbers[{i}];" for i in used) + body
