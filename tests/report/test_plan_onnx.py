"""A plan as ONNX: another engine runs it, and has the same result for the plan and for the model."""

import numpy as np
import pytest

import korch
from benchmarks.models import build
from korch.ablation import Ablation
from korch.limits import SearchLimits
from korch.primitive import reference
from korch.primitive.as_onnx import OnnxNodes
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops import OPS
from korch.report.plan_onnx import metadata, plan_model
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from tests.support.models import in_onnxruntime
from tests.support.samples_of_ops import LEGAL

pytest.importorskip("onnxruntime")
UNKNOWN = {"asinh", "acosh", "atanh", "bitwise_not", "shift_left", "shift_right"}
"""Whose samples ONNX Runtime does not run in their types."""


@pytest.mark.long
@pytest.mark.parametrize("name", ["tiny_candy", "tiny_yolox", "tiny_transformer"])
def test_onnxruntime_runs_the_plan_and_agrees(name, cache_folder):
    given = build(name)
    executable = korch.optimize(
        given,
        measure=name == "tiny_candy",
        budget=4,
        cache_folder=cache_folder,
        search=SearchLimits(max_primitives=4),
        ablation=Ablation(baselines=False),
    )
    model = plan_model(executable.plan, executable.artifact.weights.array)
    assert len(model.functions) == len(executable.plan.steps)
    facts = metadata(model)["kernel_0"]
    assert facts["cost_ns"] == executable.plan.steps[0].cost_ns and facts["provider"]
    rng = np.random.default_rng(0)
    arrays = {
        t.name: rng.integers(0, 2, t.shape).astype(t.dtype)
        if t.dtype.kind in "iu"
        else rng.standard_normal(t.shape).astype(t.dtype)
        for t in executable.get_inputs()
    }
    own = executable(*arrays.values())
    for tensor, a, b in zip(executable.get_outputs(), own, in_onnxruntime(model, arrays), strict=True):
        assert_same(a, b, terms=1000, name=tensor.name)
    for tensor, found, expected in zip(executable.get_outputs(), own, in_onnxruntime(given, arrays), strict=True):
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max(), tensor.name


@pytest.mark.parametrize("row", [r for r in OPS.values() if r.name not in UNKNOWN], ids=lambda r: r.name)
def test_every_primitive_means_the_same_in_onnx(row):
    rng = np.random.default_rng(1)
    for sample in LEGAL[row.name]:
        if min(t.size for t in sample.types) == 0 or ("u8" in sample.inputs[0] and row.name != "winograd"):
            continue
        builder = GraphBuilder()
        values = [builder.input(f"i{k}", t) for k, t in enumerate(sample.types)]
        builder.output("o0", builder.add(row.name, values, sample.attributes))
        graph = builder.freeze()
        arrays = random_arrays(rng, sample.types)
        if row.name in ("div", "mod"):  # ONNX Runtime refuses to divide integers by 0
            arrays[1] = np.where(arrays[1] == 0, np.ones_like(arrays[1]), arrays[1])
        feeds = {f"i{k}": a for k, a in enumerate(arrays)}
        expected = reference.run(graph, feeds)["o0"]
        (found,) = in_onnxruntime(OnnxNodes(graph, "a test").model(), feeds)
        assert_same(found, expected, terms=100, name=row.name)
