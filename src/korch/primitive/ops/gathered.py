"""The product of each row by a matrix that an index chooses for it, as in a mixture of experts."""

from collections.abc import Sequence

import numpy as np

from korch.primitive.op import Array, Attributes, Category, Op, require
from korch.primitive.ops.linear import matmul_flop
from korch.primitive.types import DType, ValueType

GATHERED = "matmul_gathered"
"""The operation's name."""

INDICES = (DType.I64, DType.I32)
"""The element types of indices."""


def _infer(inputs: Sequence[ValueType], attributes: Attributes) -> ValueType:
    require(len(inputs) == 3, f"matmul_gathered: there are {len(inputs)} arguments")
    a, b, index = inputs
    require(a.rank == 2 and a.dtype.is_float, f"matmul_gathered: argument 0 is {a}")
    fits = b.rank == 3 and b.dtype is a.dtype and b.shape[1] == a.shape[1] and b.shape[0] > 0
    require(fits, f"matmul_gathered: argument 1 is {b}")
    is_index = index.dtype in INDICES and index.shape == a.shape[:1]
    require(is_index, f"matmul_gathered: argument 2 is {index}")
    return ValueType((a.shape[0], b.shape[2]), a.dtype)


def chosen(index: Array, count: int) -> Array:
    """Return the numbers of the chosen matrices: negative indices count from the end, then all are clipped."""
    return np.asarray(np.clip(np.where(index < 0, index + count, index), 0, count - 1))


def _reference(inputs: Sequence[Array], attributes: Attributes) -> Array:
    a, b, index = inputs
    out = np.zeros((a.shape[0], b.shape[2]), a.dtype)
    numbers = chosen(index, b.shape[0])
    with np.errstate(all="ignore"):
        for number in np.unique(numbers):
            out[numbers == number] = a[numbers == number] @ b[number]
    return out


ROWS: tuple[Op, ...] = (
    Op(
        name=GATHERED,
        category=Category.LINEAR,
        arity=3,
        attributes=Attributes,
        infer=_infer,
        reference=_reference,
        work_flop=matmul_flop,
        source="ONNX Gather of matrices along axis 0, opset 13, and MatMul",
    ),
)
