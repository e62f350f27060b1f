"""Rules that merge linear primitives with a shared operand into one, whose result is split."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from korch.equivalence.affine_chains import affine_step
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer
from korch.equivalence.rules.stored import STORED_WEIGHTS_LIE_BY_COLUMNS
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.layout import ConcatAttributes, SliceAttributes
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.stored import STORED
from korch.primitive.types import ValueType

LINEAR = ("conv", "matmul", STORED)
UNSCALED = ("", "scale-folds-into-linear-before-it", STORED_WEIGHTS_LIE_BY_COLUMNS.name)
"""The rules that may have written a linear primitive that is merged, "" for the model."""

MOST = 8
"""The most siblings that are merged."""

COPIED = 2
"""Operands are concatenated only if all together have at most the elements of the shared one divided by this."""


@dataclass(frozen=True, slots=True)
class SiblingsMatch:
    """A linear primitive, the position of the operand that it does not share, and all siblings that share the other."""

    root: Primitive
    at: int
    siblings: tuple[Primitive, ...]


def _match(view: View, root: Primitive) -> Iterator[SiblingsMatch]:
    for at in (0, 1) if root.op == "matmul" else (1,):
        if None in map(view.constant, _own(root, at)) or view.constant(root.inputs[1 - at]) is not None:
            continue
        siblings: dict[int, Primitive] = {}
        for other in sorted(view.users(root.inputs[1 - at]), key=lambda p: p.output):
            if _is_like(view, other, root, at) and _is_plain(view, other):
                siblings.setdefault(_result(view, other.output), other)
        if root in siblings.values() and len(siblings) > 1:
            yield SiblingsMatch(root, at, tuple(siblings.values()))


def _is_like(view: View, other: Primitive, root: Primitive, at: int) -> bool:
    return (
        (other.op, other.attributes, len(other.inputs)) == (root.op, root.attributes, len(root.inputs))
        and other.inputs[1 - at] == root.inputs[1 - at]
        and None not in map(view.constant, _own(other, at))
        and all(
            _fits(view.type(a), view.type(b), root.op, at) for a, b in zip(_own(other, at), _own(root, at), strict=True)
        )
    )


def _own(linear: Primitive, at: int) -> Sequence[int]:
    """Return the operands that siblings do not share: weights; of stored ones, also their scales and zero points."""
    return linear.inputs[1:] if linear.op == STORED else (linear.inputs[at],)


def _result(view: View, value: int) -> int:
    """Return a value after the shift that reads it; linear primitives with the same result are variants of one."""
    steps = [affine_step(view, user) for user in view.users(value)]
    shifted = [s.steps[0].output for s in steps if s is not None and not s.has_scale]
    return min(shifted) if shifted and len(shifted) == len(steps) else value


def _fits(weights: ValueType, own: ValueType, op: str, at: int) -> bool:
    """Return whether two tensors of weights differ at most in their number of output channels."""
    axis = _weights_axis(op, at, own.rank)
    return (weights.rank, weights.dtype) == (own.rank, own.dtype) and all(
        i == axis or a == b for i, (a, b) in enumerate(zip(weights.shape, own.shape, strict=True))
    )


def _weights_axis(op: str, at: int, rank: int) -> int:
    return 0 if op == "conv" else rank - 1 if at == 1 else rank - 2


def _is_plain(view: View, linear: Primitive) -> bool:
    """Return whether a primitive comes from the model, except for a folded scale, and no further scale follows."""
    value, rule = linear.output, view.rule_of(linear)
    if rule not in UNSCALED:
        return False
    steps = (affine_step(view, user) for user in view.users(value))
    return not any(step is not None and step.has_scale for step in steps)


def _merge(view: View, match: SiblingsMatch) -> Write | RuleRefusal:
    root, at = match.root, match.at
    if isinstance(root.attributes, ConvAttributes) and root.attributes.groups != 1:
        return RuleRefusal("the siblings have groups", root.output)
    if len(match.siblings) > MOST:
        return RuleRefusal("there are too many siblings", root.output)
    axis, shape = _weights_axis(root.op, at, view.type(root.inputs[at]).rank), view.shape(root.output)
    out = 1 if root.op == "conv" else len(shape) - 1 if at == 1 else len(shape) - 2
    first = sum(view.shape(s.output)[out] for s in match.siblings if s.output < root.output)
    operands = zip(*(_own(sibling, at) for sibling in match.siblings), strict=True)
    joined = [np.concatenate([_array(view, value) for value in values], axis) for values in operands]

    def write(writer: Writer) -> int:
        weights = [writer.constant(array, view.type(v).dtype) for array, v in zip(joined, _own(root, at), strict=True)]
        data = root.inputs[1 - at]
        merged = writer.add(root.op, (data, *weights) if at == 1 else (*weights, data), root.attributes)
        start = tuple(first if i == out else 0 for i in range(len(shape)))
        return writer.add("slice", (merged,), SliceAttributes(start, shape, (1,) * len(shape)))

    return write


def _array(view: View, value: int) -> Array:
    constant = view.constant(value)
    if constant is None:
        raise AssertionError("a sibling without weights")
    return constant.array


SIBLINGS_ARE_ONE_LINEAR = Rule(
    name="siblings-are-one-linear",
    law="W x, V x = split([W; V] x)",
    source="linearity; the projections of attention, the heads of a detector",
    roots=LINEAR,
    match=_match,
    rewrite=_merge,
    is_last=True,
)


# Products with operands that are not all constant


def _match_join(view: View, root: Primitive) -> Iterator[SiblingsMatch]:
    for at in (0, 1):
        shared = root.inputs[1 - at]
        own: dict[int, Primitive] = {}
        for other in sorted(view.users(shared), key=lambda p: p.output):
            is_like = other.op == root.op and other.inputs[1 - at] == shared and other.inputs[at] != shared
            is_like = is_like and view.rule_of(other) in ("", "sum-is-matmul-with-ones")
            if is_like and _fits(view.type(other.inputs[at]), view.type(root.inputs[at]), root.op, at):
                own.setdefault(other.inputs[at], other)
        computed = [value for value in own if view.constant(value) is None]
        if len(own) > 1 and computed and own.get(root.inputs[at]) == root:
            yield SiblingsMatch(root, at, tuple(own.values()))


def _join(view: View, match: SiblingsMatch) -> Write | RuleRefusal:
    root, at = match.root, match.at
    if len(match.siblings) > MOST:
        return RuleRefusal("there are too many siblings", root.output)
    joined = sum(math.prod(view.shape(sibling.inputs[at])) for sibling in match.siblings)
    if joined * COPIED > math.prod(view.shape(root.inputs[1 - at])):
        return RuleRefusal("the joined operands are too large to be copied", root.output)
    return lambda writer: _write_joined(writer, match)


def _write_joined(writer: Writer, match: SiblingsMatch) -> int:
    root, at, values = match.root, match.at, [sibling.inputs[match.at] for sibling in match.siblings]
    shape = writer.type(root.output).shape
    axis = len(shape) - (1 if at == 1 else 2)
    joined = writer.add("concat", values, ConcatAttributes(axis))
    merged = writer.add("matmul", (root.inputs[0], joined) if at == 1 else (joined, root.inputs[1]))
    before = values[: values.index(root.inputs[at])]
    start = [0] * len(shape)
    start[axis] = sum(writer.type(value).shape[axis] for value in before)
    return writer.add("slice", (merged,), SliceAttributes(tuple(start), shape, (1,) * len(shape)))


SIBLINGS_ARE_ONE_PRODUCT = Rule(
    name="computed-siblings-are-one-matmul",
    law="x a, x b = split(x [a, b])",
    source="definition of the matrix product; the sums of a softmax beside its product with the values",
    roots=("matmul",),
    match=_match_join,
    rewrite=_join,
    is_last=True,
)

RULES: tuple[AnyRule, ...] = (SIBLINGS_ARE_ONE_LINEAR, SIBLINGS_ARE_ONE_PRODUCT)
