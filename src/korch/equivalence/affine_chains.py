"""Affine chains: steps x -> scale*x + shift whose constants vary along one axis at most.

The rules for scales and shifts share this analysis: from a primitive it walks towards the inputs
through add, sub, mul, div and neg with constants, and returns the chain's input with the one scale
and the one shift of the whole chain, in float64.
"""

from dataclasses import dataclass, field

import numpy as np

from korch.equivalence.rule import View, is_finite_in, underflows
from korch.primitive.graph import Primitive
from korch.primitive.op import Array

STEPS = ("add", "sub", "mul", "div", "neg")


@dataclass(frozen=True, slots=True)
class AxisConstant:
    """A constant whose elements depend only on their position along one axis.

    Attributes:
        axis: the axis; None if all elements are equal.
        vector: float64[n], or float64[] if all elements are equal.
    """

    axis: int | None
    vector: Array


@dataclass(frozen=True, slots=True)
class AffineChain:
    """output = scale*base + shift, in one or more steps. Two chains are equal if their steps are.

    Attributes:
        steps: the primitives, last one first.
        base: the value that the first step reads.
        axis: the axis along which scale and shift vary; None if they are uniform.
        scale: float64[n] or float64[].
        shift: float64[n] or float64[].
    """

    steps: tuple[Primitive, ...]
    base: int = field(compare=False)
    axis: int | None = field(compare=False)
    scale: Array = field(compare=False)
    shift: Array = field(compare=False)

    @property
    def has_scale(self) -> bool:
        """Whether the scale differs from 1."""
        return not bool(np.all(self.scale == 1))

    @property
    def has_shift(self) -> bool:
        """Whether the shift differs from -0: only x + -0 is x for zeros of both signs."""
        return not bool(np.all((self.shift == 0) & np.signbit(self.shift)))


def axis_constant(view: View, value: int) -> AxisConstant | None:
    """Return a value as a constant that varies along at most one axis, or None if it is not such a constant."""
    constant = view.stored_constant(value)
    rank = view.type(value).rank
    if constant is None:
        return None
    if constant.is_uniform:
        return AxisConstant(None, np.asarray(constant.scalar, np.float64))
    lead = rank - constant.array.ndim
    for axis, size in enumerate(constant.array.shape):
        place = tuple(slice(None) if i == axis else slice(0, 1) for i in range(rank - lead))
        line = constant.array[place]
        last = constant.array[tuple(slice(None) if i == axis else slice(-1, None) for i in range(rank - lead))]
        if (
            size > 1
            and np.array_equal(line, last)
            and np.array_equal(np.broadcast_to(line, constant.array.shape), constant.array)
        ):
            return AxisConstant(lead + axis, line.reshape(-1).astype(np.float64))
    return None


def affine_step(view: View, primitive: Primitive) -> AffineChain | None:
    """Return a primitive as a chain of one step, or None if it is not one."""
    if primitive.op not in STEPS or not view.type(primitive.output).dtype.is_float:
        return None
    one, zero = np.float64(1), np.float64(-0.0)
    if primitive.op == "neg":
        return AffineChain((primitive,), primitive.inputs[0], None, -np.asarray(one), np.asarray(zero))
    for position in (1, 0):
        if primitive.op == "div" and position == 0:
            return None
        constant = axis_constant(view, primitive.inputs[position])
        if constant is None:
            continue
        base, c = primitive.inputs[1 - position], constant.vector
        with np.errstate(all="ignore"):
            scale, shift = {
                "add": (one, c),
                "sub": (one, -c) if position == 1 else (-one, c),
                "mul": (c, zero),
                "div": (1 / c, zero),
            }[primitive.op]
        scale, shift = np.asarray(scale, np.float64), np.asarray(shift, np.float64)
        return AffineChain((primitive,), base, constant.axis, scale, shift)
    return None


def chains_from(view: View, step: AffineChain) -> list[AffineChain]:
    """Return the chains that end in a step: of one step, of two, and so on up to the longest.

    If a value has several affine alternatives, the walk follows the first one: the others are equal,
    and following each would only give the same chain with other rounding errors. A chain ends where its
    scale or shift would overflow or its scale underflow in the type of the values, as steps apart may not.
    """
    chains, dtype = [step], view.type(step.base).dtype
    seen = {step.steps[0].output, step.base}
    while True:
        top = chains[-1]
        found = (affine_step(view, p) for p in view.producing(top.base, *STEPS))
        below = next((s for s in found if s is not None), None)
        if below is None or below.base in seen:
            return chains
        if below.axis is not None and top.axis is not None and below.axis != top.axis:
            return chains
        axis = top.axis if below.axis is None else below.axis
        with np.errstate(all="ignore"):
            scale = top.scale * below.scale
            shift = top.scale * below.shift + top.shift if below.has_shift else top.shift
        if below.has_shift and np.any((shift == 0) & np.signbit(shift)):
            return chains  # -(x + 0), which no multiple of x and a shift is for x = -0
        fits = is_finite_in(scale, dtype) and is_finite_in(shift, dtype)
        if not fits or underflows(top.scale, below.scale, dtype):
            return chains
        chains.append(AffineChain((*top.steps, *below.steps), below.base, axis, scale, shift))
        seen.add(below.base)


def goes_on(view: View, value: int) -> bool:
    """Return whether a value is only an inner value of a longer chain, read by nothing but affine steps.

    If a rule fired on each part of a chain, it would add alternatives that no plan uses.
    """
    users = view.users(value)
    if view.is_output(value) or not users:
        return False
    return all(affine_step(view, user) is not None for user in users)


def is_read_elsewhere(view: View, value: int, inside: frozenset[int], depth: int = 2) -> bool:
    """Return whether a value is needed for more than the values `inside`.

    A user whose own output is needed only for `inside` does not count, because an earlier rule may
    have written the same chain in other steps. `depth` limits how many such users are followed.
    """
    if view.is_output(value):
        return True
    for user in view.users(value):
        if user.output in inside or value == user.output:
            continue
        is_dead_end = depth == 0 or not view.users(user.output)
        if is_dead_end or is_read_elsewhere(view, user.output, inside, depth - 1):
            return True
    return False
