"""Layout operations: O[x] = I[L(x)]; elements move, nothing is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.op import A, Array, Attributes, Category, Infer, Op, Reference, no_flop, require
from korch.primitive.types import ValueType


@dataclass(frozen=True, slots=True)
class TransposeAttributes(Attributes):
    """Output axis i is input axis perm[i]."""

    perm: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReshapeAttributes(Attributes):
    """The output's shape; elements keep their row-major order."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceAttributes(Attributes):
    """Per axis: O[x] = I[start + step*x] for x < size; steps may be negative."""

    start: tuple[int, ...]
    size: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PadAttributes(Attributes):
    """The number of elements added before and after each axis; mode is constant, reflect, edge or wrap."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    mode: str = "constant"
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class ConcatAttributes(Attributes):
    """The axis along which the inputs are concatenated."""

    axis: int


MOST_INDICES = 1 << 16
"""The most indices of a `take`, which are attributes; more are better stored in a tensor."""


@dataclass(frozen=True, slots=True)
class TakeAttributes(Attributes):
    """O[..., i, ...] = I[..., indices[i], ...] along one axis; indices are not negative."""

    axis: int
    indices: tuple[int, ...]

    @property
    def repeats(self) -> int:
        """How many times in a row each element is taken, in order from the first; 0 if the indices differ from this."""
        count = self.indices.count(0)
        return count if count and self.indices == tuple(i // count for i in range(len(self.indices))) else 0


def pad_source(index: int, size: int, before: int, mode: str) -> int:
    """Return the input index that output `index` of a padded axis reads, or -1 for the fill value."""
    i = index - before
    if 0 <= i < size:
        return i
    if mode == "constant":
        return -1
    if mode == "edge":
        return min(max(i, 0), size - 1)
    if mode == "wrap":
        return i % size
    period = 2 * (size - 1)
    return min(i % period, period - i % period) if period else 0


def _infer_transpose(inputs: Sequence[ValueType], attributes: TransposeAttributes) -> ValueType:
    given, perm = inputs[0], attributes.perm
    require(sorted(perm) == list(range(given.rank)), f"transpose: {perm} does not permute {given}")
    return given.with_shape(tuple(given.shape[axis] for axis in perm))


def _infer_reshape(inputs: Sequence[ValueType], attributes: ReshapeAttributes) -> ValueType:
    result = inputs[0].with_shape(attributes.shape)
    require(result.size == inputs[0].size, f"reshape: {inputs[0]} has not the size of {result}")
    require(all(n >= 0 for n in attributes.shape), f"reshape: negative size in {result}")
    return result


def _infer_slice(inputs: Sequence[ValueType], attributes: SliceAttributes) -> ValueType:
    given = inputs[0]
    fields = (attributes.start, attributes.size, attributes.step)
    require(all(len(f) == given.rank for f in fields), f"slice: rank differs from {given}")
    for axis, (start, size, step) in enumerate(zip(*fields, strict=True)):
        last = start + step * (size - 1)
        inside = size == 0 or (0 <= start < given.shape[axis] and 0 <= last < given.shape[axis])
        require(step != 0 and size >= 0 and inside, f"slice: axis {axis} leaves {given}")
    return given.with_shape(attributes.size)


def _infer_pad(inputs: Sequence[ValueType], attributes: PadAttributes) -> ValueType:
    given, modes = inputs[0], ("constant", "reflect", "edge", "wrap")
    require(attributes.mode in modes, f"pad: mode {attributes.mode!r} is none of {modes}")
    legal = len(attributes.before) == len(attributes.after) == given.rank
    require(legal, f"pad: rank differs from {given}")
    require(min((*attributes.before, *attributes.after), default=0) >= 0, "pad: negative pads")
    shape = tuple(b + n + a for b, n, a in zip(attributes.before, given.shape, attributes.after, strict=True))
    for axis, (old, new) in enumerate(zip(given.shape, shape, strict=True)):
        empty = old == 0 and new > 0 and attributes.mode != "constant"
        require(not empty, f"pad: axis {axis} of {given} is empty, mode {attributes.mode}")
    return given.with_shape(shape)


def _infer_concat(inputs: Sequence[ValueType], attributes: ConcatAttributes) -> ValueType:
    first, axis = inputs[0], attributes.axis
    require(0 <= axis < first.rank, f"concat: axis {axis} is none of {first}")
    for position, given in enumerate(inputs):
        same = (
            given.dtype is first.dtype
            and given.rank == first.rank
            and all(a == b or i == axis for i, (a, b) in enumerate(zip(given.shape, first.shape, strict=True)))
        )
        require(same, f"concat: argument {position} is {given}, argument 0 is {first}")
    total = sum(given.shape[axis] for given in inputs)
    return first.with_shape((*first.shape[:axis], total, *first.shape[axis + 1 :]))


def _infer_take(inputs: Sequence[ValueType], attributes: TakeAttributes) -> ValueType:
    given, axis = inputs[0], attributes.axis
    require(0 <= axis < given.rank, f"take: axis {axis} is none of {given}")
    inside = all(0 <= i < given.shape[axis] for i in attributes.indices)
    require(inside, f"take: an index leaves axis {axis} of {given}")
    return given.with_shape((*given.shape[:axis], len(attributes.indices), *given.shape[axis + 1 :]))


def _slice(inputs: Sequence[Array], attributes: SliceAttributes) -> Array:
    x = inputs[0]
    for axis, (start, size, step) in enumerate(zip(attributes.start, attributes.size, attributes.step, strict=True)):
        x = np.take(x, start + step * np.arange(size), axis=axis)
    return x


def _pad(inputs: Sequence[Array], attributes: PadAttributes) -> Array:
    x = inputs[0]
    for axis, (before, after) in enumerate(zip(attributes.before, attributes.after, strict=True)):
        if before or after:
            size = x.shape[axis]
            sources = np.array(
                [pad_source(i, size, before, attributes.mode) for i in range(before + size + after)], np.int64
            )
            fill_shape = [1] * x.ndim
            fill_shape[axis] = len(sources)
            is_fill = (sources < 0).reshape(fill_shape)
            fill = np.asarray(attributes.value).astype(x.dtype)
            if size == 0:
                x = np.full([*x.shape[:axis], len(sources), *x.shape[axis + 1 :]], fill)
            else:
                x = np.where(is_fill, fill, np.take(x, np.maximum(sources, 0), axis=axis))
    return x


def _row(
    name: str, attributes: type[A], infer: Infer[A], reference: Reference[A], source: str, arity: int | None = 1
) -> Op:
    return Op(
        name=name,
        category=Category.LAYOUT,
        arity=arity,
        attributes=attributes,
        infer=infer,
        reference=reference,
        work_flop=no_flop,
        source=source,
    )


ROWS: tuple[Op, ...] = (
    _row(
        "transpose",
        TransposeAttributes,
        _infer_transpose,
        lambda inputs, a: np.transpose(inputs[0], a.perm),
        "ONNX Transpose-13",
    ),
    _row(
        "reshape",
        ReshapeAttributes,
        _infer_reshape,
        lambda inputs, a: np.reshape(inputs[0], a.shape),
        "ONNX Reshape-13",
    ),
    _row("slice", SliceAttributes, _infer_slice, _slice, "ONNX Slice-13"),
    _row("pad", PadAttributes, _infer_pad, _pad, "ONNX Pad-19"),
    _row(
        "concat",
        ConcatAttributes,
        _infer_concat,
        lambda inputs, a: np.concatenate(list(inputs), a.axis),
        "ONNX Concat-13",
        arity=None,
    ),
    _row(
        "take",
        TakeAttributes,
        _infer_take,
        lambda inputs, a: np.take(inputs[0], np.array(a.indices, np.int64), a.axis),
        "ONNX Gather-13 with constant indices",
    ),
)
