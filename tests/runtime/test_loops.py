"""Loops of a plan: their kernels compute what ONNX Runtime computes, on one thread, on several, and with libraries."""

import numpy as np
import onnx
import onnxruntime
import pytest

import korch
from korch.ablation import Ablation
from korch.candidate.candidate import Refusal, make_group
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.runtime.loop import ALONE, APART, TEAM, LoopPlan, LoopProvider, loop_key
from tests.support.loops import STEP, loop_inputs, loop_model, scan

LARGE = scan(
    "(float[2,100,60] a, float[2,100,60] v) => (float[2,100,60] b, float[2,100,60] u)"
    "{ o = MatMul(a, m) p = Mul(o, eighth) q = Add(p, v) b = Tanh(q) e = Exp(b) f = ReduceSum(e, last) u = Div(e, f) }",
    "(float[2,100,60] s0, float[10,2,100,60] x, float[60,60] m) => (float[2,100,60] s, float[10,2,100,60] y)",
    "num_scan_inputs = 1, scan_output_directions = [1]",
)


def assert_right(model, threads=1, tmp_path=None):
    """Check an executable of a model, and return the variants of its loops."""
    feeds = loop_inputs(model)
    executable = korch.optimize(model, measure=False, ablation=Ablation(baselines=False, host=False), threads=threads)
    if tmp_path is not None:
        executable.save(tmp_path / "loops.korch")
        executable = korch.load(tmp_path / "loops.korch")
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
    for _ in range(2):
        for array, right in zip(executable.run(None, feeds), expected, strict=True):
            assert array.shape == right.shape
            np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-5)
    return [step.variant for step in executable.plan.steps if step.provider == "loop"]


def test_loops_of_all_kinds_run_natively(tmp_path):
    names = ("backward", "axes", "product", "shift", "constant", "number", "swap", "several", "nested")
    model, *others = map(loop_model, names)
    for i, other in enumerate(others):
        model = onnx.compose.merge_models(model, other, [], prefix2=f"p{i}_")
    variants = assert_right(model, tmp_path=tmp_path)
    assert sorted(text.split(":")[0] for text in variants) == ["40 iterations alone"] * len(names)


@pytest.mark.parametrize(("mode", "threads"), [(ALONE, 1), (ALONE, 2), (TEAM, 2), (APART, 2)])
def test_a_loop_runs_in_each_mode(mode, threads, monkeypatch):
    monkeypatch.setattr(LoopPlan, "modes", (mode,))
    (variant,) = assert_right(onnx.parser.parse_model(LARGE), threads)
    assert variant.startswith(f"10 iterations {mode}: ")


def test_an_operator_with_a_state_of_its_own_runs_in_each_iteration():
    text = scan(STEP + "{ p = Add(a, v) n = LpNormalization(p) b = Mul(n, half) u = Neg(n) }")
    (variant,) = assert_right(onnx.parser.parse_model(text))
    assert variant.startswith("40 iterations")


RECURRENT = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[n, b, 7] x, float[1, b, 5] h) =>
  (float[n, 2, b, 5] y, float[2, b, 5] last, float[n, 1, b, 5] z, float[1, b, 5] end, float[n, 1, b, 5] u)
{
    y, last = LSTM <hidden_size = 5, direction = "bidirectional"> (x, w, r, bias)
    z, end = GRU <hidden_size = 5, linear_before_reset = 1, direction = "reverse"> (x, gw, gr, gb, , h)
    u = GRU <hidden_size = 5> (x, gw, gr, gb, , h)
}
"""


def test_recurrent_operators_end_at_the_size_of_a_run():
    model, rng = onnx.parser.parse_model(RECURRENT), np.random.default_rng(0)
    shapes = {"w": (2, 20, 7), "r": (2, 20, 5), "bias": (2, 40), "gw": (1, 15, 7), "gr": (1, 15, 5), "gb": (1, 30)}
    arrays = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    session = onnxruntime.InferenceSession(model.SerializeToString())
    ranges = {"n": range(1, 18), "b": range(1, 4)}
    executable = korch.optimize(model, shapes=ranges, measure=False, ablation=Ablation(baselines=False), threads=2)
    for n, b in ((1, 1), (17, 3), (1, 3), (16, 1), (6, 2)):
        feeds = {"x": rng.normal(size=(n, b, 7)), "h": rng.normal(size=(1, b, 5))}
        feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
        for array, right in zip(executable.run(None, feeds), session.run(None, feeds), strict=True):
            assert array.shape == right.shape
            np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-5)


SUMS = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[t, 1, n] x, float[1, 1] s0) => (float[1, 1] s, float[t, 1, n] y) <int64[1] one = {1}>
{
    e = Exp(x)
    s, y = Scan <num_scan_inputs = 1, body = b (float[1, 1] a, float[1, n] v) => (float[1, 1] k, float[1, n] u)
      { r = ReduceSum(v, one) p = Add(a, r) k = Tanh(p) q = Softmax <axis = 1> (v) u = Mul(q, k) }> (s0, e)
}
"""


@pytest.mark.parametrize("least", [1, 40])
def test_iterations_combine_elements_up_to_the_size_of_a_run(least):
    model, rng = onnx.parser.parse_model(SUMS), np.random.default_rng(0)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    ranges = {"t": range(least, 41), "n": range(1, 20)}
    ablation = Ablation(baselines=False, host=False)
    executable = korch.optimize(model, shapes=ranges, measure=False, ablation=ablation, threads=2)
    assert [step.provider for step in executable.executables[0].plan.steps].count("loop")
    for t, n in ((40, 19), (least, 3), (40, 1), (max(least, 7), 17)):
        feeds = {"x": rng.normal(size=(t, 1, n)) - 2, "s0": rng.normal(size=(1, 1))}
        feeds = {name: array.astype(np.float32) for name, array in feeds.items()}
        for array, right in zip(executable.run(None, feeds), session.run(None, feeds), strict=True):
            assert array.shape == right.shape
            np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-5)


def group_of(model):
    graph = fission(load_model(model))
    places = [p for p, row in enumerate(graph.primitives) if row.op == "loop"]
    return make_group(graph, places, [graph.primitives[p].output for p in places])


def test_the_provider_refuses_a_loop_without_a_plan():
    group = group_of(loop_model("product"))
    key = loop_key(group)
    assert not isinstance(key, Refusal)
    for plans, reason in (({}, "have no plan"), ({key: Refusal("too large")}, "too large")):
        assert reason in LoopProvider(plans).offer(group, None).reason


def test_the_provider_refuses_what_is_no_loop():
    graph = fission(load_model(loop_model("single")))
    group = make_group(graph, [0], [graph.primitives[0].output])
    assert LoopProvider({}).offer(group, None) == Refusal("it is not one loop")
