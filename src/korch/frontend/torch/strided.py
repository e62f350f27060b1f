"""Computes views of the memory of a tensor, which PyTorch's ONNX exporter takes from the tensor's elements in order.

The two differ if the axes of the tensor lie in another order in memory. The strides of traced tensors are those of
eager mode. Each function has the signature of its operator.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from korch.errors import UnsupportedError

aten = torch.ops.aten


def _in_memory(x: Any) -> list[int]:
    """Return the axes in the order in which they lie in memory, which the elements must fill."""
    order = sorted(range(x.dim()), key=lambda axis: (x.stride(axis), x.shape[axis]), reverse=True)
    if not x.permute(order).is_contiguous():
        raise UnsupportedError(
            "as_strided refers to memory between the elements of a tensor",
            expected="a tensor that fills its memory",
            hint="Call .contiguous() before as_strided",
        )
    return order


def _strided(x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None) -> Any:
    """Each axis, from the largest stride on, is a split of the line of all elements, or a copy of windows."""
    numbers = (*x.shape, *x.stride(), *size, *stride, x.storage_offset(), storage_offset or 0)
    if not all(isinstance(n, int) for n in numbers):
        if x.is_contiguous() and storage_offset in (None, 0):
            return NotImplemented  # the elements are in order, as the exporter takes them
        raise UnsupportedError(
            "as_strided refers to the memory of a tensor whose sizes are not known",
            hint="Call .contiguous() before as_strided",
        )
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    line = x.permute(_in_memory(x)).reshape(-1)
    order = sorted(range(len(size)), key=lambda axis: stride[axis], reverse=True)
    if 0 in size:
        return line.new_zeros(size)
    left = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if first < 0 or first + left > line.shape[0]:
        raise UnsupportedError(
            "as_strided reads memory outside of the tensor that it is given",
            hint="Call as_strided on the tensor that holds all elements",
        )
    found = line.narrow(0, first, left)
    for axis in order:
        left -= (size[axis] - 1) * stride[axis]
        found = _split(found, size[axis], stride[axis], left)
    return found[..., 0].permute([order.index(axis) for axis in range(len(size))])


def _split(x: Any, count: int, step: int, length: int) -> Any:
    """Return parts of the last axis with this distance and length; they may overlap."""
    if count == 1 or not step:
        return x.narrow(-1, 0, length).unsqueeze(-2).expand(*x.shape[:-1], count, length)
    if length > step:
        return x.unfold(-1, length, step)
    missing = count * step - x.shape[-1]  # behind the last part
    whole = torch.constant_pad_nd(x, [0, missing]) if missing else x
    return whole.reshape(*x.shape[:-1], count, step).narrow(-1, 0, length)


def _strided_scatter(
    x: Any, src: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Any:
    order = _in_memory(x)
    first = 0 if storage_offset is None else storage_offset - x.storage_offset()
    places = torch.arange(x.numel()).as_strided(size, stride, first).reshape(-1)
    stored = x.permute(order)
    changed = stored.reshape(-1).index_put((places,), src.reshape(-1)).reshape(stored.shape)
    return changed.permute([order.index(axis) for axis in range(x.dim())])


STRIDED: dict[Any, Callable[..., Any]] = {
    aten.as_strided.default: _strided,
    aten.as_strided_scatter.default: _strided_scatter,
}
