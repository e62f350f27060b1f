"""Rules for layout primitives: compositions become one step, and steps that move nothing are removed.

Layout primitives compute nothing, so all these rules are exact.
"""

from collections.abc import Iterator

from korch.equivalence.rule import AnyRule, Pair, Rule, RuleRefusal, View, Write, reads
from korch.primitive.graph import Primitive
from korch.primitive.op import Attributes
from korch.primitive.ops.layout import SliceAttributes, TakeAttributes, TransposeAttributes


def _keeps_type(view: View, root: Primitive) -> Iterator[Primitive]:
    if len(root.inputs) == 1 and view.type(root.inputs[0]) == view.type(root.output):
        yield root


def _compose_transposes(view: View, pair: Pair) -> Write | RuleRefusal:
    outer = pair.root.attributes_as(TransposeAttributes)
    inner = pair.inner.attributes_as(TransposeAttributes)
    perm = tuple(inner.perm[axis] for axis in outer.perm)
    source = pair.inner.inputs[0]
    return lambda writer: source if _is_count(perm) else writer.add("transpose", (source,), TransposeAttributes(perm))


def _compose_reshapes(view: View, pair: Pair) -> Write | RuleRefusal:
    source, shape = pair.inner.inputs[0], view.shape(pair.root.output)
    return lambda writer: writer.reshape(source, shape)


def _compose_broadcasts(view: View, pair: Pair) -> Write | RuleRefusal:
    return lambda writer: writer.add("broadcast", (pair.inner.inputs[0],), pair.root.attributes)


def _keep_input(view: View, root: Primitive) -> Write | RuleRefusal:
    """Return the input if no element moves. The types are equal, so no element is added or left out."""
    if _moves(root.attributes):
        return RuleRefusal("elements move", root.output)
    return lambda writer: root.inputs[0]


def _is_count(indices: tuple[int, ...]) -> bool:
    return indices == tuple(range(len(indices)))


def _moves(attributes: Attributes) -> bool:
    """Return whether elements move, given that the shape is unchanged."""
    match attributes:
        case TransposeAttributes(perm):
            return not _is_count(perm)
        case SliceAttributes(start, size, step):
            # A slice that keeps a size above 1 keeps all elements or reverses them; a size of 1 is one element.
            return any(n > 1 and (s, d) != (0, 1) for n, s, d in zip(size, start, step, strict=True))
        case TakeAttributes(indices=indices):
            return not _is_count(indices)
        case _:
            return False


TRANSPOSES_COMPOSE = Rule(
    name="transposes-compose",
    law="transpose(transpose(x, p), q) = transpose(x, p∘q), and x if p∘q is the identity",
    source="composition of permutations",
    roots=("transpose",),
    match=reads("transpose"),
    rewrite=_compose_transposes,
)
RESHAPES_COMPOSE = Rule(
    name="reshapes-compose",
    law="reshape(reshape(x, s), t) = reshape(x, t), and x if x has shape t",
    source="a reshape keeps the row-major order",
    roots=("reshape",),
    match=reads("reshape"),
    rewrite=_compose_reshapes,
)
BROADCASTS_COMPOSE = Rule(
    name="broadcasts-compose",
    law="broadcast(broadcast(x, s), t) = broadcast(x, t)",
    source="NumPy's broadcasting is transitive",
    roots=("broadcast",),
    match=reads("broadcast"),
    rewrite=_compose_broadcasts,
)
IDENTITY_LAYOUT_IS_NOTHING = Rule(
    name="identity-layout-is-nothing",
    law="layout(x) = x if no element moves",
    source="definition of each operation",
    roots=("transpose", "reshape", "slice", "pad", "take", "concat", "broadcast"),
    match=_keeps_type,
    rewrite=_keep_input,
)

RULES: tuple[AnyRule, ...] = (TRANSPOSES_COMPOSE, RESHAPES_COMPOSE, BROADCASTS_COMPOSE, IDENTITY_LAYOUT_IS_NOTHING)
