"""LSTM, GRU and RNN as loops compute what ONNX Runtime computes; what loops do not express is kept whole."""

import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from korch.fission import fission_with_report
from korch.frontend.onnx import load_model
from korch.primitive import reference
from korch.primitive.as_onnx import OnnxNodes
from korch.primitive.check import check_graph
from korch.primitive.op import Array
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.text import format_graph
from tests.support.models import BIAS, CELL, STATE, feeds_of, one_operator, recurrent_inputs

DIRECTIONS = ("forward", "reverse", "bidirectional")


def _model(
    operator: str, steps: int, batch: int, hidden: int, given: list[int], **attributes: Any
) -> tuple[onnx.ModelProto, list[Array | None]]:
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    inputs = recurrent_inputs(operator, (steps, batch, 3, hidden), given, directions)
    outputs = 3 if operator == "LSTM" else 2
    return one_operator(operator, inputs, opset=14, outputs=outputs, hidden_size=hidden, **attributes), inputs


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("case", ["LSTM", "GRU", "GRU reset last", "RNN", "RNN of Relu"])
def test_a_loop_computes_what_onnx_runtime_computes(case: str, direction: str) -> None:
    operator, attributes = case.split()[0], dict[str, Any](direction=direction)
    if case == "GRU reset last":
        attributes["linear_before_reset"] = 1
    if case == "RNN of Relu":
        attributes["activations"] = ["Relu"] * (2 if direction == "bidirectional" else 1)
    states = [STATE, CELL] if operator == "LSTM" else [STATE]
    for (steps, batch, hidden), given in itertools.product(((1, 1, 1), (4, 3, 5), (6, 1, 8)), ([], [BIAS, *states])):
        model, inputs = _model(operator, steps, batch, hidden, given, **attributes)
        feeds = feeds_of(inputs)
        graph, report = fission_with_report(load_model(model))
        check_graph(graph)
        assert not report.kept
        expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)
        made = onnxruntime.InferenceSession(OnnxNodes(graph, "here").model().SerializeToString()).run(None, feeds)
        for found in (reference.run(graph, feeds).values(), made):
            for array, right in zip(found, expected, strict=True):
                np.testing.assert_allclose(array, right, rtol=1e-4, atol=1e-6)


def test_each_direction_is_a_loop_after_the_product_of_all_steps() -> None:
    model, _ = _model("LSTM", 4, 2, 5, [BIAS], direction="bidirectional")
    graph, _ = fission_with_report(load_model(model))
    rows = [p.attributes for p in graph.primitives if isinstance(p.attributes, LoopAttributes)]
    assert [row.reads_backward for row in rows] == [(False,)] * 3 + [(True,)] * 3
    assert {row.inputs[2] for row in rows} == {"f32[4,2,20]"}
    assert {row.body.count("matmul") for row in rows} == {1}


@pytest.mark.parametrize(
    ("operator", "attributes"),
    [("LSTM", {"clip": 0.1}), ("LSTM", {"input_forget": 1}), ("RNN", {"activations": ["Softsign"]})],
)
def test_what_a_loop_does_not_express_is_kept_whole(operator: str, attributes: dict[str, Any]) -> None:
    model, _ = _model(operator, 4, 2, 5, [], **attributes)
    (kept,) = fission_with_report(load_model(model))[1].kept
    assert kept.reason.startswith("it has ")


@pytest.mark.parametrize(
    "attribute",
    [
        onnx.helper.make_attribute("activations", [], attr_type=onnx.AttributeProto.STRINGS),
        onnx.helper.make_attribute("clip", 0.0),
    ],
)
def test_an_empty_attribute_means_the_default(attribute: onnx.AttributeProto) -> None:
    model, _ = _model("LSTM", 4, 2, 5, [])
    graph, _ = fission_with_report(load_model(model))
    model.graph.node[0].attribute.append(attribute)
    found, report = fission_with_report(load_model(model))
    assert not report.kept
    assert format_graph(found) == format_graph(graph)


def test_recurrent_operators_are_kept_whole_without_loops() -> None:
    model, _ = _model("GRU", 4, 2, 5, [])
    assert fission_with_report(load_model(model), with_loops=False)[1].kept
