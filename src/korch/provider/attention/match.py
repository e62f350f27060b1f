"""Group -> softmax(f(q k)) v: the two products, and the three inputs that they read."""

from __future__ import annotations

from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.types import DType
from korch.provider.attention.groups import find_softmax
from korch.provider.gemm.match import source_of


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention.

    Attributes:
        first: the product q k.
        second: the product of the weights and v.
        q: the position of the input that the queries are.
        k: the same of the keys.
        v: the same of the values.
        weighed: the value that the softmax is of.
        is_guarded: whether weights that are not numbers become 0.
    """

    first: Primitive
    second: Primitive
    q: int
    k: int
    v: int
    weighed: int
    is_guarded: bool


def match_group(group: Group) -> Attention | Refusal:
    """Return what a group is, or why it is no attention."""
    body = group.body
    products = body.linear
    if [p.op for p in products] != ["matmul", "matmul"]:
        return Refusal("it is not two matrix products")
    first, second = products
    softmax = find_softmax(body, second.inputs[0])
    if softmax is None:
        return Refusal("no softmax is the left operand of the second product")
    inside = {primitive.output for primitive in softmax.primitives}  # a guard's are truth values
    others = (type_ for value, type_ in enumerate(body.types) if value not in inside)
    if any(type_.dtype is not DType.F32 for type_ in others):
        return Refusal("the elements are not all float32")
    for p in body.primitives:
        if p.row.category in (Category.REDUCE, Category.OPAQUE) and p.output not in inside:
            return Refusal(f"{p.op} is not fused into attention")
    q, k, v = (source_of(group, value) for value in (*first.inputs, second.inputs[1]))
    if q is None or k is None or v is None:
        return Refusal("an operand is computed in the group")
    return Attention(first, second, q, k, v, softmax.x, softmax.is_guarded)
