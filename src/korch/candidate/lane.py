"""The kernels that parts of the threads run at the same time; a record of a plan has them too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LanePart:
    """One kernel of a lane: its provider, its variant, and the number of outputs that it writes."""

    provider: str
    variant: str
    outputs: int

    def __str__(self) -> str:
        variant = f":{self.variant}" if self.variant else ""
        return f"{self.provider}{variant}" + (f"*{self.outputs}" if self.outputs > 1 else "")


@dataclass(frozen=True, slots=True)
class Lane:
    """The kernels that a part of the threads runs one after another."""

    parts: tuple[LanePart, ...]
    threads: int = 1

    def __str__(self) -> str:
        threads = f"{self.threads}: " if self.threads > 1 else ""
        return threads + " + ".join(map(str, self.parts))
