"""Lets kernels that compute the same at different sizes share their code; only a table of numbers differs.

Kernels whose programs have the same form, and differ only in extents, strides and offsets, are compiled once. For
each further size, a kernel consists of a table and a call. All other kernels are left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from korch.provider.provider import Kernel, Threading
from korch.system.content_name import content_name
from korch.tile.cpp.numbers import Numbered, shared_text, table_of

Compile = Callable[[Sequence[str]], list[bool]]
"""Compiles sources, and returns for each whether the compiler accepted it."""

TEAM_TYPE = "int (*)(void* const*, korch::Member&)"


@dataclass(eq=False)
class _Family:
    """Kernels of the same form.

    Attributes:
        members: the text of each such kernel seen so far.
        refused: shared sources that the compiler rejected.
    """

    members: list[Numbered] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)

    def text(self) -> str:
        """Return the source that all members share; "" if the members do not differ."""
        return shared_text(self.members) if table_of(self.members) else ""


class Families:
    """The kernels for several sizes of a model that have the same plan, by the kernel's position in that plan."""

    def __init__(self) -> None:
        """Begin with no kernels."""
        self._families: dict[tuple[int, tuple[str, ...]], _Family] = {}
        self._places: dict[str, int] = {}

    def learn(self, place: int, key: str, kernel: Kernel) -> None:
        """Record the kernel at position `place` of the plan for one size; `key` is its candidate's key."""
        self._places[key] = place
        self._add(place, kernel)

    def share(self, kernels: Sequence[tuple[str, Kernel]], compiles: Compile) -> list[Kernel]:
        """Replace each kernel that has code in common with kernels of other sizes by a call of the shared code.

        Args:
            kernels: the kernels for one size, each with the key of its candidate.
            compiles: compiles sources.
        """
        found = [self._add(self._places[key], kernel) if key in self._places else None for key, kernel in kernels]
        texts = {family: family.text() for family, _ in filter(None, found)}
        todo = [text for family, text in texts.items() if text and text not in family.refused]
        taken = dict(zip(todo, compiles(todo), strict=True))
        for family, text in texts.items():
            if not taken.get(text, False):
                family.refused.add(text)
        kernels_of = list[Kernel]()
        for (_, kernel), entry in zip(kernels, found, strict=True):
            if entry is None or texts[entry[0]] in entry[0].refused:
                kernels_of.append(kernel)
            else:
                family, member = entry
                own = family.members.index(member)
                numbers = [column[own] for column in table_of(family.members)]
                kernels_of.append(_caller(kernel, texts[family], numbers))
        return kernels_of

    def _add(self, place: int, kernel: Kernel) -> tuple[_Family, Numbered] | None:
        if not kernel.marked:
            return None
        member = Numbered.of(kernel.marked)
        family = self._families.setdefault((place, member.parts), _Family())
        if member not in family.members:
            family.members.append(member)
        return family, member


def _caller(kernel: Kernel, text: str, numbers: Sequence[int]) -> Kernel:
    """Return a kernel that calls the shared code `text` with this kernel's table of numbers."""
    callee = content_name("k", text)
    head = "".join(line for line in kernel.source.splitlines(keepends=True) if line.startswith("//"))
    table = f"static const long NAME_numbers[] = {{{', '.join(map(str, numbers))}}};\n"
    if kernel.threading is not Threading.TEAM:
        body = (
            f'extern "C" int {callee}_run(const long*, void*, void* const*);\n{table}'
            f'extern "C" int NAME_run(void*, void* const* buffers) {{\n'
            f"  return {callee}_run(NAME_numbers, nullptr, buffers);\n}}\n"
        )
    else:
        body = (
            f'namespace korch {{\nstruct Member;\n}}\nextern "C" {{\n'
            f"int {callee}_run(const long*, {TEAM_TYPE}, void* const*);\n"
            f"int {callee}_team(const long*, void* const*, korch::Member&);\n"
            f"void {callee}_task(const long*, int, void* const*, long, long, long);\n{table}"
            "int NAME_team(void* const* buffers, korch::Member& own) {\n"
            f"  return {callee}_team(NAME_numbers, buffers, own);\n}}\n"
            "void NAME_task(int stage, void* const* buffers, long begin, long end, long me) {\n"
            f"  {callee}_task(NAME_numbers, stage, buffers, begin, end, me);\n}}\n"
            "int NAME_run(void*, void* const* buffers) {\n"
            f"  return {callee}_run(NAME_numbers, NAME_team, buffers);\n}}\n}}\n"
        )
    symbol = content_name("k", head + body)
    source, shared = (head + body).replace("NAME", symbol), text.replace("NAME", callee)
    return replace(kernel, symbol=symbol, source=source, units=(shared,))
