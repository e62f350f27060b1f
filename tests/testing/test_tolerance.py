import numpy as np
import pytest

from korch.primitive.types import DType
from korch.testing.tolerance import assert_same, tolerance

ONES = np.ones((2, 3), np.float32)


def _with(value, at=(0, 0), dtype=np.float32):
    array = np.ones((2, 3), dtype)
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("actual", "expected", "complaint"),
    [
        (np.ones((3, 2), np.float32), ONES, "shape"),
        (np.ones((2, 3), np.float16), ONES, "elements float16"),
        (np.ones((2, 3), np.int32), np.ones((2, 3)), "elements int32"),
        (_with(np.nan), ONES, "NaN"),
        (ONES, _with(np.nan), "NaN"),
        (_with(np.inf), ONES, "infinite"),
        (_with(np.inf), _with(-np.inf), "infinite"),
        (_with(1e30), _with(np.inf), "infinite"),
        (_with(1.001), ONES, "more than"),
        (_with(2, dtype=np.int32), np.ones((2, 3), np.int32), "differs at"),
    ],
)
def test_what_differs_is_refused(actual, expected, complaint):
    with pytest.raises(AssertionError, match=complaint):
        assert_same(actual, expected, name="it")


def test_what_is_the_same_is_accepted():
    assert_same(_with(np.nan), _with(np.nan, dtype=np.float64))
    assert_same(_with(-np.inf), _with(-np.inf))
    assert_same(ONES * np.float32(1 + 1e-7), ONES)
    assert_same(_with(np.inf), _with(1e300, dtype=np.float64))  # beyond float32
    assert_same(np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32))
    assert_same(np.array([True]), np.array([True]))


def test_moved_elements_may_not_change_at_all():
    with pytest.raises(AssertionError):
        assert_same(np.nextafter(ONES, np.float32(2)), ONES, family="move")


def test_tolerances_grow_with_terms_and_with_coarser_types():
    assert tolerance(DType.F32, "composite", 100)[1] > tolerance(DType.F32, "composite", 1)[1]
    assert tolerance(DType.BF16, "composite")[0] > tolerance(DType.F16, "composite")[0]
    assert tolerance(DType.I32, "composite", 100) == (0.0, 0.0)
