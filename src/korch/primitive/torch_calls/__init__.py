"""Translates ONNX operators into the text of PyTorch calls with the same semantics.

A row of the table is a function that takes a node and returns a few lines of Python: statements, and
last a tuple of the node's outputs. It returns None for a form of the operator that PyTorch does not
have. The calls are captured in a CUDA graph: they must not wait for the device, copy numbers from the
host, or depend on the contents of a tensor.
"""

from korch.primitive.torch_calls import arithmetic, indices, integers, recurrences, search, windows
from korch.primitive.torch_calls.node import Node, Row

TABLE: dict[str, Row] = {
    **search.ROWS,
    **indices.ROWS,
    **arithmetic.ROWS,
    **integers.ROWS,
    **windows.ROWS,
    **recurrences.ROWS,
}
"""The row of each operator, by the operator's name."""

__all__ = ["TABLE", "Node", "Row"]
