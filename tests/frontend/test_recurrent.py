"""Recurrent operators of layout 1 are compared with ONNX Runtime's result for layout 0."""

from typing import Any

import numpy as np
import pytest
from onnx import parser

from korch.frontend import load_model
from korch.frontend.recurrent import replace_batch_first
from korch.primitive.definitions import by_definition
from korch.primitive.op import Array
from tests.support.models import BIAS, CELL, PEEPHOLES, STATE, feeds_of, in_onnxruntime, one_operator, recurrent_inputs

LENGTHS, STEPS, BATCH, WIDTH, HIDDEN = 4, 4, 3, 2, 5
BOTH = {"direction": "bidirectional"}
CASES: list[tuple[str, list[int], dict[str, Any]]] = [
    ("LSTM", [], {}),
    ("LSTM", [LENGTHS], {}),
    ("LSTM", [BIAS, LENGTHS, STATE, CELL], BOTH),
    ("LSTM", [BIAS, LENGTHS, STATE, CELL, PEEPHOLES], {"direction": "reverse"}),
    ("LSTM", [CELL], {"clip": 0.1}),
    ("LSTM", [LENGTHS], {"activations": ["Sigmoid", "Relu", "Softsign"]}),
    ("LSTM", [], {"activations": ["HardSigmoid", "Tanh", "Tanh"], "activation_alpha": [0.3], "activation_beta": [0.4]}),
    ("LSTM", [LENGTHS], {"input_forget": 1}),
    ("GRU", [LENGTHS], {}),
    ("GRU", [BIAS, LENGTHS, STATE], BOTH | {"linear_before_reset": 1}),
    ("GRU", [STATE], {"direction": "reverse", "clip": 0.2}),
    ("GRU", [LENGTHS], {"activations": ["Sigmoid", "Relu"]}),
    ("RNN", [LENGTHS], {}),
    ("RNN", [BIAS, LENGTHS, STATE], BOTH),
    ("RNN", [LENGTHS], {"activations": ["Relu"], "clip": 0.3}),
]


def _inputs(operator: str, given: list[int], directions: int) -> list[Array | None]:
    """Return the inputs of layout 0."""
    sizes, floats = (STEPS, BATCH, WIDTH, HIDDEN), [i for i in given if i != LENGTHS]
    arrays = recurrent_inputs(operator, sizes, floats, directions)
    if LENGTHS in given:
        arrays += [None] * (LENGTHS + 1 - len(arrays))
        arrays[LENGTHS] = np.array([4, 1, 3], np.int32)
    return arrays


def _swapped(inputs: list[Array | None]) -> list[Array | None]:
    """Return the inputs of layout 1 for those of layout 0."""
    return [x.swapaxes(0, 1) if x is not None and i in (0, STATE, CELL) else x for i, x in enumerate(inputs)]


@pytest.mark.parametrize(("operator", "given", "attributes"), CASES)
def test_layout_1_is_layout_0_between_transposes(operator: str, given: list[int], attributes: dict[str, Any]) -> None:
    usual = _inputs(operator, given, 2 if attributes.get("direction") == "bidirectional" else 1)
    inputs = _swapped(usual)
    outputs = 3 if operator == "LSTM" else 2
    options: dict[str, Any] = {"opset": 14, "outputs": outputs, "hidden_size": HIDDEN, **attributes}
    y, *states = in_onnxruntime(one_operator(operator, usual, **options), feeds_of(usual))
    model = one_operator(operator, inputs, layout=1, **options)
    defined = by_definition(model.graph.node[0], inputs, 14)
    nodes = list(replace_batch_first(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    expected = [y.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in states)]
    results = in_onnxruntime(model, feeds_of(inputs))
    for found, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(found, right)
    for found, right in zip(defined, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-6)
    assert LENGTHS not in given or not results[0][1, 1:].any()  # sequence 1 has one step


def test_the_operator_has_layout_0_in_the_graph() -> None:
    inputs = _swapped(_inputs("LSTM", [LENGTHS], 1))
    model = one_operator("LSTM", inputs, opset=14, hidden_size=HIDDEN, layout=1)
    graph = load_model(model)
    assert [operator.op_type for operator in graph.operators] == ["Transpose", "LSTM", "Transpose"]
    assert "layout" not in graph.operators[1].attributes
    assert graph.types["y0"].shape == (BATCH, STEPS, 1, HIDDEN)


def test_omitted_outputs_and_nodes_of_branches() -> None:
    model = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 14]>
        g (bool b, float[3,4,2] x, float[1,5,2] w, float[1,5,5] r) => (float[3,1,5] y) {
          y = If (b) <then_branch = t () => (a) { , a = RNN <hidden_size = 5, layout = 1> (x, w, r) },
                      else_branch = e () => (c) { , c = RNN <hidden_size = 5> (x, w, r) }>
        }"""
    )
    before = model.SerializeToString()
    (node,) = replace_batch_first(model.graph.node)
    kinds = {attribute.name: [inner.op_type for inner in attribute.g.node] for attribute in node.attribute}
    assert kinds == {"then_branch": ["Transpose", "RNN", "Transpose"], "else_branch": ["RNN"]}
    assert model.SerializeToString() == before
