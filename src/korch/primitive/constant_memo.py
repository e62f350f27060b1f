"""Results of pure functions of large constant arrays, computed once per array.

A model is read, split and packed once for each of several sizes, with the same weights.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np

from korch.primitive.op import Array

P = ParamSpec("P")
R = TypeVar("R")

LARGE_BYTES = 1 << 16
"""Results for smaller arrays are not kept."""


def once_per_array(function: Callable[Concatenate[Array, P], R]) -> Callable[Concatenate[Array, P], R]:
    """Return a pure function of an array that keeps its results while the array's memory lives.

    Only large arrays that can't be written are known again. Nor can the arrays in a result be written; they must not
    be views of the argument, which would then live forever.
    """
    kept: dict[tuple[object, ...], tuple[weakref.ref[Array], R]] = {}

    @functools.wraps(function)
    def remembered(array: Array, /, *args: P.args, **kwargs: P.kwargs) -> R:
        owner = _owner(array)
        if array.nbytes < LARGE_BYTES or owner.flags.writeable:
            return function(array, *args, **kwargs)
        key = (array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str, args, *kwargs.items())
        if key in kept and kept[key][0]() is owner:
            return kept[key][1]
        found = function(array, *args, **kwargs)
        protect(found)
        kept[key] = weakref.ref(owner, lambda _: kept.pop(key, None)), found
        return found

    return remembered


def protect(found: object) -> None:
    """Make the arrays in a result read-only, with the memory that they are views of."""
    for part in found if isinstance(found, tuple) else (found,):
        if isinstance(part, np.ndarray):
            part.flags.writeable = _owner(part).flags.writeable = False


def _owner(array: Array) -> Array:
    """Return the array that keeps the memory of an array."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
