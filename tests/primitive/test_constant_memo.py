"""Results of functions of constant arrays are kept as long as the arrays, and only for those that can't change."""

import gc
import weakref

import numpy as np
import pytest

from korch.primitive.constant_memo import LARGE_BYTES, once_per_array
from korch.primitive.graph import Constant


def calls_of(arrays):
    """Return how often a function of arrays that is kept is called for some arrays."""
    calls = []
    doubled = once_per_array(lambda array, factor: calls.append(0) or array * factor)
    for array in arrays:
        assert (doubled(array, 2) == array * 2).all()
    return len(calls)


def read_only(count):
    array = np.arange(count, dtype=np.int32)
    array.flags.writeable = False
    return array


LARGE = LARGE_BYTES // 4


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ([read_only(LARGE)] * 2, 1),
        ([read_only(LARGE), read_only(LARGE)], 2),
        ([np.arange(LARGE)] * 2, 2),
        ([read_only(9)] * 2, 2),
        ([a := read_only(2 * LARGE).reshape(2, -1), a.T, a.T, a], 2),
    ],
)
def test_a_function_is_called_once_for_each_large_array_that_cannot_be_written(arrays, expected):
    assert calls_of(arrays) == expected


def test_a_transposed_constant_is_copied_once_and_freed_with_its_array():
    array = read_only(LARGE).reshape(4, -1)
    first, second = Constant.of(array.T), Constant.of(array.T)
    assert first.array is not array and np.shares_memory(first.array, second.array)
    assert not first.array.flags.writeable
    alive = weakref.ref(array.base)
    del array
    gc.collect()
    assert alive() is None
