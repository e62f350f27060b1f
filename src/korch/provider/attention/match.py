"""Group -> softmax(f(q k)) v: the two products, f between them, and what follows."""

from __future__ import annotations

from dataclasses import dataclass

from korch.candidate.candidate import Group, Refusal
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.types import DType
from korch.provider.attention.groups import find_softmax
from korch.provider.gemm.match import MOVES, Operand, operand_of


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention.

    Attributes:
        first: the product q k.
        second: the product of the weights and v.
        q: how the queries are read.
        k: the keys.
        v: the values.
        between: the steps from the first product to the softmax.
        weighed: the value that the softmax is of.
        after: the steps that follow the second product.
        is_guarded: whether weights that are not numbers become 0.
    """

    first: Primitive
    second: Primitive
    q: Operand
    k: Operand
    v: Operand
    between: tuple[Primitive, ...]
    weighed: int
    after: tuple[Primitive, ...]
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
    sides = [operand_of(group, value) for value in (*first.inputs, second.inputs[1])]
    for side in sides:
        if isinstance(side, Refusal):
            return side
    q, k, v = (side for side in sides if isinstance(side, Operand))
    known = {id(p) for p in (*products, *softmax.primitives, *q.steps, *k.steps, *v.steps)}
    rest = [p for p in body.primitives if id(p) not in known]
    between = tuple(_before(body, softmax.x, rest))
    after = tuple(p for p in rest if p not in between)
    for primitive in rest:
        is_step = primitive.row.category is Category.ELEMENTWISE or primitive.op == "broadcast"
        if not is_step and (primitive.op not in MOVES or primitive in between):
            return Refusal(f"{primitive.op} is not fused into attention")
    return Attention(first, second, q, k, v, between, softmax.x, after, softmax.is_guarded)


def _before(body: PrimitiveGraph, value: int, rest: list[Primitive]) -> list[Primitive]:
    """Return those of some primitives that a value is computed by, each after what it reads."""
    wanted, found = {value}, []
    for primitive in reversed(rest):
        if primitive.output in wanted:
            wanted.update(primitive.inputs)
            found.append(primitive)
    return found[::-1]
