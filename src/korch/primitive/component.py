"""Strongly connected components of a directed graph."""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def strong_components(after: Mapping[Node, Sequence[Node]]) -> list[list[Node]]:
    """Return the strongly connected components of a directed graph.

    `after`: the successors of each node; every successor must be a key, too.

    Source: Tarjan, "Depth-first search and linear graph algorithms" (1972), without recursion.
    """
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    path: list[Node] = []
    on_path: set[Node] = set()
    found: list[list[Node]] = []
    for root in after:
        work = [(root, iter(after[root]))] if root not in index else []
        if work:
            index[root] = low[root] = len(index)
            path.append(root)
            on_path.add(root)
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    path.append(other)
                    on_path.add(other)
                    work.append((other, iter(after[other])))
                    break
                if other in on_path:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = path.index(node)
                    found.append(path[at:])
                    on_path.difference_update(path[at:])
                    del path[at:]
    return found
