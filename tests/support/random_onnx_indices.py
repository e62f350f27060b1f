"""Random operators that read or write at indices, or return indices."""

from typing import Any

import numpy as np

from korch.primitive.op import Array
from tests.support.random_onnx_fragment import Writer
from tests.support.random_onnx_shapes import Rng, floats, ints, pick


def elements(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add a gather or scatter of elements, along any axis."""
    if not x.size:
        return False
    axis = int(rng.integers(-x.ndim, x.ndim))
    n = x.shape[axis]
    shape = [int(rng.integers(1, m + 1)) for m in x.shape]
    shape[axis] = int(rng.integers(1, 2 * n + 1)) if rng.integers(2) else shape[axis]
    if rng.integers(2):
        indices = rng.integers(-n, n, shape).astype(pick(rng, np.int64, np.int32))
        w.node("GatherElements", [source, w.constant(indices)], last=True, axis=axis)
        return True
    shape[axis] = int(rng.integers(1, n + 1))
    reduction = pick(rng, "none", "add", "mul", *(["max", "min"] if opset >= 18 else [])) if opset >= 16 else "none"
    indices = np.argsort(rng.random(x.shape), axis=axis).take(range(shape[axis]), axis=axis)
    indices = indices[tuple(slice(m) for m in shape)]
    if reduction != "none" and rng.integers(2):
        indices = rng.integers(-n, n, shape)
    given: dict[str, Any] = {} if reduction == "none" else {"reduction": reduction}
    updates = w.constant(floats(rng, x, *shape))
    w.node("ScatterElements", [source, w.constant(indices.astype(np.int64)), updates], last=True, axis=axis, **given)
    return True


def n_dimensional(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add a gather or scatter of slices."""
    if not x.size:
        return False
    is_gather = bool(rng.integers(2))
    batch = int(rng.integers(0, min(2, x.ndim - 1) + 1)) if is_gather else 0
    depth = int(rng.integers(1, x.ndim - batch + 1))
    rows = [*x.shape[:batch], *ints(rng, 1, 4, int(rng.integers(1, 3)))]
    columns = [rng.integers(-x.shape[batch + i], x.shape[batch + i], rows) for i in range(depth)]
    indices = np.stack(columns, -1).astype(np.int64)
    if is_gather:
        w.node("GatherND", [source, w.constant(indices)], last=True, **({"batch_dims": batch} if batch else {}))
        return True
    reduction = pick(rng, "add", "mul", *(["max", "min"] if opset >= 18 else [])) if opset >= 16 else "none"
    if rng.integers(2) or opset < 16:  # without a reduction, places must differ
        places = rng.permutation(int(np.prod(x.shape[:depth])))[: int(rng.integers(1, 5))]
        indices, reduction = np.stack(np.unravel_index(places, x.shape[:depth]), -1).astype(np.int64), "none"
    updates = w.constant(floats(rng, x, *indices.shape[:-1], *x.shape[depth:]))
    given: dict[str, Any] = {} if reduction == "none" else {"reduction": reduction}
    w.node("ScatterND", [source, w.constant(indices), updates], last=True, **given)
    return True


def looked_up(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Look up elements of a constant by integers of the graph."""
    if x.dtype not in (np.int32, np.int64) or not x.size or np.abs(x).max() > 9:
        return False
    axis = int(rng.integers(0, x.ndim))
    table = rng.standard_normal([10 if a == axis else max(2, n) for a, n in enumerate(x.shape)]).astype(np.float32)
    match pick(rng, "Gather", "GatherElements", "OneHot"):
        case "OneHot":
            depth = w.constant(np.array(int(rng.integers(1, 12)), np.int64))
            w.node("OneHot", [source, depth, w.constant(np.array([0.5, 2.0], np.float32))], last=True, axis=axis)
        case op:
            w.node(op, [w.constant(table), source], last=True, axis=axis)
    return True


def extremes(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add TopK of different values, ArgMax or ArgMin."""
    if not x.size or len(np.unique(x)) < x.size:
        return False
    axis = int(rng.integers(-x.ndim, x.ndim))
    if rng.integers(2):
        given = {
            "axis": axis,
            "keepdims": int(x.ndim == 1 or rng.integers(2)),
            "select_last_index": int(rng.integers(2)),
        }
        w.node(pick(rng, "ArgMax", "ArgMin"), [source], last=True, **given)
        return True
    k = w.constant(np.array([int(rng.integers(1, x.shape[axis] + 1))], np.int64))
    w.node("TopK", [source, k], last=True, outputs=int(rng.integers(1, 3)), axis=axis, largest=int(rng.integers(2)))
    return True
