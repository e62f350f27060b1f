"""Results of a graph of torch.compile that are made from its inputs without a kernel.

An input, or a view of one, shares its memory with it. A number is computed from sizes and other numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from korch.frontend.torch.effects import span_of, storage_of
from korch.frontend.torch.graph import inputs_of


@dataclass(frozen=True, eq=False)
class Aliases:
    """Results that are views of inputs, or numbers.

    Attributes:
        graph: the graph without these results.
        views: by place in the result, the position of an input, and the sizes, the steps and the offset of the view
            from the input's first element; None for the input itself.
        numbers: by place in the result, a formula of integers.
        symbols: by symbol in a formula, the position of an input, and an axis of it; None if the input is the number.
        reason: why the results can't be made; "" if they can.
    """

    graph: Any
    views: Mapping[int, tuple[int, tuple[Any, Any, int] | None]]
    numbers: Mapping[int, Any] = field(default_factory=dict)
    symbols: Mapping[Any, tuple[int, int | None]] = field(default_factory=dict)
    reason: str = ""

    def joined(self, found: Sequence[Any], args: Sequence[Any]) -> Sequence[Any]:
        """Return the result of the whole graph, from that of `graph` and the inputs."""
        made = {k: self._view(k, args) for k in self.views} | self._numbers(args)
        rest, count = iter(found), len(found) + len(made)
        return tuple(made[k] if k in made else next(rest) for k in range(count)) if made else found

    def _numbers(self, args: Sequence[Any]) -> dict[int, int]:
        if not self.numbers:
            return {}
        values = {s: args[i] if axis is None else args[i].shape[axis] for s, (i, axis) in self.symbols.items()}
        return {k: int(formula.xreplace(values)) for k, formula in self.numbers.items()}

    def _view(self, place: int, args: Sequence[Any]) -> Any:
        i, view = self.views[place]
        if view is None:
            return args[i]
        shape, steps, offset = view
        return args[i].as_strided(shape, steps, args[i].storage_offset() + offset)


def aliases_of(graph: Any) -> Aliases:
    """Return the results of a graph that are views of inputs."""
    nodes = inputs_of(graph)
    given = {storage_of(value): i for i, node in enumerate(nodes) if (value := _tensor(node)) is not None}
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    views: dict[int, tuple[int, tuple[Any, Any, int] | None]] = {}
    seen: list[tuple[int, int, int]] = []
    numbers, symbols = dict[int, Any](), _symbols(nodes)
    for k, node in enumerate(output.args[0] if isinstance(output.args[0], tuple | list) else ()):
        value = _tensor(node)
        if value is None:
            number = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
            if isinstance(number, torch.SymInt):
                numbers[k] = number.node.expr
                if not number.node.expr.free_symbols <= symbols.keys():
                    return Aliases(graph, {}, reason="it returns a number that is not computed from sizes")
            continue
        storage, (start, stop) = storage_of(value), span_of(value)
        if storage in given:
            i = given[storage]
            (shape, steps, offset), own = _geometry(value), _geometry(_tensor(nodes[i]))
            if (shape, steps, offset) == own:
                views[k] = i, None
            elif all(type(n) is int for n in (*shape, *steps, offset, own[2])):
                views[k] = i, (shape, steps, offset - own[2])
            else:
                return Aliases(graph, {}, reason="a result shares memory with an input of several sizes")
        elif any(storage == s and start < end and begin < stop for s, begin, end in seen):
            return Aliases(graph, {}, reason="two results share memory")
        seen.append((storage, start, stop))
    used = {symbol for formula in numbers.values() for symbol in formula.free_symbols}
    symbols = {symbol: place for symbol, place in symbols.items() if symbol in used}
    return Aliases(_without(graph, {*views, *numbers}) if views or numbers else graph, views, numbers, symbols)


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


def _without(graph: Any, places: Set[int]) -> Any:
    """Return a graph without some places of its result."""
    nodes = torch.fx.Graph()
    found = nodes.graph_copy(graph.graph, {})
    nodes.output(tuple(node for k, node in enumerate(found) if k not in places))
    return torch.fx.GraphModule(graph, nodes)


def _tensor(node: Any) -> Any:
    """Return the tensor that stands for a node's value; None if it is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _geometry(tensor: Any) -> tuple[Any, Any, Any]:
    """Return the sizes, the steps and the offset of a tensor; those that are symbolic as formulas."""

    def plain(n: Any) -> Any:
        return n.node.expr if isinstance(n, torch.SymInt) else n

    return tuple(map(plain, tensor.shape)), tuple(map(plain, tensor.stride())), plain(tensor.storage_offset())
