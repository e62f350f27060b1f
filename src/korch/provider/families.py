"""Kernels that do the same at several sizes -> kernels that share their code, and differ in a table of numbers.

Most kernels for one size are those of another but for numbers: extents, strides, places. Where templates and arrays
need a number when they are compiled, the texts must agree; every other number that differs comes from a table at run
time. So all kernels are compiled once, and those of a further size are a table and a call each. Numbers that do not
differ stay in the text, as do all of a kernel that no other is like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from korch.content_name import content_name
from korch.provider.provider import Kernel

Compile = Callable[[Sequence[str]], list[bool]]
"""Compiles texts, and says of each whether the compiler took it."""

FREE_ARGUMENTS = {
    "korch::Rows": (1, 2),
    "korch::Turns": (1,),
    "korch::WindowContraction": (2, 10, 11),
    "korch_amx::fed_rows": (1,),
}
"""The arguments of templates that may be entries of a table (`korch_numbers.h`)."""

TAILS = 13
"""The place of the first of a contraction's numbers of rows that may be left."""

TOKEN = re.compile(r"(?<![\w.])\d+L?(?![\w.])|[A-Za-z_](?:\w|::)*|[<>,]")
CONTRACTION = "korch::Contraction<"
WINDOW = "korch::WindowContraction<"
FUNCTION = re.compile(
    r"^(?:static KORCH_ALONE void NAME_stage\d+|extern \"C\" int NAME_team|extern \"C\" int NAME_run|"
    r"extern \"C\" void NAME_task)\(.*\{$",
    re.MULTILINE,
)
"""The lines with which the functions of a printed tile program begin."""

DECLARED = "namespace korch {\nstruct Member;\n}\n"
TEAM_TYPE = "int (*team)(void* const*, korch::Member&)"


@dataclass(frozen=True, slots=True)
class Shape:
    """A source as a text with gaps for numbers.

    Attributes:
        parts: the text between the numbers.
        numbers: those that may come from a table.
        in_types: whether each is an argument of a template.
        tails: of each contraction, the numbers of rows that may be left.
    """

    parts: tuple[str, ...]
    numbers: tuple[int, ...]
    in_types: tuple[bool, ...]
    tails: tuple[frozenset[int], ...]


@dataclass(eq=False)
class _Family:
    """Kernels whose shapes have the same parts.

    Attributes:
        shapes: of all that were seen.
        refused: texts that the compiler did not take.
    """

    shapes: list[Shape] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def columns(self) -> list[tuple[int, ...]]:
        """Return the numbers that differ, each with its value in each shape."""
        rows = [shape.numbers for shape in self.shapes]
        return list(dict.fromkeys(column for column in zip(*rows, strict=True) if len(set(column)) > 1))

    def text(self) -> str:
        """Return the source that all of them share."""
        columns = {column: i for i, column in enumerate(self.columns())}
        first = self.shapes[0]
        filled = [first.parts[0]]
        rows = [shape.numbers for shape in self.shapes]
        for part, is_type, column in zip(first.parts[1:], first.in_types, zip(*rows, strict=True), strict=True):
            number = columns.get(column)
            if number is None:
                filled.append(str(column[0]))
            else:
                filled.append(f"korch::At<{number}>{{}}" if is_type else f"number{number}")
            filled.append(part)
        text = "".join(filled)
        for i in range(len(first.tails)):
            tails = sorted(frozenset.union(*(shape.tails[i] for shape in self.shapes)))
            text = text.replace(f", TAILS{i}>", "".join(f", {n}" for n in tails) + ">")
        return _named(_with_table(text))


class Families:
    """The kernels of some sizes of a model, by the place of a kernel in the plan that all of them have."""

    def __init__(self) -> None:
        """Know no kernel."""
        self._families: dict[tuple[int, tuple[str, ...]], _Family] = {}
        self._places: dict[str, int] = {}

    def learn(self, place: int, key: str, kernel: Kernel) -> None:
        """Remember the kernel of a candidate with some key at a place of the plan for a size."""
        self._places[key] = place
        self._add(place, kernel)

    def share(self, kernels: Sequence[tuple[str, Kernel]], compiles: Compile) -> list[Kernel]:
        """Return kernels that call the code that they share with those of other sizes, where there is some.

        Args:
            kernels: of one size, with the keys of their candidates.
            compiles: compiles texts.
        """
        found = [self._add(self._places[key], kernel) if key in self._places else None for key, kernel in kernels]
        texts = {family: family.text() for family, _ in filter(None, found) if family.columns()}
        todo = [text for family, text in texts.items() if text not in family.refused]
        taken = dict(zip(todo, compiles(todo), strict=True))
        for family, text in texts.items():
            if not taken.get(text, False):
                family.refused.add(text)
        kernels_of = list[Kernel]()
        for (_, kernel), entry in zip(kernels, found, strict=True):
            shared = texts.get(entry[0]) if entry is not None else None
            if entry is None or shared is None or shared in entry[0].refused:
                kernels_of.append(kernel)
            else:
                kernels_of.append(_caller(kernel, shared, _numbers(*entry)))
        return kernels_of

    def _add(self, place: int, kernel: Kernel) -> tuple[_Family, Shape] | None:
        shape = shape_of(kernel)
        if shape is None:
            return None
        family = self._families.setdefault((place, shape.parts), _Family())
        if shape not in family.shapes:
            family.shapes.append(shape)
        return family, shape


def shape_of(kernel: Kernel) -> Shape | None:
    """Return a kernel's source as a text with gaps; None if its numbers must all be known when it is compiled."""
    if kernel.program is None or kernel.has_state or kernel.libraries or kernel.size_input:
        return None
    lines = kernel.source.replace(kernel.symbol, "NAME").splitlines(keepends=True)
    text, tails = _without_tails(_without_widths("".join(line for line in lines if not line.startswith("//"))))
    parts, numbers, in_types, last = list[str](), list[int](), list[bool](), 0
    for begin, end, is_type in _gaps(text):
        parts.append(text[last:begin])
        numbers.append(int(text[begin:end].removesuffix("L")))
        in_types.append(is_type)
        last = end
    return Shape((*parts, text[last:]), tuple(numbers), tuple(in_types), tuple(tails))


def _gaps(text: str) -> Iterator[tuple[int, int, bool]]:
    """Yield where a text has numbers that may come from a table, and whether they are arguments of templates."""
    place = 0
    for line in text.splitlines(keepends=True):
        if not re.match(r"\s*(#|alignas|static const |case )", line) and "constexpr" not in line:
            for begin, end, is_type in _gaps_of_line(line):
                yield place + begin, place + end, is_type
        place += len(line)


def _gaps_of_line(line: str) -> Iterator[tuple[int, int, bool]]:
    stack: list[list[str | int]] = []  # the templates around, and which of their arguments follows
    name = ""
    for token in TOKEN.finditer(line):
        text, begin = token[0], token.start()
        if text == "<" and begin and not line[begin - 1].isspace() and line[begin - 1] != "<":
            stack.append([name, 0])
        elif text == ">" and stack and line[begin - 1] != "-":
            stack.pop()
        elif text == "," and stack:
            stack[-1][1] = int(stack[-1][1]) + 1
        elif text[0].isdigit() and (not stack or stack[-1][1] in FREE_ARGUMENTS.get(str(stack[-1][0]), ())):
            yield begin, token.end(), bool(stack)
        name = text if text[0].isalpha() or text[0] == "_" else name


def _arguments(text: str, begin: int) -> tuple[list[str], int]:
    """Return the arguments of a template behind its "<", and where its ">" is."""
    depth, found, last = 0, list[str](), begin
    for i in range(begin, len(text)):
        if text[i] == "<":
            depth += 1
        elif text[i] == ">" and depth:
            depth -= 1
        elif text[i] in ",>" and not depth:
            found.append(text[last:i].strip())
            last = i + 1
            if text[i] == ">":
                return found, i
    raise AssertionError("a template without an end")


def _without_tails(text: str) -> tuple[str, list[frozenset[int]]]:
    """Return a text whose contractions have names for their tails, and the tails."""
    tails: list[frozenset[int]] = []
    at = text.find(CONTRACTION)
    while at >= 0:
        begin = at + len(CONTRACTION)
        arguments, end = _arguments(text, begin)
        text = f"{text[:begin]}{', '.join([*arguments[:TAILS], f'TAILS{len(tails)}'])}{text[end:]}"
        tails.append(frozenset(map(int, arguments[TAILS:])))
        at = text.find(CONTRACTION, begin)
    return text, tails


def _without_widths(text: str) -> str:
    """Return a text whose windows say how far the last one ends behind its row, not how many places a row has."""
    at = text.find(WINDOW)
    while at >= 0:
        begin = at + len(WINDOW)
        arguments, end = _arguments(text, begin)
        places, taps, stride, dilation, _, before, width = map(int, arguments[2:9])
        over = (places - 1) * stride + (taps - 1) * dilation + 1 - before - width
        arguments[8] = f"korch::Wide<{over}>{{}}"
        text = f"{text[:begin]}{', '.join(arguments)}{text[end:]}"
        at = text.find(WINDOW, begin)
    return text


def _with_table(text: str) -> str:
    """Return a text whose functions take a table of numbers."""
    text = re.sub(r"NAME_stage(\d+)\(buffers", r"NAME_stage\1(numbers, buffers", text)
    text = re.sub(r"(korch::(?:Window)?Contraction<[^;(]*>)::run\(", r"\1::run(korch::Numbers{numbers}, ", text)
    text = re.sub(r"(korch_amx::fed_rows<[^(]*>)\(", r"\1(korch::Numbers{numbers}, ", text)
    text = text.replace("NAME_run(void*, void*", f"NAME_run({TEAM_TYPE}, void*").replace("NAME_team, buf", "team, buf")
    begins = [match.start() for match in FUNCTION.finditer(text)]
    found = [text[: begins[0]], DECLARED]
    for begin, end in zip(begins, [*begins[1:], len(text)], strict=True):
        head, body = text[begin:end].split("\n", 1)
        used = sorted(set(map(int, re.findall(r"\bnumber(\d+)\b", body))))
        own = "".join(f"  const long number{i} = numbers[{i}];\n" for i in used)
        name, arguments = head.split("(", 1)
        found.append(f"{name}([[maybe_unused]] const long* const numbers, {arguments}\n{own}{body}")
    return "".join(found)


def _named(text: str) -> str:
    return text.replace("NAME", content_name("k", text))


def _numbers(family: _Family, shape: Shape) -> list[int]:
    own = family.shapes.index(shape)
    return [column[own] for column in family.columns()]


def _caller(kernel: Kernel, shared: str, numbers: Sequence[int]) -> Kernel:
    """Return a kernel that calls a shared one with its numbers."""
    found = re.search(r"\bint (k_\w+)_run\(", shared)
    if found is None:
        raise AssertionError("a kernel without its function")
    callee = found[1]
    head = "".join(line for line in kernel.source.splitlines(keepends=True) if line.startswith("//"))
    lines = [
        f"int {callee}_run(const long*, {TEAM_TYPE}, void* const*);",
        f"static const long NAME_numbers[] = {{{', '.join(map(str, numbers))}}};",
    ]
    team = "nullptr"
    if f"{callee}_team(" in shared:
        team = "NAME_team"
        lines += [
            f"int {callee}_team(const long*, void* const*, korch::Member&);",
            f"void {callee}_task(const long*, int, void* const*, long, long, long);",
            "int NAME_team(void* const* buffers, korch::Member& own) {",
            f"  return {callee}_team(NAME_numbers, buffers, own);\n}}",
            "void NAME_task(int stage, void* const* buffers, long begin, long end, long me) {",
            f"  {callee}_task(NAME_numbers, stage, buffers, begin, end, me);\n}}",
        ]
    lines += ["int NAME_run(void*, void* const* buffers) {"]
    lines += [f"  return {callee}_run(NAME_numbers, {team}, buffers);\n}}"]
    text = f'{head}{DECLARED}extern "C" {{\n' + "\n".join(lines) + "\n}\n"
    symbol = content_name("k", text)
    return replace(kernel, symbol=symbol, source=text.replace("NAME", symbol), shared=shared)
