"""Fission of gathers and scatters, with constant indices or along a short axis.

Constant indices become `take` primitives. `OneHot`, and a scatter by indices that are known only at run time, compare
each index with all positions of the axis.
"""

import math

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.op import Array
from korch.primitive.ops.layout import MOST_INDICES
from korch.primitive.types import DType, ValueId
from korch.primitive.verbs import lit

MOST_PLACES = 256
"""The longest axis whose positions are all compared with an index that is known only at run time."""

MOST_COMPARED = 1 << 20
"""The most comparisons of run-time indices with positions."""

MOST_UPDATES = 16
"""The most updates along an axis that are scattered one after another."""


def _indices(c: Context) -> Array:
    array = c.array(1)
    if array is None:
        raise NotSplitError("indices are computed at run time")
    if array.size > MOST_INDICES:
        raise NotSplitError(f"{array.size} indices, more than {MOST_INDICES}")
    return array.astype(np.int64)


def _wrapped(indices: Array, sizes: int | Array) -> Array:
    """Return indices into axes of these sizes with negative ones converted to count from the start."""
    if ((indices < -sizes) | (indices >= sizes)).any():
        raise NotSplitError("an index outside of the axis")
    return np.where(indices < 0, indices + sizes, indices)


def _strides(shape: tuple[int, ...]) -> Array:
    return np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))], np.int64)


def _element_positions(c: Context, indices: Array) -> Array:
    """Return the flat positions in the data that indices along the attribute's axis refer to."""
    shape = c.shape(c.input(0))
    axis = axis_of(c.attributes.integer("axis", 0), len(shape))
    grid = np.indices(indices.shape)
    grid[axis] = _wrapped(indices, shape[axis])
    positions: Array = np.tensordot(_strides(shape), grid, 1)
    if positions.size and positions.max() >= math.prod(shape):
        raise NotSplitError("an index outside of the data")
    return positions


def _row_positions(c: Context, indices: Array) -> Array:
    """Return the flat number of the row of the data that each index selects; its last axis has the coordinates."""
    sizes = c.shape(c.input(0))[: indices.shape[-1]]
    found: Array = (_wrapped(indices, np.array(sizes, np.int64)) * _strides(sizes)).sum(-1)
    return found


def _taken(c: Context, x: ValueId, axis: int, positions: Array) -> Result:
    return c.reshape(c.take(x, axis, [int(i) for i in positions.reshape(-1)]), c.output_type().shape)


def _gather(c: Context) -> Result:
    x, indices = c.input(0), _indices(c)
    if c.builder.constant_of(x) is not None and c.input(1) in c.builder.sized:
        raise NotSplitError("rows of a table at places that follow from sizes")
    axis = axis_of(c.attributes.integer("axis", 0), c.rank(x))
    return _taken(c, x, axis, _wrapped(indices, c.shape(x)[axis]))


def _gather_elements(c: Context) -> Result:
    x = c.input(0)
    return _taken(c, c.reshape(x, (math.prod(c.shape(x)),)), 0, _element_positions(c, _indices(c)))


_LEAST = {DType.I32: -(1 << 31), DType.I64: -(1 << 63)}


def _is_short(shape: tuple[int, ...], size: int) -> bool:
    """Return whether comparing indices with all positions of an axis stays within the limits."""
    return 0 < size <= MOST_PLACES and 0 < math.prod(shape) * size <= MOST_COMPARED


def _is_at_place(c: Context, index: ValueId, axis: int, size: int) -> ValueId:
    """Insert an axis of `size` positions, and return for each index whether it equals each position.

    Negative indices count from the end of the axis.
    """
    shape, dtype = c.shape(index), c.dtype(index)
    wrapped = c.elementwise("add", index, lit(size))
    index = c.add("where", c.elementwise("less", index, lit(0)), wrapped, index)
    lead = (*shape[:axis], size, *shape[axis:])
    places = np.arange(size, dtype=dtype.numpy).reshape([size if i == axis else 1 for i in range(len(lead))])
    wide = c.broadcast(c.reshape(index, (*shape[:axis], 1, *shape[axis:])), lead)
    return c.elementwise("equal", wide, c.broadcast(c.constant(places), lead))


def _one_hot(c: Context) -> Result:
    index, depth, values = c.input(0), c.ints(1), c.input(2)
    if c.dtype(index) not in _LEAST:
        raise NotSplitError(f"indices of type {c.dtype(index).value}")
    if depth is None or not depth[0] > 0:
        raise NotSplitError("the number of classes is computed at run time")
    axis = axis_of(c.attributes.integer("axis", -1), c.rank(index) + 1)
    is_on = _is_at_place(c, index, axis, depth[0])
    off, on = (c.broadcast(c.slice_axis(values, 0, i, 1), c.shape(is_on)) for i in (0, 1))
    return c.add("where", is_on, on, off)


def _gather_nd(c: Context) -> Result:
    indices = _indices(c)
    if c.attributes.integer("batch_dims", 0):
        raise NotSplitError("batch axes")
    shape, depth = c.shape(c.input(0)), indices.shape[-1]
    rows = c.reshape(c.input(0), (math.prod(shape[:depth]), *shape[depth:]))
    return _taken(c, rows, 0, _row_positions(c, indices))


def _scatter_indices(c: Context) -> Array:
    if c.attributes.text("reduction", "none") != "none":
        raise NotSplitError("updates are combined")
    if math.prod(c.shape(c.input(0))) > MOST_INDICES:
        raise NotSplitError(f"more than {MOST_INDICES} elements")
    return _indices(c)


def _placed(c: Context, positions: Array) -> Result:
    """Return the data with update i at flat position positions[i]; the last update of a position wins."""
    data, updates = c.input(0), c.input(2)
    count = math.prod(c.shape(data))
    sources = np.arange(count)
    sources[positions.reshape(-1)] = count + np.arange(positions.size)
    flat = [c.reshape(value, (math.prod(c.shape(value)),)) for value in (data, updates)]
    return _taken(c, c.concat(flat, 0), 0, sources)


def _scattered(c: Context) -> Result:
    """Scatter along a short axis by indices known only at run time; the last update of a position wins."""
    found, index, updates = c.input(0), c.input(1), c.input(2)
    shape, count = c.shape(found), c.shape(index)
    axis = axis_of(c.attributes.integer("axis", 0), len(shape))
    is_whole = all(a == b for i, (a, b) in enumerate(zip(shape, count, strict=True)) if i != axis)
    if not is_whole or not _is_short(count, shape[axis]) or count[axis] > MOST_UPDATES:
        raise NotSplitError("indices are computed at run time")
    if c.attributes.text("reduction", "none") != "none":
        raise NotSplitError("updates are combined")
    for i in range(count[axis]):
        own, update = (c.slice_axis(value, axis, i, 1) for value in (index, updates))
        is_here = c.reshape(_is_at_place(c, own, axis + 1, shape[axis]), shape)
        found = c.add("where", is_here, c.broadcast(update, shape), found)
    return found


def _scatter_elements(c: Context) -> Result:
    if c.array(1) is None:
        return _scattered(c)
    return _placed(c, _element_positions(c, _scatter_indices(c)))


def _scatter_nd(c: Context) -> Result:
    indices = _scatter_indices(c)
    each = math.prod(c.shape(c.input(0))[indices.shape[-1] :])
    return _placed(c, each * _row_positions(c, indices)[..., None] + np.arange(each))


RULES: tuple[FissionRule, ...] = (
    FissionRule("Gather", _gather),
    FissionRule("GatherElements", _gather_elements, 11),
    FissionRule("GatherND", _gather_nd, 11),
    FissionRule("OneHot", _one_hot, 9),
    FissionRule("ScatterElements", _scatter_elements, 11),
    FissionRule("Scatter", _scatter_elements, 9),
    FissionRule("ScatterND", _scatter_nd, 11),
)
