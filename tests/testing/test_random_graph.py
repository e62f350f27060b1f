import numpy as np
import pytest

from korch.primitive.check import check_graph
from korch.primitive.op import Category
from korch.primitive.reference import run
from korch.primitive.types import DType, ValueType
from korch.testing.samples import random_array
from tests.support.random_graph import random_graph, random_inputs


@pytest.mark.parametrize("seed", range(25))
def test_random_graphs_are_legal_alive_and_moderate(seed):
    graph = random_graph(np.random.default_rng(seed), 15, linear=True)
    check_graph(graph)
    assert len(graph.primitives) >= 12
    results = run(graph, random_inputs(graph, np.random.default_rng(0)))
    assert all(np.isfinite(array).all() for array in results.values())
    assert max(np.abs(array).max(initial=0) for array in results.values()) < 1e6


def test_linear_primitives_occur_only_on_request():
    def categories(linear):
        graphs = [random_graph(np.random.default_rng(s), 15, linear) for s in range(25)]
        return {p.row.category for graph in graphs for p in graph.primitives}

    assert Category.LINEAR not in categories(False)
    assert categories(True) == set(Category) - {Category.OPAQUE}


def test_special_numbers_occur_only_on_request():
    type_ = ValueType((1000,), DType.F32)
    plain = random_array(np.random.default_rng(0), type_)
    special = random_array(np.random.default_rng(0), type_, specials=True)
    assert np.isfinite(plain).all()
    assert np.isnan(special).any()
    assert np.isposinf(special).any()
    assert np.isneginf(special).any()
    assert (special == 0).any()


@pytest.mark.parametrize("dtype", list(DType))
def test_every_element_type_has_samples(dtype):
    array = random_array(np.random.default_rng(0), ValueType((3, 0, 2), dtype))
    assert array.dtype == dtype.numpy
    assert array.shape == (3, 0, 2)
