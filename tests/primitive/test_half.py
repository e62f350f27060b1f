"""Float32 graphs with products in 16-bit floats."""

from __future__ import annotations

import numpy as np
import pytest

from korch.primitive.check import check_graph
from korch.primitive.precision import with_half
from korch.primitive.reference import run
from korch.primitive.text import parse_graph
from korch.primitive.types import DType
from korch.testing.samples import random_array
from korch.testing.tolerance import assert_same

MIXED = """graph(%0 "x": f16[3,4], %1 "w": f32[4,5]) -> (%7 "y", %4 "wide", %3 "power")
%2: f32[3,4] = cast(%0) {to='f32'}
%3: f32[3,4] = exp(%2)
%4: f32[3,5] = matmul(%2, %1)
%5: f16[3,5] = cast(%4) {to='f16'}
%6: f16[3,5] = neg(%5)
%7: f16[3,5] = tanh(%6)
"""
"""The product reads widened numbers, which a step in float32 reads, too, and its result is rounded."""

CHAIN = """graph(%0 "x": f16[3,4], %1 "w": f16[4,5], %2 "u": f16[5,2]) -> (%8 "y")
%3: f32[3,4] = cast(%0) {to='f32'}
%4: f32[4,5] = cast(%1) {to='f32'}
%5: f32[3,5] = matmul(%3, %4)
%6: f16[3,5] = cast(%5) {to='f16'}
%7: f32[3,5] = exp(%9)
%8: f32[3,2] = matmul(%7, %10)
%9: f32[3,5] = cast(%6) {to='f32'}
%10: f32[5,2] = cast(%2) {to='f32'}
"""


@pytest.mark.parametrize("text", [MIXED, CHAIN])
@pytest.mark.parametrize("half", [DType.F16, DType.BF16])
def test_results_are_those_of_the_graph_within_16_bits(text, half, rng):
    graph = parse_graph(text)
    found = with_half(graph, half)
    check_graph(found)
    assert {found.types[p.output].dtype for p in found.linear} == {half}
    assert [found.types[v] for _, v in found.outputs] == [graph.types[v] for _, v in graph.outputs]
    feeds = {name: random_array(rng, graph.types[value]) for name, value in graph.inputs}
    expected, actual = run(graph, feeds), run(found, feeds, exact=False)
    for name, array in expected.items():
        rounded = actual[name].astype(half.numpy)
        assert np.isfinite(array).all()
        assert_same(rounded, array, terms=64, name=name)


def test_casts_back_and_forth_are_left_out():
    found = with_half(parse_graph(CHAIN), DType.F16)
    casts = [(found.types[p.inputs[0]].dtype, found.types[p.output].dtype) for p in found.primitives if p.op == "cast"]
    assert casts.count((DType.F16, DType.F32)) == 2, "of what the exponential reads, and of the output"
    assert casts.count((DType.F32, DType.F16)) == 1, "of the exponential"
    assert len(casts) == 3
