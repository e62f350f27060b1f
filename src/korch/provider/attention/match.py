"""Recognizes a group that computes softmax(f(q k)) v: two products with a softmax between them."""

from korch.candidate.candidate import Group, Refusal
from korch.primitive.op import Category
from korch.provider.attention.groups import find_softmax
from korch.schedule.contraction import FLOATS
from korch.schedule.heads import Attention


def match_group(group: Group) -> Attention | Refusal:
    """Return the attention that a group computes, or why the group is not attention."""
    body = group.body
    products = body.linear
    if [p.op for p in products] != ["matmul", "matmul"]:
        return Refusal("it is not two matrix products")
    first, second = products
    if body.types[first.output].dtype not in FLOATS:
        return Refusal("the elements are not floats of at most 32 bits")
    softmax = find_softmax(body, second.inputs[0])
    if softmax is None:
        return Refusal("no softmax is the left operand of the second product")
    inside = frozenset(primitive.output for primitive in softmax.primitives)
    others = [p for p in body.primitives if p.output not in inside]
    if any(p.row.category in (Category.REDUCE, Category.OPAQUE) for p in others):
        return Refusal("a reduction beside the softmax is not fused")
    if body.types[first.output].shape[:-2] != body.types[second.output].shape[:-2]:
        return Refusal("the products have different batches")
    return Attention(first, second, softmax.x, softmax.is_guarded, inside)
