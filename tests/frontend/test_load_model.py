import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from korch.errors import ModelError, OptionError, UnsupportedError
from korch.fission import fission
from korch.frontend import format_operators, load_model
from korch.frontend.onnx import load_segments
from korch.primitive.reference import run
from tests.support.models import chain, one_operator, parsed

F, I = TensorProto.FLOAT, TensorProto.INT64  # noqa: E741 - as in ONNX
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def _model():
    return parsed("(float[2,3] x) => (float[2,3] y) { [r] y = Relu(x) }")


def test_path_bytes_and_proto_give_the_same_graph(tmp_path):
    model = _model()
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    texts = {
        format_operators(load_model(source)).split("#", 1)[1].split("\n", 1)[1]
        for source in (path, str(path), model, model.SerializeToString())
    }
    assert len(texts) == 1
    assert load_model(path).name == str(path)


GROWTH = """
import gc, os, sys
from pathlib import Path
from korch.frontend.onnx import read_model

def resident():
    return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")

before = resident()
found = read_model(sys.argv[1])
gc.collect()
assert found.constants["w"].shape == (4096, 4096)
print(resident() - before)
"""


def test_weights_are_in_memory_once(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(
        parsed("(float[4096] x) => (float[4096] y) { y = MatMul(w, x) }", w=np.ones((4096, 4096), np.float32)), path
    )
    # in a process of its own: memory that other tests have freed would be used again, and none added
    grown = subprocess.run([sys.executable, "-c", GROWTH, path], check=True, capture_output=True, text=True).stdout
    assert 64 << 20 <= int(grown) < 96 << 20


def test_the_text_form():
    model = one_operator("Softmax", [X], axis=0)
    assert str(load_model(model)) == (
        "operators(x0: f32[2,3]) -> (y0)   # model\ny0: f32[2,3] = Softmax-17(x0) {axis=0}   # it\n"
    )


def test_a_shape_subgraph_vanishes():
    text = """(float[2,3,4] x) => (float[] y) {
        s = Shape(x)
        n = Gather(s, zero)
        n1 = Unsqueeze(n, axes)
        shape = Concat<axis = 0>(n1, minus)
        y = Reshape(x, shape)
    }"""
    graph = load_model(parsed(text, zero=np.array(0), axes=np.array([0]), minus=np.array([-1])))
    assert [operator.op_type for operator in graph.operators] == ["Reshape"]
    assert graph.types["y"].shape == (2, 12)


def test_dead_nodes_are_dropped_even_if_nothing_could_run_them():
    graph = load_model(parsed("(float[2] x) => (float[2] y) { y = Relu(x) z = none.Fly(x) }"))
    assert [operator.op_type for operator in graph.operators] == ["Relu"]


def test_nodes_in_any_order():
    graph = load_model(parsed("(float[2] x) => (float[2] y) { y = Neg(a) a = Abs(x) }"))
    assert [operator.op_type for operator in graph.operators] == ["Abs", "Neg"]


def _listed(node, array, version=8):
    """Return a model whose initializer w is also an input."""
    elem_type = helper.np_dtype_to_tensor_dtype(array.dtype)
    model = chain([node], {"x": (F, [1, 1, 2, 3]), "w": (elem_type, array.shape)}, ["y"], {"w": array})
    model.ir_version = version
    return model


ADD = helper.make_node("Add", ["x", "w"], ["y"])
ONES = np.ones(3, np.float32)


def test_an_initializer_that_is_listed_as_an_input_can_be_given():
    graph = load_model(_listed(ADD, ONES))
    assert graph.inputs == ("x", "w") and not graph.constants
    assert graph.types["w"].shape == (3,)
    np.testing.assert_array_equal(graph.defaults["w"], ONES)


@pytest.mark.parametrize(
    ("node", "array", "version"),
    [
        (ADD, ONES, 3),
        (ADD, np.ones((1 << 14, 1, 1, 3), np.float32), 8),
        (helper.make_node("Gather", ["x", "w"], ["y"], axis=2), np.array([1, 0]), 8),
        (helper.make_node("Resize", ["x", "", "w"], ["y"]), np.array([1, 1, 2, 2], np.float32), 8),
    ],
)
def test_old_large_whole_and_shaping_initializers_are_constants(node, array, version):
    graph = load_model(_listed(node, array, version))
    assert graph.inputs == ("x",) and not graph.defaults


def test_an_initializer_that_is_an_input_can_be_given_to_the_host():
    segmented = load_segments(_listed(helper.make_node("Add", ["x", "w"], ["y"]), ONES), forced={"y": "a test"})
    assert [name for name, _ in segmented.inputs] == ["x", "w"]
    assert set(segmented.defaults) == set(segmented.segments[0].inputs) - {"x"} == {"w"}


def test_an_output_may_be_an_input_or_a_constant():
    text = "(float[2] x) => (float[2] y, float[2] x, float[2] w) { y = Relu(x) }"
    model = parsed(text, w=np.ones(2, np.float32))
    x = np.array([-1, 1], np.float32)
    results = run(fission(load_model(model)), {"x": x})
    np.testing.assert_array_equal(results["y"], [0, 1])
    np.testing.assert_array_equal(results["x"], x)
    np.testing.assert_array_equal(results["w"], [1, 1])


CONSTANTS = [
    ({"value": numpy_helper.from_array(np.array([1, 2], np.int32))}, np.array([1, 2], np.int32)),
    ({"value_float": 1.5}, np.array(1.5, np.float32)),
    ({"value_floats": [1.5, 2.0]}, np.array([1.5, 2.0], np.float32)),
    ({"value_int": 3}, np.array(3)),
    ({"value_ints": [3, 4]}, np.array([3, 4])),
]


@pytest.mark.parametrize(("attribute", "expected"), CONSTANTS)
def test_constant_nodes(attribute, expected):
    graph = load_model(chain([helper.make_node("Constant", [], ["y"], **attribute)], {}, ["y"]))
    assert graph.constants["y"].dtype == expected.dtype
    np.testing.assert_array_equal(graph.constants["y"], expected)


def test_local_functions_are_inlined():
    text = """<ir_version: 8, opset_import: ["": 17, "mine": 1]>
    g (float[2] x) => (float[2] y) { y = mine.Twice(x) }
    <domain: "mine", opset_import: ["": 17]> Twice (a) => (b) { b = Add(a, a) }"""
    model = onnx.parser.parse_model(text)
    assert [operator.op_type for operator in load_model(model).operators] == ["Add"]


def _if(condition_known):
    given, known = ("", {"c": np.array(False)}) if condition_known else (", bool c", {})
    text = f"""(float[3] x{given}) => (float[] y) {{
        [choice] y = If<
            then_branch = a () => (float[] inner) {{ inner = Neg(x) }},
            else_branch = b () => (float[] inner) <float[3] ones = {{1, 1, 1}}> {{ inner = Add(x, ones) }}
        >(c)
    }}"""
    return parsed(text, **known)


def test_an_if_whose_condition_is_known_becomes_its_branch():
    graph = load_model(_if(True))
    assert [operator.op_type for operator in graph.operators] == ["Add", "Identity"]
    result = run(fission(graph), {"x": np.arange(3, dtype=np.float32)})
    np.testing.assert_array_equal(result["y"], [1, 2, 3])


_ATTENTION = "Attention<scale = 0.5, q_num_heads = 1, kv_num_heads = 1>(q, q, q)"
_GRU = "GRU<hidden_size = 3, layout = 1>(q, w, r)"
_STEPS = (
    "Loop<body = g (int64 i, bool c, float[2,3] s) => (bool d, float[2,3] t)"
    " { d = Identity(c) f = Cast<to = 1>(i) t = Add(s, f) }>"
)
_BRANCH = (
    "If<then_branch = g () => (float[1,2,3] t) { s = Constant<value_float = 2.0>() t = Mul(q, s) },"
    " else_branch = g () => (float[] t) { t = Sin(q) }>(yes)"
)
TWICE = {
    "composite": (_ATTENTION, _ATTENTION.replace("0.5", "2.0")),
    "branch": (_BRANCH, _BRANCH.replace("2.0", "3.0")),
    "iterations": (f"{_STEPS}(five, yes, x)", f"{_STEPS}(three, yes, x)"),
    "batch first": (_GRU, _GRU.replace("w", "r")),
}


@pytest.mark.parametrize("kind", TWICE)
def test_names_of_nodes_need_not_be_unique(kind):
    nodes = " ".join(f"[n] y{i} = {node}" for i, node in enumerate(TWICE[kind]))
    known = {"yes": np.array(True), "three": np.array(3), "five": np.array(5)}
    known |= {n: np.linspace(-1, k, 27, dtype=np.float32).reshape(1, 9, 3) for n, k in (("w", 1), ("r", 2))}
    model = parsed(f"(float[1,2,3] q, float[2,3] x) => (float[] y0, float[] y1) {{ {nodes} }}", 23, **known)
    feeds = {"q": X[None], "x": X}
    graph = fission(load_model(model))
    assert "opaque" not in [p.op for p in graph.primitives]
    found = run(graph, feeds)
    for name, expected in zip(("y0", "y1"), ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(found[name], expected, rtol=1e-5)


def test_control_flow_that_reads_from_outside_is_unsupported_and_named():
    with pytest.raises(UnsupportedError, match=r"node 'choice' \(If\): .*reads 'x' from outside"):
        load_model(_if(False))


def test_control_flow_that_is_closed_is_opaque():
    branches = (
        f"{side}_branch = g () => (float[3] r) {{ k = Constant<value = float[3] {{1, 1, 1}}>() r = {op}(k) }}"
        for side, op in (("then", "Neg"), ("else", "Abs"))
    )
    graph = load_model(parsed(f"(bool c) => (float[] y) {{ y = If<{', '.join(branches)}>(c) }}"))
    assert [operator.op_type for operator in graph.operators] == ["If"]
    for condition, expected in ((True, -1), (False, 1)):
        found = run(fission(graph), {"c": np.array(condition)})["y"]
        np.testing.assert_array_equal(found, [expected] * 3)


# Shapes


def _dynamic():
    return parsed(
        "(float[batch,length,4] ids, float[batch,1,length] mask) => (float[] y) { [m] y = MatMul(mask, ids) }"
    )


def test_dimensions_are_bound_by_name_and_shared_between_inputs():
    graph = load_model(_dynamic(), {"ids": (2, 5, 4)})
    assert graph.types["mask"].shape == (2, 1, 5)
    assert graph.types["y"].shape == (2, 1, 4)


def test_an_unknown_dimension_names_input_dimension_and_option():
    with pytest.raises(ModelError) as caught:
        load_model(_dynamic())
    assert str(caught.value) == (
        "model: input 'ids': dimension 0, 'batch', is unknown; expected a static shape. "
        "Give it with --shape ids=batchxlengthx4, a number for each dimension, "
        "or all by their names: --shape batch=1 --shape length=128. In Python: shapes={'ids': (...)}"
    )


def test_an_input_without_any_shape_needs_one():
    model = parsed("(float[] x) => (float[] y) { y = Relu(x) }")
    with pytest.raises(ModelError, match="the shape is unknown"):
        load_model(model)
    assert load_model(model, {"x": (2, 3)}).types["y"].shape == (2, 3)


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        ({"idz": (2, 5, 4)}, "no input and no named dimension 'idz'; expected one of 'ids', 'mask'"),
        ({"ids": (2, 5)}, "it has 2 dimensions; expected 3"),
        ({"ids": (2, 5, 3)}, "dimension 2 is 3; expected 4"),
        ({"ids": (2, -5, 4)}, "negative"),
        ({"ids": (2, 5, 4), "mask": (3, 1, 5)}, "'batch', is 3; expected 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, complaint):
    with pytest.raises(OptionError, match=complaint):
        load_model(_dynamic(), shapes)


def test_shapes_that_contradict_the_operators_name_the_node():
    model = parsed("(float[2,3] a, float[4,5] b) => (float[] y) { [m] y = MatMul(a, b) }")
    with pytest.raises(ModelError, match=r"node 'm' \(MatMul\): the types of its inputs"):
        load_model(model)


def test_a_scale_of_an_image_is_a_constant_and_other_defaults_are_inputs() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 1, 2, 2] x, float[4] scales, float[1] more) => (float[1, 1, 4, 4] y)
        <float[4] scales = {1, 1, 2, 2}, float[1] more = {3}>
        { r = Resize <mode = "nearest"> (x, , scales) y = Add(r, more) }"""
    graph = load_model(onnx.parser.parse_model(text))
    assert {name: array.tolist() for name, array in graph.defaults.items()} == {"more": [3.0]}
    assert graph.types["y"].shape == (1, 1, 4, 4)
