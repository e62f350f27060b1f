"""Fission of scatters whose indices are known: each element is taken from one place."""

from __future__ import annotations

import math

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import NotSplit, Result, Rule, rule
from korch.primitive.op import Array
from korch.primitive.ops.layout import MOST_INDICES


def _known(c: Context) -> Array | NotSplit:
    indices = c.array(1)
    if indices is None:
        return NotSplit("indices are computed at run time")
    if c.attribute("reduction", "none") not in ("none", b"none"):
        return NotSplit("updates are combined")
    if max(math.prod(c.shape(c.input(0))), indices.size) > MOST_INDICES:
        return NotSplit(f"more than {MOST_INDICES} elements")
    return indices.astype(np.int64)


def _place(c: Context, positions: Array) -> Result:
    """Return the data with update i at flat position positions[i]; the last one at a place wins."""
    data, updates = c.input(0), c.input(2)
    count = math.prod(c.shape(data))
    if positions.size and not (positions.min() >= 0 and positions.max() < count):
        return NotSplit("an index outside of the data")
    sources = np.arange(count)
    sources[positions.reshape(-1)] = count + np.arange(positions.size)
    flat = [c.reshape(value, (math.prod(c.shape(value)),)) for value in (data, updates)]
    joined = c.concat(flat, 0)
    return c.reshape(c.take(joined, 0, [int(i) for i in sources]), c.shape(data))


def _scatter_elements(c: Context) -> Result:
    indices = _known(c)
    if isinstance(indices, NotSplit):
        return indices
    shape = c.shape(c.input(0))
    axis = axis_of(int(c.attribute("axis", 0)), len(shape))
    if ((indices < -shape[axis]) | (indices >= shape[axis])).any():
        return NotSplit("an index outside of the axis")
    grid: list[Array] = list(np.indices(indices.shape))
    grid[axis] = np.where(indices < 0, indices + shape[axis], indices)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return _place(c, sum((g * s for g, s in zip(grid, strides, strict=True)), np.zeros(indices.shape, np.int64)))


def _scatter_nd(c: Context) -> Result:
    indices = _known(c)
    if isinstance(indices, NotSplit):
        return indices
    shape, depth = c.shape(c.input(0)), indices.shape[-1]
    sizes = np.array(shape[:depth], np.int64)
    if ((indices < -sizes) | (indices >= sizes)).any():
        return NotSplit("an index outside of the data")
    strides = np.array([math.prod(shape[i + 1 :]) for i in range(depth)], np.int64)
    firsts = (np.where(indices < 0, indices + sizes, indices) * strides).sum(-1)
    each = math.prod(shape[depth:])
    return _place(c, firsts[..., None] + np.arange(each))


RULES: tuple[Rule, ...] = (
    rule("ScatterElements", _scatter_elements, 11),
    rule("Scatter", _scatter_elements, 9),
    rule("ScatterND", _scatter_nd, 11),
)
