"""The groups that providers request: providers of the package, and one from outside of it."""

import importlib
import sys
from pathlib import Path

import pytest

import korch
from korch.candidate.candidate import Group
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.shape import COMMON, FUSED, LINEAR, GroupShape, around, shapes_of
from korch.errors import ProviderError
from korch.options import Options
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.reduce import ReduceAttributes
from korch.primitive.types import ValueType
from korch.provider import provider as provider_module
from korch.provider.attention.groups import attention_groups
from korch.provider.provider import load_providers
from korch.testing.kernels import check_offers

ROW_MAX = '''
"""The largest element of each row of a matrix product, as a plug-in."""

from korch.candidate.candidate import Offer, Refusal
from korch.candidate.shape import GroupShape
from korch.primitive.op import Category
from korch.provider.provider import Kernel
from tests.support.c_code import llvm_of

SOURCE = """
int {symbol}_run(void *state, void *const *buffers) {{
  const float* a = buffers[0];
  const float* b = buffers[1];
  float* y = buffers[2];
  for (long m = 0; m < {m}; ++m) {{
    float most = -__builtin_inff();
    for (long n = 0; n < {n}; ++n) {{
      float sum = 0;
      for (long k = 0; k < {k}; ++k) sum += a[m * {k} + k] * b[k * {n} + n];
      if (sum > most || sum != sum) most = sum;
    }}
    y[m] = most;
  }}
  return 0;
}}
"""


class RowMax:
    name = "row max"
    version = "1"
    group_shapes = (GroupShape(("matmul",), beside=frozenset({Category.REDUCE})),)

    def offer(self, group, target):
        if [p.op for p in group.body.primitives] != ["matmul", "reduce_max"]:
            return Refusal("it is not a product and the maximum of its rows")
        if len(group.outputs) > 1 or len(group.input_types) != 2:
            return Refusal("the product is an output, too")
        return [Offer(*group.plain_layouts)]

    def build(self, group, offer, target):
        (m, k), (_, n) = (type_.shape for type_ in group.input_types)
        symbol = f"k_row_max_{group.key}"
        return Kernel(symbol, llvm_of(SOURCE.format(symbol=symbol, m=m, n=n, k=k)))
'''


@pytest.fixture
def row_max(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "row_max_plugin.py").write_text(ROW_MAX)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(provider_module, "_registered", {})
    yield importlib.import_module("row_max_plugin").RowMax
    del sys.modules["row_max_plugin"]


def product_and_maximum() -> PrimitiveGraph:
    builder = GraphBuilder()
    a, b = (builder.input(name, ValueType.parse(text)) for name, text in (("a", "f32[6,4]"), ("b", "f32[4,9]")))
    product = builder.add("matmul", [a, b])
    builder.output("y", builder.add("tanh", [builder.add("reduce_max", [product], ReduceAttributes((1,)))]))
    return builder.freeze()


def found(graph: PrimitiveGraph, *shapes: GroupShape) -> dict[tuple[str, ...], Group]:
    groups, _ = enumerate_groups(graph, Options(), shapes=shapes)
    return {tuple(p.op for p in group.body.primitives): group for group in groups}


def test_a_provider_outside_of_the_package_gets_the_groups_that_it_asks_for(row_max, target, builder, rng):
    graph = product_and_maximum()
    wanted = ("matmul", "reduce_max")
    assert wanted not in found(graph, *shapes_of(load_providers()))
    korch.register_provider(row_max)
    providers = load_providers()
    groups = found(graph, *shapes_of(providers))
    assert wanted in groups
    assert (*wanted, "tanh") not in groups
    (plugin,) = (provider for provider in providers if provider.name == "row max")
    assert len(check_offers(plugin, [groups[wanted]], target, builder, rng)) == 1


def test_registering_twice_is_registering_once(row_max):
    for _ in range(2):
        korch.register_provider(row_max)
    assert [provider.name for provider in load_providers()].count("row max") == 1


def test_without_shapes_there_are_single_primitives_only():
    assert {len(ops) for ops in found(product_and_maximum())} == {1}


def test_a_shape_finds_the_same_groups_alone_as_among_others():
    builder = GraphBuilder()
    a, b = (builder.input(name, ValueType.parse("f32[4,4]")) for name in "ab")
    product = builder.add("matmul", [a, b])
    curve = builder.add("mul", [product, builder.add("erf", [builder.add("neg", [product])])])
    builder.output("y", curve)
    graph = builder.freeze()
    shape = around("matmul")
    together = {ops for ops in found(graph, *COMMON) if "matmul" in ops}
    assert {ops for ops in found(graph, shape) if "matmul" in ops} == together
    assert ("matmul", "neg", "erf", "mul") in together


def test_a_shape_without_an_anchor_has_no_linear_primitive():
    groups = found(product_and_maximum(), FUSED)
    assert ("reduce_max", "tanh") in groups
    assert not any("matmul" in ops and len(ops) > 1 for ops in groups)


def test_each_shape_is_asked_for_once_and_a_provider_without_any_gets_the_common_ones():
    class Silent:
        pass

    class Conv:
        group_shapes = (around("conv"), attention_groups, FUSED)

    assert shapes_of([Silent(), Conv(), Conv()]) == (*COMMON, around("conv"), attention_groups)
    assert COMMON[1].anchors == LINEAR


def test_an_anchor_is_a_linear_operation():
    with pytest.raises(ValueError, match=r"tanh: not linear operations; these are .*matmul"):
        around("tanh")


def test_an_incomplete_provider_is_refused_when_it_is_registered():
    class Incomplete:
        name = "incomplete"

    with pytest.raises(ProviderError, match="has no member 'version'"):
        korch.register_provider(Incomplete)
    assert all(provider.name != "incomplete" for provider in load_providers())
