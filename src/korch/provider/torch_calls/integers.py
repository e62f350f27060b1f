"""Integers that stand for reals: exact sums in float64, rounded as ONNX says."""

from __future__ import annotations

from korch.primitive.types import DType
from korch.provider.torch_calls.node import Node, Row, dtype_text


def _centred(node: Node, i: int, zero: int, axis: int | None = None) -> str:
    """Return the text of an input without its zero point, in float64: sums are exact."""
    x = f"{node.inputs[i]}.double()"
    if not node.given(zero):
        return x
    if node.type(zero).size > 1 and axis is not None:
        shape = [node.type(zero).size if a == axis else 1 for a in range(len(node.shape(i)))]
        return f"({x} - {node.inputs[zero]}.double().reshape({shape}))"
    return f"({x} - {node.inputs[zero]}.double().reshape(()))"


def _matmul_integer(node: Node) -> str | None:
    left, right = (len(node.shape(i)) for i in (0, 1))
    if any(node.given(z) and len(node.shape(z)) > 1 for z in (2, 3)):
        return None
    a = _centred(node, 0, 2, left - 2 if left > 1 else None)
    b = _centred(node, 1, 3, right - 1)
    return f"torch.matmul({a}, {b}).to(torch.int32),"


def _convolution(node: Node, x: str, w: str, weights: int) -> str | None:
    """Return the text of a convolution in float64 with a node's attributes."""
    axes = node.rank - 2
    pads = [int(n) for n in node.get("pads", [0] * (2 * axes))]
    if node.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or len(node.shape(weights)) < 3:
        return None
    around = [n for a in range(axes - 1, -1, -1) for n in (pads[a], pads[axes + a])]
    strides, dilations = ([int(n) for n in node.get(name, [1] * axes)] for name in ("strides", "dilations"))
    return (
        f"torch.convolution(torch.nn.functional.pad({x}, {around}), {w}, None, {strides}, "
        f"{[0] * axes}, {dilations}, False, {[0] * axes}, {int(node.get('group', 1))})"
    )


def _conv_integer(node: Node) -> str | None:
    text = _convolution(node, _centred(node, 0, 2), _centred(node, 1, 3, 0), 1)
    return None if text is None else f"{text}.to(torch.int32),"


_LIMITS = {DType.U8: (0, 255), DType.I8: (-128, 127)}


def _rounded(node: Node, text: str, scale: str, zero: str) -> str | None:
    """Return the text of reals as integers of the output's type."""
    if node.result().dtype not in _LIMITS:
        return None
    low, high = _LIMITS[node.result().dtype]
    shift = f" + {zero}.double()" if zero else ""
    return f"torch.clamp(torch.round({text} / {scale}){shift}, {low}, {high}).to({dtype_text(node.result())}),"


def _one_element(node: Node, *positions: int) -> bool:
    return all(node.type(i).size == 1 for i in positions)


def _linear_matmul(node: Node) -> str | None:
    if not _one_element(node, *(i for i in (1, 2, 4, 5, 6, 7))):
        return None
    a, b = _centred(node, 0, 2), _centred(node, 3, 5)
    scales = f"{node.inputs[1]}.double().reshape(()) * {node.inputs[4]}.double().reshape(())"
    return _rounded(
        node,
        f"(torch.matmul({a}, {b}) * ({scales}))",
        f"{node.inputs[6]}.double().reshape(())",
        f"{node.inputs[7]}.reshape(())",
    )


def _linear_conv(node: Node) -> str | None:
    if not _one_element(node, 1, 2, 6, 7):
        return None
    sums = _convolution(node, _centred(node, 0, 2), _centred(node, 3, 5, 0), 3)
    if sums is None:
        return None
    shape = [1, -1] + [1] * (node.rank - 2)
    bias = f" + {node.inputs[8]}.double().reshape({shape})" if node.given(8) else ""
    scales = f"{node.inputs[1]}.double().reshape(()) * {node.inputs[4]}.double().reshape({shape})"
    return _rounded(
        node,
        f"(({sums}{bias}) * ({scales}))",
        f"{node.inputs[6]}.double().reshape(())",
        f"{node.inputs[7]}.reshape(())",
    )


def _dynamic_quantize(node: Node) -> str | None:
    x = node.inputs[0]
    if not node.type().size:
        return None
    return (
        f"low, high = torch.clamp({x}.min(), max=0.0), torch.clamp({x}.max(), min=0.0)\n"
        f"scale = (high - low) / 255.0\n"
        f"scale = torch.where(scale == 0, torch.ones_like(scale), scale)\n"
        f"zero = torch.clamp(torch.round(-low / scale), 0, 255)\n"
        f"y = torch.clamp(torch.round({x} / scale) + zero, 0, 255)\n"
        f"y.to(torch.uint8), scale, zero.to(torch.uint8),"
    )


ROWS: dict[str, Row] = {
    "ConvInteger": _conv_integer,
    "DynamicQuantizeLinear": _dynamic_quantize,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _linear_conv,
    "QLinearMatMul": _linear_matmul,
}
