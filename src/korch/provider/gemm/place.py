"""Where the elements of a tensor lie, as a sum of one offset per axis.

Layout steps are followed with an array of addresses: what they do to the elements they do to the
addresses, so no step needs a rule of its own. Groups of one model share most of their steps, and
the arrays are as large as the tensors, so what is found is remembered, up to some megabytes: they
stay with the process after a search.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np

from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.op import Array, Attributes
from korch.primitive.ops import OPS

ARRAY_BYTES = 128 << 20
"""Size of the arrays of addresses in the cache, which always keeps the last one."""

PLACE_BYTES = 32 << 20
"""Size of the offsets in the cache: three vectors each."""

KEY_BYTES = 1024
"""What it takes to remember that there is no place."""

ANSWERS = 4096
"""Comparisons of addresses that are remembered."""


class Recent:
    """What was asked for last, as much of it as some bytes hold. Threads may ask at once."""

    def __init__(self, most_bytes: int) -> None:
        """Begin with nothing."""
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """Return what was made for a key, or make it."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][0]
        made = make()
        size_bytes = size(made)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made, size_bytes
                self.held_bytes += size_bytes
            while self.held_bytes > self.most_bytes and len(self._kept) > 1:
                _, (_, gone_bytes) = self._kept.popitem(last=False)
                self.held_bytes -= gone_bytes
        return made


_ARRAYS, _PLACES = Recent(ARRAY_BYTES), Recent(PLACE_BYTES)


@dataclass(frozen=True, eq=False)
class Offsets:
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


@dataclass(frozen=True)
class Addresses:
    """The addresses of a dense tensor's elements after layout steps.

    Attributes:
        shape: of the dense tensor.
        layout: without blocks; None for row-major.
        steps: operation and attributes of each step (transpose, reshape, slice, take, broadcast).
    """

    shape: tuple[int, ...]
    layout: Layout | None = None
    steps: tuple[tuple[str, Attributes], ...] = ()

    def after(self, *steps: Primitive) -> Addresses:
        """Return the addresses after further steps."""
        added = ((step.op, step.attributes) for step in steps)
        return Addresses(self.shape, self.layout, (*self.steps, *added))

    def array(self) -> Array:
        """Return them, in the shape after the steps; they can't be written to."""
        found: Array = _ARRAYS.get(self, partial(_array, self), lambda array: int(array.nbytes))
        return found

    def is_same(self, other: Addresses) -> bool:
        """Return whether others are equal."""
        return self == other or _are_equal(self, other)


def _array(addresses: Addresses) -> Array:
    if not addresses.steps:
        found = _first(addresses.shape, addresses.layout)
    else:
        *before, (op, attributes) = addresses.steps
        source = Addresses(addresses.shape, addresses.layout, tuple(before)).array()
        found = np.asarray(OPS[op].reference([source], attributes))
    found = found.view()
    found.flags.writeable = False  # whoever asks next gets the same
    return found


def _first(shape: tuple[int, ...], layout: Layout | None) -> Array:
    """Return the addresses before any step."""
    flat = np.arange(math.prod(shape), dtype=np.int32 if math.prod(shape) < 2**31 else np.int64)
    if layout is None or layout.is_plain:
        return flat.reshape(shape)
    stored = flat.reshape([shape[axis] for axis in layout.order])
    return stored.transpose(np.argsort(layout.order))


@lru_cache(ANSWERS)
def _are_equal(a: Addresses, b: Addresses) -> bool:
    return np.array_equal(a.array(), b.array())


def place_of_matrices(addresses: Addresses, batch: tuple[int, ...]) -> Offsets | None:
    """Return where [batch..., row, column] lies, with axes of the batch broadcast; or None."""
    make = partial(_place_of_matrices, addresses, batch)
    found: Offsets | None = _PLACES.get((addresses, batch), make, _place_bytes)
    return found


def _place_of_matrices(addresses: Addresses, batch: tuple[int, ...]) -> Offsets | None:
    array = addresses.array()
    matrix = array.shape[-2:]
    return _split(np.broadcast_to(array, (*batch, *matrix)).reshape(-1, *matrix))


def place_by_number(addresses: Addresses, numbers: Addresses, shape: tuple[int, int, int]) -> Offsets | None:
    """Return where the element lies that has number [i, j, k] of a dense tensor of rank 3; or None.

    Args:
        addresses: of a tensor's elements.
        numbers: which number each of them has.
        shape: of the dense tensor.
    """
    make = partial(_place_by_number, addresses, numbers, shape)
    found: Offsets | None = _PLACES.get((addresses, numbers, shape), make, _place_bytes)
    return found


def _place_by_number(addresses: Addresses, numbers: Addresses, shape: tuple[int, int, int]) -> Offsets | None:
    array = addresses.array()
    if numbers.steps or numbers.layout is not None:
        by_number = np.empty(array.size, array.dtype)
        by_number[numbers.array().reshape(-1)] = array.reshape(-1)
        array = by_number
    return _split(array.reshape(shape))


def _place_bytes(place: Offsets | None) -> int:
    vectors = () if place is None else place.offsets
    return KEY_BYTES + sum(int(offsets.nbytes) for offsets in vectors)


def _split(addresses: Array) -> Offsets | None:
    """Return addresses[i, j, k] as sums of offsets per axis, or None if they are no such sums."""
    if addresses.size == 0:
        return None
    first = addresses[:, 0, 0].astype(np.int64)  # a view would keep all addresses in memory
    second = addresses[0, :, 0] - addresses[0, 0, 0]
    third = addresses[0, 0, :] - addresses[0, 0, 0]
    rows = second[:, None] + third
    if not all(np.array_equal(rows, matrix - matrix[0, 0]) for matrix in addresses):
        return None
    return Offsets((first, second.astype(np.int64), third.astype(np.int64)))
