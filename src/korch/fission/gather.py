"""Fission of gathers and scatters whose indices are known: elements are taken from known places."""

from __future__ import annotations

import math

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import NotSplit, Result, Rule, rule
from korch.primitive.op import Array
from korch.primitive.ops.layout import MOST_INDICES
from korch.primitive.types import ValueId


def _indices(c: Context) -> Array | NotSplit:
    array = c.array(1)
    if array is None:
        return NotSplit("indices are computed at run time")
    if array.size > MOST_INDICES:
        return NotSplit(f"{array.size} indices, more than {MOST_INDICES}")
    return array.astype(np.int64)


def _wrapped(indices: Array, sizes: int | Array) -> Array | NotSplit:
    """Return indices that count from the start of their axes, of these sizes."""
    if ((indices < -sizes) | (indices >= sizes)).any():
        return NotSplit("an index outside of the axis")
    return np.where(indices < 0, indices + sizes, indices)


def _strides(shape: tuple[int, ...]) -> Array:
    return np.array([math.prod(shape[i + 1 :]) for i in range(len(shape))], np.int64)


def _element_positions(c: Context, indices: Array) -> Array | NotSplit:
    """Return where among the data's elements each index points that replaces one coordinate."""
    shape = c.shape(c.input(0))
    axis = axis_of(c.attributes.integer("axis", 0), len(shape))
    along = _wrapped(indices, shape[axis])
    if isinstance(along, NotSplit):
        return along
    grid = np.indices(indices.shape)
    grid[axis] = along
    positions: Array = np.tensordot(_strides(shape), grid, 1)
    if positions.size and positions.max() >= math.prod(shape):
        return NotSplit("an index outside of the data")
    return positions


def _row_positions(c: Context, indices: Array) -> Array | NotSplit:
    """Return which of the data's rows each index selects; its last axis has the coordinates."""
    sizes = c.shape(c.input(0))[: indices.shape[-1]]
    wrapped = _wrapped(indices, np.array(sizes, np.int64))
    return wrapped if isinstance(wrapped, NotSplit) else (wrapped * _strides(sizes)).sum(-1)


def _taken(c: Context, x: ValueId, axis: int, positions: Array) -> Result:
    return c.reshape(c.take(x, axis, [int(i) for i in positions.reshape(-1)]), c.output_type().shape)


def _gather(c: Context) -> Result:
    x, indices = c.input(0), _indices(c)
    if isinstance(indices, NotSplit):
        return indices
    axis = axis_of(c.attributes.integer("axis", 0), c.rank(x))
    along = _wrapped(indices, c.shape(x)[axis])
    return along if isinstance(along, NotSplit) else _taken(c, x, axis, along)


def _gather_elements(c: Context) -> Result:
    x, indices = c.input(0), _indices(c)
    positions = indices if isinstance(indices, NotSplit) else _element_positions(c, indices)
    if isinstance(positions, NotSplit):
        return positions
    return _taken(c, c.reshape(x, (math.prod(c.shape(x)),)), 0, positions)


def _gather_nd(c: Context) -> Result:
    indices = _indices(c)
    if isinstance(indices, NotSplit):
        return indices
    if c.attributes.integer("batch_dims", 0):
        return NotSplit("batch axes")
    positions = _row_positions(c, indices)
    if isinstance(positions, NotSplit):
        return positions
    shape, depth = c.shape(c.input(0)), indices.shape[-1]
    rows = c.reshape(c.input(0), (math.prod(shape[:depth]), *shape[depth:]))
    return _taken(c, rows, 0, positions)


def _scatter_indices(c: Context) -> Array | NotSplit:
    if c.attributes.text("reduction", "none") != "none":
        return NotSplit("updates are combined")
    if math.prod(c.shape(c.input(0))) > MOST_INDICES:
        return NotSplit(f"more than {MOST_INDICES} elements")
    return _indices(c)


def _placed(c: Context, positions: Array) -> Result:
    """Return the data with update i at flat position positions[i]; the last one at a place wins."""
    data, updates = c.input(0), c.input(2)
    count = math.prod(c.shape(data))
    sources = np.arange(count)
    sources[positions.reshape(-1)] = count + np.arange(positions.size)
    flat = [c.reshape(value, (math.prod(c.shape(value)),)) for value in (data, updates)]
    return _taken(c, c.concat(flat, 0), 0, sources)


def _scatter_elements(c: Context) -> Result:
    indices = _scatter_indices(c)
    positions = indices if isinstance(indices, NotSplit) else _element_positions(c, indices)
    return positions if isinstance(positions, NotSplit) else _placed(c, positions)


def _scatter_nd(c: Context) -> Result:
    indices = _scatter_indices(c)
    if isinstance(indices, NotSplit):
        return indices
    firsts = _row_positions(c, indices)
    if isinstance(firsts, NotSplit):
        return firsts
    each = math.prod(c.shape(c.input(0))[indices.shape[-1] :])
    return _placed(c, each * firsts[..., None] + np.arange(each))


RULES: tuple[Rule, ...] = (
    rule("Gather", _gather),
    rule("GatherElements", _gather_elements, 11),
    rule("GatherND", _gather_nd, 11),
    rule("ScatterElements", _scatter_elements, 11),
    rule("Scatter", _scatter_elements, 9),
    rule("ScatterND", _scatter_nd, 11),
)
