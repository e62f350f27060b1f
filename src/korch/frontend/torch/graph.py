"""Exports a graph of torch.compile as ONNX, for the sizes of a call or for all sizes of its symbolic dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from korch.errors import UnsupportedError
from korch.frontend.torch.export import Exported, export_call
from korch.frontend.torch.free import FreeModule, largest, resized
from korch.ranges.form import Dimension, Sizes

MOST_ELEMENTS = 1 << 20
"""The default upper bound of a size is chosen so that the inputs with this size have at most this many elements
together, unless the first call has more."""

HINT = "torch._dynamo.mark_dynamic(tensor, axis, min=..., max=...) gives an axis a range"


class BoundGraph(torch.nn.Module):  # type: ignore[misc]
    """A graph with its weights and some numbers bound, so that they are constants of the exported model."""

    def __init__(self, graph: Any, weights: Mapping[int, Any], numbers: Mapping[int, int]) -> None:
        """Bind some inputs.

        Args:
            graph: a torch.fx.GraphModule.
            weights: the weights, by position among the graph's inputs.
            numbers: the numbers, also by position.
        """
        super().__init__()
        self.graph, self._numbers = graph, dict(numbers)
        names = [node.name for node in inputs_of(graph)]
        self._of = {i: f"weight_{names[i]}" for i in weights}
        self._count = len(names)
        for i, weight in weights.items():
            if isinstance(weight, torch.nn.Parameter):
                self.register_parameter(self._of[i], weight)
            else:
                self.register_buffer(self._of[i], weight)

    def forward(self, *dynamic: Any) -> Any:
        """Run the graph with the inputs that are not bound."""
        rest = iter(dynamic)
        return self.graph(*(self._bound(i) if self._is_bound(i) else next(rest) for i in range(self._count)))

    def _is_bound(self, i: int) -> bool:
        return i in self._of or i in self._numbers

    def _bound(self, i: int) -> Any:
        return getattr(self, self._of[i]) if i in self._of else self._numbers[i]


def inputs_of(graph: Any) -> list[Any]:
    """Return the placeholder nodes of a graph."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def like(arg: Any) -> Any:
    """Return a new tensor of the same shape, strides and type; an argument that is not a tensor is returned itself."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)


@dataclass(frozen=True, eq=False)
class FreeGraph:
    """A graph for all sizes of its symbolic dimensions.

    Attributes:
        module: the module, which takes the input tensors that are not weights.
        axes: (position of an input, axis, number of a dimension) of each symbolic axis.
        tensors: the positions of the inputs that the module takes.
        returned: for a place in the result, the position of the input that is a size and returned there.
    """

    module: FreeModule
    axes: tuple[tuple[int, int, int], ...]
    tensors: tuple[int, ...]
    returned: Mapping[int, int]

    def takes(self, args: Sequence[Any]) -> bool:
        """Return whether all sizes of a call are within the ranges of the dimensions."""
        dimensions = self.module.dimensions
        return all(
            dimensions[number].low <= args[i].shape[axis] <= dimensions[number].high for i, axis, number in self.axes
        )

    def result(self, found: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the result of a call: what the module has returned, with sizes taken from the arguments."""
        return tuple(args[self.returned[k]] if k in self.returned else value for k, value in enumerate(found))


def free_graph(graph: Any, args: Sequence[Any], weights: Mapping[int, Any], most: int) -> FreeGraph | None:
    """Return a graph for all sizes of its symbolic dimensions; None if it has none.

    Args:
        graph: a torch.fx.GraphModule.
        args: the arguments of the first call.
        weights: the constants among the arguments, by position.
        most: the largest size of a dimension without an upper bound, unless the first call has a larger one.

    Raises:
        UnsupportedError: the sizes can't be derived from the tensors, or several have no upper bound.
    """
    nodes, places = inputs_of(graph), dict[Any, list[tuple[int, int]]]()
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if i in weights or not isinstance(value, torch.Tensor):
            continue
        for axis, size in enumerate(value.shape):
            symbol = _symbol(size, f"input {node.name!r}, axis {axis}")
            if symbol is not None:
                places.setdefault(symbol, []).append((i, axis))
    if not places:
        return None
    numbers = {symbol: number for number, symbol in enumerate(places)}
    sizes = {i: numbers[symbol] for i, symbol in _size_inputs(nodes, numbers).items()}
    dimensions = _dimensions(nodes, args, places, most)
    axes = tuple((i, axis, numbers[symbol]) for symbol, own in places.items() for i, axis in own)
    examples = [like(arg) for arg in args]
    tensors = tuple(i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor) and i not in weights)
    others = {i: arg for i, arg in enumerate(args) if not isinstance(arg, torch.Tensor) and i not in sizes}

    def at(wanted: Sizes) -> Exported:
        given = list(examples)
        with torch.inference_mode(False), torch.no_grad():
            for i, axis, number in axes:
                given[i] = resized(given[i], axis, wanted[number])
            known = {**others, **{i: wanted[number] for i, number in sizes.items()}}
            return export_call(BoundGraph(graph, weights, known), [given[i] for i in tensors], {}, "graph")

    return FreeGraph(FreeModule(dimensions, at), axes, tensors, _returned(graph, nodes))


def _symbol(size: Any, where: str) -> Any:
    """Return the symbol of a size; None if it is constant."""
    if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
        return None
    if not size.node.expr.is_Symbol:
        raise UnsupportedError(f"its size is {size.node.expr}, which follows from another one", where, hint=HINT)
    return size.node.expr


def _size_inputs(nodes: Sequence[Any], numbers: Mapping[Any, int]) -> dict[int, Any]:
    """Return the symbols of the inputs that are numbers, by position."""
    found = {}
    for i, node in enumerate(nodes):
        symbol = _symbol(node.meta.get("example_value"), f"input {node.name!r}")
        if symbol is not None and symbol not in numbers:
            raise UnsupportedError("it is a number that is no size of a tensor", f"input {node.name!r}")
        if symbol is not None:
            found[i] = symbol
    return found


def _dimensions(
    nodes: Sequence[Any], args: Sequence[Any], places: Mapping[Any, Sequence[tuple[int, int]]], most: int
) -> tuple[Dimension, ...]:
    """Return the dimension of each symbol, with the range that PyTorch knows or a default.

    Raises:
        UnsupportedError: several have no upper bound.
    """
    found, unbounded = [], []
    for own in places.values():
        (i, axis), *_ = own
        size = nodes[i].meta["example_value"].shape[axis]
        bounds = size.node.shape_env.var_to_range[size.node.expr]
        high = largest(bounds)
        if high is None:
            unbounded.append(f"{nodes[i].name!r}, axis {axis}")
            high = default_high(args, own, most)
        found.append(Dimension(nodes[i].name, axis, max(1, int(bounds.lower)), high))
    if len(unbounded) > 1:
        raise UnsupportedError(f"the sizes of inputs {' and '.join(unbounded)} have no upper end", "graph", hint=HINT)
    return tuple(found)


def default_high(args: Sequence[Any], own: Sequence[tuple[int, int]], most: int) -> int:
    """Return an upper bound for a size without one: a power of two, at least the size of the first call."""
    (first, first_axis), *_ = own
    now = max(1, int(args[first].shape[first_axis]))
    elements = max(1, sum(int(args[i].numel()) for i in {i for i, _ in own}) // now)
    fitting = min(most, max(1, MOST_ELEMENTS // elements))
    return max(1 << (fitting.bit_length() - 1), 1 << (now - 1).bit_length())


def _returned(graph: Any, nodes: Sequence[Any]) -> dict[int, int]:
    """Return the positions of inputs that are numbers and are returned, by place in the result.

    Raises:
        UnsupportedError: a number is computed from sizes and returned.
    """
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    found = {}
    for k, node in enumerate(output.args[0]):
        if not isinstance(node, torch.fx.Node) or not isinstance(node.meta.get("example_value"), torch.SymInt):
            continue
        if node not in nodes:
            raise UnsupportedError("it returns a number that is computed from sizes", "graph")
        found[k] = nodes.index(node)
    return found
