"""What a model computes: ONNX Runtime and `onnx.reference`, and a third opinion where these two differ.

Both have faults, so a single reference is not enough: ONNX Runtime's inverse DFT of odd lengths is wrong, and so is the
reference's softmax of opset 11. The third opinion is that of the other references of `agreed.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import helper

from korch.frontend.names import captured_names
from korch.primitive.agreed import NUMPY, REFERENCE, TORCH, agreed, opinions_of
from korch.primitive.op import Array
from tests.support.bodies import by_body

FAR = {2: 2e-2, 4: 1e-3, 8: 1e-3}
"""The largest difference of results, relative to the largest element or to 1, by the bytes of an element."""


def onnx_runtime(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Any] | None:
    """Return ONNX Runtime's results without its optimizations; None if it can't run the model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, dict(feeds)))
    except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
        return None


def onnx_reference(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Any] | None:
    """Return the results of `onnx.reference`; None if it can't run the model."""
    found = agreed("", {REFERENCE: opinions_of(model, feeds)[REFERENCE]})
    return None if found is None else list(found[0])


def settled(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Any] | None:
    """Return the results of a model with one output: one array, or two if the references differ and nothing decides.

    None if ONNX Runtime can't run the model and there is no third opinion.
    """
    ours = onnx_runtime(model, feeds)
    theirs = onnx_reference(model, feeds)
    if ours is not None and theirs is not None and not difference(np.asarray(theirs[0]), np.asarray(ours[0])):
        return ours
    if ours is None and (theirs is None or not _is_legal(model)):
        return None
    third = opinion(model, feeds, ours or theirs or [])
    if third is not None:
        return [third]
    if ours is None or theirs is None:
        return ours
    return [ours[0], theirs[0]]


def _is_legal(model: onnx.ModelProto) -> bool:
    try:
        onnx.checker.check_model(model)
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
        return False
    return True


def opinion(model: onnx.ModelProto, feeds: Mapping[str, Array], like: list[Any]) -> Array | None:
    """Return what NumPy, PyTorch or the nodes of its bodies compute for the last node of a model.

    Args:
        model: the model.
        feeds: its inputs.
        like: arrays of the types of its results.
    """
    *before, node = model.graph.node
    known = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer} | dict(feeds)
    read = (*node.input, *captured_names(node))
    wanted = [name for name in dict.fromkeys(read) if name and name not in known]
    own = onnx.ModelProto()
    own.CopyFrom(model)
    del own.graph.node[:]
    if before and wanted:
        del own.graph.output[:]
        own.graph.node.extend(before)
        own.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted)
        known |= zip(wanted, onnx_runtime(own, feeds) or (), strict=False)
        del own.graph.node[:]
    own.graph.node.append(node)
    opinions = opinions_of(own, known)
    chosen = {NUMPY: opinions[NUMPY], TORCH: lambda _: opinions[TORCH](like)}
    found = agreed("", chosen | {"its bodies": lambda _: by_body(node, known, model.opset_import)})
    at = [name for name in node.output if name].index(model.graph.output[0].name)
    return None if found is None else np.asarray(found[0][at]).astype(like[0].dtype, copy=False)


def difference(found: Array, expected: Array) -> str:
    """Return how an array differs from the expected one; "" if it does not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if found.dtype.kind != "f":
        count = int((found != expected).sum())
        return f"{count} of {found.size} elements differ" if count else ""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if found.dtype == np.float32:  # this is ONNX Runtime's maximum of no elements
        b = np.where(b == np.finfo(np.float32).min, -np.inf, b)
    if (np.isnan(a) != np.isnan(b)).any():
        return f"{int((np.isnan(a) != np.isnan(b)).sum())} of {a.size} elements are NaN in one only"
    infinite = np.isinf(a) | np.isinf(b)
    if (a[infinite] != b[infinite]).any():
        return "infinities differ"
    finite = np.isfinite(a) & np.isfinite(b)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    size = np.abs(b[finite]).max(initial=1.0)
    return f"error {error:.3g} of {size:.3g}" if error > FAR[found.dtype.itemsize] * size else ""
