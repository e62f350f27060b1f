"""Products of quantized integers: exact sums in float64, rounded as ONNX specifies.

Fission splits the other operators on quantized integers, and this one too if its scales are float32.
"""

from korch.primitive.torch_calls.node import Node, Row, dtype_text
from korch.primitive.types import DType

_LIMITS = {DType.U8: (0, 255), DType.I8: (-128, 127)}


def _scalar(node: Node, i: int) -> str:
    """Return the text that converts a one-element input to a float64 scalar."""
    return f"{node.inputs[i]}.double().reshape(())"


def _linear_matmul(node: Node) -> str | None:
    dtype = node.result().dtype
    if dtype not in _LIMITS or any(node.type(i).size != 1 for i in (1, 2, 4, 5, 6, 7)):
        return None
    low, high = _LIMITS[dtype]
    a, b = (f"({node.inputs[i]}.double() - {_scalar(node, i + 2)})" for i in (0, 3))
    product = f"(torch.matmul({a}, {b}) * ({_scalar(node, 1)} * {_scalar(node, 4)}))"
    rounded = f"torch.round({product} / {_scalar(node, 6)}) + {_scalar(node, 7)}"
    return f"torch.clamp({rounded}, {low}, {high}).to({dtype_text(node.result())}),"


ROWS: dict[str, Row] = {"QLinearMatMul": _linear_matmul}
