"""Converts a `OneDnnOp` and layouts into a call, with oneDNN's shapes, steps and memory formats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.ops.linear import ConvAttributes, ConvTransposeAttributes
from korch.primitive.ops.reduce import PoolAttributes
from korch.primitive.types import row_major_strides
from korch.provider.onednn.call import ANY, Binary, CallTensor, Dims, Eltwise, PrimitiveCall
from korch.provider.onednn.match import MatrixView, OneDnnOp, Other


def describe(group: Group, found: OneDnnOp, x: Layout, y: Layout, weights: Layout | None = None) -> PrimitiveCall:
    """Return the call for a match.

    `y`: the layout of the output, and of the tensors of its shape in post-operations. `weights`: the layout of the
    weights in terms of oneDNN's axes; None lets the library choose, the plain layout means their order in the model.
    """
    source = _tensor(group, found.inputs[0], x)
    target = CallTensor(len(group.inputs), group.output_types[0].shape, str(y))
    tensors: tuple[CallTensor, ...] = (source, target)
    if found.op == "matmul":
        a, b, product = (
            _viewed(buffer, view) for buffer, view in zip((*found.inputs, len(group.inputs)), found.views, strict=True)
        )
        tensors = (a, _with_form(b, weights), product)
    elif len(found.inputs) == 2:
        tensors = (source, _with_form(_conv_weights(group, found), weights), target)
    kinds = {"conv": "convolution", "conv_transpose": "deconvolution", "matmul": "matmul", "reorder": "reorder"}
    kind = kinds.get(found.op, "pooling")
    algorithms = {
        "pool_max": "pooling_max",
        "pool_average": "pooling_avg_include_padding",
        "conv": "convolution_direct",
        "conv_transpose": "deconvolution_direct",
    }
    bias = _bias(group, found) if found.bias is not None else None
    post = tuple(_post(operation, group, found, y) for operation in found.post)
    return PrimitiveCall(kind, algorithms.get(found.op, ""), tensors, bias, _steps(found), post)


def weights_axes(group: Group, found: OneDnnOp) -> Dims:
    """Return, for each of oneDNN's axes of the weights, the axis of the model that it belongs to."""
    if found.op == "matmul":
        return found.views[1].perm
    rank = group.input_types[found.inputs[1]].rank
    spatial = tuple(range(2, rank))
    first = (0, 1) if found.op == "conv" else (1, 0)
    return (*first, *spatial) if _convolution(found).groups == 1 else (0, *first, *spatial)


def model_layout(layout: Layout, dims: Dims, axes: Dims) -> Layout | None:
    """Return the layout of the model's axes that equals a layout of oneDNN's axes, or None if there is none.

    `axes`: for each of oneDNN's axes, the model's axis that it belongs to. With groups, oneDNN's first axis and another
    one are the outer and inner part of one axis of the model.
    """
    partner = axes.index(axes[0], 1) if axes.count(axes[0]) > 1 else None
    order, blocks = list(layout.order), layout.blocks
    if partner is not None and dims[partner] == 1:
        if any(axis == partner for axis, _ in blocks):
            return None
        order.remove(partner)
    elif partner is not None:
        place = order.index(0)
        is_split = any(axis == 0 for axis, _ in blocks) or dims[partner] % layout.block(partner)
        if is_split or order[place + 1 : place + 2] != [partner]:
            return None
        del order[place]
    return Layout(tuple(axes[axis] for axis in order), tuple((axes[axis], size) for axis, size in blocks))


def _tensor(group: Group, position: int, layout: Layout) -> CallTensor:
    return CallTensor(position, group.input_types[position].shape, str(layout))


def _with_form(tensor: CallTensor, weights: Layout | None) -> CallTensor:
    if weights is None:
        return CallTensor(tensor.buffer, tensor.dims, ANY)
    return tensor if weights.is_plain else CallTensor(tensor.buffer, tensor.dims, str(weights))


def _viewed(buffer: int, view: MatrixView) -> CallTensor:
    """Return a tensor of a matrix product, with strides for its order in the model.

    For a matrix of one row, the stride between rows is arbitrary. But if it is smaller than a row, oneDNN takes
    the row for a column and fails at run time.
    """
    strides = row_major_strides(view.shape)
    dims = tuple(view.shape[axis] for axis in view.perm)
    steps = [strides[axis] for axis in view.perm]
    if dims[-2] == 1:
        steps[-2] = max(steps[-2], dims[-1] * steps[-1])
    return CallTensor(buffer, dims, tuple(steps))


def _conv_weights(group: Group, found: OneDnnOp) -> CallTensor:
    """Return the weights, with strides for their order in the model.

    With groups, oneDNN's weights have an additional first axis. For a transposed convolution, oneDNN orders the
    axes as output by input channels, ONNX as input by output channels.
    """
    position = found.inputs[1]
    shape = group.input_types[position].shape
    strides = row_major_strides(shape)
    attributes = _convolution(found)
    if attributes.groups > 1:
        each = shape[0] // attributes.groups
        shape = (attributes.groups, each, *shape[1:])
        strides = (each * strides[0], *strides)
    if found.op == "conv_transpose":
        i = len(shape) - len(attributes.strides) - 2
        shape = (*shape[:i], shape[i + 1], shape[i], *shape[i + 2 :])
        strides = (*strides[:i], strides[i + 1], strides[i], *strides[i + 2 :])
    return CallTensor(position, shape, strides)


def _bias(group: Group, found: OneDnnOp) -> CallTensor:
    position = found.bias or 0
    size = math.prod(group.input_types[position].shape)
    if found.op != "matmul":
        return CallTensor(position, (size,), "a")
    rank = len(found.views[-1].perm)
    return CallTensor(position, (1,) * (rank - 1) + (size,), str(Layout.plain(rank)))


def follows_output(group: Group, found: OneDnnOp, operation: Other) -> bool:
    """Return whether a post-operation's tensor has the layout of the output."""
    output, other = group.output_types[0], group.input_types[operation.input]
    return found.op != "matmul" and operation.dims == output.shape == other.shape


def _post(operation: Eltwise | Other, group: Group, found: OneDnnOp, y: Layout) -> Eltwise | Binary:
    if isinstance(operation, Eltwise):
        return operation
    is_full = follows_output(group, found, operation)
    layout = y if is_full else Layout.plain(len(operation.dims))
    return Binary(operation.kind, CallTensor(operation.input, operation.dims, str(layout)))


def _steps(found: OneDnnOp) -> tuple[Dims, ...]:
    """Return strides, the windows' sizes (pooling only), dilations (0 means dense), and pads before and after."""
    if found.primitive is None or found.op == "matmul":
        return ()
    match found.primitive.attributes:
        case PoolAttributes(kernel, strides, begin, end, dilations):
            return (strides, kernel, tuple(d - 1 for d in dilations), begin, end)
        case ConvAttributes(strides, begin, end, dilations):
            extra: Dims = (0,) * len(end)
        case ConvTransposeAttributes(strides, begin, end, dilations, extra):
            pass
        case _:
            raise AssertionError(f"{found.op} has no windows")
    end = _sum(_sum(end, found.pads_end), [-n for n in extra])
    return (strides, tuple(d - 1 for d in dilations), _sum(begin, found.pads_begin), end)


def _convolution(found: OneDnnOp) -> ConvAttributes | ConvTransposeAttributes:
    """Return the attributes of a convolution or its transpose.

    Raises:
        TypeError: the primitive is neither.
    """
    if found.primitive is None:
        raise TypeError(f"{found.op} is no convolution")
    return found.primitive.attributes_as(ConvAttributes, ConvTransposeAttributes)


def _sum(a: Sequence[int], b: Sequence[int]) -> Dims:
    return tuple(n + m for n, m in zip(a, b, strict=True))
