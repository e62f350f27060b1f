"""The output shapes of windowed operators, where ONNX's inference functions differ from the specification.

Opset 22 specifies that, with ceil_mode, a window which begins in the padding after the image is dropped, and
that auto_pad SAME gives the size divided by the stride, rounded up. ONNX Runtime does both in all opsets.
ONNX's inference functions of older opsets give one row and one column more. They also give one window where
none fits, and no shape to a ConvTranspose whose `output_shape` is below its input's.
"""

from collections.abc import Mapping, Sequence

import onnx

from korch.errors import ModelError
from korch.frontend.attributes import NodeAttributes
from korch.primitive.ops.reduce import window_extent

POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})


def correct_windows(
    node: onnx.NodeProto, inputs: Mapping[str, onnx.TypeProto], found: dict[str, onnx.TypeProto], where: str
) -> None:
    """Correct the inferred types of a pooling or ConvTranspose; leave those of other nodes unchanged.

    `inputs`: the types of its inputs by name. `found`: the types that ONNX infers, by output name; corrected in place.

    Raises:
        ModelError: a pooling's window is larger than the padded image.
    """
    if node.op_type in POOLS and not node.domain:
        image = inputs[node.input[0]].tensor_type.shape.dim[2:]
        for i, count in _pool_sizes(NodeAttributes(node), image, where).items():
            for name in filter(None, node.output):
                dims = found[name].tensor_type.shape.dim if name in found else ()
                if len(dims) == len(image) + 2:
                    dims[2 + i].dim_value = count
    if node.op_type == "ConvTranspose" and not node.domain:
        x, w = (inputs[name].tensor_type.shape.dim for name in node.input[:2])
        sizes = _transposed_sizes(NodeAttributes(node), x[2:], w[2:])
        if sizes and all(dim.HasField("dim_value") for dim in (*x, *w)):
            shape = (x[0].dim_value, w[1].dim_value * NodeAttributes(node).integer("group", 1), *sizes)
            kind = inputs[node.input[0]].tensor_type.elem_type
            found[node.output[0]] = onnx.helper.make_tensor_type_proto(kind, shape)


def _transposed_sizes(
    attributes: NodeAttributes,
    image: Sequence[onnx.TensorShapeProto.Dimension],
    window: Sequence[onnx.TensorShapeProto.Dimension],
) -> tuple[int, ...]:
    """Return the sizes of a ConvTranspose's output that an attribute fixes; () if ONNX's inference is right."""
    rank = len(image)
    sizes = attributes.integers("output_shape", ())
    if len(window) != rank or sizes or not attributes.text("auto_pad", "NOTSET").startswith("SAME"):
        return sizes if len(sizes) == len(window) == rank else ()
    strides, dilations, more = (
        attributes.integers(name, (default,) * rank)
        for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
    )
    return tuple(
        min(n.dim_value * s, (n.dim_value - 1) * s + window_extent(k.dim_value, d) + e)
        for n, k, s, d, e in zip(image, window, strides, dilations, more, strict=True)
    )


def _pool_sizes(
    attributes: NodeAttributes, image: Sequence[onnx.TensorShapeProto.Dimension], where: str
) -> dict[int, int]:
    """Return the number of windows along the axes of an image where ONNX's inference may be wrong about it."""
    kernel = attributes.integers("kernel_shape")
    rank = len(kernel)
    strides = attributes.integers("strides", (1,) * rank)
    dilations = attributes.integers("dilations", (1,) * rank)
    auto, none = attributes.text("auto_pad", "NOTSET"), (0,) * (2 * rank)
    pads = attributes.integers("pads", none) if auto == "NOTSET" else none
    rounds_up, counts = bool(attributes.integer("ceil_mode", 0)), dict[int, int]()
    for i, dim in enumerate(image if len(image) == rank else ()):
        size, extent = dim.dim_value, window_extent(kernel[i], dilations[i])
        padded = size + pads[i] + pads[rank + i]
        if not size:  # unknown or empty
            continue
        if auto.startswith("SAME"):
            counts |= {i: -(-size // strides[i])} if rounds_up else {}
            continue
        count = -(-(padded - extent) // strides[i]) + 1
        if count < 1 or (padded < extent and not rounds_up):
            raise ModelError(
                f"its window spans {extent} elements of axis {2 + i}, which has {padded} with pads",
                where,
                hint="Check kernel_shape, dilations and pads",
            )
        if rounds_up:
            counts[i] = count - ((count - 1) * strides[i] >= size + pads[i])
    return counts
