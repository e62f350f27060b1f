"""Splits all operators of a model into a primitive graph.

The first rule that holds for an operator splits it. An operator without a rule, or whose rule
does not apply, is kept whole, and the report gives the reason.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from korch.errors import InvalidGraphError, ModelError
from korch.fission.context import Context
from korch.fission.opaque import keep_whole
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.frontend.operator import Operator, OperatorGraph
from korch.frontend.shapes import check_size
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.op import Array, Category
from korch.primitive.types import ValueId, ValueType

MOST_KNOWN = 4096
"""The most elements of an array whose contents rules may read when an operator is evaluated."""


@dataclass(frozen=True, slots=True)
class KeptWhole:
    """An operator that became opaque."""

    operator: str  # the operator's label, as in the primitives' origins
    op_type: str  # the operator's type
    reason: str  # why it was not split


@dataclass(frozen=True, slots=True)
class FissionReport:
    """The result of fission in numbers."""

    split: int  # how many operators were split
    kept: tuple[KeptWhole, ...]  # the operators that were kept whole, in the model's order


def split_operators(
    graph: OperatorGraph, rules: Mapping[str, tuple[FissionRule, ...]]
) -> tuple[PrimitiveGraph, FissionReport]:
    """Split every operator by the given rules.

    Returns:
        The primitive graph, and the report.

    Raises:
        ModelError: an operator contradicts its definition, or the result of one that is kept whole is too large.
    """
    builder = GraphBuilder()
    values = {name: builder.input(name, graph.types[name]) for name in graph.inputs}
    for name, array in graph.constants.items():
        values[name] = builder.constant(array)
        if name in graph.sized:
            builder.sized.add(values[name])
    read = frozenset(graph.outputs) | {n for operator in graph.operators for n in operator.inputs}
    kept: list[KeptWhole] = []
    for operator in graph.operators:
        context = Context(operator, builder, values, graph.types, read)
        if operator.iteration is not None:
            context.iteration = split_operators(operator.iteration.graph, rules)[0]
        try:
            outputs = _split(context, rules)
        except NotSplitError as error:
            outputs = keep_whole(context)
            kept.append(KeptWhole(operator.label, operator.op_type, str(error)))
        _name(context, outputs, values)
    for name in graph.outputs:
        builder.output(name, values[name])
    report, found = FissionReport(len(graph.operators) - len(kept), tuple(kept)), builder.freeze()
    for primitive, origin in zip(found.primitives, found.origins, strict=True):
        if primitive.op == "opaque":
            check_size(found.types[primitive.output], origin)
    return found, report


def evaluate_operator(
    operator: Operator,
    types: Mapping[str, ValueType],
    arrays: Mapping[str, Array],
    rules: Mapping[str, tuple[FissionRule, ...]],
) -> list[Array] | None:
    """Return the outputs of an operator whose inputs are known, computed by the primitives' interpreter.

    Floats are computed in float64 and rounded once. Where elements are only moved, nothing is rounded; and integers
    that result from floats, as in a quantization, depend on the roundings of the operator's own types.

    `arrays`: its inputs by name.

    Returns:
        One array for each output, an empty one for an omitted output; None if no rule splits the operator.
    """
    builder, names = GraphBuilder(folds=False), [name for name in operator.outputs if name]
    feeds = {name: arrays[name] for name in dict.fromkeys(operator.inputs) if name}
    large = {name for name, array in feeds.items() if array.size > MOST_KNOWN}
    values = {
        name: builder.input(name, types[name]) if name in large else builder.constant(array)
        for name, array in feeds.items()
    }
    context = Context(operator, builder, values, types, frozenset(names))
    try:
        _name(context, _split(context, rules), values)
    except NotSplitError:
        return None
    for name in names:
        builder.output(name, values[name])
    graph = builder.freeze()
    is_exact = all(types[name].dtype.is_float for name in names) and any(
        p.row.category not in (Category.LAYOUT, Category.BROADCAST) for p in graph.primitives
    )
    with np.errstate(all="ignore"):
        found = reference.run(graph, {name: feeds[name] for name in large}, exact=is_exact)
        return [
            found[name].astype(types[name].dtype.numpy, copy=False) if name else np.zeros(0)
            for name in operator.outputs
        ]


def _split(c: Context, rules: Mapping[str, tuple[FissionRule, ...]]) -> dict[int, ValueId]:
    """Split one operator; return the value of each output by position.

    Raises:
        NotSplitError: no rule splits it.
    """
    result = _nothing(c) or _build(c, _find(c.operator, rules))
    return dict(enumerate(result if isinstance(result, Sequence) else (result,)))


def _name(c: Context, outputs: Mapping[int, ValueId], values: dict[str, ValueId]) -> None:
    """Record the values of an operator's outputs by name."""
    for position, value in outputs.items():
        if position < len(c.operator.outputs) and c.operator.outputs[position]:
            _check_type(c, position, value)
            values[c.operator.outputs[position]] = value


def _nothing(c: Context) -> tuple[ValueId, ...]:
    """Return the outputs of an operator whose outputs are all empty; () if one has elements."""
    types = [c.output_type(i) for i, name in enumerate(c.operator.outputs) if name]
    if any(type_.size for type_ in types) or len(types) < len(c.operator.outputs):
        return ()
    return tuple(c.full(0, type_) for type_ in types)


def _build(c: Context, rule: FissionRule) -> Result:
    """Apply a rule; its errors mean that the model breaks the operator's definition where ONNX does not check it."""
    try:
        return rule.build(c)
    except (InvalidGraphError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        raise ModelError(
            f"its inputs or attributes contradict the operator's definition ({error})", where=c.operator.label
        ) from error


def _check_type(c: Context, position: int, value: ValueId) -> None:
    found, expected = c.builder.type(value), c.output_type(position)
    if c.is_read(position) and found != expected:
        raise InvalidGraphError(
            f"output {position} was split into {found}", where=c.operator.label, expected=str(expected)
        )


def _find(operator: Operator, rules: Mapping[str, tuple[FissionRule, ...]]) -> FissionRule:
    candidates = rules.get(operator.op_type, ()) if not operator.domain else ()
    for candidate in candidates:
        if candidate.holds_for(operator.version):
            return candidate
    if operator.op_type.startswith("TreeEnsemble"):
        raise NotSplitError("the next node of a tree depends on data")
    raise NotSplitError("no rule for this opset" if candidates else "no rule")
