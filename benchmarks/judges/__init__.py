"""Judges that nobody here wrote: samples, pipelines and models of other projects, each compared with their own results.

A judge is a list of items, a function that runs one, and a table of the results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any


@dataclass(frozen=True)
class Judge:
    """What runs the items of one source.

    Attributes:
        items: returns the names of all items; the same ones each time.
        run: runs an item; returns its line of the results, which has the item as "item" and counts of verdicts as
            "counts", by a name of its own for each row of the table, and messages as "texts".
        verdicts: what each verdict means.
        limit_s: the longest time for an item.
        life: the number of items after which a process is replaced.
        time: returns the milliseconds of a call of an item by engine; None if the judge compares no times.
    """

    items: Callable[[], list[str]]
    run: Callable[[str], dict[str, Any]]
    verdicts: dict[str, str]
    limit_s: float
    life: int = 100
    time: Callable[[str], dict[str, float]] | None = None


def table(rows: Sequence[dict[str, Any]], verdicts: Sequence[str]) -> str:
    """Return how many calls of each kind have each verdict, and the geometric means of times relative to Korch's."""
    sums: dict[str, dict[str, int]] = {}
    ratios: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for kind, counts in row["counts"].items():
            of_kind = sums.setdefault(kind, dict.fromkeys(verdicts, 0))
            for verdict, count in counts.items():
                of_kind[verdict] += count
            for engine, time_ms in row.get("times_ms", {}).items():
                if engine != "korch":
                    found = ratios.setdefault(engine, {}).setdefault(kind, [])
                    found.append(time_ms / row["times_ms"]["korch"])
    heads = [*verdicts, *(f"{engine} / Korch" for engine in ratios)]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for kind, counts in sums.items():
        means = [f"{geometric_mean(own[kind]):.2f}" if kind in own else "" for own in ratios.values()]
        lines.append(f"| {kind} | {' | '.join([*map(str, counts.values()), *means])} |")
    return "\n".join(lines)
