"""A masked graph with alternatives -> what kernels of a plan leave out, for timing them in a search as they will run.

Which elements of a value are needed depends on the plan (`needed.py`), which is not known before the search. So this
is a prediction: of several readers of a value, those that say nothing of an axis are left out of account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.ops.reduce import ReduceAttributes
from korch.ranges.endings import Ending
from korch.ranges.form import Extent, Sizes, prefix
from korch.ranges.needed import Conditions, Ends, Need, of_operand
from korch.ranges.plan import RangePlan

MOST_VISITS = 8
"""How often a primitive is looked at: alternatives may read each other."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is needed of a kernel's results, and for which sizes it is timed.

    Attributes:
        needs: by output.
        sizes: of each dimension.
        endings: how its reductions can end.
    """

    needs: tuple[Need, ...]
    sizes: Sizes
    endings: tuple[Ending, ...] = ()

    def __str__(self) -> str:
        parts = (f"{axis}:{sorted(map(str, extents))}" for need in self.needs for axis, extents in sorted(need.items()))
        return " ".join((*parts, *map(str, self.endings), f"at {self.sizes}"))

    def share(self, shapes: Sequence[tuple[int, ...]]) -> float:
        """Return the least share of the elements that a kernel computes, or reads for one of its results."""
        least = 1.0
        for need, shape in zip(self.needs, shapes, strict=True):
            share = 1.0
            for axis, extents in need.items():
                share *= min(1.0, max(extent.at(self.sizes) for extent in extents) / max(1, shape[axis]))
            least = min(least, share)
        return least * min((ending.share(self.sizes) for ending in self.endings), default=1.0)


def likely_needs(graph: PrimitiveGraph, plan: RangePlan, ended: Mapping[int, Ends] | None = None) -> dict[int, Need]:
    """Return what is likely needed of the values of a graph with alternatives; of those that are not there, all is.

    Args:
        graph: the graph.
        plan: how it serves sizes.
        ended: which reductions likely end early, by number.
    """
    found: dict[int, Need] = {}
    for (_, value), form in zip(graph.outputs, plan.outputs, strict=True):
        found[value] = {a: frozenset((e,)) for a, axis in enumerate(form) if (e := prefix(axis)) is not None}
    conditions = Conditions(graph, range(len(graph.primitives)), plan.hidden)
    visits = [0] * len(graph.primitives)
    todo = [p for value in found for p in graph.producers[value]]
    while todo:
        number = todo.pop()
        visits[number] += 1
        if visits[number] > MOST_VISITS:
            continue
        primitive = graph.primitives[number]
        for k, value in enumerate(primitive.inputs):
            need = of_operand(graph, primitive, k, found[primitive.output], conditions)
            need = {**_reduced(graph, primitive, k, (ended or {}).get(number, {})), **need}
            known, before = found.get(value, {}), found.get(value)
            found[value] = {**known, **{axis: known.get(axis, frozenset()) | e for axis, e in need.items()}}
            if found[value] != before:
                todo += graph.producers[value]
    return {value: _limited(need, graph.types[value].shape) for value, need in found.items()}


def _reduced(graph: PrimitiveGraph, primitive: Primitive, k: int, ends: Ends) -> Need:
    """Return the axes of an operand that a primitive reduces: all of them is needed, or up to where it ends."""
    shape = graph.types[primitive.inputs[k]].shape
    axes: Sequence[int] = ()
    if isinstance(primitive.attributes, ReduceAttributes):
        axes = primitive.attributes.axes
    elif primitive.op == "matmul":
        axes = (len(graph.types[primitive.inputs[0]].shape) - 1,)
    return {axis - k: frozenset((ends.get(axis, Extent(0, 0, shape[axis - k])),)) for axis in axes}


def _limited(need: Need, shape: tuple[int, ...]) -> Need:
    """Return a need without the axes along which all is needed."""
    return {axis: e for axis, e in need.items() if all(x.times or x.plus < shape[axis] for x in e)}
