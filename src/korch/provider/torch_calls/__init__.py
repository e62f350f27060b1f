"""ONNX operators -> the text of calls of PyTorch with the same meaning.

A row is a function from a node to a few lines of Python: statements, and last a tuple of the
node's outputs; None stands for a form that PyTorch does not have. Calls are captured in a graph:
nothing in them may wait for the device, take numbers from the host, or depend on what a tensor
holds.
"""

from korch.provider.torch_calls import arithmetic, indices, integers, recurrences, search, windows
from korch.provider.torch_calls.node import Node, Row

TABLE: dict[str, Row] = {
    **search.ROWS,
    **indices.ROWS,
    **arithmetic.ROWS,
    **integers.ROWS,
    **windows.ROWS,
    **recurrences.ROWS,
}
"""By operator."""

__all__ = ["TABLE", "Node", "Row"]
