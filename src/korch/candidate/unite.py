"""Independent groups -> one group that runs them all, and back.

The united group is an ordinary group: it has the parts' inputs, each value once, and the parts' outputs, part
after part. So the parts can be recovered from the number of outputs of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from korch.candidate.candidate import Group, Refusal, make_group
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category


def unite(graph: PrimitiveGraph, parts: Sequence[Group]) -> Group | Refusal:
    """Return the group that unites several groups of which none depends on another.

    The caller must check that no group depends on another through a third kernel.

    Args:
        graph: the graph to which the groups' ids refer.
        parts: the groups.
    """
    primitives = {p for part in parts for p in part.primitives}
    made = [graph.primitives[p].output for p in primitives]
    outputs = [value for part in parts for value in part.outputs]
    if any(graph.primitives[p].row.category is Category.OPAQUE for p in primitives):
        return Refusal("an opaque operator may have threads of its own")
    if len(set(made)) < len(made):
        return Refusal("two parts compute a value in different ways")
    if len(set(outputs)) < len(outputs):
        return Refusal("two parts write a value")
    if any(not set(made).isdisjoint(part.inputs) for part in parts):
        return Refusal("a part computes what another reads")
    group = make_group(graph, primitives, outputs)
    again = split(group, [len(part.outputs) for part in parts])
    if [part.key for part in again] != [part.key for part in parts]:
        return Refusal("a constant is part of one group and an input of another")
    return group


def split(group: Group, counts: Sequence[int]) -> tuple[Group, ...]:
    """Return the groups from which a group was united; their ids refer to its body.

    Args:
        group: the group.
        counts: the number of outputs of each part.
    """
    body = group.body
    maker = {primitive.output: p for p, primitive in enumerate(body.primitives)}
    constants = {body.inputs[i][1] for i in group.constant_inputs}
    outputs = [value for _, value in body.outputs]
    parts = []
    for end, count in zip(accumulate(counts), counts, strict=True):
        own = outputs[end - count : end]
        found: set[int] = set()
        waiting = [maker[value] for value in own if value in maker]
        while waiting:
            p = waiting.pop()
            if p not in found:
                found.add(p)
                waiting += [maker[v] for v in body.primitives[p].inputs if v in maker]
        part = make_group(body, found, own)
        known = frozenset(i for i, value in enumerate(part.inputs) if value in constants)
        parts.append(replace(part, constant_inputs=known))
    return tuple(parts)
