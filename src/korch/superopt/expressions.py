"""Computation over named axes -> the steps that can lead to its result, by the laws of algebra.

The terms of the computation are values of a `GraphBuilder`, with one dimension for each axis, and the graph is
saturated with the laws as rewrite rules. Its classes of equal values are then the expressions that occur in some way
to compute the result. A program is found step by step, and a step whose expression is in no class can't lead to the
result. There is no law that cancels (x / x = 1): with it, any expression could occur in any result.

Source: Mirage (Wu et al., OSDI 2025), section 4: pruning by abstract expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, View, Write, Writer
from korch.equivalence.saturate import SaturationLimits, saturate
from korch.primitive.graph import GraphBuilder, Primitive, PrimitiveGraph
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.primitive.types import DType, ValueType
from korch.superopt.axes import Named

COMMUTATIVE = ("mul", "add", "max", "min")

LIMITS = SaturationLimits(iterations=8, values=2500, seconds=6.0)
"""Limits of saturation; an expression that is not found within them is assumed not to lead to the result."""

Recipe = int | tuple["str | Recipe", ...]
"""A value; or an operation with its arguments; or a sum with its axis and its argument."""


@dataclass(frozen=True, slots=True, order=True)
class Expression:
    """A step that can lead to the result."""

    op: str  # the last operation
    arguments: tuple[int, ...]  # the classes that are read
    result: int  # the class that is computed
    axis: str = ""  # of a reduction, the axis that it reduces
    # elementwise steps, in order, that are fused with it: the level of threads, which is not searched. The last one is
    # the step itself if that is elementwise.
    body: tuple[Expression, ...] = ()


@dataclass(frozen=True)
class Expressions:
    """All expressions that can lead to the result."""

    goal: int  # the class of the result
    steps: tuple[Expression, ...]  # the expressions
    inputs: Mapping[int, int]  # the class of each input, by the number of its term
    numbers: Mapping[int, float]  # the value of each class that is a number
    axes: Mapping[int, tuple[str, ...]]  # the axes of each class
    is_complete: bool  # whether no limit ended the saturation


def expressions(computation: Named, joins: bool = True) -> Expressions:
    """Return the expressions that lead to the result of a computation.

    `joins`: whether functions of one value are merged into the step that reads them.
    """
    order = sorted(computation.sizes)
    graph = _as_graph(computation, order)
    found, report = saturate(graph, strict=False, rules=AXIOMS, limits=LIMITS)
    return _ClassTable(found, order, report.stopped == "saturated").read(joins)


def _as_graph(computation: Named, order: list[str]) -> PrimitiveGraph:
    """Return terms as values with one dimension for each axis, of size 1 where they don't depend on it."""
    builder, values = GraphBuilder(), list[int]()
    for number, term in enumerate(computation.terms):
        arguments = [values[a] for a in term.arguments]
        if term.op == "input":
            # Sizes only identify axes here: each axis has the size 2 + its number.
            shape = tuple(2 + i if axis in term.axes else 1 for i, axis in enumerate(order))
            values.append(builder.input(f"t{number}", ValueType(shape, DType.F32)))
        elif term.op == "number":
            values.append(builder.constant(np.full((1,) * len(order), term.value, np.float32)))
        elif term.axis:
            values.append(builder.add(term.op, arguments, ReduceAttributes((order.index(term.axis),))))
        else:
            values.append(_joined(builder, term.op, arguments))
    builder.output("y", values[-1])
    return builder.freeze()


def _joined(builder: GraphBuilder | Writer, op: str, values: list[int]) -> int:
    """Add an elementwise operation on values that are broadcast to each other first."""
    shapes = [builder.type(value).shape for value in values]
    shape = tuple(map(max, zip(*shapes, strict=True)))
    values = sorted(values) if op in COMMUTATIVE else values
    wide = [
        value if builder.type(value).shape == shape else builder.add("broadcast", (value,), BroadcastAttributes(shape))
        for value in values
    ]
    return builder.add(op, wide)


def _pairs(view: View, value: int, *ops: str) -> Iterator[tuple[str, int, int]]:
    for p in view.producing(value, *ops):
        a, b = (view.unbroadcast(x) for x in p.inputs)
        yield p.op, a, b


def _axis(primitive: Primitive) -> int:
    return primitive.attributes_as(ReduceAttributes).axes[0]


def _varies(view: View, value: int, axis: int) -> bool:
    return view.shape(value)[axis] != 1


def _sums(view: View, root: Primitive) -> Iterator[Recipe]:
    """Move factors out of sums over axes that they don't depend on; swap nested sums; split sums of additions."""
    axis, x = _axis(root), root.inputs[0]
    for op, a, b in _pairs(view, x, "mul", "div"):
        if view.constant(a) is not None or view.constant(b) is not None:
            continue  # the position of a constant factor makes no difference
        if not _varies(view, b, axis):
            yield op, ("sum", str(axis), a), b
        elif op == "mul" and not _varies(view, a, axis):
            yield op, a, ("sum", str(axis), b)
    for op, a, b in _pairs(view, x, "add", "sub"):
        if _varies(view, a, axis) and _varies(view, b, axis):
            yield op, ("sum", str(axis), a), ("sum", str(axis), b)
    for inner in view.producing(x, "reduce_sum"):
        yield "sum", str(_axis(inner)), ("sum", str(axis), inner.inputs[0])


def _factors(view: View, root: Primitive) -> Iterator[Recipe]:
    """Reassociate products and quotients, and move factors into sums over axes that they don't depend on."""
    a, b = (view.unbroadcast(value) for value in root.inputs)
    ways = ((a, b), (b, a)) if root.op == "mul" else ((a, b),)
    for x, y in ways if view.constant(a) is None is view.constant(b) else ():
        for inner in view.producing(x, "reduce_sum"):
            if not _varies(view, y, _axis(inner)):
                yield "sum", str(_axis(inner)), (root.op, inner.inputs[0], y)
        for op, c, d in _pairs(view, x, "mul", "div"):
            if view.constant(c) is None is view.constant(d):
                yield from _associated(root.op, op, c, d, y)


def _associated(outer: str, inner: str, c: int, d: int, y: int) -> Iterator[Recipe]:
    """Yield other forms of (c inner d) outer y."""
    match outer, inner:
        case "mul", "mul":
            yield "mul", c, ("mul", d, y)
            yield "mul", d, ("mul", c, y)
        case "mul", "div":
            yield "div", ("mul", c, y), d
            yield "mul", c, ("div", y, d)
        case "div", "mul":
            yield "mul", c, ("div", d, y)
            yield "mul", d, ("div", c, y)
        case _:
            yield "div", ("div", c, y), d


def _additions(view: View, root: Primitive) -> Iterator[Recipe]:
    """Replace the addition of two sums along the same axis by one sum."""
    a, b = (view.unbroadcast(value) for value in root.inputs)
    for x in view.producing(a, "reduce_sum"):
        for y in view.producing(b, "reduce_sum"):
            if _axis(x) == _axis(y):
                yield "sum", str(_axis(x)), (root.op, x.inputs[0], y.inputs[0])


def _written(writer: Writer, recipe: Recipe) -> int:
    if isinstance(recipe, int):
        return recipe
    op, *arguments = recipe
    if op == "sum":
        axis, argument = arguments
        value = _written(writer, argument) if not isinstance(argument, str) else 0
        return writer.add("reduce_sum", (value,), ReduceAttributes((int(str(axis)),)))
    return _joined(writer, str(op), [_written(writer, a) for a in arguments if not isinstance(a, str)])


def _axiom(name: str, law: str, roots: tuple[str, ...], ways: Callable[[View, Primitive], Iterator[Recipe]]) -> AnyRule:
    def match(view: View, root: Primitive) -> Iterator[tuple[Primitive, Recipe]]:
        for recipe in ways(view, root):
            yield root, recipe

    def rewrite(_: View, found: tuple[Primitive, Recipe]) -> Write:
        return lambda writer: _written(writer, found[1])

    return Rule(name, law, "distributivity, associativity", roots, match, rewrite, reorders=True)


AXIOMS: tuple[AnyRule, ...] = (
    _axiom("sums-distribute", "Σ a c = c Σ a, Σ a + b = Σ a + Σ b, ΣΣ a = ΣΣ a", ("reduce_sum",), _sums),
    _axiom("factors-associate", "(a b) c = a (b c), a / b c = (a c) / b", ("mul", "div"), _factors),
    _axiom("sums-join", "Σ a + Σ b = Σ a + b", ("add", "sub"), _additions),
)


def joined(
    steps: list[Expression], goal: int, numbers: Mapping[int, float], axes: Mapping[int, tuple[str, ...]]
) -> list[Expression]:
    """Return steps in which functions of one value that one step only reads are merged with a neighbouring step."""
    found = list(steps)
    while (pair := _next_pair(found, goal, numbers, axes)) is not None:
        first, second = pair
        body = (*first.body, *second.body)
        inside = {step.result for step in body}
        read = dict.fromkeys(a for step in body for a in step.arguments if a not in inside)
        made = replace(second, arguments=tuple(read), body=body)
        found = [step for step in found if step not in pair] + [made]
    return found


def _next_pair(
    steps: list[Expression], goal: int, numbers: Mapping[int, float], axes: Mapping[int, tuple[str, ...]]
) -> tuple[Expression, Expression] | None:
    makers: dict[int, list[Expression]] = {}
    readers: dict[int, list[Expression]] = {}
    for step in steps:
        makers.setdefault(step.result, []).append(step)
        for a in step.arguments:
            readers.setdefault(a, []).append(step)
    for value, (maker, *others) in makers.items():
        if others or maker.axis or value == goal or len(readers.get(value, ())) != 1:
            continue
        (reader,) = readers[value]
        is_alone = all(a == value or a in numbers for a in reader.arguments)
        if is_alone and (
            not reader.axis or (axes[value] in [axes[a] for a in maker.arguments] and _is_unary(maker, numbers))
        ):
            return maker, reader
    return None


def _is_unary(step: Expression, numbers: Mapping[int, float]) -> bool:
    return len({a for a in step.arguments if a not in numbers}) == 1


class _ClassTable:
    """The classes of a saturated graph, without broadcasts."""

    def __init__(self, graph: PrimitiveGraph, order: list[str], is_complete: bool) -> None:
        self.graph, self.order, self.is_complete = graph, order, is_complete
        self.same = list(range(len(graph.types)))
        for primitive in graph.primitives:
            if primitive.op == "broadcast":
                self.same[primitive.output] = primitive.inputs[0]

    def find(self, value: int) -> int:
        while self.same[value] != value:
            value = self.same[value]
        return value

    def read(self, joins: bool) -> Expressions:
        steps = self._steps()
        while (merged := self._congruent(steps)) is not None:
            steps = merged
        graph, order = self.graph, self.order
        inputs = {int(name[1:]): self.find(value) for name, value in graph.inputs}
        numbers = {self.find(value): float(constant.scalar) for value, constant in graph.constants.items()}
        axes = {
            value: tuple(axis for axis, n in zip(order, graph.types[value].shape, strict=True) if n != 1)
            for value in {self.find(v) for v in range(len(graph.types))}
        }
        goal = self.find(graph.outputs[0][1])
        single = [step if step.axis else replace(step, body=(step,)) for step in steps]
        whole = joined(single, goal, numbers, axes) if joins else single
        return Expressions(goal, tuple(whole), inputs, numbers, axes, self.is_complete)

    def _steps(self) -> list[Expression]:
        found = []
        for p in self.graph.primitives:
            if p.op != "broadcast":
                axis = self.order[_axis(p)] if p.op.startswith("reduce_") else ""
                found.append(Expression(p.op, p.inputs, p.output, axis))
        return self._renamed(found)

    def _renamed(self, steps: list[Expression]) -> list[Expression]:
        found: dict[Expression, None] = {}
        for step in steps:
            arguments = tuple(self.find(a) for a in step.arguments)
            arguments = tuple(sorted(arguments)) if step.op in COMMUTATIVE else arguments
            found[Expression(step.op, arguments, self.find(step.result), step.axis)] = None
        return list(found)

    def _congruent(self, steps: list[Expression]) -> list[Expression] | None:
        """Return the steps after equal steps are given the same result; None if none are equal."""
        results: dict[tuple[object, ...], int] = {}
        changed = False
        for step in steps:
            key = step.op, step.arguments, step.axis
            other = self.find(results.setdefault(key, step.result))
            own = self.find(step.result)
            if other != own:
                self.same[max(own, other)], changed = min(own, other), True
        return self._renamed(steps) if changed else None
