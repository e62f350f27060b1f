"""Products in 16-bit floats: in float32 models with reduced precision, and in float16 models."""

import pytest

from benchmarks.models import build
from benchmarks.models.narrow import in_float16
from korch.backend import open_meter
from korch.options import Options
from korch.pipeline import Run, front, untold
from korch.primitive.op import Category
from korch.primitive.types import DType
from korch.search.instance import Answers
from korch.segments.block_task import prepare


def tasks_of(model, precision, cache_folder):
    """Return the blocks of a model for a Hopper GPU, with their candidates."""
    options = Options(target="cuda:sm_90", precision=precision, cache_folder=cache_folder)
    with open_meter(options) as meter:
        partition, _ = front(Run(options, {}, untold, model.SerializeToString()))
        return [
            prepare(partition, block, Answers(meter.providers, meter.target), options) for block in partition.blocks
        ]


@pytest.mark.parametrize(("precision", "kind"), [("float16", DType.F16), ("bfloat16", DType.BF16)])
def test_attention_is_a_candidate_and_sums_stay_in_float32(precision, kind, cache_folder):
    tasks = tasks_of(build("tiny_transformer"), precision, cache_folder)
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


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_model_in_float16_is_multiplied_as_it_is(precision, cache_folder):
    pytest.importorskip("onnxruntime")
    tasks = tasks_of(in_float16(build("tiny_transformer")), precision, cache_folder)
    assert any(c.provider == "triton-attention" for task in tasks for c in task.candidates)
    for task in tasks:
        graph = task.block.graph
        assert {graph.types[p.output].dtype for p in graph.linear} <= {DType.F16}
        for primitive in graph.primitives:
            if primitive.op == "cast":
                before = [graph.types[p.inputs[0]] for p in graph.producing(primitive.inputs[0], "cast")]
                assert graph.types[primitive.output] not in before, "an exact cast, and its reverse"
