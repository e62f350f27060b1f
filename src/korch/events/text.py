"""Task graph -> text, one item a line.

    stage k_1 tasks 4
    stage k_2 tasks 2
    event counts 2 2
      from 0 i -> [(i)/2, (i + 2)/2)
      to 1 i -> [i, i + 1)
    event counts 1
      from 0 table 0:1 0:0 0:0 0:0
      to 1 table 0:0 0:1

A quotient is rounded down.
"""

from __future__ import annotations

from collections.abc import Iterator

from korch.events.graph import AffineMap, TableMap, TaskGraph


def format_tasks(graph: TaskGraph) -> str:
    """Return the text form of a task graph; equal graphs have equal texts."""
    return "".join(line + "\n" for line in _lines(graph))


def _lines(graph: TaskGraph) -> Iterator[str]:
    for stage in graph.stages:
        yield f"stage {stage.name} tasks {stage.tasks}"
    for tensor in graph.events:
        yield "event counts" + "".join(f" {count}" for count in tensor.counts)
        for word, edges in (("from", tensor.producers), ("to", tensor.consumers)):
            for edge in edges:
                yield f"  {word} {edge.stage} {_map_text(edge.map)}"


def _map_text(map_: AffineMap | TableMap) -> str:
    if isinstance(map_, TableMap):
        return "table" + "".join(f" {first}:{end}" for first, end in map_.ranges)
    return f"i -> [{_end_text(map_, map_.first)}, {_end_text(map_, map_.end)})"


def _end_text(map_: AffineMap, offset: int) -> str:
    step = "" if map_.step == 1 else "-" if map_.step == -1 else f"{map_.step}*"
    text = f"{step}i" if map_.step else ""
    if offset or not text:
        sign = (" - " if offset < 0 else " + ") if text else "-" if offset < 0 else ""
        text += f"{sign}{abs(offset)}"
    if map_.divisor == 1:
        return text
    return f"({text})/{map_.divisor}"
