"""Judges that nobody here wrote: samples, pipelines and models of other projects, each compared with their own results.

A judge is a list of items, a function that runs one, and a table of the results.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any


@dataclass(frozen=True)
class Judge:
    """What runs the items of one source."""

    items: Callable[[], list[str]]  # returns the names of all items; the same ones each time
    # runs an item; returns its line of the results, which has the item as "item" and counts of verdicts as
    # "counts", by a name of its own for each row of the table, and messages as "texts"
    run: Callable[[str], dict[str, Any]]
    verdicts: dict[str, str]  # what each verdict means
    limit_s: float  # the longest time for an item
    life: int = 100  # the number of items after which a process is replaced
    # returns the milliseconds of a call of an item by engine; None if the judge compares no times
    time: Callable[[str], dict[str, float]] | None = None


ALL = "all"
"""The name of the line for all kinds."""

OF_MODELS = {
    "right": "the results of eager mode, computed without PyTorch",
    "partly": "the results of eager mode; some calls of graphs run in PyTorch",
    "noticed": "the same, because what was exported or built computes something else",
    "wrong": "other results",
    "timeout": "no end within the limit",
    "crash": "an error",
    "none": "PyTorch itself fails, or a package is missing",
}
"""The verdicts on models that torch.compile optimizes, and what they mean."""


def table(rows: Sequence[dict[str, Any]], verdicts: Sequence[str]) -> str:
    """Return how many calls of each kind have each verdict.

    If some rows have times, there are also the number of these rows and the geometric means of times relative to
    Korch's, and a last line for all kinds.
    """
    sums: dict[str, dict[str, int]] = {}
    times: dict[str, list[dict[str, float]]] = {}
    is_timed = any(row.get("times_ms") for row in rows)
    for row in rows:
        for kind, counts in row["counts"].items():
            for name in (kind, ALL) if is_timed else (kind,):
                of_kind = sums.setdefault(name, dict.fromkeys(verdicts, 0))
                for verdict, count in counts.items():
                    of_kind[verdict] += count
                times.setdefault(name, []).extend([row["times_ms"]] if row.get("times_ms") else [])
    sums |= {ALL: sums.pop(ALL)} if is_timed else {}
    engines = [engine for engine in dict.fromkeys(itertools.chain(*times.get(ALL, []))) if engine != "korch"]
    heads = [*verdicts, *(["timed"] if is_timed else []), *(f"{engine} / Korch" for engine in engines)]
    lines = [f"| | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    for kind, counts in sums.items():
        own = times[kind]
        cells = [*map(str, counts.values()), *([str(len(own))] if is_timed else [])]
        ratios = ([row[engine] / row["korch"] for row in own if engine in row] for engine in engines)
        cells += [f"{geometric_mean(found):.2f}" if found else "" for found in ratios]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)
