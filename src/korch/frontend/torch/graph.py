"""Exports a graph of torch.compile as ONNX, for the sizes of a call or for all sizes of its symbolic dimensions."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from korch.errors import UnsupportedError
from korch.frontend.torch.free import FreeModule, largest
from korch.ranges.form import Dimension

MOST_ELEMENTS = 1 << 20
"""The default upper bound of a size is chosen so that the inputs with this size have at most this many elements
together, unless the first call has more."""


class BoundGraph(torch.nn.Module):  # type: ignore[misc]
    """A graph with its weights and some numbers bound, so that they are constants of the exported model."""

    def __init__(
        self, graph: Any, weights: Mapping[int, Any], numbers: Mapping[int, Any], sizes: Mapping[int, tuple[int, int]]
    ) -> None:
        """Bind some inputs.

        Args:
            graph: a torch.fx.GraphModule.
            weights: the weights, by position among the graph's inputs.
            numbers: the numbers, also by position.
            sizes: the inputs that are sizes, also by position: the number of an input that is not bound, and an axis.
        """
        super().__init__()
        self.graph, self._numbers, self._sizes = graph, numbers, sizes
        names = [node.name for node in inputs_of(graph)]
        self._of = {i: f"weight_{names[i]}" for i in weights}
        self._count = len(names)
        for i, weight in weights.items():
            if isinstance(weight, torch.nn.Parameter):
                self.register_parameter(self._of[i], weight)
            else:
                self.register_buffer(self._of[i], weight)

    def forward(self, *dynamic: Any) -> Any:
        """Run the graph with the inputs that are not bound; numbers among them are tensors."""
        bound = {i: getattr(self, name) for i, name in self._of.items()} | dict(self._numbers)
        bound |= {i: dynamic[k].shape[axis] for i, (k, axis) in self._sizes.items()}
        rest = iter(dynamic)
        return self.graph(*(bound[i] if i in bound else next(rest) for i in range(self._count)))


def inputs_of(graph: Any) -> list[Any]:
    """Return the placeholder nodes of a graph."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def numbers_of(graph: Any) -> frozenset[int]:
    """Return the positions of the inputs that are integers and no sizes of other inputs, such as a position."""
    nodes = inputs_of(graph)
    values = [node.meta.get("example_value") for node in nodes]
    sizes = {size.node.expr for x in values if isinstance(x, torch.Tensor) for size in x.shape if _is_symbolic(size)}
    return frozenset(i for i, value in enumerate(values) if _is_symbolic(value) and value.node.expr not in sizes)


def with_tensors(graph: Any) -> Any:
    """Return a graph whose inputs that are integers may be tensors of rank 0."""
    nodes = torch.fx.Graph()
    output = nodes.graph_copy(graph.graph, {})
    nodes.output(output)
    for node in nodes.nodes:
        if node.op == "call_function" and node.target in _OF_TENSORS:
            node.target = _OF_TENSORS[node.target]
    return torch.fx.GraphModule(graph, nodes)


def _largest_of(*values: Any) -> Any:
    return reduce(torch.maximum, map(torch.as_tensor, values))


def _least_of(*values: Any) -> Any:
    return reduce(torch.minimum, map(torch.as_tensor, values))


_OF_TENSORS = {torch.sym_max: _largest_of, max: _largest_of, torch.sym_min: _least_of, min: _least_of}
"""Functions of integers, and what computes the same of tensors."""


def as_input(arg: Any) -> Any:
    """Return an input of a graph as a tensor."""
    return arg if isinstance(arg, torch.Tensor) else torch.tensor(arg)


def like(arg: Any) -> Any:
    """Return a copy with the same strides; an argument that is not a tensor is returned itself."""
    if not isinstance(arg, torch.Tensor):
        return arg
    length = 1 + sum((n - 1) * step for n, step in zip(arg.shape, arg.stride(), strict=True)) if arg.numel() else 0
    return arg.detach().as_strided((length,), (1,)).clone().as_strided(arg.shape, arg.stride())


@dataclass(frozen=True, eq=False)
class FreeGraph:
    """A graph for all sizes of its symbolic dimensions."""

    module: FreeModule  # the module, which takes the input tensors that are not weights
    # (position of an input, axis, number of a dimension) of each symbolic axis; no axis if the input is the size itself
    axes: tuple[tuple[int, int | None, int], ...]
    tensors: tuple[int, ...]  # the positions of the inputs that the module takes
    numbers: Mapping[int, Any]  # the inputs that are constants of the module and no weights, by position

    def takes(self, args: Sequence[Any]) -> bool:
        """Return whether the sizes of a call are within the ranges of the dimensions, and its numbers are the same."""
        dimensions = self.module.dimensions
        is_within = all(dimensions[d].low <= n <= dimensions[d].high for d, n in self._sizes(args))
        return is_within and not self._splits(args) and all(args[i] == number for i, number in self.numbers.items())

    def is_left(self, args: Sequence[Any]) -> bool:
        """Return whether a size of a call is above its range, or those of one dimension differ."""
        return self._splits(args) or any(self.module.dimensions[d].high < n for d, n in self._sizes(args))

    def _splits(self, args: Sequence[Any]) -> bool:
        return len(set(self._sizes(args))) > len(self.module.dimensions)

    def _sizes(self, args: Sequence[Any]) -> list[tuple[int, int]]:
        return [(d, args[i] if axis is None else args[i].shape[axis]) for i, axis, d in self.axes]


def free_graph(
    graph: Any,
    args: Sequence[Any],
    weights: Mapping[int, Any],
    most: int,
    earlier: Sequence[Sequence[Any]] = (),
    given: Set[int] = frozenset(),
) -> FreeGraph | None:
    """Return a graph for all sizes of its symbolic dimensions; None if it has none.

    Axes without an upper bound are one dimension if they have equal sizes in all calls so far: PyTorch gives each
    tensor of a cache a symbol of its own. A number that has been equal to a size so far is that size.

    `weights`: the constants among the arguments, by position. `most`: the largest size of a dimension without an upper
    bound, unless the call has a larger one; if there are several such dimensions, the largest product of their sizes.
    `given`: the positions of numbers that are passed as tensors; the others are constants.

    Raises:
        UnsupportedError: the sizes can't be derived from the tensors.
    """
    nodes, places = inputs_of(graph), dict[Any, list[tuple[int, int]]]()
    numbers = dict[Any, Any]()  # the dimension of each symbol
    calls = [shapes_of(args), *earlier]
    for i, node in enumerate(nodes):
        value = node.meta.get("example_value")
        if i in weights or not isinstance(value, torch.Tensor):
            continue
        for axis, size in enumerate(value.shape):
            symbol = _symbol(size, f"input {node.name!r}, axis {axis}")
            if symbol is not None:
                is_bounded = largest(_bounds(size)) is not None
                key = numbers.setdefault(symbol, symbol if is_bounded else tuple(shapes[i][axis] for shapes in calls))
                places.setdefault(key, []).append((i, axis))
    if not places:
        return None
    order = list(places)
    axes = [(i, axis, order.index(key)) for key, own in places.items() for i, axis in own]
    symbols = {i: _symbol(node.meta.get("example_value"), f"input {node.name!r}") for i, node in enumerate(nodes)}
    tensors = tuple(
        i for i, arg in enumerate(args) if i in given or (isinstance(arg, torch.Tensor) and i not in weights)
    )
    firsts = {symbol: places[key][0] for symbol, key in numbers.items()}
    known = {i: firsts[s] for i, s in symbols.items() if s in firsts}
    rest = {i: arg for i, arg in enumerate(args) if not isinstance(arg, torch.Tensor) and i not in {*known, *given}}
    equal = {i: key for i in rest if (key := _equal_size(i, calls, places)) is not None}
    known |= {i: places[key][0] for i, key in equal.items()}
    sizes = {i: (tensors.index(k), axis) for i, (k, axis) in known.items()}
    others = {i: arg for i, arg in rest.items() if i not in equal}
    bound = BoundGraph(graph, weights, others, sizes)
    with torch.inference_mode(False), torch.no_grad():
        module = FreeModule.at_largest(
            _dimensions(nodes, args, list(places.values()), most),
            {(tensors.index(i), axis): number for i, axis, number in axes},
            (bound, [like(as_input(args[i])) for i in tensors], {}, "graph"),
        )
    all_axes = (*axes, *((i, None, order.index(key)) for i, key in equal.items()))
    return FreeGraph(module, all_axes, tensors, others)


def _equal_size(
    number: int, calls: Sequence[Sequence[Any]], places: Mapping[Any, Sequence[tuple[int, int]]]
) -> Any | None:
    """Return the dimension whose size is the same as a number in all calls; None if there is none."""
    for key, ((i, axis), *_) in places.items():
        if all(type(shapes[number]) is int and shapes[number] == shapes[i][axis] for shapes in calls):
            return key
    return None


def shapes_of(args: Sequence[Any]) -> list[Any]:
    """Return the shape of each argument, and those that are no tensors themselves."""
    return [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args]


def _bounds(size: Any) -> Any:
    """Return the range of a symbolic size."""
    return size.node.shape_env.var_to_range[size.node.expr]


def _is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _symbol(size: Any, where: str) -> Any:
    """Return the symbol of a size; None if it is constant."""
    if not _is_symbolic(size):
        return None
    if not size.node.expr.is_Symbol:
        raise UnsupportedError(f"its size is {size.node.expr}, which follows from another one", where)
    return size.node.expr


def _dimensions(
    nodes: Sequence[Any], args: Sequence[Any], places: Sequence[Sequence[tuple[int, int]]], most: int
) -> tuple[Dimension, ...]:
    """Return the dimension of each list of places, with the range that PyTorch knows or a default."""
    sizes = [nodes[i].meta["example_value"].shape[axis] for ((i, axis), *_) in places]
    unbounded = sum(largest(_bounds(size)) is None for size in sizes)
    found = []
    for own, size in zip(places, sizes, strict=True):
        (i, axis), *_ = own
        high = largest(_bounds(size))
        if high is None:
            high = default_high(args, own, int(most ** (1 / unbounded)))
        lows = [int(_bounds(nodes[k].meta["example_value"].shape[a]).lower) for k, a in own]
        found.append(Dimension(nodes[i].name, axis, max(1, *lows), high))
    return tuple(found)


def default_high(args: Sequence[Any], own: Sequence[tuple[int, int]], most: int) -> int:
    """Return an upper bound for a size without one: a power of two, at least the size of the first call."""
    (first, first_axis), *_ = own
    now = max(1, int(args[first].shape[first_axis]))
    elements = max(1, sum(int(args[i].numel()) for i in {i for i, _ in own}) // now)
    fitting = min(most, max(1, MOST_ELEMENTS // elements))
    return max(1 << (fitting.bit_length() - 1), 1 << (now - 1).bit_length())
