"""Translates operators of PyTorch's quantizers to ONNX where PyTorch's exporter lacks them or ignores their range.

The exporter does not support scales that are computed at run time, and ignores quant_min and quant_max, which may
be narrower than the range of the integer type.
"""

from typing import Any

import torch

RANGES = {onnx_type: torch.iinfo(dtype) for onnx_type, dtype in ((2, torch.uint8), (3, torch.int8))}
"""The limits of integer types, by the type's number in ONNX."""

FLOAT, DOUBLE, INT64 = 1, 11, 7


def translations() -> dict[Any, Any]:
    """Return functions that write ONNX nodes, by PyTorch operator; an empty table if no quantizer is loaded.

    The exporter has some of these, too, but only if the operators were defined before it was loaded.
    """
    from onnxscript import opset18

    found = torch.ops.quantized_decomposed
    return {**_of_tensors(opset18, found), **_of_channels(opset18, found)} if hasattr(found, "choose_qparams") else {}


def _of_tensors(op: Any, found: Any) -> dict[Any, Any]:
    """Return the functions for quantizers with one scale per tensor."""

    def choose(x: Any, quant_min: int, quant_max: int, eps: float, dtype: int) -> Any:
        zero = op.Constant(value_float=0.0)
        low, high = op.Min(op.ReduceMin(x, keepdims=0), zero), op.Max(op.ReduceMax(x, keepdims=0), zero)
        span = op.Constant(value_float=float(quant_max - quant_min))
        scale = op.Max(op.Div(op.Sub(high, low), span), op.Constant(value_float=eps))
        least, most = op.Constant(value_float=float(quant_min)), op.Constant(value_float=float(quant_max))
        point = op.Clip(op.Sub(least, op.Round(op.Div(low, scale))), least, most)
        return op.Cast(scale, to=DOUBLE), op.Cast(point, to=INT64)

    def quantize(x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int) -> Any:
        return _quantize(op, x, (scale, zero_point), (quant_min, quant_max), dtype)

    def dequantize(
        x: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int, dtype: int, *, out_dtype: int = FLOAT
    ) -> Any:
        return _dequantize(op, x, (scale, zero_point), dtype, out_dtype)

    return {
        found.choose_qparams.tensor: choose,
        found.quantize_per_tensor.default: quantize,
        found.quantize_per_tensor.tensor: quantize,
        found.dequantize_per_tensor.default: dequantize,
        found.dequantize_per_tensor.tensor: dequantize,
    }


def _of_channels(op: Any, found: Any) -> dict[Any, Any]:
    """Return the functions for quantizers with one scale per channel; their signatures are PyTorch's."""

    def quantize(x: Any, scales: Any, zero_points: Any, axis: int, quant_min: int, quant_max: int, dtype: int) -> Any:
        return _quantize(op, x, (scales, zero_points), (quant_min, quant_max), dtype, axis=axis)

    def dequantize(
        x: Any,
        scales: Any,
        zero_points: Any,
        axis: int,
        quant_min: int,
        quant_max: int,
        dtype: int,
        *,
        out_dtype: int = FLOAT,
    ) -> Any:
        return _dequantize(op, x, (scales, zero_points), dtype, out_dtype, axis=axis)

    return {found.quantize_per_channel.default: quantize, found.dequantize_per_channel.default: dequantize}


def _grid(op: Any, scale: Any, zero_point: Any, dtype: int) -> tuple[Any, Any]:
    """Return a scale and a zero point as ONNX's operators take them."""
    if isinstance(scale, float):
        scale = op.Constant(value_float=scale)
    if isinstance(zero_point, int):
        zero_point = op.Constant(value_int=zero_point)
    return op.Cast(scale, to=FLOAT), op.Cast(zero_point, to=dtype)


def _dequantize(op: Any, x: Any, grid: tuple[Any, Any], dtype: int, out_dtype: int | None, **axis: int) -> Any:
    """Return dequantized integers in an element type."""
    y = op.DequantizeLinear(x, *_grid(op, *grid, dtype), **axis)
    return y if out_dtype in (-1, None, FLOAT) else op.Cast(y, to=out_dtype)


def _quantize(op: Any, x: Any, grid: tuple[Any, Any], ends: tuple[int, int], dtype: int, **axis: int) -> Any:
    """Return quantized numbers, clipped to `ends` if these are narrower than the integer type."""
    y = op.QuantizeLinear(x, *_grid(op, *grid, dtype), **axis)
    limits = RANGES.get(int(dtype))
    if limits is None or (ends[0] <= limits.min and ends[1] >= limits.max):
        return y
    least, most = (op.Cast(op.Constant(value_int=end), to=dtype) for end in ends)
    return op.Clip(y, least, most)
