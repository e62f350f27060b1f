"""Each element type with each kind of operator: one model per type, run by native kernels.

The reference is `onnx.reference`, which computes in the types of the model. For float16 and bfloat16
it gets the same elements in float64, because these types are for storage only.
"""

import math

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

import korch
from korch.runtime.executable import Executable
from tests.support.models import in_onnxruntime

H = onnx.helper
# No kernel has more than one operator: each would otherwise be tried with all others that read the same input.
QUICK = {
    "measure": False,
    "threads": 1,
    "ablation": korch.Ablation(baselines=False),
    "search": korch.SearchLimits(max_primitives=8, max_outputs=1),
}
NUMPY = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float64": np.float64,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "uint8": np.uint8,
    "bool": np.bool_,
}
FLOATS = ("float32", "float16", "bfloat16", "float64")
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2, "float64": 1e-11}

EXACT = {"Erf": math.erf, "Gelu": lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2}
"""What `onnx.reference` rounds to float32."""

LAYOUT = (
    ("Transpose", ["x"], {"perm": [0, 2, 3, 1]}),
    ("Reshape", ["x", "flat"], {}),
    ("Slice", ["x", "ones", "twos", "axes"], {}),
    ("Concat", ["x", "y"], {"axis": 1}),
    ("Gather", ["x", "places"], {"axis": 3}),
    ("Expand", ["row", "full"], {}),
    ("Pad", ["x", "pads"], {"mode": "edge"}),
    ("Where", ["choice", "x", "y"], {}),
)
COMPARE = tuple((op, ["x", "y"], {}) for op in ("Equal", "Greater", "LessOrEqual"))
NUMBERS = (
    *((op, ["x", "y"], {}) for op in ("Add", "Sub", "Mul", "Max", "Min")),
    ("Abs", ["x"], {}),
    ("ReduceSum", ["x", "axes"], {"keepdims": 0}),
    ("ReduceMax", ["x", "axes"], {"keepdims": 1}),
    ("CumSum", ["x", "axis"], {}),
    ("MatMul", ["x", "square"], {}),
)
REALS = (
    *((op, ["x"], {}) for op in ("Exp", "Tanh", "Sigmoid", "Erf", "Relu", "Gelu", "Floor")),
    ("Div", ["x", "apart"], {}),
    ("Softmax", ["x"], {"axis": -1}),
    ("ReduceMean", ["x", "axes"], {}),
    ("LayerNormalization", ["x", "row"], {"axis": 3}),
    ("Conv", ["x", "taps"], {"pads": [1, 0, 1, 2], "strides": [2, 1], "group": 2}),
    ("Conv", ["x", "taps", "shift"], {"dilations": [1, 2], "group": 2}),
    ("ConvTranspose", ["x", "taps"], {"strides": [2, 1], "pads": [0, 1, 0, 1]}),
    ("MaxPool", ["x"], {"kernel_shape": [2, 2], "strides": [1, 2]}),
    ("AveragePool", ["x"], {"kernel_shape": [2, 2], "pads": [1, 0, 0, 1]}),
    ("Gemm", ["left", "square", "row"], {"alpha": 0.5, "transB": 1}),
    ("Resize", ["x", "", "", "larger"], {"mode": "linear"}),
)
INTEGERS = (
    ("Div", ["x", "apart"], {}),
    ("Mod", ["x", "apart"], {}),
    ("Neg", ["x"], {}),
    ("BitwiseAnd", ["x", "y"], {}),
    ("BitwiseXor", ["x", "y"], {}),
)
LOGIC = (
    *((op, ["x", "y"], {}) for op in ("And", "Or", "Xor", "Equal")),
    ("Not", ["x"], {}),
    ("Cast", ["x"], {"to": onnx.TensorProto.FLOAT}),
)

# What ONNX does not define for a type.
UNDEFINED = {"int8": {"CumSum", "MatMul", "ReduceSum"}, "uint8": {"CumSum", "MatMul", "ReduceSum", "Neg"}}


def rows(name: str) -> list[tuple[str, list[str], dict[str, object]]]:
    """Return the operators of a type."""
    if name == "bool":
        return [*LAYOUT, *LOGIC]
    own = REALS if name in FLOATS else INTEGERS
    gone = UNDEFINED.get(name, set())
    return [row for row in (*LAYOUT, *COMPARE, *NUMBERS, *own) if row[0] not in gone]


def arrays(name: str) -> dict[str, np.ndarray]:
    """Return the inputs of a type; integers are small and apart from zero where they divide."""
    rng = np.random.default_rng(5)

    def draw(*shape: int) -> np.ndarray:
        if name == "bool":
            return rng.integers(0, 2, shape).astype(bool)
        if name in FLOATS:
            return rng.standard_normal(shape).astype(NUMPY[name])
        return rng.integers(0 if name == "uint8" else -9, 10, shape).astype(NUMPY[name])

    made = {
        "x": draw(2, 4, 5, 6),
        "y": draw(2, 4, 5, 6),
        "row": draw(6),
        "square": draw(6, 6),
        "left": draw(3, 6),
        "taps": draw(4, 2, 3, 2),
        "shift": draw(4),
    }
    made["apart"] = (np.abs(draw(2, 4, 5, 6).astype(np.float64)) + 1).astype(NUMPY[name])
    return made


CONSTANTS = {
    "flat": np.array([2, 4, -1]),
    "ones": np.array([1, 1]),
    "twos": np.array([4, 5]),
    "axes": np.array([1, 2]),
    "places": np.array([5, 0, 3, 3]),
    "full": np.array([3, 2, 6]),
    "pads": np.array([0, 1, 0, 2, 0, 0, 1, 0]),
    "axis": np.array(2),
    "choice": np.arange(240).reshape(2, 4, 5, 6) % 3 == 0,
    "larger": np.array([2, 4, 7, 9]),
}


def model(name: str, element: str) -> onnx.ModelProto:
    """Return a model of all operators of a type, with its inputs in the type `element`."""
    kind = H.np_dtype_to_tensor_dtype(np.dtype(NUMPY[element]))
    nodes, outputs = [], []
    for i, (op, inputs, attributes) in enumerate(rows(name)):
        nodes.append(H.make_node(op, inputs, [f"{op}_{i}"], **attributes))
        outputs.append(H.make_empty_tensor_value_info(f"{op}_{i}"))
    used = {value for node in nodes for value in node.input}
    graph = H.make_graph(
        nodes,
        name,
        [H.make_tensor_value_info(n, kind, a.shape) for n, a in arrays(name).items() if n in used],
        outputs,
        [onnx.numpy_helper.from_array(a, n) for n, a in CONSTANTS.items() if n in used],
    )
    made = H.make_model(graph, opset_imports=[H.make_opsetid("", 22)], ir_version=10)
    return onnx.shape_inference.infer_shapes(made, strict_mode=True)


@pytest.mark.parametrize("name", NUMPY)
def test_each_element_type(name: str, cache_folder) -> None:
    proto = model(name, name)
    used = {i.name for i in proto.graph.input}
    feeds = {n: a for n, a in arrays(name).items() if n in used}
    exact = "float64" if name in FLOATS else name
    expected = ReferenceEvaluator(model(name, exact)).run(None, {n: a.astype(NUMPY[exact]) for n, a in feeds.items()})
    executable = korch.optimize(proto, cache_folder=cache_folder, **QUICK)
    assert isinstance(executable, Executable)
    assert "onnxruntime" not in {step.provider for step in executable.plan.steps}
    results = executable.run(None, feeds)
    for node, found, right in zip(proto.graph.node, results, expected, strict=True):
        assert found.shape == right.shape, node.op_type
        if found.dtype.kind in "iub" or node.op_type in {x[0] for x in COMPARE}:
            np.testing.assert_array_equal(found, right, err_msg=node.op_type)
            continue
        if node.op_type in EXACT:
            right = np.vectorize(EXACT[node.op_type], otypes=[float])(feeds["x"].astype(np.float64))
        scale = max(1.0, float(np.abs(right).max()))
        error = np.abs(found.astype(np.float64) - right).max() / scale
        assert error <= TOLERANCE.get(name, 0.0), f"{node.op_type}: {error:.1e}"
        assert math.isfinite(error)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("spatial", [(7,), (5, 6), (3, 4, 3)])
def test_convolutions_of_float64(transposed, groups, spatial, cache_folder) -> None:
    rng, rank = np.random.default_rng(1), len(spatial)
    x = rng.standard_normal((2, 6, *spatial)).astype(np.float32)
    first, second = (6, 4) if transposed else (3 * 2, 6 // groups)
    w = rng.standard_normal((first, second, *(2, 3, 2)[:rank])).astype(np.float32)
    attributes = {
        "group": groups,
        "strides": [2, 1, 3][:rank],
        "dilations": [1, 2, 1][:rank],
        "pads": [1, 0, 1][:rank] + [0, 2, 1][:rank],
    }

    def proto(kind: int) -> onnx.ModelProto:
        node = H.make_node("ConvTranspose" if transposed else "Conv", ["x", "w"], ["y"], **attributes)
        inputs = [H.make_tensor_value_info(n, kind, a.shape) for n, a in (("x", x), ("w", w))]
        graph = H.make_graph([node], "g", inputs, [H.make_empty_tensor_value_info("y")])
        return H.make_model(graph, opset_imports=[H.make_opsetid("", 17)], ir_version=8)

    (right,) = in_onnxruntime(proto(onnx.TensorProto.FLOAT), {"x": x, "w": w})
    executable = korch.optimize(proto(onnx.TensorProto.DOUBLE), cache_folder=cache_folder, **QUICK)
    assert {step.provider for step in executable.plan.steps} == {"generated"}
    (found,) = executable(x.astype(np.float64), w.astype(np.float64))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)
