"""Gathers, scatters and one-hot codes along short axes whose indices are known at run time become primitives."""

import numpy as np
import pytest

from korch.fission import fission_with_report
from korch.frontend import load_model
from korch.primitive.check import check_graph
from korch.primitive.op import Array
from korch.primitive.reference import run
from tests.support.models import in_onnxruntime, one_operator

SPECIALS = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3.0], np.float32)


def numbers(*shape: int) -> Array:
    """Return numbers of which some are no ordinary ones."""
    return np.random.default_rng(3).choice(SPECIALS, shape)


def places(size: int, *shape: int, dtype: type = np.int64) -> Array:
    """Return indices of an axis, distinct along the last axis; some count from the end."""
    rng = np.random.default_rng(4)
    found = np.array([rng.permutation(size)[: shape[-1]] for _ in np.ndindex(*shape[:-1])]).reshape(shape)
    return (found - size * rng.integers(0, 2, shape)).astype(dtype)


CASES = [
    ("ScatterElements", [numbers(5, 8), places(8, 5, 2), numbers(5, 2)], {}, {"axis": 1}),
    ("ScatterElements", [numbers(3, 1), places(1, 3, 1), numbers(3, 1)], {}, {"axis": -1}),
    ("ScatterElements", [np.zeros((6, 2), np.int32), places(6, 2, 3).T, np.ones((3, 2), np.int32)], {}, {"axis": 0}),
    ("OneHot", [places(6, 4, 2)], {1: np.array([6]), 2: np.array([0, 1])}, {}),
    ("OneHot", [places(6, 4, 2) * 2], {1: np.array([6]), 2: np.array([-1.5, np.inf], np.float32)}, {"axis": 0}),
    ("OneHot", [places(3, 2, 2), None, numbers(2)], {1: np.array(3)}, {"axis": 1}),
]


@pytest.mark.parametrize(("op", "inputs", "constants", "attributes"), CASES)
def test_they_compute_what_onnxruntime_does(op, inputs, constants, attributes):
    model = one_operator(op, inputs, constants=constants, opset=17, **attributes)
    graph, report = fission_with_report(load_model(model))
    check_graph(graph)
    assert not report.kept
    feeds = {f"x{i}": array for i, array in enumerate(inputs) if array is not None}
    (expected,) = in_onnxruntime(model, feeds)
    found = run(graph, feeds, exact=False)["y0"]
    np.testing.assert_array_equal(found, expected)
    if found.dtype.kind == "f":
        np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(expected[found == 0]))


REFUSED = [
    ("GatherElements", [numbers(5, 8), places(8, 5, 2)], {"axis": 1}),
    ("ScatterElements", [numbers(5, 8), places(8, 3, 2), numbers(3, 2)], {"axis": 1}),
    ("ScatterElements", [numbers(2, 40), places(40, 2, 17), numbers(2, 17)], {"axis": 1}),
]


@pytest.mark.parametrize(("op", "inputs", "attributes"), REFUSED)
def test_longer_ones_stay_whole(op, inputs, attributes):
    _, report = fission_with_report(load_model(one_operator(op, inputs, opset=17, **attributes)))
    assert [kept.reason for kept in report.kept] == ["indices are computed at run time"]
