"""Which constants are a matrix and its transpose."""

import numpy as np
import pytest

from korch.primitive.graph import GraphBuilder
from korch.primitive.tied import is_transpose


@pytest.mark.parametrize(
    ("one", "other", "is_tied"),
    [((4, 5), (5, 4), True), ((1, 4, 5), (5, 4), True), ((0, 4, 5), (5, 4), False), ((0, 5), (5, 0), True)],
)
def test_axes_of_size_1_are_left_out_and_others_are_not(one, other, is_tied) -> None:
    builder = GraphBuilder(folds=False)
    values = [builder.constant(np.ones(shape, np.float32)) for shape in (one, other)]
    builder.output("y", values[0])
    builder.output("z", values[1])
    graph = builder.freeze()
    assert is_transpose(graph, *values) is is_tied
    assert is_transpose(graph, *values[::-1]) is is_tied
