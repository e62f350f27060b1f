"""Where the elements of a tensor lie, as a sum of one offset per axis.

Layout steps are followed with an array of addresses: what they do to the elements they do to the
addresses, so no step needs a rule of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.op import Array


@dataclass(frozen=True, eq=False)
class Place:
    """Addresses of the elements [i, j, k] of a tensor of rank 3: their sum over the axes.

    Attributes:
        offsets: int64[n] per axis, in elements; the first axis has the base, the others begin at 0.
    """

    offsets: tuple[Array, Array, Array]

    @property
    def step(self) -> int | None:
        """The distance between neighbours along the last axis; None if it varies."""
        return _step(self.offsets[2])

    @property
    def row_step(self) -> int | None:
        """The distance between neighbours along the middle axis; None if it varies."""
        return _step(self.offsets[1])

    def text(self, axis: int, variable: str) -> str | None:
        """Return the offset along an axis as C++, or None if it is no multiple of the index."""
        offsets = self.offsets[axis]
        step = _step(offsets)
        if step is None:
            return None
        base = int(offsets[0]) if len(offsets) else 0
        parts = ([str(base)] if base else []) + ([f"{step} * {variable}"] if step else [])
        return " + ".join(parts)


def _step(offsets: Array) -> int | None:
    if len(offsets) < 2:
        return 0
    step = int(offsets[1] - offsets[0])
    return step if bool((np.diff(offsets) == step).all()) else None


def split(addresses: Array) -> Place | None:
    """Return addresses[i, j, k] as sums of offsets per axis, or None if they are no such sums."""
    if addresses.size == 0:
        return None
    first = addresses[:, 0, 0].copy()  # a view would keep all addresses in memory
    second = addresses[0, :, 0] - addresses[0, 0, 0]
    third = addresses[0, 0, :] - addresses[0, 0, 0]
    total = first[:, None, None] + second[:, None] + third
    return Place((first, second, third)) if np.array_equal(total, addresses) else None


def follow(addresses: Array, steps: Sequence[Primitive]) -> Array:
    """Return the addresses after layout steps (transpose, reshape, slice, take, broadcast)."""
    for step in steps:
        addresses = np.asarray(step.row.reference([addresses], step.attributes))
    return addresses


def natural(shape: tuple[int, ...], layout: Layout | None = None) -> Array:
    """Return the addresses of a dense tensor, row-major or in a layout without blocks."""
    addresses = np.arange(int(np.prod(shape)), dtype=np.int64)
    if layout is None or layout.is_plain:
        return addresses.reshape(shape)
    stored = addresses.reshape([shape[axis] for axis in layout.order])
    return stored.transpose(np.argsort(layout.order))
