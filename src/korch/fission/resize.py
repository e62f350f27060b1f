"""Fission of Resize and Upsample into weighted sums of elements taken along each resized axis.

Along one axis the operator is a product by a constant sparse matrix. Nearest has one tap per output
element (a take), linear has two, cubic four: Σ_k take(x, i_k)·w_k.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.op import Array
from korch.primitive.ops.layout import MOST_INDICES
from korch.primitive.types import ValueId

MOST_TAPS = 8


def _coordinates(mode: str, size: int, out: int, scale: float) -> Array:
    """Return the position in the input to which each output element corresponds."""
    x = np.arange(out, dtype=np.float64)
    if mode == "asymmetric":
        return x / scale
    if mode == "align_corners":  # the resized length may be fractional
        return x * (size - 1) / (scale * size - 1) if scale * size != 1 else np.zeros(out)
    if mode == "half_pixel":
        return (x + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return (x + 0.5) / scale - 0.5 if out > 1 else np.zeros(out)
    if mode == "half_pixel_symmetric":
        adjustment = out / (scale * size)
        center = size / 2
        return center * (1 - adjustment) + (x + 0.5) / scale - 0.5
    if mode == "tf_half_pixel_for_nn":
        return (x + 0.5) / scale
    raise NotSplitError(f"the coordinates {mode}")


_ROUNDINGS: dict[str, Callable[[Array], Array]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


def _triangle(x: Array, a: float) -> Array:
    return np.maximum(0.0, 1.0 - np.abs(x))


def _cubic(x: Array, a: float) -> Array:
    x = np.abs(x)
    near = (a + 2) * x**3 - (a + 3) * x**2 + 1
    far = a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a
    return np.where(x <= 1, near, np.where(x < 2, far, 0.0))


def _taps(mode: str, where: Array, size: int, scale: float, c: Context) -> list[tuple[Array, Array]]:
    """Return (indices, weights) per tap of a linear or cubic filter."""
    radius, curve = (1, _triangle) if mode == "linear" else (2, _cubic)
    stretch = min(scale, 1.0) if c.attributes.integer("antialias", 0) else 1.0
    reach = math.ceil(radius / stretch)
    a = c.attributes.number("cubic_coeff_a", -0.75)
    base = np.floor(where)
    taps = []
    for offset in range(-reach + 1, reach + 1):
        index = base + offset
        weight = curve((where - index) * stretch, a)
        if c.attributes.integer("exclude_outside", 0):
            weight = np.where((index >= 0) & (index < size), weight, 0.0)
        taps.append((np.clip(index, 0, size - 1).astype(np.int64), weight))
    total = sum(weight for _, weight in taps)
    return [(index, weight / total) for index, weight in taps if weight.any()]


def _resize_axis(c: Context, x: ValueId, axis: int, out: int, scale: float) -> ValueId:
    """Resize one axis."""
    size = c.shape(x)[axis]
    old = c.operator.op_type == "Upsample"
    coordinates = "asymmetric" if old else c.attributes.text("coordinate_transformation_mode", "half_pixel")
    if c.version < 11:
        coordinates = "asymmetric"
    where = _coordinates(coordinates, size, out, scale)
    mode = c.attributes.text("mode", "nearest")
    if mode == "nearest":
        rounding = c.attributes.text("nearest_mode", "round_prefer_floor")
        rounding = "floor" if c.version < 11 else rounding
        # Rounding errors of x / scale must not move a position across an integer or half of one; the scale may be of
        # float32.
        near = np.rint(2 * where) / 2
        exact = np.where(np.abs(where - near) < 2.0**-23 * np.maximum(near, 1), near, where)
        index = np.clip(_ROUNDINGS[rounding](exact), 0, size - 1)
        return c.take(x, axis, [int(i) for i in index])
    taps = _taps(mode, where, size, scale, c)
    if len(taps) > MOST_TAPS:
        raise NotSplitError(f"a filter of {len(taps)} taps")
    shape = [-1 if i == axis else 1 for i in range(c.rank(x))]
    total: ValueId | None = None
    for index, weight in taps:
        term = c.take(x, axis, [int(i) for i in index])
        if not (weight == 1).all():
            factor = c.constant(weight.reshape(shape).astype(c.dtype(x).numpy))
            term = c.elementwise("mul", term, factor)
        total = term if total is None else c.elementwise("add", total, term)
    return x if total is None else total


def _scales(c: Context, axes: Sequence[int]) -> dict[int, float]:
    """Return the scale of each axis that is resized."""
    x = c.input(0)
    if c.operator.op_type == "Upsample" and c.version < 9:
        return dict(enumerate(c.attributes.numbers("scales")))
    position = 1 if c.operator.op_type == "Upsample" or c.version < 11 else 2
    sizes_given = c.version >= 11 and c.is_given(3)
    array = None if sizes_given else c.array(position)
    if not sizes_given and array is None:
        raise NotSplitError("scales are computed at run time")
    if array is not None and array.size:
        return {axis: float(s) for axis, s in zip(axes, array.reshape(-1), strict=True)}
    sizes = c.ints(3)
    if sizes is None:
        raise NotSplitError("sizes are computed at run time")
    ratios = [n / max(c.shape(x)[axis], 1) for axis, n in zip(axes, sizes, strict=True)]
    policy = c.attributes.text("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(ratios)
    return dict(zip(axes, ratios, strict=True))


def _resize(c: Context) -> Result:
    x = c.input(0)
    axes = [axis_of(a, c.rank(x)) for a in c.attributes.integers("axes", tuple(range(c.rank(x))))]
    scales = _scales(c, axes)
    if c.attributes.text("mode", "nearest") != "nearest" and not c.is_float(x):
        raise NotSplitError("integers are interpolated")
    if 0 in c.shape(x):
        raise NotSplitError("an empty input")
    mode, rounding = c.attributes.text("mode", "nearest"), c.attributes.get("nearest_mode")
    if mode not in ("nearest", "linear", "cubic") or rounding not in (None, *_ROUNDINGS):
        raise NotSplitError(f"the mode {mode}, rounding {rounding}")
    if max(c.output_type().shape, default=0) > MOST_INDICES:
        raise NotSplitError(f"an axis of more than {MOST_INDICES} elements")
    for axis, scale in scales.items():
        out = c.output_type().shape[axis]
        if scale == 1.0 and out == c.shape(x)[axis]:
            continue
        x = _resize_axis(c, x, axis, out, scale)
    return x


RULES: tuple[FissionRule, ...] = (FissionRule("Resize", _resize, 10), FissionRule("Upsample", _resize, 7, 9))
