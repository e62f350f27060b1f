"""A masked graph with alternatives -> the elements that kernels will likely leave out, so that a search times them so.

Which elements of a value are needed depends on the plan (`needed.py`), which is not known before the search. So this
is a prediction: readers of a value that do not limit the needed elements along an axis are ignored for that axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.ops.reduce import ReduceAttributes
from korch.ranges.endings import Ending
from korch.ranges.form import Extent, Sizes
from korch.ranges.needed import Conditions, Ends, Need, of_form, of_operand
from korch.ranges.plan import RangePlan

MOST_VISITS = 8
"""The most visits of a primitive; there may be several, since alternatives may depend on each other."""


@dataclass(frozen=True, slots=True)
class Served:
    """The needed elements of a kernel's results, and the sizes for which it is timed.

    Attributes:
        needs: the needed elements of each output.
        sizes: the size of each dimension.
        endings: how its reductions can end early.
    """

    needs: tuple[Need, ...]
    sizes: Sizes
    endings: tuple[Ending, ...] = ()

    def __str__(self) -> str:
        parts = (f"{axis}:{sorted(map(str, extents))}" for need in self.needs for axis, extents in sorted(need.items()))
        return " ".join((*parts, *map(str, self.endings), f"at {self.sizes}"))

    def share(self, shapes: Sequence[tuple[int, ...]]) -> float:
        """Return a lower bound of the fraction of the elements that a kernel computes, or reads for one result."""
        least = 1.0
        for need, shape in zip(self.needs, shapes, strict=True):
            share = 1.0
            for axis, extents in need.items():
                share *= min(1.0, max(extent.at(self.sizes) for extent in extents) / max(1, shape[axis]))
            least = min(least, share)
        return least * min((ending.share(self.sizes) for ending in self.endings), default=1.0)


def likely_needs(graph: PrimitiveGraph, plan: RangePlan, ended: Mapping[int, Ends] | None = None) -> dict[int, Need]:
    """Return the likely needed elements of a graph's values; all elements are needed of values that are left out.

    Args:
        graph: a graph with alternatives.
        plan: how it serves sizes.
        ended: the reductions that likely end early, by the primitive's number.
    """
    found: dict[int, Need] = {}
    for (_, value), form in zip(graph.outputs, plan.outputs, strict=True):
        found[value] = of_form(form)
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
    """Return the need along the operand axes that a primitive reduces: all elements, or those before an early end."""
    shape = graph.types[primitive.inputs[k]].shape
    axes: Sequence[int] = ()
    if isinstance(primitive.attributes, ReduceAttributes):
        axes = primitive.attributes.axes
    elif primitive.op == "matmul":
        axes = (len(graph.types[primitive.inputs[0]].shape) - 1,)
    return {axis - k: frozenset((ends.get(axis, Extent(0, 0, shape[axis - k])),)) for axis in axes}


def _limited(need: Need, shape: tuple[int, ...]) -> Need:
    """Return a need without the axes along which all elements are needed."""
    return {axis: e for axis, e in need.items() if all(x.times or x.plus < shape[axis] for x in e)}
