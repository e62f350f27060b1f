"""Gather and scatter operators: their indices are computed at run time."""

from collections.abc import Sequence

import numpy as np

from korch.primitive.torch_calls.node import WIDE_UNSIGNED, Node, Row, positive
from korch.primitive.types import DType


def _gather(node: Node) -> str | None:
    axis, out = node.axis(0), list(node.result().shape)
    index = positive(node.inputs[1], node.shape()[axis])
    return f"at = {index}.reshape(-1)\ntorch.index_select({node.inputs[0]}, {axis}, at).reshape({out}),"


def _gather_elements(node: Node) -> str:
    axis = node.axis(0)
    index = positive(node.inputs[1], node.shape()[axis])
    return f"torch.gather({node.inputs[0]}, {axis}, {index}),"


def _flat_index(node: Node, name: str, sizes: Sequence[int], batch: int) -> str:
    """Return statements that set `flat` to one linear index for each index tuple of the tensor `name`."""
    depth = node.shape(1)[-1]
    lines = [f"at = {name}.long().reshape({batch}, -1, {depth})", "flat = at.new_zeros(1)"]
    for j, size in enumerate(sizes):
        part = f"at[..., {j}]"
        lines.append(f"flat = flat * {size} + torch.where({part} < 0, {part} + {size}, {part})")
    if not sizes:
        lines.append("flat = at.new_zeros(at.shape[:2])")
    return "\n".join(lines)


def _gather_nd(node: Node) -> str:
    batch, depth = int(node.get("batch_dims", 0)), node.shape(1)[-1]
    shape = node.shape()
    outer = int(np.prod(shape[:batch]))
    sizes, rest = shape[batch : batch + depth], int(np.prod(shape[batch + depth :]))
    inner = int(np.prod(sizes))
    return (
        f"{_flat_index(node, node.inputs[1], sizes, outer)}\n"
        f"flat = flat + {inner} * torch.arange({outer}, device=flat.device)[:, None]\n"
        f"x = {node.inputs[0]}.reshape({outer * inner}, {rest})\n"
        f"torch.index_select(x, 0, flat.reshape(-1)).reshape({list(node.result().shape)}),"
    )


_COMBINED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _scattered(node: Node, x: str, axis: int, index: str, updates: str) -> str | None:
    combine = node.get("reduction", "none")
    if combine == "none":
        return f"{x}.scatter({axis}, {index}, {updates})"
    if combine not in _COMBINED or node.type().dtype in (*WIDE_UNSIGNED, DType.BOOL):
        return None
    return f"{x}.scatter_reduce({axis}, {index}, {updates}, {_COMBINED[combine]!r})"


def _scatter_elements(node: Node) -> str | None:
    axis = node.axis(0)
    index = positive(node.inputs[1], node.shape()[axis])
    text = _scattered(node, node.inputs[0], axis, index, node.inputs[2])
    return None if text is None else f"{text},"


def _scatter_nd(node: Node) -> str | None:
    depth, shape = node.shape(1)[-1], node.shape()
    sizes, rest = shape[:depth], int(np.prod(shape[depth:]))
    text = _scattered(node, "x", 0, "flat", "updates")
    if text is None:
        return None
    return (
        f"{_flat_index(node, node.inputs[1], sizes, 1)}\n"
        f"flat = flat.reshape(-1, 1).expand(-1, {rest})\n"
        f"updates = {node.inputs[2]}.reshape(flat.shape)\n"
        f"x = {node.inputs[0]}.reshape({int(np.prod(sizes))}, {rest})\n"
        f"{text}.reshape({list(shape)}),"
    )


def _tensor_scatter(node: Node) -> str:
    axis, length = node.axis(-2), node.shape()[node.axis(-2)]
    batch, update = node.shape()[0], node.shape(1)
    view = [batch] + [1] * (node.rank - 1)
    along = [update[axis] if a == axis else 1 for a in range(node.rank)]
    begin = f"{node.inputs[2]}.reshape({view})" if node.given(2) else "0"
    rest = f" % {length}" if node.get("mode", "linear") == "circular" else ""
    return (
        f"at = torch.arange({update[axis]}, device={node.inputs[0]}.device).reshape({along})\n"
        f"at = ((at + {begin}){rest}).expand({list(update)})\n"
        f"{node.inputs[0]}.scatter({axis}, at, {node.inputs[1]}),"
    )


def _one_hot(node: Node) -> str | None:
    depth = node.numbers(1)
    if depth is None:
        return None
    count, rank = depth[0], node.rank + 1
    axis = int(node.get("axis", -1)) % rank
    shape = [count if a == axis else 1 for a in range(rank)]
    index, values = node.inputs[0], node.inputs[2]
    return (
        f"at = {index}.long().unsqueeze({axis})\n"
        f"at = torch.where(at < 0, at + {count}, at)\n"
        f"on = at == torch.arange({count}, device=at.device).reshape({shape})\n"
        f"torch.where(on, {values}[1], {values}[0]),"
    )


ROWS: dict[str, Row] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "OneHot": _one_hot,
    "Scatter": _scatter_elements,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "TensorScatter": _tensor_scatter,
}
