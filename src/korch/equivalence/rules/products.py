"""Computes chains of matrix products in their cheaper order."""

import math

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, stands
from korch.primitive.pattern import Found, either, op

_CHAIN = either(op("matmul", op("matmul", "a", "b", name="first"), "c"), op("matmul", "a", op("matmul", "b", "c")))
"""(a b) c or a (b c)."""


def _rewrite(view: View, match: Found) -> Write | RuleRefusal:
    root, is_left_first = match.root, "first" in match.values
    if not view.type(root.output).dtype.is_float:
        return RuleRefusal("products of integers wrap", root.output)
    x, y, z = match.values["a"], match.values["b"], match.values["c"]
    a, b, c = map(view.shape, (x, y, z))
    batches = {shape[:-2] for shape in (a, b, c)}
    if len(batches) != 1:
        return RuleRefusal("the batches of the factors differ", root.output)
    m, k, n, p = a[-2], a[-1], b[-1], c[-1]
    costs = (m * k * n + m * n * p, k * n * p + m * k * p)
    now, other = costs if is_left_first else costs[::-1]
    if other >= now:
        return RuleRefusal("the other order multiplies no less", root.output)
    if math.prod(a[:-2]) == 0:
        return RuleRefusal("the product is empty", root.output)
    if is_left_first:
        return lambda writer: writer.add("matmul", (x, writer.add("matmul", (y, z))))
    return lambda writer: writer.add("matmul", (writer.add("matmul", (x, y)), z))


PRODUCTS_ASSOCIATE = Rule(
    name="matmul-chain-in-its-cheaper-order",
    law="(a b) c = a (b c)",
    source="associativity; linear attention: (q k') v = q (k' v)",
    roots=("matmul",),
    match=stands(_CHAIN),
    rewrite=_rewrite,
    reorders=True,
)


RULES: tuple[AnyRule, ...] = (PRODUCTS_ASSOCIATE,)
