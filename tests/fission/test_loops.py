"""Loops with a known number of iterations: their primitives compute what ONNX Runtime computes."""

import numpy as np
import onnx
import pytest

from korch.fission import fission, fission_with_report
from korch.frontend.onnx import load_model
from korch.primitive import reference
from korch.primitive.as_onnx import OnnxNodes
from korch.primitive.check import check_graph
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.text import format_graph, parse_graph
from tests.support.loops import GOES_ON, MODELS, STEP, loop, loop_inputs, loop_model, scan
from tests.support.models import in_onnxruntime

WITHOUT_LOOP = {"short", "single", "no iteration", "false at the start", "false at once", "ends itself"}


def loops_of(graph):
    return [p.attributes for p in graph.primitives if isinstance(p.attributes, LoopAttributes)]


@pytest.mark.parametrize("name", MODELS)
def test_the_primitives_of_a_loop_compute_what_onnx_runtime_computes(name):
    model = loop_model(name)
    feeds, graph = loop_inputs(model), fission(load_model(model))
    check_graph(graph)
    # `onnx.reference` has no directions and axes, and does not stack the results of a Loop.
    expected = in_onnxruntime(model, feeds)
    for exact in (True, False):
        found = reference.run(graph, feeds, exact=exact)
        for array, right in zip(found.values(), expected, strict=True):
            assert array.shape == right.shape
            np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-6)
    assert bool(loops_of(graph)) == (name not in WITHOUT_LOOP)


@pytest.mark.parametrize("name", MODELS)
def test_loops_print_and_parse_back_and_have_an_onnx_form(name):
    model = loop_model(name)
    feeds, graph = loop_inputs(model), fission(load_model(model))
    text, arrays = format_graph(graph), {c.digest: c.array for c in graph.constants.values()}
    assert format_graph(parse_graph(text, arrays)) == text
    found = in_onnxruntime(OnnxNodes(graph, "here").model(), feeds)
    for array, right in zip(found, reference.run(graph, feeds).values(), strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-5, atol=1e-6)


def test_what_does_not_change_between_iterations_is_computed_before_the_loop():
    graph = fission(load_model(loop_model("invariant")))
    (body,) = {p.body for p in loops_of(graph)}
    assert "exp" not in body
    assert [p.op for p in graph.primitives].count("exp") == 1


def test_a_gather_by_the_number_of_the_iteration_reads_slices():
    (row, _) = loops_of(fission(load_model(loop_model("loop"))))
    assert row.inputs == ("f32[2,3]", "f32[40,2,3]", "f32[3]")
    assert row.reads_backward == (False,)


def test_random_roundings_reach_the_iterations():
    model = loop_model("product")
    graph, feeds = fission(load_model(model)), loop_inputs(model)
    exact, noisy = (
        reference.run(graph, feeds, exact=not r, roundings=r)["y"] for r in (None, np.random.default_rng(0))
    )
    assert 1e-8 < np.abs(exact - noisy).max() < 1e-4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (loop("e = ReduceMax <keepdims = 0> (a) d = Less(e, half) b = Add(a, w)"), "its condition depends on data"),
        (loop(GOES_ON + "b = Add(a, w)", most=""), "it has no end"),
    ],
)
def test_a_loop_that_depends_on_data_stays_one_operator(text, reason, caplog):
    caplog.set_level("INFO", "korch.frontend")
    try:
        fission(load_model(onnx.parser.parse_model(text)))
    except Exception as error:  # noqa: BLE001 - the host runs it
        assert type(error).__name__ == "UnsupportedError"
    assert reason in caplog.text


def test_a_state_that_changes_its_shape_stays_one_operator(caplog):
    caplog.set_level("INFO", "korch.frontend")
    model = loop(GOES_ON + "b = Concat <axis = 0> (a, a)").replace("=> (float[2,3] s)", "=> (float[?,3] s)")
    with pytest.raises(Exception, match="depends on data"):
        load_model(onnx.parser.parse_model(model))
    assert "begins as f32[2,3] and becomes f32[4,3]" in caplog.text


def test_an_old_scan_stays_one_operator():
    ends = "(float[1,2,3] s0, float[1,40,2,3] x) => (float[1,2,3] s, float[1,40,2,3] y)"
    model = onnx.parser.parse_model(scan(STEP + "{ b = Add(a, v) u = Neg(b) }", ends))
    model.opset_import[0].version = 8
    model.graph.node[0].input.insert(0, "")
    (kept,) = fission_with_report(load_model(model))[1].kept
    assert (kept.op_type, kept.reason) == ("Scan", "no rule for this opset")


@pytest.mark.parametrize(("name", "flop"), [("scan", 40 * 18), ("shift", 0), ("nested", 40 * (6 + 40 * 12))])
def test_a_loop_has_the_operations_of_its_iterations_once(name, flop):
    graph = fission(load_model(loop_model(name)))
    assert len(loops_of(graph)) == 2  # the state and the stacked results
    assert graph.total_flop == flop
