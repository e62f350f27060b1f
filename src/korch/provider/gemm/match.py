"""Group -> one matrix product, and where its operands and results lie."""

from __future__ import annotations

from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.schedule.contraction import refuse_types, root_of

MOVES = ("transpose", "reshape", "slice", "take")
"""What may stand between an input and a product, beside casts that widen 16-bit floats or constant bytes."""


@dataclass(frozen=True, eq=False)
class MatchedProduct:
    """A product: the positions of the two inputs that it reads, perhaps moved."""

    primitive: Primitive
    a: int
    b: int


def match_group(group: Group) -> MatchedProduct | Refusal:
    """Return what a group is, or why it is not a matrix product."""
    root = root_of(group, "matmul")
    if isinstance(root, Refusal):
        return root
    stored = {cast.inputs[0] for cast in group.body.primitives if is_widened(group, cast)}
    refusal = refuse_types(group.body, root, inside=stored, with_bytes=True)
    if refusal is not None:
        return refusal
    a, b = (source_of(group, value) for value in root.inputs)
    if a is None or b is None:
        return Refusal("an operand is computed in the group")
    return MatchedProduct(root, a, b)


def source_of(group: Group, value: int) -> int | None:
    """Return the position of the input that only was moved to give a value; None if it is none."""
    while value not in group.position:
        makers = group.body.producers[value]
        maker = group.body.primitives[makers[0]] if makers else None
        if maker is None or not (maker.op in MOVES or is_widened(group, maker)):
            return None
        value = maker.inputs[0]
    return group.position[value]


def is_widened(group: Group, cast: Primitive) -> bool:
    """Return whether a primitive widens 16-bit floats, or bytes that are constant."""
    return group.body.is_widening(cast, group.position.get(cast.inputs[0]) in group.constant_inputs)
