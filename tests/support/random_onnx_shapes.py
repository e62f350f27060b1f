"""Random nodes whose attributes depend on the shape that they read: windows, axes, indices."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from korch.primitive.op import Array

OPSETS = (11, 13, 17, 18, 19, 20, 21, 22)

SENSITIVE = frozenset(
    {
        "ReduceLogSum",
        "LpNormalization",
        "MeanVarianceNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "LayerNormalization",
        "QuantizeLinear",
        "Cast",
        "ReduceL2",
        "LpPool",
        "LRN",
    }
)
"""Operators that amplify rounding errors, because they divide by a deviation or have steps."""


@dataclass
class Part:
    """A node: its attributes, and by position its inputs, as arrays or names, without the value read at `at`."""

    op: str
    attributes: dict[str, Any] = field(default_factory=dict)
    inputs: dict[int, Any] = field(default_factory=dict)
    at: int = 0


Rng = np.random.Generator


def draw(rng: Rng, x: Array, opset: int, is_exact: bool) -> Part | None:
    """Return a random node that reads `x`; None if the drawn node is not suitable."""
    part = MOVES[int(rng.integers(len(MOVES)))](rng, x, opset)
    is_tame = is_exact and x.size and np.abs(x).max() < 99
    if part is None or (part.op in SENSITIVE and not is_tame):
        return None
    if x.dtype.kind == "f" and not np.isfinite(x).all() and _is_open(part):
        return None
    return part


def _is_open(part: Part) -> bool:
    """Return whether implementations may differ on NaN and infinities.

    ONNX Runtime's maximum of several elements ignores NaN, and an implementation may skip weights of 0.
    """
    is_blend = part.op == "Resize" and part.attributes["mode"] != "nearest"
    return is_blend or part.op in ("MaxPool", "GlobalMaxPool", "ReduceMax", "ReduceMin")


def ints(rng: Rng, low: int, high: int, count: int) -> list[int]:
    return [int(n) for n in rng.integers(low, high + 1, count)]


def pick(rng: Rng, *items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def floats(rng: Rng, x: Array, *shape: int) -> Array:
    values = np.asarray(rng.standard_normal(shape))
    return (np.round(3 * values) if x.dtype.kind in "iu" else values).astype(x.dtype)


def _window(rng: Rng, rank: int, *, has_ceil: bool) -> dict[str, Any]:
    kernel = ints(rng, 1, 4, rank)
    found: dict[str, Any] = {"kernel_shape": kernel}
    if rng.random() < 0.7:
        found["strides"] = ints(rng, 1, 3, rank)
    auto = pick(rng, "NOTSET", "NOTSET", "NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER")
    if auto != "NOTSET":
        found["auto_pad"] = auto
    elif rng.random() < 0.7:
        found["pads"] = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
    if rng.random() < 0.3 and not auto.startswith("SAME"):  # for SAME padding, ONNX Runtime deviates from ONNX
        found["dilations"] = ints(rng, 1, 3, rank)
    if has_ceil and rng.random() < 0.5:
        found["ceil_mode"] = 1
    return found


def _pool(rng: Rng, x: Array, opset: int) -> Part | None:
    if x.ndim < 3:
        return None
    op = pick(rng, "MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool")
    found = _window(rng, x.ndim - 2, has_ceil=op != "LpPool" or opset >= 18)
    if (op == "AveragePool" and opset < 19) or (op == "LpPool" and opset < 18):
        found.pop("dilations", None)
    if op == "AveragePool" and rng.integers(2):
        found["count_include_pad"] = 1
    if op == "LpPool":
        found["p"] = pick(rng, 1, 2, 3)
    return None if _has_no_window(found, x.shape[2:]) else Part(op, found)


def _has_no_window(found: dict[str, Any], sizes: tuple[int, ...]) -> bool:
    """Return whether a window is larger than a padded axis: ONNX Runtime computes something then."""
    if found.get("auto_pad", "").startswith("SAME"):
        return False
    rank, kernel = len(sizes), found["kernel_shape"]
    pads, dilations, strides = (
        found.get(k, [n] * 2 * rank) for k, n in (("pads", 0), ("dilations", 1), ("strides", 1))
    )
    left = [n + pads[i] + pads[rank + i] - (kernel[i] - 1) * dilations[i] - 1 for i, n in enumerate(sizes)]
    most = [strides[i] if found.get("ceil_mode") else 1 for i in range(rank)]  # rounded up, a window may hang over
    return any(n and rest <= -over for n, rest, over in zip(sizes, left, most, strict=True))


def _global_pool(rng: Rng, x: Array, opset: int) -> Part | None:
    return Part(pick(rng, "GlobalAveragePool", "GlobalMaxPool")) if x.ndim >= 3 else None


def _conv(rng: Rng, x: Array, opset: int) -> Part | None:
    if x.ndim < 3 or not x.shape[1]:
        return None
    found = _window(rng, x.ndim - 2, has_ceil=False)
    kernel = found["kernel_shape"]
    groups = pick(rng, 1, 1, *(g for g in (2, x.shape[1]) if x.shape[1] % g == 0))
    found["group"] = groups
    count = groups * int(rng.integers(1, 5))
    if rng.random() < 0.25:
        found.pop("auto_pad", None)
        weights = floats(rng, x, x.shape[1], count // groups, *kernel)
        if rng.integers(2) and "strides" in found:
            found["output_padding"] = [int(rng.integers(0, s)) for s in found["strides"]]
        op, channels = "ConvTranspose", count
    else:
        weights = floats(rng, x, count, x.shape[1] // groups, *kernel)
        op, channels = "Conv", count
    inputs: dict[int, Any] = {1: weights}
    if rng.integers(2):
        inputs[2] = floats(rng, x, channels)
    return Part(op, found, inputs)


def _matmul(rng: Rng, x: Array, opset: int) -> Part | None:
    n = int(rng.integers(1, 20))
    right = bool(rng.integers(2)) or x.ndim == 0
    if right:
        shape = pick(rng, [x.shape[-1], n], [x.shape[-1]], [2, x.shape[-1], n])
        return Part("MatMul", {}, {1: floats(rng, x, *shape)})
    k = x.shape[-2] if x.ndim > 1 else x.shape[0]
    return Part("MatMul", {}, {0: floats(rng, x, *pick(rng, [n, k], [k]))}, at=1)


def _gemm(rng: Rng, x: Array, opset: int) -> Part | None:
    if x.ndim != 2:
        return None
    a, b, n = int(rng.integers(2)), int(rng.integers(2)), int(rng.integers(1, 20))
    k = x.shape[0] if a else x.shape[1]
    m = x.shape[1] if a else x.shape[0]
    weights = floats(rng, x, *((n, k) if b else (k, n)))
    c = floats(rng, x, *pick(rng, (n,), (1, n), (m, 1), (m, n), (1,)))
    attributes = {"transA": a, "transB": b, "alpha": 0.5, "beta": 2.0}
    return Part("Gemm", attributes, {1: weights, 2: c} if rng.integers(3) else {1: weights})


def _einsum(rng: Rng, x: Array, opset: int) -> Part | None:
    letters = "abcde"[: x.ndim]
    kept = [c for c in letters if rng.integers(2)]
    other = str(rng.choice(list(letters)))
    out = "".join(str(c) for c in rng.permutation(kept)) + "z"
    weights = floats(rng, x, x.shape[letters.index(other)], 3)
    return Part("Einsum", {"equation": f"{letters},{other}z->{out}"}, {1: weights})


def _sums(rng: Rng, x: Array, opset: int) -> Part | None:
    axis = np.array(int(rng.integers(-x.ndim, x.ndim)), pick(rng, np.int32, np.int64))
    flags = {"exclusive": int(rng.integers(2)), "reverse": int(rng.integers(2))}
    return Part("CumSum", flags, {1: axis})


def _reduce(rng: Rng, x: Array, opset: int) -> Part | None:
    op = pick(
        rng,
        "ReduceSum",
        "ReduceMax",
        "ReduceMin",
        "ReduceMean",
        "ReduceProd",
        "ReduceL1",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
        "ReduceLogSum",
    )
    count = int(rng.integers(1, x.ndim + 1))
    axes = [int(a) for a in rng.permutation(x.ndim)[:count]]
    axes = [a - x.ndim if rng.integers(2) else a for a in axes]
    found: dict[str, Any] = {"keepdims": int(rng.integers(2)) if count < x.ndim else 1}
    if rng.random() < 0.1:
        return Part(op, found | {"keepdims": 1})
    if (op == "ReduceSum" and opset >= 13) or opset >= 18:
        return Part(op, found, {1: np.array(axes, np.int64)})
    return Part(op, found | {"axes": axes})


def _softmax(rng: Rng, x: Array, opset: int) -> Part | None:
    op = pick(rng, "Softmax", "LogSoftmax", "LpNormalization")
    attributes = {"axis": int(rng.integers(-x.ndim, x.ndim))}
    return Part(op, attributes | ({"p": pick(rng, 1, 2)} if op == "LpNormalization" else {}))


def _normalize(rng: Rng, x: Array, opset: int) -> Part | None:
    op = pick(
        rng,
        "LayerNormalization",
        "InstanceNormalization",
        "GroupNormalization",
        "BatchNormalization",
        "MeanVarianceNormalization",
        "LRN",
    )
    channels = x.shape[1] if x.ndim > 1 else 0
    if op == "LayerNormalization":
        axis = int(rng.integers(-x.ndim, x.ndim))
        size = x.shape[axis % x.ndim :]
        inputs = {1: floats(rng, x, *size)} | ({2: floats(rng, x, *size)} if axis % 2 else {})
        return Part(op, {"axis": axis}, inputs)
    if op == "MeanVarianceNormalization":
        axes = [int(a) for a in rng.permutation(x.ndim)[: int(rng.integers(1, x.ndim + 1))]]
        has_deviation = np.prod([x.shape[a] for a in axes]) > 1
        return Part(op, {"axes": sorted(axes)}) if has_deviation else None
    if x.ndim < 3 or not channels:
        return None
    if op == "LRN":
        return Part(op, {"size": pick(rng, 1, 3, 5), "alpha": 0.1, "beta": 0.6, "bias": 1.5})
    if op == "GroupNormalization":
        groups = pick(rng, *(g for g in range(1, channels + 1) if channels % g == 0))
        size = groups if opset < 21 else channels
        pair = {1: floats(rng, x, size), 2: floats(rng, x, size)}
        return Part(op, {"num_groups": groups, "epsilon": 1e-2}, pair)
    inputs = {i: floats(rng, x, channels) for i in (1, 2)}
    if op == "BatchNormalization":
        inputs |= {3: floats(rng, x, channels), 4: np.abs(floats(rng, x, channels)) + x.dtype.type(1)}
    return Part(op, {"epsilon": 1e-2}, inputs)


def _slice(rng: Rng, x: Array, opset: int) -> Part | None:
    count = int(rng.integers(1, x.ndim + 1))
    axes = [int(a) for a in rng.permutation(x.ndim)[:count]]
    steps = [pick(rng, 1, 1, 2, 3, -1, -2) for _ in axes]
    starts = [int(rng.integers(-x.shape[a] - 1, x.shape[a] + 2)) for a in axes]
    ends = [int(rng.integers(-x.shape[a] - 1, x.shape[a] + 2)) for a in axes]
    ends = [pick(rng, e, (1 << 62) * (1 if s > 0 else -1)) for e, s in zip(ends, steps, strict=True)]
    rows = (starts, ends, axes, steps)
    return Part("Slice", {}, {i + 1: np.array(row, np.int64) for i, row in enumerate(rows)})


def _pad(rng: Rng, x: Array, opset: int) -> Part | None:
    mode = pick(rng, "constant", "reflect", "edge", *(["wrap"] if opset >= 19 else []))
    low = -1 if rng.random() < 0.2 else 0
    inputs: dict[int, Any] = {1: np.array(ints(rng, low, 3, 2 * x.ndim), np.int64)}
    if mode == "constant" and rng.integers(2):
        inputs[2] = np.array(2, x.dtype)
    return Part("Pad", {"mode": mode}, inputs)


def _resize(rng: Rng, x: Array, opset: int) -> Part | None:
    mode = pick(rng, "nearest", "nearest", "linear", "linear", "cubic")
    found: dict[str, Any] = {
        "mode": mode,
        "coordinate_transformation_mode": pick(
            rng,
            "half_pixel",
            "asymmetric",
            "align_corners",
            "pytorch_half_pixel",
            *(["half_pixel_symmetric"] if opset >= 19 else []),
        ),
    }
    if mode == "nearest":
        found["nearest_mode"] = pick(rng, "floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    if mode == "cubic" and rng.integers(2):
        found |= {"exclude_outside": 1, "cubic_coeff_a": -0.5}
    if opset >= 18 and mode != "nearest" and rng.random() < 0.3:
        found["antialias"] = 1
    keep = 2 if x.ndim > 2 else 0
    # With scales and align_corners, ONNX Runtime uses the fractional size of the resized image.
    if rng.integers(2) and found["coordinate_transformation_mode"] != "align_corners":
        scales = [1.0] * keep + [pick(rng, 0.5, 1.0, 1.5, 2.0, 3.0) for _ in x.shape[keep:]]
        return Part("Resize", found, {2: np.array(scales, np.float32)})
    sizes = [*x.shape[:keep], *(int(rng.integers(1, 2 * n + 2)) for n in x.shape[keep:])]
    return Part("Resize", found, {3: np.array(sizes, np.int64)})


def _reshape(rng: Rng, x: Array, opset: int) -> Part | None:
    target = pick(rng, [-1], [1, -1], [-1, 1], [*x.shape, 1], [x.shape[0], -1], [*x.shape[::-1]], [0, -1])
    kind = pick(rng, "Reshape", "Reshape", "Flatten", "Unsqueeze", "Squeeze")
    if kind == "Flatten":
        return Part(kind, {"axis": int(rng.integers(-x.ndim, x.ndim + 1))})
    if kind == "Reshape":
        return Part(kind, {}, {1: np.array(target, np.int64)})
    ones = [a for a, n in enumerate(x.shape) if n == 1]
    if opset < 13:
        return Part(kind, {"axes": ones[:1]}) if ones and kind == "Squeeze" and x.ndim > 1 else None
    if kind == "Squeeze":
        return Part(kind, {}, {1: np.array(ones[:1], np.int64)}) if ones and x.ndim > 1 else None
    axes = np.array([int(rng.integers(-x.ndim - 1, x.ndim + 1))], np.int64)
    return Part(kind, {}, {1: axes}) if x.ndim < 5 else None


def _move(rng: Rng, x: Array, opset: int) -> Part | None:
    kind = pick(
        rng,
        "Transpose",
        "Tile",
        "Expand",
        "Trilu",
        "Concat",
        "Gather",
        "Split",
        "DepthToSpace",
        "SpaceToDepth",
        "ReverseSequence",
    )
    axis = int(rng.integers(-x.ndim, x.ndim))
    match kind:
        case "Transpose":
            return Part(kind, {"perm": [int(a) for a in rng.permutation(x.ndim)]})
        case "Tile":
            return Part(kind, {}, {1: np.array(ints(rng, 1, 3, x.ndim), np.int64)})
        case "Expand":
            wide = [n if n != 1 else int(rng.integers(1, 5)) for n in x.shape]
            return Part(kind, {}, {1: np.array([*ints(rng, 1, 2, int(rng.integers(2))), *wide])})
        case "Trilu":
            return Part(kind, {"upper": int(rng.integers(2))}, {1: np.array(pick(rng, -3, -1, 0, 2))})
        case "Concat":
            return Part(kind, {"axis": axis}, {1: floats(rng, x, *x.shape)})
        case "Gather":
            n = x.shape[axis]
            shape = pick(rng, (), (1,), (5,), (2, 3), (0,))
            indices = rng.integers(-n, n, shape) if n else np.zeros((0,))
            return Part(kind, {"axis": axis}, {1: np.asarray(indices, np.int64)})
        case "Split":
            n = x.shape[axis]
            first = int(rng.integers(0, n + 1))
            if first != n:
                return None
            return Part(
                kind,
                {"axis": axis, "split": [n]} if opset < 13 else {"axis": axis},
                {} if opset < 13 else {1: np.array([n], np.int64)},
            )
        case "ReverseSequence":
            if x.ndim < 2:
                return None
            lengths = rng.integers(1, max(2, x.shape[0] + 1), x.shape[1])
            return Part(kind, {"time_axis": 0, "batch_axis": 1}, {1: lengths})
    return Part(kind, {"blocksize": 2}) if x.ndim == 4 else None


def _other(rng: Rng, x: Array, opset: int) -> Part | None:
    kind = pick(rng, "Clip", "Clip", "Cast", "Where", "QuantizeLinear", "ScatterElements")
    match kind:
        case "Clip":
            low, high = np.array(-1, x.dtype), np.array(2, x.dtype)
            return Part(kind, {}, pick(rng, {1: low}, {2: high}, {1: low, 2: high}))
        case "Cast":
            return Part(kind, {"to": pick(rng, 1, 10, 11, 6, 7, 9)})
        case "Where":
            condition = rng.integers(0, 2, [n if rng.integers(2) else 1 for n in x.shape])
            return Part(kind, {}, {0: condition.astype(bool), 2: floats(rng, x, *x.shape)}, at=1)
        case "QuantizeLinear":
            zero = np.array(pick(rng, 0, 100), np.uint8)
            return Part(kind, {}, {1: np.array(0.05, np.float32), 2: zero})
    axis = int(rng.integers(-x.ndim, x.ndim))
    count = x.shape[axis]
    shape = list(x.shape)
    shape[axis] = int(rng.integers(0, count + 1))
    indices = np.argsort(rng.random(x.shape), axis=axis)
    indices = indices.take(range(shape[axis]), axis=axis)
    return Part(kind, {"axis": axis}, {1: indices.astype(np.int64), 2: floats(rng, x, *shape)})


MOVES: tuple[Callable[[Rng, Array, int], Part | None], ...] = (
    _pool,
    _pool,
    _pool,
    _global_pool,
    _conv,
    _conv,
    _matmul,
    _matmul,
    _gemm,
    _einsum,
    _sums,
    _reduce,
    _reduce,
    _softmax,
    _normalize,
    _normalize,
    _slice,
    _pad,
    _resize,
    _resize,
    _reshape,
    _move,
    _move,
    _other,
)
