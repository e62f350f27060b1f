"""Kernels that another kernel runs: their sources and the rows of its table of parts (`native/korch_parts.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.provider.provider import Kernel, Threading
from korch.tile.llvm.print import MARK

MOST_BUFFERS = 64
"""The most buffers of a part; `korch_parts.h` has the same number."""


@dataclass(frozen=True)
class Parts:
    """The kernels that a kernel runs.

    Attributes:
        kernels: the kernels in their order; equal ones have one source.
        names: the names of their functions in the source of the kernel that runs them, by symbol.
        sources: their sources with these names, or declarations of kernels that are units of their own.
    """

    kernels: tuple[Kernel, ...]
    names: dict[str, str]
    sources: tuple[str, ...]

    @staticmethod
    def of(kernels: Sequence[Kernel]) -> Parts:
        """Return the parts for some kernels."""
        symbols = dict.fromkeys(kernel.symbol for kernel in kernels)
        alone = {kernel.symbol for kernel in kernels if _is_alone(kernel)}
        names = {symbol: symbol if symbol in alone else f"NAME_{i}" for i, symbol in enumerate(symbols)}
        sources = {k.symbol: _declared(k) if k.symbol in alone else k.source for k in kernels}
        sources = {symbol: text.replace(symbol, names[symbol]) for symbol, text in sources.items()}
        return Parts(tuple(kernels), names, tuple(sources.values()))

    @property
    def units(self) -> tuple[str, ...]:
        """The units that the parts are or call."""
        own = (kernel.source for kernel in self.kernels if _is_alone(kernel))
        return tuple(dict.fromkeys((*own, *(text for kernel in self.kernels for text in kernel.units))))

    @property
    def has_state(self) -> bool:
        """Whether a part has a state."""
        return any(kernel.has_state for kernel in self.kernels)

    @property
    def libraries(self) -> tuple[str, ...]:
        """The libraries that the parts are linked to."""
        return tuple(dict.fromkeys(name for kernel in self.kernels for name in kernel.libraries))

    @property
    def opens(self) -> tuple[str, ...]:
        """The libraries that the parts open when they run."""
        return tuple(dict.fromkeys(name for kernel in self.kernels for name in kernel.opens))

    def row(self, kernel: Kernel, first_slot: int) -> str:
        """Return the row of a part, whose buffers begin with a slot."""
        name = self.names[kernel.symbol]
        team = f"{name}_team" if kernel.threading is Threading.TEAM else "nullptr"
        state = f"{name}_create, {name}_destroy" if kernel.has_state else "nullptr, nullptr"
        return f"{{{name}_run, {team}, {state}, {first_slot}}}"


def _is_alone(kernel: Kernel) -> bool:
    """Return whether a kernel is not C++, and so a unit of its own."""
    return kernel.source.startswith(MARK)


def _declared(kernel: Kernel) -> str:
    """Return the declarations of a kernel's functions."""
    return (
        f'#include "korch_team.h"\nextern "C" int {kernel.symbol}_run(void*, void* const*);\n'
        f'extern "C" int {kernel.symbol}_team(void* const*, korch::Member&);\n'
    )
