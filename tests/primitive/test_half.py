"""Float32 graphs with products in 16-bit floats."""

import numpy as np
import pytest

from korch.primitive.check import check_graph
from korch.primitive.precision import with_half, with_tf32
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

CONVS = """graph(%0 "x": f32[1,8,6,4]) -> (%4 "y")
%1: f32[8,4,3,3] = constant {digest=0123456789abcdef}
%2: f32[1,8,6,4] = exp(%0)
%3: f32[1,4,8,6] = transpose(%5) {perm=(0, 3, 1, 2)}
%4: f32[1,8,6,4] = conv(%3, %1) {strides=(1, 1), pads_begin=(0, 0), pads_end=(0, 0), dilations=(1, 1), groups=1}
   | winograd(%3, %6) {tile=2, pads_begin=(0, 0), pads_end=(0, 0)}
%5: f32[1,8,6,4] = exp(%2)
%6: f32[4,4,4,8] = constant {digest=fedcba9876543210}
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


def test_factors_are_rounded_to_tf32_where_they_are_computed():
    graph = with_tf32(parse_graph(CONVS))
    rounded = [p for p in graph.primitives if p.op == "round_tf32"]
    assert [graph.primitives[q].op for p in rounded for q in graph.producers[p.inputs[0]]] == ["exp"]
    (conv,) = [p for p in graph.primitives if p.op == "conv"]
    (move,) = graph.producing(conv.inputs[0], "transpose")
    assert move.inputs[0] == rounded[0].output, "the move reads what is rounded"
    bits = graph.constants[conv.inputs[1]].array.view(np.uint32)
    assert not (bits & 0x1FFF).any() and bits.any()
    (twin,) = [p for p in graph.primitives if p.op == "winograd"]
    assert not graph.producing(twin.inputs[0], "round_tf32"), "Winograd's operands are not rounded"
