"""Rules that fold scales and shifts into the linear primitive before or after them.

A linear primitive with constant weights is y[o] = sum over i of W[o,i]*x[i], where o and i are its
channels: the channel axis of a convolution, the last axis of x @ W, the second last axis of W @ x.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from korch.equivalence.affine_chains import STEPS, AffineChain, affine_step, chains_from, goes_on, is_read_elsewhere
from korch.equivalence.rule import AnyRule, Rule, RuleRefusal, View, Write, Writer, is_finite_in, is_normal, underflows
from korch.primitive.graph import Primitive
from korch.primitive.op import Array
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType

LINEAR = ("conv", "matmul")


@dataclass(frozen=True, slots=True)
class FoldMatch:
    """A linear primitive and the affine chain before or after it; `root` is the last primitive of both."""

    root: Primitive
    linear: Primitive
    chain: AffineChain


@dataclass(frozen=True, slots=True, eq=False)
class _Channels:
    """A linear primitive's weights with explicit axes for its channels.

    `weights` is float64[batch or groups, o, i, taps], a view of the constant; `back` restores its shape.
    """

    linear: Primitive
    weights_at: int
    axis_in: int
    axis_out: int
    weights: Array
    is_batched: bool
    shape: tuple[int, ...]

    @property
    def data(self) -> int:
        return self.linear.inputs[1 - self.weights_at]

    def back(self, weights: Array) -> Array:
        """Return grouped weights in the shape of the primitive's weights."""
        is_swapped = self.is_batched and self.weights_at == 1
        return (weights.transpose(0, 2, 1, 3) if is_swapped else weights).reshape(self.shape)

    def scaled(self, vector: Array, axis: int) -> Array:
        """Return the grouped weights times a scalar, or a vector over output (`axis` 1) or input channels (2)."""
        with np.errstate(all="ignore"):
            return np.asarray(self.weights * self._factor(vector, axis))

    def scaled_in(self, dtype: DType, vector: Array, axis: int) -> Array | None:
        """Return scaled weights if all are finite in a type, and the largest one of each channel still normal."""
        largest = np.abs(self.weights).max(axis=(3 - axis, 3), keepdims=True)
        largest = np.where(is_normal(largest, dtype), largest, 0)  # other channels have lost their precision before
        if underflows(largest, self._factor(vector, axis), dtype):
            return None
        found = self.scaled(vector, axis)
        return found if is_finite_in(found, dtype) else None

    def _factor(self, vector: Array, axis: int) -> Array:
        groups = 1 if self.is_batched else self.weights.shape[0]
        shape = (groups, -1, 1, 1) if axis == 1 else (groups, 1, -1, 1)
        return vector.reshape(shape) if np.ndim(vector) else vector


def _channels(view: View, linear: Primitive) -> _Channels | None:
    """Return a linear primitive's channels, or None if its weights are not constant, or have to stay as they are."""
    if linear.op == "matmul":
        at = 1 if view.constant(linear.inputs[1]) is not None else 0
    else:
        at = 1
    constant = view.constant(linear.inputs[at])
    rank = view.type(linear.output).rank
    if constant is None or constant.array.size == 0 or view.is_tied(linear.inputs[at]):
        return None
    array, shape = constant.array.astype(np.float64), constant.array.shape
    if linear.op == "matmul":
        grouped = array.reshape((-1, *shape[-2:], 1))
        grouped = grouped.transpose(0, 2, 1, 3) if at == 1 else grouped
        axis = rank - 1 if at == 1 else rank - 2
        return _Channels(linear, at, axis, axis, grouped, True, shape)
    attributes = linear.attributes_as(ConvAttributes)
    groups = attributes.groups
    grouped = array.reshape((groups, shape[0] // groups, shape[1], -1))
    return _Channels(linear, 1, 1, 1, grouped, False, shape)


def _folded(channels: _Channels, data: int, weights: Array, shift: Array | None) -> Write:
    """Return what writes the linear primitive of `data` with other grouped weights, followed by a shift."""
    linear, weights = channels.linear, channels.back(weights)

    def write(writer: Writer) -> int:
        type_ = writer.type(linear.output)
        constant = writer.constant(weights, type_.dtype)
        inputs = (data, constant) if channels.weights_at == 1 else (constant, data)
        result = writer.add(linear.op, inputs, linear.attributes)
        if shift is None:
            return result
        return writer.add("add", (result, writer.along(shift, channels.axis_out, type_)))

    return write


def _match_after(view: View, root: Primitive) -> Iterator[FoldMatch]:
    step = affine_step(view, root)
    if step is None:
        return
    chain = chains_from(view, step)[-1]
    for linear in view.producing(chain.base, *LINEAR):
        yield FoldMatch(root, linear, chain)


def _fold_after(view: View, match: FoldMatch) -> Write | RuleRefusal:
    root, chain = match.root.output, match.chain
    channels = _channels(view, match.linear)
    if channels is None:
        return RuleRefusal("the weights are not constant", root)
    if not chain.has_scale:
        return RuleRefusal("there is no scale", root)
    if goes_on(view, root):
        return RuleRefusal("the chain continues", root)
    values = frozenset(step.output for step in chain.steps)
    if any(is_read_elsewhere(view, v, values) for v in (chain.base, *values - {root})):
        return RuleRefusal("the unscaled value is needed too", root)
    if chain.axis not in (None, channels.axis_out):
        return RuleRefusal("the scale is not per channel", root)
    weights = channels.scaled_in(view.type(root).dtype, chain.scale, 1)
    if weights is None:
        return RuleRefusal("weights overflow or underflow", root)
    return _folded(channels, channels.data, weights, chain.shift if chain.has_shift else None)


def _match_before(view: View, root: Primitive) -> Iterator[FoldMatch]:
    channels = _channels(view, root)
    if channels is None:
        return
    for primitive in view.producing(channels.data, *STEPS):
        step = affine_step(view, primitive)
        if step is not None:
            chains = chains_from(view, step)
            if _drops_shift_taps(root):
                # Before zero pads, only the part of the chain after its last shift can be folded.
                chains = [c for c in chains if not c.has_shift] or chains[:1]
            yield FoldMatch(root, root, chains[-1])
            return


def _drops_shift_taps(linear: Primitive) -> bool:
    """Return whether some outputs skip taps, so that a shift of the input is not a uniform shift of the output."""
    pads = (getattr(linear.attributes, name, ()) for name in ("pads_begin", "pads_end"))
    return any(pad for field in pads for pad in field)


def _fold_before(view: View, match: FoldMatch) -> Write | RuleRefusal:
    root, chain = match.root.output, match.chain
    channels = _channels(view, match.linear)
    if channels is None or (chain.axis not in (None, channels.axis_in)):
        return RuleRefusal("the scale is not per channel", root)
    if chain.has_shift and _drops_shift_taps(match.linear):
        return RuleRefusal("the shift comes before zero pads", root)
    if chain.has_shift and channels.is_batched and channels.weights.shape[0] != 1:
        return RuleRefusal("the shift comes before batched weights", root)
    dtype = view.type(root).dtype
    weights = channels.scaled_in(dtype, chain.scale, 2)
    if weights is None:
        return RuleRefusal("weights overflow or underflow", root)
    shift = None
    if chain.has_shift:
        shifts = channels.scaled(chain.shift, 2)
        with np.errstate(all="ignore"):
            shift = shifts.sum(axis=(2, 3)).reshape(-1)
        if not is_finite_in(shift, dtype):
            return RuleRefusal("a shift is not finite", root)
    return _folded(channels, chain.base, weights, shift)


SCALE_FOLDS_INTO_LINEAR_BEFORE_IT = Rule(
    name="scale-folds-into-linear-before-it",
    law="s*(W x) + t = (s*W) x + t",
    source="linearity; BatchNormalization folding",
    roots=STEPS,
    match=_match_after,
    rewrite=_fold_after,
    reorders=True,
)
AFFINE_FOLDS_INTO_LINEAR_AFTER_IT = Rule(
    name="affine-folds-into-linear-after-it",
    law="W (s*x + t) = (W*s) x + W t",
    source="linearity; LayerNorm's scale and shift in the matmul that follows",
    roots=LINEAR,
    match=_match_before,
    rewrite=_fold_before,
    reorders=True,
)

RULES: tuple[AnyRule, ...] = (SCALE_FOLDS_INTO_LINEAR_BEFORE_IT, AFFINE_FOLDS_INTO_LINEAR_AFTER_IT)
