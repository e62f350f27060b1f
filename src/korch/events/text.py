"""Task graph -> text and back, one item a line.

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

import re
from collections.abc import Iterator

from korch.errors import InvalidGraphError
from korch.events.graph import AffineMap, Edge, EventStage, EventTensor, TableMap, TaskGraph

_EDGE = re.compile(r"  (from|to) (\d+) (?:i -> \[(.+), (.+)\)|table((?: \d+:\d+)*))")
_END = re.compile(r"(?:(-?\d*)\*?i)?(?: ?([+-]) ?)?(\d+)?")


def format_tasks(graph: TaskGraph) -> str:
    """Return the text form of a task graph; equal graphs have equal texts."""
    return "".join(line + "\n" for line in _lines(graph))


def parse_tasks(text: str) -> TaskGraph:
    """Return the task graph that prints as `text`.

    Raises:
        InvalidGraphError: a line can't be read; the text has its number.
    """
    stages: list[EventStage] = []
    events: list[tuple[tuple[int, ...], dict[str, list[Edge]]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if found := re.fullmatch(r"stage (\S+) tasks (\d+)", line):
            stages.append(EventStage(found[1], int(found[2])))
        elif found := re.fullmatch(r"event counts((?: \d+)*)", line):
            events.append((tuple(map(int, found[1].split())), {"from": [], "to": []}))
        elif (found := _EDGE.fullmatch(line)) and events and (map_ := _map(*found.groups()[2:])) is not None:
            events[-1][1][found[1]].append(Edge(int(found[2]), map_))
        else:
            raise InvalidGraphError(f"line {number} can't be read: {line!r}", where="task graph")
    return TaskGraph(
        tuple(stages), tuple(EventTensor(counts, tuple(edges["from"]), tuple(edges["to"])) for counts, edges in events)
    )


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


def _map(first: str | None, end: str | None, table: str | None) -> AffineMap | TableMap | None:
    if first is None or end is None:
        pairs = (pair.split(":") for pair in (table or "").split())
        return TableMap(tuple((int(a), int(b)) for a, b in pairs))
    low, high = _end(first), _end(end)
    if low is None or high is None or (low[0], low[2]) != (high[0], high[2]):
        return None
    return AffineMap(low[0], low[1], high[1], low[2])


def _end(text: str) -> tuple[int, int, int] | None:
    """Return step, offset and divisor of one end of a range."""
    whole = re.fullmatch(r"\((.*)\)/(\d+)", text)
    inner, divisor = (whole[1], int(whole[2])) if whole else (text, 1)
    found = _END.fullmatch(inner)
    if found is None or not inner or divisor < 1:
        return None
    step = 0 if found[1] is None else {"": 1, "-": -1}.get(found[1]) or int(found[1])
    return step, int(f"{found[2] or ''}{found[3] or 0}"), divisor
