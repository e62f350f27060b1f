"""Fission of gathers whose indices are known: elements are taken along one axis."""

from __future__ import annotations

import math

import numpy as np

from korch.fission.context import Context, axis_of
from korch.fission.rule import NotSplit, Result, Rule, rule
from korch.primitive.op import Array
from korch.primitive.ops.layout import MOST_INDICES


def _indices(c: Context) -> Array | NotSplit:
    array = c.array(1)
    if array is None:
        return NotSplit("indices are computed at run time")
    if array.size > MOST_INDICES:
        return NotSplit(f"{array.size} indices, more than {MOST_INDICES}")
    return array.astype(np.int64)


def _gather(c: Context) -> Result:
    x, indices = c.input(0), _indices(c)
    if isinstance(indices, NotSplit):
        return indices
    axis = axis_of(int(c.attribute("axis", 0)), c.rank(x))
    size = c.shape(x)[axis]
    flat = [int(i) + size if i < 0 else int(i) for i in indices.reshape(-1)]
    if any(not 0 <= i < size for i in flat):
        return NotSplit("an index outside of the axis")
    return c.reshape(c.take(x, axis, flat), c.output_type().shape)


def _take_flat(c: Context, positions: Array) -> Result:
    x = c.input(0)
    flat = c.reshape(x, (math.prod(c.shape(x)),))
    if positions.size and not (positions.min() >= 0 and positions.max() < c.shape(flat)[0]):
        return NotSplit("an index outside of the input")
    taken = c.take(flat, 0, [int(i) for i in positions.reshape(-1)])
    return c.reshape(taken, c.output_type().shape)


def _gather_elements(c: Context) -> Result:
    x, indices = c.input(0), _indices(c)
    if isinstance(indices, NotSplit):
        return indices
    shape = c.shape(x)
    axis = axis_of(int(c.attribute("axis", 0)), len(shape))
    if ((indices < -shape[axis]) | (indices >= shape[axis])).any():
        return NotSplit("an index outside of the axis")
    grid: list[Array] = list(np.indices(indices.shape))
    grid[axis] = np.where(indices < 0, indices + shape[axis], indices)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return _take_flat(c, sum((g * s for g, s in zip(grid, strides, strict=True)), np.zeros(indices.shape, np.int64)))


def _gather_nd(c: Context) -> Result:
    x, indices = c.input(0), _indices(c)
    if isinstance(indices, NotSplit):
        return indices
    if c.attribute("batch_dims", 0):
        return NotSplit("batch axes")
    shape, depth = c.shape(x), indices.shape[-1]
    sizes = np.array(shape[:depth], np.int64)
    if ((indices < -sizes) | (indices >= sizes)).any():
        return NotSplit("an index outside of the input")
    strides = np.array([math.prod(shape[i + 1 : depth]) for i in range(depth)], np.int64)
    positions = (np.where(indices < 0, indices + sizes, indices) * strides).sum(-1)
    rows = c.reshape(x, (math.prod(shape[:depth]), *shape[depth:]))
    taken = c.take(rows, 0, [int(i) for i in positions.reshape(-1)])
    return c.reshape(taken, c.output_type().shape)


RULES: tuple[Rule, ...] = (
    rule("Gather", _gather),
    rule("GatherElements", _gather_elements, 11),
    rule("GatherND", _gather_nd, 11),
)
