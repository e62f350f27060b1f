"""Finds the axis of rows of each value that depends on a given value with an axis of rows.

A node is accepted only if its result for a row depends on that row alone, for any number of rows.
"""

from collections.abc import Sequence

import numpy as np
import onnx

from korch.frontend.attributes import NodeAttributes
from korch.frontend.propagate import Propagation

ELEMENTWISE = frozenset(
    [
        "Abs",
        "Add",
        "And",
        "Cast",
        "Celu",
        "Clip",
        "Cos",
        "Div",
        "Elu",
        "Equal",
        "Erf",
        "Exp",
        "Gelu",
        "Greater",
        "GreaterOrEqual",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Min",
        "Mish",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pow",
        "Reciprocal",
        "Relu",
        "Selu",
        "Sigmoid",
        "Sin",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Sub",
        "Sum",
        "Swish",
        "Tanh",
        "ThresholdedRelu",
        "Where",
    ]
)
SHAPES = frozenset(("Concat", "Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Reshape"))
"""Operators that may compute shapes from the number of rows."""

COUNT, FREE = -100, -101
"""Codes in place of an axis: COUNT is a shape that may contain the number of rows, FREE does not depend on rows."""


def row_axes(first: str, nodes: Sequence[onnx.NodeProto], known: Propagation, rows: int) -> dict[str, int] | None:
    """Return the axis of rows of each value; None if a node may mix rows.

    `first`: the result of `NonZero`, whose rows are on its second axis. `nodes`: the nodes that depend on it; the last
    one is a scatter.
    """
    axes = {first: 1}
    for node in nodes[:-1]:
        if any(name not in known.types for name in (*filter(None, node.input), *node.output)) or node.domain:
            return None
        given = {j: axes[name] for j, name in enumerate(node.input) if name in axes}
        found = _axis(node, given, known, rows)
        if found is None:
            return None
        axes |= dict.fromkeys(node.output, found)
    end = nodes[-1]
    is_split = [axes.get(name) for name in end.input[1:]] == [0, 0] and end.input[0] not in axes
    return axes if is_split else None


def _axis(node: onnx.NodeProto, given: dict[int, int], known: Propagation, rows: int) -> int | None:
    """Return the axis of rows of a node's result, or a code in its place; None if the node may mix rows."""
    op, attributes = node.op_type, NodeAttributes(node)
    types = [known.types[name] if name else None for name in node.input]
    out = known.types[node.output[0]]
    given = {j: axis for j, axis in given.items() if axis != FREE}
    if not given:
        return FREE
    if op == "Shape":
        return None if given[0] < 0 else COUNT if attributes else -1 - given[0]  # -1 - (its place in the shape)
    counts = {j for j, axis in given.items() if axis < 0}
    if counts:
        if op == "Gather" and counts == {0} and _takes_others(given[0], known, node):
            return FREE
        is_target = op in ("Reshape", "Expand") and counts == {1} and given.get(0, COUNT) >= 0
        if not is_target:
            return COUNT if op in SHAPES and len(counts) == len(given) else None
        given = {0: given[0]}
    places = set(given.values())
    axis = next(iter(places))
    if op in ELEMENTWISE or op == "Expand":
        moved = {axis + out.rank - types[j].rank for j, axis in given.items()}  # type: ignore[union-attr]
        if len(moved) != 1 or out.shape[min(moved)] != rows:
            return None
        (to,) = moved
        others = [t for j, t in enumerate(types) if j not in given and t is not None and op != "Expand"]
        is_apart = all(t.rank < out.rank - to or t.shape[to - out.rank] == 1 for t in others)
        return to if is_apart else None
    if op == "Concat":
        return (
            axis
            if len(given) == len(types) and len(places) == 1 and attributes.integer("axis") % out.rank != axis
            else None
        )
    if op in ("Gather", "GatherND"):
        return _of_gather(op, attributes, given, known, node)
    if set(given) != {0} or types[0] is None:
        return None
    if op == "Transpose":
        perm = attributes.integers("perm", (*range(out.rank),)[::-1])
        return perm.index(axis)
    if op in ("Reshape", "Flatten"):
        before = int(np.prod(types[0].shape[:axis]))
        fits = (j for j in range(out.rank) if int(np.prod(out.shape[:j])) == before and out.shape[j] == rows)
        return next(fits, None)
    if op in ("MatMul", "Gemm"):
        return (
            axis
            if axis < out.rank - 1 and not attributes.get("transA") and types[1] is not None and types[1].rank == 2
            else None
        )
    return _of_part(op, attributes, axis, known, node)


def _takes_others(place: int, known: Propagation, node: onnx.NodeProto) -> bool:
    """Return whether a node gathers only sizes other than the number of rows from a shape."""
    index, size = known.constants.get(node.input[1]), known.types[node.input[0]].shape[0]
    return place != COUNT and index is not None and not (index % size == -1 - place).any()


def _of_gather(
    op: str, attributes: NodeAttributes, given: dict[int, int], known: Propagation, node: onnx.NodeProto
) -> int | None:
    data, index = (known.types[name] for name in node.input)
    if set(given) == {1} and op == "Gather":
        return attributes.integer("axis", 0) % data.rank + given[1]
    if set(given) == {1}:
        return given[1] if given[1] < index.rank - 1 and not attributes.get("batch_dims", 0) else None
    if set(given) != {0} or op != "Gather":
        return None
    axis = attributes.integer("axis", 0) % data.rank
    return None if axis == given[0] else given[0] + (index.rank - 1 if axis < given[0] else 0)


def _of_part(op: str, attributes: NodeAttributes, axis: int, known: Propagation, node: onnx.NodeProto) -> int | None:
    """Return the axis of rows after a Split, Slice, Squeeze or Unsqueeze; None if that may mix rows."""
    rank, out = known.types[node.input[0]].rank, known.types[node.output[0]]
    if op == "Split":
        return axis if attributes.integer("axis", 0) % rank != axis else None
    place = {"Slice": 3, "Squeeze": 1, "Unsqueeze": 1}.get(op)
    if place is None or len(node.input) <= place:
        return None
    array = known.constants.get(node.input[place])
    if array is None:
        return None
    if op == "Unsqueeze":
        added = {int(a) % out.rank for a in array.reshape(-1)}
        return [j for j in range(out.rank) if j not in added][axis]
    parts = {int(a) % rank for a in array.reshape(-1)}
    if axis in parts:
        return None
    return axis if op == "Slice" else axis - sum(a < axis for a in parts)
