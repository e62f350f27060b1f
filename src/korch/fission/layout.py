"""Fission of operators that move elements."""

import itertools

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import Build, FissionRule, NotSplitError, Result
from korch.primitive.ops.layout import MOST_INDICES
from korch.primitive.types import DType
from korch.primitive.verbs import Shape


def _same_elements(c: Context) -> Result:
    """Reshape, Flatten, Squeeze, Unsqueeze: the output shape is known, and the order of the elements is unchanged."""
    return c.reshape(c.input(0), c.output_type().shape)


def _transpose(c: Context) -> Result:
    x = c.input(0)
    return c.transpose(x, c.attributes.integers("perm", tuple(range(c.rank(x)))[::-1]))


def _concat(c: Context) -> Result:
    axis = axis_of(c.attributes.integer("axis"), c.rank(c.input(0)))
    parts = [value for value in c.inputs if c.shape(value)[axis]]
    return parts[0] if len(parts) == 1 else c.concat(parts or c.inputs, axis)


def _split(c: Context) -> Result:
    x = c.input(0)
    axis = axis_of(c.attributes.integer("axis", 0), c.rank(x))
    parts, start = [], 0
    sizes = c.ints(1) if c.is_given(1) or "split" not in c.attributes else c.attributes.integers("split")
    count = len(c.operator.outputs)
    if sizes is None:
        if c.is_given(1):
            raise NotSplitError("sizes are computed at run time")
        size = -(-c.shape(x)[axis] // count)
        sizes = tuple(max(0, min(size, c.shape(x)[axis] - i * size)) for i in range(count))
    for size in sizes:
        parts.append(c.slice_axis(x, axis, start, size))
        start += size
    return parts


def _slice(c: Context) -> Result:
    x = c.input(0)
    rank, shape = c.rank(x), c.shape(x)
    if c.version < 10:
        starts, ends = c.attributes.integers("starts"), c.attributes.integers("ends")
        axes, steps = c.attributes.integers("axes", tuple(range(len(starts)))), (1,) * len(starts)
    else:
        known = [c.ints(i) for i in range(1, 5)]
        if any(known[i - 1] is None and c.is_given(i) for i in range(1, 5)):
            raise NotSplitError("starts, ends, axes or steps are computed at run time")
        starts, ends = known[0] or (), known[1] or ()
        axes = known[2] if known[2] is not None else tuple(range(len(starts)))
        steps = known[3] if known[3] is not None else (1,) * len(starts)
    begin, size, step = [0] * rank, list(shape), [1] * rank
    for start, end, axis, stride in zip(starts, ends, axes, steps, strict=True):
        axis = axis_of(int(axis), rank)
        first, last, stride = _range(int(start), int(end), int(stride), shape[axis])
        size[axis] = len(range(first, last, stride))
        begin[axis], step[axis] = (first, stride) if size[axis] else (0, 1)
    return c.slice(x, begin, size, step)


def _range(start: int, end: int, step: int, size: int) -> tuple[int, int, int]:
    """Return the range of a slice, clamped as ONNX specifies.

    A start before the axis is clamped to its first element in either direction. A backward slice in
    Python is empty in this case.
    """
    top = size if step > 0 else size - 1
    start = min(max(start + size if start < 0 else start, 0), top)
    end = min(max(end + size if end < 0 else end, 0 if step > 0 else -1), top)
    return start, end, step


def _pad(c: Context) -> Result:
    x, mode = c.input(0), c.attributes.text("mode", "constant")
    rank, shape = c.rank(x), c.shape(x)
    pads = c.attributes.integers("pads", ()) if c.version < 11 else c.ints(1)
    if pads is None:
        raise NotSplitError("pads are computed at run time")
    fill: float | int = c.attributes.number("value", 0.0) if c.version < 11 else 0.0
    if c.version >= 11 and c.is_given(2) and mode == "constant":
        constant = c.array(2)
        if constant is None:
            raise NotSplitError("the fill is computed at run time")
        fill = float(constant.reshape(-1)[0]) if constant.size else 0.0
        if not c.is_float(x) and abs(fill) >= 2**53:
            raise NotSplitError("a fill that a float can't hold")
    axes = c.ints(3) if c.is_given(3) else tuple(range(rank))
    if axes is None:
        raise NotSplitError("axes are computed at run time")
    before, after = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        before[axis_of(axis, rank)], after[axis_of(axis, rank)] = pads[i], pads[i + len(axes)]
    grown = [max(0, n) for n in before], [max(0, n) for n in after]
    cut = [max(0, -n) for n in before], [max(0, -n) for n in after]
    # The standard leaves the order open. As in ONNX Runtime, axes are cut first, and what is left is repeated or
    # reflected. PyTorch also reflects what is cut.
    axes_left = [max(0, n - a - b) for n, a, b in zip(shape, *cut, strict=True)]
    for n, left, growth in zip(shape, axes_left, zip(*grown, strict=True), strict=True):
        least = 1 + max(growth) if mode == "reflect" and left < n else 1
        if mode != "constant" and any(growth) and left < least:
            raise NotSplitError(f"an axis of {left} elements in mode {mode}")
    if axes_left != list(shape):
        x = c.slice(x, cut[0], axes_left)
    return c.pad(x, *grown, mode, fill)


def _expand(c: Context) -> Result:
    return c.broadcast(c.input(0), c.output_type().shape)


def _constant_of_shape(c: Context) -> Result:
    """A uniform constant, which is stored as one number; folding the node would store all elements."""
    value = c.attributes.get("value")
    return c.full(value.reshape(-1)[0] if isinstance(value, np.ndarray) else 0, c.output_type())


def _tile(c: Context) -> Result:
    x, repeats = c.input(0), c.ints(1)
    if repeats is None:
        raise NotSplitError("repeats are computed at run time")
    if max(c.output_type().shape, default=0) > MOST_INDICES:
        raise NotSplitError(f"an axis of more than {MOST_INDICES} elements")
    for axis, count in enumerate(repeats):
        size = c.shape(x)[axis]
        if count != 1:
            x = c.take(x, axis, list(range(size)) * count)
    return x


def _depth_to_space(c: Context) -> Result:
    x, block = c.input(0), c.attributes.integer("blocksize")
    n, depth, h, w = c.shape(x)
    less = depth // (block * block)
    if c.attributes.text("mode", "DCR") == "DCR":
        x = c.reshape(x, (n, block, block, less, h, w))
        x = c.transpose(x, (0, 3, 4, 1, 5, 2))
    else:
        x = c.reshape(x, (n, less, block, block, h, w))
        x = c.transpose(x, (0, 1, 4, 2, 5, 3))
    return c.reshape(x, (n, less, h * block, w * block))


def _space_to_depth(c: Context) -> Result:
    x, block = c.input(0), c.attributes.integer("blocksize")
    n, depth, h, w = c.shape(x)
    x = c.reshape(x, (n, depth, h // block, block, w // block, block))
    depth_last = c.attributes.text("mode", "DCR") == "DCR"
    x = c.transpose(x, (0, 3, 5, 1, 2, 4) if depth_last else (0, 1, 3, 5, 2, 4))
    return c.reshape(x, (n, depth * block * block, h // block, w // block))


def _trilu(c: Context) -> Result:
    x = c.input(0)
    diagonal = c.ints(1) if c.is_given(1) else (0,)
    if diagonal is None:
        raise NotSplitError("the diagonal is computed at run time")
    ones = np.ones(c.shape(x)[-2:], bool)
    keep = np.triu(ones, diagonal[0]) if c.attributes.integer("upper", 1) else np.tril(ones, diagonal[0])
    mask = c.broadcast(c.constant(keep), c.shape(x))
    if c.dtype(x) is DType.BOOL:
        return c.add("and", x, mask)
    return c.add("where", mask, x, c.full(0, c.builder.type(x)))


def _reverse_where(shape: Shape, lengths: Shape, batch: int, time: int) -> list[int]:
    """Return the position that ReverseSequence reads for each (batch, time) element."""
    sources = []
    for index in itertools.product(*map(range, shape)):
        position, length = list(index), lengths[index[batch]]
        if index[time] < length:
            position[time] = length - 1 - index[time]
        sources.append(int(np.ravel_multi_index(position, shape)))
    return sources


def _reverse_sequence(c: Context) -> Result:
    x, lengths = c.input(0), c.ints(1)
    batch, time = c.attributes.integer("batch_axis", 1), c.attributes.integer("time_axis", 0)
    if lengths is None:
        raise NotSplitError("lengths are computed at run time")
    if {batch, time} != {0, 1}:
        raise NotSplitError("axes other than the first two")
    shape = c.shape(x)
    if shape[0] * shape[1] > MOST_INDICES:
        raise NotSplitError(f"more than {MOST_INDICES} indices")
    flat = c.reshape(x, (shape[0] * shape[1], *shape[2:]))
    return c.reshape(c.take(flat, 0, _reverse_where(shape[:2], lengths, batch, time)), shape)


_RESHAPES: tuple[str, ...] = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")
_OTHERS: tuple[tuple[str, Build, int], ...] = (
    ("Transpose", _transpose, 7),
    ("Concat", _concat, 7),
    ("Split", _split, 7),
    ("Slice", _slice, 7),
    ("Pad", _pad, 7),
    ("Expand", _expand, 8),
    ("Tile", _tile, 7),
    ("DepthToSpace", _depth_to_space, 7),
    ("SpaceToDepth", _space_to_depth, 7),
    ("Trilu", _trilu, 14),
    ("ConstantOfShape", _constant_of_shape, 9),
    ("ReverseSequence", _reverse_sequence, 10),
)

RULES: tuple[FissionRule, ...] = (
    *(FissionRule(name, _same_elements) for name in _RESHAPES),
    *(FissionRule(name, build, first) for name, build, first in _OTHERS),
)
