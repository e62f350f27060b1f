"""The output shape of a pooling node with ceil_mode, as opset 22 defines it, for every opset.

Opset 22 specifies that a window which begins in the padding after the image is dropped, and that
auto_pad SAME gives the size divided by the stride, rounded up. ONNX Runtime does both in all opsets.
ONNX's inference functions of older opsets give one row and one column more.
"""

from __future__ import annotations

import onnx

from korch.frontend.attributes import NodeAttributes
from korch.primitive.ops.reduce import window_extent

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})


def drop_late_windows(node: onnx.NodeProto, given: onnx.TypeProto | None, found: dict[str, onnx.TypeProto]) -> None:
    """Correct the inferred types of a pooling node with ceil_mode; leave those of other nodes unchanged.

    Args:
        node: any node.
        given: the type of its first input; None if it has no input.
        found: the types that ONNX infers, by output name; corrected in place.
    """
    if node.op_type not in POOLS or node.domain or given is None:
        return
    attributes = NodeAttributes(node)
    if not attributes.get("ceil_mode", 0):
        return
    kernel = attributes.integers("kernel_shape")
    rank = len(kernel)
    strides = attributes.integers("strides", (1,) * rank)
    dilations = attributes.integers("dilations", (1,) * rank)
    auto, none = attributes.text("auto_pad", "NOTSET"), (0,) * (2 * rank)
    pads = attributes.integers("pads", none) if auto == "NOTSET" else none
    sizes = [dim.dim_value for dim in given.tensor_type.shape.dim[2:]]
    for name in filter(None, node.output):
        dims = found[name].tensor_type.shape.dim if name in found else ()
        if len(dims) != rank + 2 or len(sizes) != rank:
            continue
        for i in range(rank):
            if auto.startswith("SAME"):
                dims[2 + i].dim_value = -(-sizes[i] // strides[i])
                continue
            extent = window_extent(kernel[i], dilations[i])
            room = sizes[i] + pads[i] + pads[rank + i] - extent
            count = -(-room // strides[i]) + 1
            if (count - 1) * strides[i] >= sizes[i] + pads[i]:
                count -= 1
            dims[2 + i].dim_value = count
