import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

from korch.errors import ModelError, UnsupportedError
from korch.fission import fission
from korch.frontend import load_model
from korch.primitive.reference import run

X = np.array([-4, -1, 2], np.float32)
CALL = "y = my.f(x)"


def _model(nodes: str, *functions: str, opset: int = 18) -> onnx.ModelProto:
    imports = 'opset_import: ["": 18, "my": 1]'
    head = f"<ir_version: 10, {imports}> g (float[3] x) => (float[3] y) <bool yes = {{1}}> {{ {nodes} }}"
    inner = imports.replace("18", str(opset))
    return parser.parse_model(head + "".join(f'<domain: "my", {inner}> {text}' for text in functions))


LEAK = "f <a: float = 0.25> (x) => (y) { y = LeakyRelu <alpha: float = @a> (x) }"
INNER = "h <b: float = 7.0> (x) => (y) { y = LeakyRelu <alpha: float = @b> (x) }"


def _scaled(attribute: str, constant: str) -> str:
    nodes = f"c = Constant <{constant} = @a> () d = CastLike (c, x) y = Mul (x, d)"
    return f"f <{attribute}> (x) => (y) {{ {nodes} }}"


@pytest.mark.parametrize(
    ("functions", "nodes", "expected"),
    [
        ([LEAK], CALL, [-1, -0.25, 2]),
        ([LEAK], "t = my.f <a: float = 3.0> (x) y = my.f (t)", [-3, -0.75, 2]),
        (
            [LEAK],
            "y = If (yes) <then_branch = t () => (z) { z = my.f (x) }, else_branch = e () => (x) {}>",
            [-1, -0.25, 2],
        ),
        (["f <a: float = 0.25> (x) => (y) { y = my.h <b: float = @a> (x) }", INNER], CALL, [-1, -0.25, 2]),
        (["f <a> (x) => (y) { y = my.h <b: float = @a> (x) }", INNER], CALL, [-28, -7, 2]),
        (["f (x) => (y) { t = my.h (x) y = my.h <b: float = 2.0> (t) }", INNER], CALL, [-56, -14, 2]),
        (["f <a> (x) => (y) { y = LeakyRelu <alpha: float = @a> (x) }"], CALL, [-0.04, -0.01, 2]),
        ([_scaled("a: float = 0.5", "value_float: float")], CALL, [-2, -0.5, 1]),
        ([_scaled("a: floats = [1.0, 2.0, 3.0]", "value_floats: floats")], CALL, [-4, -2, 6]),
        ([_scaled("a: int = 5", "value_int: int")], CALL, [-20, -5, 10]),
        ([_scaled("a: ints = [1, 2, 3]", "value_ints: ints")], CALL, [-4, -2, 6]),
        ([_scaled("a: tensor = float[3] {1., 5., 7.}", "value: tensor")], CALL, [-4, -5, 14]),
    ],
)
def test_an_attribute_that_a_call_lacks_has_its_default(
    functions: list[str], nodes: str, expected: list[float]
) -> None:
    graph = load_model(_model(nodes, *functions))
    np.testing.assert_allclose(run(fission(graph), {"x": X})["y"], expected, rtol=1e-6)


def test_a_function_of_an_older_opset_is_converted() -> None:
    nodes = "t = Unsqueeze <axes: ints = [0]> (x) y = ReduceMax <axes: ints = [0], keepdims: int = @a> (t)"
    graph = load_model(_model(CALL, f"f <a: int = 0> (x) => (y) {{ {nodes} }}", opset=11))
    np.testing.assert_array_equal(run(fission(graph), {"x": X})["y"], X)


def test_overloads_are_told_apart() -> None:
    model = _model("t = my.f (x) y = my.f (t)", LEAK, LEAK.replace("0.25", "2.0"))
    model.functions[1].overload = model.graph.node[1].overload = "other"
    np.testing.assert_array_equal(run(fission(load_model(model)), {"x": X})["y"], [-2, -0.5, 2])


def test_initializers_keep_their_elements_and_the_model_is_not_changed() -> None:
    model = _model("t = my.f (x) y = Add (t, w)", LEAK)
    model.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    before = model.SerializeToString()
    np.testing.assert_array_equal(run(fission(load_model(model)), {"x": X})["y"], [0, 0.75, 3])
    assert model.SerializeToString() == before


def test_calls_that_double_at_each_level_are_refused_before_they_are_copied() -> None:
    bodies = [f"f{i} (x) => (y) {{ a = my.f{i + 1} (x) y = my.f{i + 1} (a) }}" for i in range(40)]
    with pytest.raises(UnsupportedError, match=f"that it has {1 << 40} nodes; expected at most 65536"):
        load_model(_model("y = my.f0 (x)", *bodies, "f40 (x) => (y) { y = Neg (x) }"))


@pytest.mark.parametrize("callee", ["f", "h"])
def test_recursion_is_refused(callee: str) -> None:
    with pytest.raises(ModelError, match="a function calls itself, or functions call each other in a cycle: 'f'"):
        load_model(_model(CALL, f"f (x) => (y) {{ y = my.{callee} (x) }}", "h (x) => (y) { y = my.f (x) }"))
