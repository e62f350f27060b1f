"""Float32 models with products of 16 bits."""

from __future__ import annotations

import pytest

from benchmarks.models import build
from korch.assembly.task import prepare
from korch.backend import open_meter
from korch.options import Options
from korch.pipeline import Run, front
from korch.primitive.op import Category
from korch.primitive.types import DType
from korch.search.instance import Answers


def tasks_of(name, precision, cache_folder):
    """Return the blocks of a model for a Hopper GPU, with their candidates."""
    options = Options(target="cuda:sm_90", precision=precision, cache_folder=cache_folder)
    with open_meter(options) as meter:
        partition, _ = front(Run(options, {}, lambda stage, text: None, build(name).SerializeToString()))
        return [
            prepare(partition, block, Answers(meter.providers, meter.target), options) for block in partition.blocks
        ]


@pytest.mark.parametrize(("precision", "kind"), [("float16", DType.F16), ("bfloat16", DType.BF16)])
def test_attention_is_a_candidate_and_sums_stay_in_float32(precision, kind, cache_folder):
    tasks = tasks_of("tiny_transformer", precision, cache_folder)
    found = [c for task in tasks for c in task.candidates if c.provider == "triton-attention"]
    assert found
    for candidate in found:
        body = candidate.group.body
        assert {body.types[p.output].dtype for p in body.linear} == {kind}
        assert kind.value in candidate.offer.variant.split()
    for task in tasks:
        graph = task.block.graph
        for primitive in graph.primitives:
            if primitive.row.category is Category.REDUCE:
                assert graph.types[primitive.output].dtype is DType.F32
            ones = [graph.constants[v] for v in primitive.inputs if v in graph.constants]
            assert primitive.op != "matmul" or not any(c.is_uniform for c in ones), "a sum is a product with ones"
