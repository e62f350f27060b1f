import numpy as np
import onnx
import pytest
from onnx import helper

from korch.errors import InvalidGraphError, ModelError
from korch.fission import RULES, fission, fission_with_report
from korch.fission.rule import FissionRule
from korch.fission.split import split_operators
from korch.frontend import load_model
from korch.primitive.check import check_graph
from korch.primitive.reference import run
from tests.support.models import chain, one_operator, parsed

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def _report(model):
    return fission_with_report(load_model(model))


def test_an_operator_without_a_rule_is_opaque_once_for_each_output_that_is_read():
    k = np.array([2], np.int64)
    graph, report = _report(one_operator("TopK", [X], constants={1: k}, outputs=2))
    check_graph(graph)
    assert [p.op for p in graph.primitives] == ["opaque", "opaque"]
    assert graph.origins == ("TopK it", "TopK it")
    assert [(item.op_type, item.reason) for item in report.kept] == [("TopK", "no rule")]
    found = run(graph, {"x0": X})
    np.testing.assert_array_equal(found["y0"], X[:, :1:-1])
    np.testing.assert_array_equal(found["y1"], [[3, 2]] * 3)


def test_any_order_is_the_sorted_one():
    k = {1: np.array([2], np.int64)}
    graphs = [_report(one_operator("TopK", [X], constants=k, outputs=2, sorted=n))[0] for n in (0, 1)]
    assert graphs[0] == graphs[1]


LSTM = "it has lengths, peepholes, clipping or coupled gates"


def test_an_omitted_input_and_an_unread_output_stay_out():
    text = "(float[4,1,3] x) => (float[] last) { [l] , last = LSTM<hidden_size = 2, clip = 9.0>(x, w, r, , , h) }"
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.normal(size=(1, 8, 3)).astype(np.float32),
        "r": rng.normal(size=(1, 8, 2)).astype(np.float32),
        "h": np.zeros((1, 1, 2), np.float32),
    }
    model = parsed(text, **weights)
    graph, report = _report(model)
    check_graph(graph)
    assert [(kept.op_type, kept.reason) for kept in report.kept] == [("LSTM", LSTM)]
    x = rng.normal(size=(4, 1, 3)).astype(np.float32)
    (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(run(graph, {"x": x})["last"], expected, rtol=1e-6)


_EMPTY = np.zeros(0, np.float32)
INDICES = np.array([0, 2], np.int64)
REFUSED = [
    ("Gather", [X, INDICES], {}, {}, 13, "indices are computed at run time"),
    (
        "GatherElements",
        [np.zeros((300, 4), np.float32), np.zeros((3, 4), np.int64)],
        {},
        {},
        13,
        "indices are computed",
    ),
    ("OneHot", [np.zeros(3, np.float32)], {1: np.array([4]), 2: np.array([0, 1])}, {}, 13, "indices of type f32"),
    ("Gather", [X], {1: np.zeros(70_000, np.int64)}, {}, 13, "more than 65536"),
    ("Mod", [np.arange(3, dtype=np.float32)] * 2, {}, {}, 28, "floored remainder"),
    ("Pow", [np.arange(3), np.ones(3, np.float32)], {}, {}, 13, "fractional power"),
    ("ReduceMean", [np.arange(3)], {}, {}, 13, "elements of type i64"),
    (
        "Resize",
        [X[None, None], np.zeros(8, np.float32)],
        {3: np.array([1, 1, 2, 2])},
        {"coordinate_transformation_mode": "tf_crop_and_resize"},
        13,
        "tf_crop_and_resize",
    ),
    ("LpPool", [X[None, None]], {}, {"kernel_shape": [2, 2], "p": 3}, 18, "p = 2"),
    ("GlobalLpPool", [X[None, None]], {}, {"p": 0}, 22, "p = 0"),
    ("Einsum", [X], {}, {"equation": "...j->..."}, 12, "ellipsis"),
    ("Einsum", [X[:, :3]], {}, {"equation": "ii->i"}, 12, "diagonal"),
    ("GatherND", [X], {1: np.zeros((3, 1), np.int64)}, {"batch_dims": 1}, 13, "batch axes"),
    ("ArgMax", [np.float32(1)], {}, {}, 13, "a scalar has no axis"),
    ("Celu", [X], {}, {"alpha": -1.0}, 12, "negative alpha"),
]


@pytest.mark.parametrize(
    ("op", "inputs", "constants", "attributes", "opset", "reason"),
    REFUSED,
    ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSED)],
)
def test_refusals_say_why(op, inputs, constants, attributes, opset, reason):
    model = one_operator(op, inputs, constants=constants, opset=opset, **attributes)
    graph, report = _report(model)
    check_graph(graph)
    assert [p.op for p in graph.primitives] == ["opaque"]
    (kept,) = report.kept
    assert reason in kept.reason
    assert kept.operator == f"{op} it"


CONTRADICTIONS = [
    ("LayerNormalization", [X, np.ones(3, np.float32)], {}, "broadcast"),
    ("Conv", [X[None, None], np.ones((1, 1, 2, 2), np.float32)], {"kernel_shape": [3, 3]}, "kernel_shape"),
    ("InstanceNormalization", [X[None], *[np.ones(2, np.float32)] * 2], {}, "contradict"),
]


@pytest.mark.parametrize(("op", "inputs", "attributes", "complaint"), CONTRADICTIONS)
def test_a_model_that_contradicts_a_definition_is_refused_with_its_node(op, inputs, attributes, complaint):
    with pytest.raises(ModelError, match=rf"{op} it: .*{complaint}"):
        fission(load_model(one_operator(op, inputs, **attributes)))


def test_a_rule_that_gives_another_type_is_korch_s_fault():
    graph = load_model(one_operator("Relu", [X]))
    wrong = FissionRule("Relu", lambda c: c.transpose(c.input(0), (1, 0)))
    with pytest.raises(InvalidGraphError, match=r"f32\[4,3\]; expected f32\[3,4\]"):
        split_operators(graph, {"Relu": (wrong,)})


def test_a_rule_for_other_opsets_does_not_fire():
    graph = load_model(one_operator("Relu", [X], opset=13))
    old = FissionRule("Relu", lambda c: c.input(0), last=12)
    _, report = split_operators(graph, {"Relu": (old,)})
    assert [(kept.op_type, kept.reason) for kept in report.kept] == [("Relu", "no rule for this opset")]


def test_axes_too_long_for_indices_are_kept_whole():
    counts = {1: np.array([1, 1 << 17])}
    _, report = _report(one_operator("Tile", [X], constants=counts))
    assert "more than 65536" in report.kept[0].reason
    sizes = {1: _EMPTY, 2: _EMPTY, 3: np.array([3, 1 << 17])}
    _, report = _report(one_operator("Resize", [X], constants=sizes, opset=13))
    assert "more than 65536" in report.kept[0].reason


def test_a_large_constant_of_one_number_is_never_written_out():
    shape = {0: np.array([1 << 20, 1 << 12])}
    graph, report = _report(one_operator("ConstantOfShape", [], constants=shape))
    assert not report.kept
    (constant,) = graph.constants.values()
    assert constant.is_uniform
    assert constant.type.size_bytes == 1 << 34


def test_max_pool_with_positions_that_are_read_is_kept_whole():
    inputs, attributes = [X[None, None]], {"kernel_shape": [2, 2]}
    _, report = _report(one_operator("MaxPool", inputs, outputs=2, **attributes))
    assert "positions" in report.kept[0].reason
    _, report = _report(one_operator("MaxPool", inputs, outputs=1, **attributes))
    assert not report.kept


def test_dropout_in_training_is_kept_whole():
    constants = {1: np.array(0.5, np.float32), 2: np.array(True)}
    _, report = _report(one_operator("Dropout", [X], constants=constants))
    assert "training" in report.kept[0].reason


def test_batch_normalization_in_training_is_kept_whole():
    inputs = [X, *[np.ones(4, np.float32)] * 4]
    model = one_operator("BatchNormalization", inputs, opset=15, outputs=3, training_mode=1)
    _, report = _report(model)
    assert "training" in report.kept[0].reason


def test_batch_normalization_with_constant_statistics_is_one_product_and_one_sum():
    constants = {i: np.linspace(0.5, 2, 4, dtype=np.float32) for i in range(1, 5)}
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    graph = fission(load_model(one_operator("BatchNormalization", [x], constants=constants)))
    assert sorted(p.op for p in graph.primitives) == ["add", "broadcast", "broadcast", "mul"]
    assert all(constant.array.size <= 4 for constant in graph.constants.values())


def test_origins_name_the_operator_on_one_line():
    model = chain([helper.make_node("Relu", ["x"], ["y"], name="a\n  b")], {"x": (1, [2])}, ["y"])
    assert fission(load_model(model)).origins == ("Relu a b",)


def test_uniform_constants_are_broadcast_for_nothing():
    half = np.full((1, 1), 0.5, np.float32)
    graph = fission(load_model(one_operator("Mul", [X], constants={1: half})))
    assert [p.op for p in graph.primitives] == ["mul"]


def test_a_mean_over_a_power_of_two_is_a_product_and_any_other_a_quotient():
    def operations(axes):
        model = one_operator("ReduceMean", [X], opset=13, axes=axes)
        return [p.op for p in fission(load_model(model)).primitives]

    assert operations([1]) == ["reduce_sum", "mul"]
    assert operations([0]) == ["reduce_sum", "div"]


def test_equal_operators_are_split_once():
    graph = fission(load_model(parsed("(float[2] x) => (float[2] a, float[2] b) { a = Tanh(x) b = Tanh(x) }")))
    assert len(graph.primitives) == 1
    assert graph.outputs == (("a", 1), ("b", 1))


def test_the_rules_are_for_operators_that_exist_and_do_not_overlap():
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}
    for rule in RULES:
        assert rule.operator in names
        same = [other for other in RULES if other.operator == rule.operator]
        for opset in range(7, 29):
            assert sum(other.holds_for(opset) for other in same) <= 1
