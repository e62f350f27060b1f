"""The result of one ONNX node on which its references agree.

ONNX Runtime, `onnx.reference` and PyTorch each compute some operators otherwise than their definition. So a node that
is not split into primitives is computed by two of them. If they differ, others are asked until two agree, and the
difference is noted (`dispute.py`).
"""

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from korch.primitive.definitions import by_definition
from korch.primitive.dispute import Dispute, note
from korch.primitive.torch_calls import TABLE, Node
from korch.primitive.torch_calls.node import TORCH_TYPES
from korch.primitive.types import UNIT_ROUNDOFF, DType, ValueType

RUNTIME, REFERENCE, NUMPY, TORCH = "ONNX Runtime", "onnx.reference", "NumPy", "PyTorch"
OWN = "Korch's interpreter"

NEAR = 1e-3
"""The difference of floats, relative to the largest element, up to which two results are equal."""

ROUNDINGS = 10
"""The difference of floats of 16 bits, in rounding errors, up to which two results are equal."""

Outputs = Sequence[Any]
"""An array, a list of arrays, or None for each output of a node."""

Opinion = Callable[[Outputs | None], Outputs | None]
"""Computes a node's outputs, given those of another reference (for their types); None or an error if it can't."""


def agreed(node: str, opinions: Mapping[str, Opinion]) -> tuple[Outputs, tuple[str, ...]] | None:
    """Return a node's outputs, and the names of the references that agree on them; None if no reference computes them.

    The references are asked one after another until two agree. If no two do, the first one's result is returned. A
    difference is noted.

    `opinions`: the references by name, the preferred one first.
    """
    groups: list[tuple[Outputs, list[str]]] = []
    error = 0.0
    for name, opinion in opinions.items():
        found = _computed(opinion, groups[0][0] if groups else None)
        if found is None:
            continue
        differences = [largest_difference(outputs, found) for outputs, _ in groups]
        equal = next((i for i, difference in enumerate(differences) if difference <= 1), None)
        error = max([error, *(difference for difference in differences if difference > 1)])
        if equal is not None:
            groups[equal][1].append(name)
            break
        groups.append((found, [name]))
    if not groups:
        return None
    best, names = max(groups, key=lambda group: len(group[1]))  # the first of several
    if len(groups) > 1:
        others = [name for outputs, own in groups if outputs is not best for name in own]
        note(Dispute(node, tuple(names), tuple(others), NEAR * error))
    return best, tuple(names)


def _computed(opinion: Opinion, like: Outputs | None) -> Outputs | None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return opinion(like)
        except Exception:  # noqa: BLE001 - foreign code: the reference does not compute this node
            return None


def largest_difference(a: Any, b: Any) -> float:
    """Return the difference of two results, in units of what counts as equal: at most 1 if they are equal."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return float("inf")
        return max((largest_difference(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if a is None or b is None:
        return 0.0 if a is None and b is None else float("inf")
    x, y = np.asarray(a), np.asarray(b)
    if x.shape != y.shape:
        return float("inf")
    if x.dtype.kind in "OSUT" or y.dtype.kind in "OSUT":
        return 0.0 if [str(t) for t in x.reshape(-1)] == [str(t) for t in y.reshape(-1)] else float("inf")
    if x.dtype.kind in "iub" and y.dtype.kind in "iub":
        return 0.0 if np.array_equal(x, y) else max(2.0, _relative(x, y) / NEAR)
    near = {np.dtype(np.float16): DType.F16, np.dtype(ml_dtypes.bfloat16): DType.BF16}
    roundings = [ROUNDINGS * UNIT_ROUNDOFF[near[array.dtype]] for array in (x, y) if array.dtype in near]
    return _relative(x, y) / max(NEAR, *roundings, 0.0)


def _relative(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest element; infinite if not the same elements are finite."""
    if np.array_equal(a, b):  # most results are exactly equal, and the rest takes many passes over both
        return 0.0
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(y)
    if not np.array_equal(np.where(np.isfinite(x), 0, x), np.where(finite, 0, y), equal_nan=True):
        return float("inf")
    off, size = np.abs(x[finite] - y[finite]), np.abs(y[finite])
    return float(off.max() / max(size.max(), 1e-30)) if off.size else 0.0


def opinions_of(model: onnx.ModelProto, feeds: Mapping[str, Any], limit_s: float | None = None) -> dict[str, Opinion]:
    """Return the references of a node.

    Args:
        model: the node is the only one of this model.
        feeds: the elements of its inputs.
        limit_s: the seconds after which `onnx.reference`, whose loops run in Python, is given up.
    """
    return {
        RUNTIME: lambda like: _by_runtime(model, feeds),
        REFERENCE: lambda like: _by_reference(model, feeds, limit_s),
        NUMPY: lambda like: _by_numpy(model, feeds),
        TORCH: lambda like: _by_torch(model, feeds, like),
    }


def _by_runtime(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Outputs | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, dict(feeds))
    types = [item.type.tensor_type.elem_type for item in model.graph.output]
    wanted = [onnx.helper.tensor_dtype_to_np_dtype(number) if number else None for number in types]
    pairs = zip(found, wanted, strict=True)
    is_typed = all(not isinstance(a, np.ndarray) or t in (None, np.dtype(object), a.dtype) for a, t in pairs)
    return found if is_typed else None  # elements of 8 bits and fewer may come as plain bytes


def _by_reference(model: onnx.ModelProto, feeds: Mapping[str, Any], limit_s: float | None) -> Outputs:
    evaluator, before = ReferenceEvaluator(model), sys.getprofile()
    end_s = time.monotonic() + (np.inf if limit_s is None else limit_s)

    def stop(*_: object) -> None:  # Python calls it at each call
        if time.monotonic() > end_s:
            raise TimeoutError

    try:
        if limit_s is not None:
            sys.setprofile(stop)
        return [*evaluator.run(None, dict(feeds))]
    finally:
        end_s = np.inf
        sys.setprofile(before)


def _by_numpy(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> Outputs | None:
    (node,) = model.graph.node
    opset = next((item.version for item in model.opset_import if not item.domain), 0)
    return by_definition(node, [feeds[name] if name else None for name in node.input], opset)


def _by_torch(model: onnx.ModelProto, feeds: Mapping[str, Any], like: Outputs | None) -> Outputs | None:
    (proto,) = model.graph.node
    row = TABLE.get(proto.op_type) if not proto.domain else None
    if row is None or like is None or importlib.util.find_spec("torch") is None:
        return None
    import torch

    version = next(item.version for item in model.opset_import if not item.domain)
    given = [feeds[name] if name else None for name in proto.input]
    results = iter(like)
    known = [next(results) if name else None for name in proto.output]
    types, outputs = (tuple(None if a is None else _type(a) for a in arrays) for arrays in (given, known))
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in proto.attribute}
    arrays = {i: a for i, a in enumerate(given) if a is not None}
    names = tuple(f"x{i}" if name else "" for i, name in enumerate(proto.input))
    text = row(Node(names, types, outputs, attributes, arrays, version))
    if text is None:
        return None
    scope: dict[str, Any] = {"torch": torch, **{f"x{i}": _tensor(torch, array) for i, array in arrays.items()}}
    *statements, result = text.splitlines()
    exec("\n".join([*statements, f"results = {result}"]), scope)
    return [
        tensor.contiguous().numpy().view(wanted.dtype.numpy)
        if tensor.dtype is not torch.bfloat16
        else tensor.float().numpy()
        for tensor, wanted in zip(scope["results"], outputs, strict=False)
        if wanted is not None
    ]


def _type(array: Any) -> ValueType:
    return ValueType(tuple(array.shape), DType.of(array.dtype))


def _tensor(torch: Any, array: Any) -> Any:
    kind = getattr(torch, TORCH_TYPES[DType.of(array.dtype).value])
    dense = np.array(array, order="C")
    if dense.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(dense.view(np.int16)).view(kind)
    return torch.from_numpy(dense.view(f"i{dense.itemsize}") if dense.dtype.kind in "ub" else dense).view(kind)
