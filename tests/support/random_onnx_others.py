"""Random quantized products, and operators of no other family."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper

from korch.primitive.op import Array
from tests.support.random_onnx_fragment import Writer
from tests.support.random_onnx_shapes import Rng, ints, pick


def quantized(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add a product with weights of 4 or 8 bits, scaled by columns or in blocks."""
    if x.ndim < 1 or x.dtype != np.float32 or not x.size or opset < 21:
        return False
    rows, columns = x.shape[-1], int(rng.integers(1, 9))
    bits = pick(rng, TensorProto.INT4, TensorProto.UINT4, TensorProto.INT8, TensorProto.UINT8)
    low, high = {3: (-128, 128), 2: (0, 256), TensorProto.INT4: (-8, 8), TensorProto.UINT4: (0, 16)}[bits]
    block = next((b for b in (16, 4, 2) if rows % b == 0), 0) if rng.integers(2) else 0
    shape = [rows // block, columns] if block else [columns]
    weights = w.four_bits(rng.integers(low, high, (rows, columns)), bits)
    scales = w.constant(rng.uniform(0.01, 0.2, shape).astype(np.float32))
    names = [weights, scales, *([w.four_bits(rng.integers(low, high, shape), bits)] if rng.integers(2) else [])]
    given: dict[str, Any] = {"axis": 0, "block_size": block} if block else {"axis": 1}
    product = [source, w.node("DequantizeLinear", names, **given)]
    w.node("MatMul", product, last=True)
    return True


def quantized_data(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add a quantization by the range of the data, and its inverse or a product of integers."""
    if x.dtype != np.float32 or not x.size or x.ndim < 1 or not np.isfinite(x).all():
        return False
    y, scale, zero = (f"{w.out}_{n}" for n in ("q", "s", "z"))
    w.fragment.nodes.append(helper.make_node("DynamicQuantizeLinear", [source], [y, scale, zero]))
    if rng.integers(2):
        w.node("DequantizeLinear", [y, scale, zero], last=True)
        return True
    weights = w.constant(rng.integers(-9, 9, (x.shape[-1], int(rng.integers(1, 7)))).astype(np.int8))
    w.node("MatMulInteger", [y, weights, zero], last=True)
    return True


def others(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    match pick(rng, "Hardmax", "CenterCropPad", "Det", "EyeLike", "Shape", "Upsample", "Range", "BitShift"):
        case "Hardmax":
            if len(np.unique(x)) < x.size:
                return False
            w.node("Hardmax", [source], last=True, axis=int(rng.integers(-x.ndim, x.ndim)))
        case "CenterCropPad" if opset >= 18:
            axes = sorted(int(a) for a in rng.permutation(x.ndim)[: int(rng.integers(1, x.ndim + 1))])
            sizes = w.constant(np.array(ints(rng, 1, 9, len(axes)), np.int64))
            w.node("CenterCropPad", [source, sizes], last=True, axes=axes)
        case "Det" if x.ndim >= 3 and x.shape[-1] == x.shape[-2]:
            w.node("Det", [source], last=True)
        case "EyeLike" if x.ndim == 2:
            w.node("EyeLike", [source], last=True, k=int(rng.integers(-2, 3)), dtype=1)
        case "Shape":
            w.node("Shape", [source], last=True)
        case _:
            return False
    return True
