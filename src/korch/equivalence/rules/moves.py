"""Rules that move elementwise steps before the transpose, reshape or broadcast that they follow.

The steps can then be fused with the primitives on both sides. For example, a transformer's feed-forward
layer with a convolution computes its activation on tokens, between the convolution, whose result is an
image, and the matrix product. Computed on the image, the activation can be fused with the convolution,
and the move from image to tokens with the product, which can read rows in any order.

A mask of attention is then computed from a few elements, which the softmax reads for all of its rows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.ops import OPS
from korch.primitive.ops.reduce import BroadcastAttributes
from korch.primitive.types import DType, ValueType

MOST_STEPS = 8
"""The most elementwise primitives that are moved together."""

MOVES = ("transpose", "reshape")

FEWER = 2
"""A step is moved before a broadcast only if it then computes at least this many times fewer elements."""


@dataclass(frozen=True, slots=True)
class MoveMatch:
    """An elementwise function of a moved value."""

    root: Primitive  # its last step
    steps: tuple[Primitive, ...]  # all of them, each after what it reads
    numbers: tuple[tuple[int, float], ...]  # the uniform constants that they read, with their numbers
    move: Primitive  # the transpose or reshape before them


def _match(view: View, root: Primitive) -> Iterator[MoveMatch]:
    users = view.users(root.output)
    if users and all(_is_step(view, user, root) for user in users):
        return  # the function is longer
    steps, numbers, leaves = _function(view, root)
    if len(leaves) == 1 and len(steps) <= MOST_STEPS:
        for move in view.producing(leaves.pop(), *MOVES):
            yield MoveMatch(root, tuple(steps), tuple(numbers.items()), move)


def _is_step(view: View, primitive: Primitive, like: Primitive) -> bool:
    same = view.shape(primitive.output) == view.shape(like.output)
    return same and primitive.row.category is Category.ELEMENTWISE


def _function(view: View, root: Primitive) -> tuple[list[Primitive], dict[int, float], set[int]]:
    """Return the elementwise steps that end in a primitive, the numbers that they read, and the moved values."""
    steps: list[Primitive] = []
    numbers: dict[int, float] = {}
    leaves: set[int] = set()
    seen: set[int] = set()

    def add(step: Primitive) -> None:
        for value in step.inputs:
            if value not in seen and len(seen) <= 2 * MOST_STEPS:
                seen.add(value)
                visit(value)
        steps.append(step)

    def visit(value: int) -> None:
        number = view.number(value)
        if number is not None:
            numbers[value] = number
            return
        makers = [p for p in view.producing(value) if _is_step(view, p, root)]
        if view.producing(value, *MOVES) or not makers:
            leaves.add(value)
        else:
            add(makers[0])

    add(root)
    return steps, numbers, leaves


def _rewrite(view: View, match: MoveMatch) -> Write | RuleRefusal:
    root = match.root.output
    values = {match.move.output, *(step.output for step in match.steps)}
    if any(not view.type(value).dtype.is_float for value in values):
        return RuleRefusal("an element is not a float", root)
    if not view.producing(match.move.inputs[0], "conv", *MOVES):
        return RuleRefusal("no primitive before the move could fuse the steps", root)
    return lambda writer: _write(writer, match)


def _write(writer: Writer, match: MoveMatch) -> int:
    source = match.move.inputs[0]
    type_ = writer.type(source)
    moved = {match.move.output: source}
    for value, number in match.numbers:
        kind = ValueType(type_.shape, writer.type(value).dtype)
        moved[value] = writer.along(np.array(number), 0, kind)
    for step in match.steps:
        arguments = [moved[value] for value in step.inputs]
        moved[step.output] = writer.add(step.op, arguments, step.attributes)
    return writer.add(match.move.op, (moved[match.root.output],), match.move.attributes)


STEPS_COME_BEFORE_THE_MOVE = Rule(
    name="steps-come-before-the-move",
    law="f(move(x)) = move(f(x)) for an elementwise f, and a transpose or a reshape",
    source="an elementwise operation does not depend on where an element is",
    roots=("add", "sub", "mul", "div", "max", "min", "sigmoid", "tanh", "erf", "exp"),
    match=_match,
    rewrite=_rewrite,
)


def _match_small(view: View, root: Primitive) -> Iterator[Primitive]:
    is_number = [view.number(value) is not None for value in root.inputs]
    grown = [view.unbroadcast(value) != value for value in root.inputs]
    if not all(is_number) and all(a or b for a, b in zip(is_number, grown, strict=True)):
        yield root


def _rewrite_small(view: View, root: Primitive) -> Write | RuleRefusal:
    type_ = view.type(root.output)
    is_logic = all(view.type(value).dtype is DType.BOOL for value in (*root.inputs, root.output))
    if not type_.dtype.is_float and not is_logic:  # kernels of products can't read booleans
        return RuleRefusal("a result is neither a float nor a step of conditions", root.output)
    numbers = [view.number(value) for value in root.inputs]
    # for each operand the value from which it is broadcast, or its number if it is uniform
    sources = [
        view.unbroadcast(value) if number is None else number
        for value, number in zip(root.inputs, numbers, strict=True)
    ]
    shapes = [view.shape(source) for source in sources if isinstance(source, int)]
    shape = np.broadcast_shapes((1,) * type_.rank, *shapes)
    if FEWER * math.prod(shape) > type_.size:
        return RuleRefusal("hardly fewer elements are computed", root.output)

    def write(writer: Writer) -> int:
        arguments = []
        for value, source in zip(root.inputs, sources, strict=True):
            own = ValueType(shape, writer.type(value).dtype)
            if isinstance(source, float):
                arguments.append(writer.along(np.array(source), 0, own))
            elif writer.type(source).size == own.size:
                arguments.append(writer.reshape(source, shape))
            else:
                arguments.append(writer.add("broadcast", (source,), BroadcastAttributes(shape)))
        small = writer.add(root.op, arguments, root.attributes)
        return writer.add("broadcast", (small,), BroadcastAttributes(type_.shape))

    return write


STEPS_COME_BEFORE_THE_BROADCAST = Rule(
    name="steps-come-before-the-broadcast",
    law="f(broadcast(x), broadcast(y)) = broadcast(f(x, y)) for an elementwise f",
    source="an elementwise operation does not depend on where an element is",
    roots=tuple(name for name, row in OPS.items() if row.category is Category.ELEMENTWISE),
    match=_match_small,
    rewrite=_rewrite_small,
)

RULES: tuple[AnyRule, ...] = (STEPS_COME_BEFORE_THE_MOVE, STEPS_COME_BEFORE_THE_BROADCAST)
