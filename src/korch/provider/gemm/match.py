"""Recognizes a group that consists of one matrix product, and finds the inputs that are its operands."""

from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.schedule.contraction import refuse_outputs, refuse_types, root_of

MOVES = ("transpose", "reshape", "slice", "take")
"""Operations allowed between an input and the product, besides casts that widen 16-bit floats or constant bytes."""


@dataclass(frozen=True, eq=False)
class MatchedProduct:
    """A matrix product and the positions of the two inputs that are its operands, perhaps after moves."""

    primitive: Primitive
    a: int
    b: int


def match_group(group: Group) -> MatchedProduct | Refusal:
    """Return the matrix product of a group, or why the group is not one matrix product."""
    root = root_of(group, "matmul")
    if isinstance(root, Refusal):
        return root
    stored = {cast.inputs[0] for cast in group.body.primitives if is_widened(group, cast)}
    refusal = refuse_types(group.body, root, inside=stored, with_bytes=True) or refuse_outputs(group.body, root)
    if refusal is not None:
        return refusal
    a, b = (source_of(group, value) for value in root.inputs)
    if a is None or b is None:
        return Refusal("an operand is computed in the group")
    return MatchedProduct(root, a, b)


def source_of(group: Group, value: int) -> int | None:
    """Return the position of the input from which a value is computed by moves and widening casts only, or None."""
    while value not in group.position:
        makers = group.body.producers[value]
        maker = group.body.primitives[makers[0]] if makers else None
        if maker is None or not (maker.op in MOVES or is_widened(group, maker)):
            return None
        value = maker.inputs[0]
    return group.position[value]


def is_widened(group: Group, cast: Primitive) -> bool:
    """Return whether a primitive is a cast that widens 16-bit floats or constant bytes."""
    return group.body.is_widening(cast, group.position.get(cast.inputs[0]) in group.constant_inputs)
