"""Results of a graph of torch.compile that are made without a kernel, from its inputs or its other results.

An input, or a view of one, shares its memory with it. Results that share memory are views of one tensor, which is
computed. A number is computed from sizes and other numbers.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from korch.frontend.torch.effects import span_of, storage_of
from korch.frontend.torch.graph import inputs_of

_View = tuple[int, tuple[Any, Any, int] | None]


@dataclass(frozen=True, eq=False)
class Aliases:
    """Results that are views, or numbers."""

    graph: Any  # the graph without these results; `hidden` tensors are its last results
    # by place in the result, the position of an input, and the sizes, the steps and the offset of the view from the
    # input's first element; None for the input itself
    views: Mapping[int, _View] = field(default_factory=dict)
    shared: Mapping[int, _View] = field(default_factory=dict)  # the same of a hidden tensor instead of an input
    hidden: int = 0  # the number of tensors of which results are views
    numbers: Mapping[int, Any] = field(default_factory=dict)  # by place in the result, a formula of integers
    # by symbol in a formula, the position of an input, and an axis of it; None if the input is the number
    symbols: Mapping[Any, tuple[int, int | None]] = field(default_factory=dict)
    reason: str = ""  # why the results can't be made; "" if they can

    @property
    def is_whole(self) -> bool:
        """Whether no tensor is left to compute."""
        return not any(isinstance(node, torch.fx.Node) for node in _results(self.graph))

    def joined(self, found: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """Return the result of the whole graph, from that of `graph` and the inputs."""
        whole, bases = found[: len(found) - self.hidden], found[len(found) - self.hidden :]
        made: dict[int, Any] = {k: _view_of(view, args) for k, view in self.views.items()}
        made |= {k: _view_of(view, bases) for k, view in self.shared.items()} | self._numbers(args)
        rest, count = iter(whole), len(whole) + len(made)
        return tuple(made[k] if k in made else next(rest) for k in range(count)) if made else found

    def _numbers(self, args: Sequence[Any]) -> dict[int, int]:
        if not self.numbers:
            return {}
        values = {s: args[i] if axis is None else args[i].shape[axis] for s, (i, axis) in self.symbols.items()}
        return {k: int(formula.xreplace(values)) for k, formula in self.numbers.items()}


def _view_of(view: _View, tensors: Sequence[Any]) -> Any:
    place, geometry = view
    if geometry is None:
        return tensors[place]
    shape, steps, offset = geometry
    return tensors[place].as_strided(shape, steps, tensors[place].storage_offset() + offset)


def aliases_of(graph: Any) -> Aliases:
    """Return the results of a graph that are views of inputs or of each other, or numbers."""
    nodes = inputs_of(graph)
    given: dict[int, list[int]] = {}  # by memory, the inputs in it
    for i, node in enumerate(nodes):
        if (value := _tensor(node)) is not None:
            given.setdefault(storage_of(value), []).append(i)
    results = _results(graph)
    views: dict[int, _View] = {}
    seen: dict[int, list[int]] = {}  # by memory, the places of results in it
    numbers, symbols = dict[int, Any](), _symbols(nodes)
    for k, node in enumerate(results):
        value = _tensor(node)
        if value is None:
            number = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
            if isinstance(number, torch.SymInt):
                numbers[k] = number.node.expr
                if not number.node.expr.free_symbols <= symbols.keys():
                    return Aliases(graph, reason=f"its result {k} is a number that is not computed from sizes")
            continue
        storage = storage_of(value)
        if storage in given:
            i, *others = given[storage]
            if others or value.dtype != _tensor(nodes[i]).dtype:
                what = "several inputs" if others else "an input of another type"
                return Aliases(graph, reason=f"its result {k} shares memory with {what}")
            (shape, steps, offset), own = _geometry(value), _geometry(_tensor(nodes[i]))
            if (shape, steps, offset) == own:
                views[k] = i, None
            elif all(type(n) is int for n in (*shape, *steps, offset, own[2])):
                views[k] = i, (shape, steps, offset - own[2])
            else:
                return Aliases(graph, reason=f"its result {k} shares memory with an input of several sizes")
        else:
            seen.setdefault(storage, []).append(k)
    shared, bases = dict[int, _View](), list[Any]()
    for places in seen.values():
        values = {k: _tensor(results[k]) for k in places}
        if not _overlap([span_of(value) for value in values.values()]):
            continue
        if (base := _base(graph, list(values.values()))) is None:
            return Aliases(graph, reason=f"its results {places} share memory, and no tensor of one size contains them")
        for k, value in values.items():
            shape, steps, offset = _geometry(value)
            shared[k] = len(bases), (shape, steps, offset - _tensor(base).storage_offset())
        bases.append(base)
    used = {symbol for formula in numbers.values() for symbol in formula.free_symbols}
    symbols = {symbol: place for symbol, place in symbols.items() if symbol in used}
    if made := {*views, *shared, *numbers}:
        graph = _without(graph, made, bases)
    return Aliases(graph, views, shared, len(bases), numbers, symbols)


def _overlap(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether two ranges of bytes have a byte in common."""
    return any(start < stop for (_, stop), (start, _) in pairwise(sorted(spans)))


def _base(graph: Any, values: Sequence[Any]) -> Any:
    """Return the first node whose tensor is contiguous and contains tensors of the same memory; None without one."""
    spans = list(map(span_of, values))
    for node in graph.graph.nodes:
        tensor = _tensor(node)
        if (
            tensor is None
            or storage_of(tensor) != storage_of(values[0])
            or any(v.dtype != tensor.dtype for v in values)
        ):
            continue
        if not all(type(n) is int for v in (tensor, *values) for n in (*v.shape, *v.stride(), v.storage_offset())):
            return None
        start, stop = span_of(tensor)
        if tensor.is_contiguous() and all(start <= begin and end <= stop for begin, end in spans):
            return node
    return None


def _symbols(nodes: Sequence[Any]) -> dict[Any, tuple[int, int | None]]:
    """Return where the inputs have the value of each symbol."""
    found: dict[Any, tuple[int, int | None]] = {}
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        sizes = enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]
        for axis, size in sizes:
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (i, axis))
    return found


def _without(graph: Any, places: Set[int], more: Sequence[Any]) -> Any:
    """Return a graph without some places of its result, and with more nodes as its last results."""
    nodes, copies = torch.fx.Graph(), dict[Any, Any]()
    found = nodes.graph_copy(graph.graph, copies)
    nodes.output((*(node for k, node in enumerate(found) if k not in places), *(copies[node] for node in more)))
    return torch.fx.GraphModule(graph, nodes)


def _results(graph: Any) -> Sequence[Any]:
    """Return the nodes that a graph of torch.compile returns."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    return output.args[0] if isinstance(output.args[0], tuple | list) else output.args


def _tensor(node: Any) -> Any:
    """Return the tensor that stands for a node's value; None if it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _geometry(tensor: Any) -> tuple[Any, Any, Any]:
    """Return the sizes, the steps and the offset of a tensor; those that are symbolic as formulas."""

    def plain(n: Any) -> Any:
        return n.node.expr if isinstance(n, torch.SymInt) else n

    return tuple(map(plain, tensor.shape)), tuple(map(plain, tensor.stride())), plain(tensor.storage_offset())
