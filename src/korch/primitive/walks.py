"""Walks over directed graphs of any nodes."""

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """Return the nodes that can be reached from some nodes, with these, in the order in which they are found."""
    found = dict.fromkeys(starts)
    waiting = list(found)
    while waiting:
        for node in following(waiting.pop()):
            if node not in found:
                found[node] = None
                waiting.append(node)
    return found


def depth_first(starts: Iterable[Node], before: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """Return some nodes and all that they need, each after the nodes `before` it, and those in their order.

    In a cycle, the node that is reached first comes last.
    """
    found: dict[Node, None] = {}
    begun: set[Node] = set()
    for start in starts:
        stack = [(start, False)]
        while stack:
            node, is_ready = stack.pop()
            if is_ready:
                found[node] = None
            elif node not in begun:
                begun.add(node)
                stack.append((node, True))
                stack += [(other, False) for other in reversed(tuple(before(node))) if other not in begun]
    return found
