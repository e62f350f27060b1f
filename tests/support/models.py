"""Small ONNX models, for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from korch.primitive.op import Array


def one_operator(
    op_type: str,
    inputs: Sequence[Array | None],
    *,
    constants: Mapping[int, Array] | None = None,
    opset: int = 17,
    outputs: int = 1,
    domain: str = "",
    version: int = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one operator.

    Args:
        op_type: the operator.
        inputs: for each input an array, which sets its type, or None if the input is omitted.
        constants: inputs, by position, that are initializers with these elements.
        opset: the version of the standard.
        outputs: the number of outputs; they are named y0, y1, ....
        domain: the operator's domain.
        version: the version of this domain, if it is not the standard.
        attributes: the operator's attributes.
    """
    known = dict(constants or {})
    count = max(len(inputs), *(position + 1 for position in known), 0) if known else len(inputs)
    names = [f"x{i}" if i in known or (i < len(inputs) and inputs[i] is not None) else "" for i in range(count)]
    node = onnx.helper.make_node(
        op_type, names, [f"y{i}" for i in range(outputs)], name="it", domain=domain, **attributes
    )
    declared = [
        onnx.helper.make_tensor_value_info(f"x{i}", onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for i, array in enumerate(inputs)
        if array is not None and i not in known
    ]
    results = [onnx.helper.make_empty_tensor_value_info(f"y{i}") for i in range(outputs)]
    stored = [onnx.numpy_helper.from_array(np.asarray(a), f"x{i}") for i, a in known.items()]
    graph = onnx.helper.make_graph([node], "one", declared, results, stored)
    imports = [onnx.helper.make_opsetid("", opset), *[onnx.helper.make_opsetid(domain, version)] * bool(domain)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)


GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
BIAS, STATE, CELL, PEEPHOLES = 3, 5, 6, 7
"""The positions of optional inputs of LSTM, GRU and RNN that are floats."""


def recurrent_inputs(
    operator: str, sizes: tuple[int, int, int, int], given: Sequence[int], directions: int
) -> list[Array | None]:
    """Return random inputs of an LSTM, GRU or RNN, the first three and those at the positions `given`.

    `sizes`: steps, batch, width of an input, and of a state.
    """
    (steps, batch, width, hidden), rng = sizes, np.random.default_rng(3)
    rows = GATES[operator] * hidden
    shapes = {
        0: (steps, batch, width),
        1: (directions, rows, width),
        2: (directions, rows, hidden),
        BIAS: (directions, 2 * rows),
        STATE: (directions, batch, hidden),
        CELL: (directions, batch, hidden),
        PEEPHOLES: (directions, 3 * hidden),
    }
    arrays: list[Array | None] = [None] * (1 + max([2, *given]))
    for i in (0, 1, 2, *given):
        arrays[i] = rng.normal(size=shapes[i]).astype(np.float32)
    return arrays


def parsed(text: str, opset: int = 17, **constants: Array) -> onnx.ModelProto:
    """Return the model of a text of ONNX, `(inputs) => (outputs) { nodes }`, with these initializers."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    return model


def feeds_of(inputs: Sequence[Array | None], known: Mapping[int, Array] | None = None) -> dict[str, Array]:
    """Return the arrays that `one_operator`'s model reads at run time, by name."""
    return {f"x{i}": array for i, array in enumerate(inputs) if array is not None and i not in (known or {})}


def chain(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, tuple[int, Sequence[Any]]],
    outputs: Sequence[str],
    constants: Mapping[str, Array] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """Return a model of these nodes.

    Args:
        nodes: the nodes, in any order.
        inputs: ONNX element type and shape (numbers or names) by name.
        outputs: the names of the outputs.
        constants: initializers by name.
        opset: the ONNX opset.
    """
    graph = onnx.helper.make_graph(
        list(nodes),
        "chain",
        [onnx.helper.make_tensor_value_info(n, t, s) for n, (t, s) in inputs.items()],
        [onnx.helper.make_empty_tensor_value_info(name) for name in outputs],
        [onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in (constants or {}).items()],
    )
    imports = [onnx.helper.make_opsetid("", opset)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)


def sum_and_place() -> onnx.ModelProto:
    """Two outputs, one of integers, of two inputs with a free size."""
    ends = "(float[rows,4] a, float[rows,4] b) => (float[rows,4] sum, int64[rows] where)"
    return parsed(f"{ends} {{ sum = Add(a, b) where = ArgMax<axis = 1, keepdims = 0>(sum) }}")


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    """Write a model to a folder; return its path."""
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def in_onnxruntime(model: Path | bytes | onnx.ModelProto, inputs: Mapping[str, Array], optimizes: bool = True) -> Any:
    """Return what ONNX Runtime computes; `optimizes`: with its optimizations."""
    import onnxruntime  # most tests of models do not need it

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs))
