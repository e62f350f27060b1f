"""Operators on windows and on images."""

import numpy as np

from korch.primitive.torch_calls.node import Node, Row


def _grid(node: Node) -> str | None:
    names = {"linear": "bilinear", "cubic": "bicubic"}
    mode = node.get("mode", "linear")
    mode, pads = names.get(mode, mode), node.get("padding_mode", "zeros")
    allowed = {4: ("bilinear", "nearest", "bicubic"), 5: ("bilinear", "nearest")}
    if mode not in allowed.get(node.rank, ()):
        return None
    corners = bool(node.get("align_corners", 0))
    return f"torch.nn.functional.grid_sample({node.inputs[0]}, {node.inputs[1]}, {mode!r}, {pads!r}, {corners}),"


def _affine_grid(node: Node) -> str | None:
    size = node.numbers(1)
    if size is None or len(size) not in (4, 5):
        return None
    corners = bool(node.get("align_corners", 0))
    return f"torch.nn.functional.affine_grid({node.inputs[0]}, {size}, {corners}),"


def _col_to_image(node: Node) -> str | None:
    image, block = node.numbers(1), node.numbers(2)
    if image is None or block is None or len(image) != 2:
        return None
    pads = [int(n) for n in node.get("pads", [0] * 4)]
    if pads[:2] != pads[2:]:
        return None
    dilations, strides = ([int(n) for n in node.get(name, [1, 1])] for name in ("dilations", "strides"))
    return f"torch.nn.functional.fold({node.inputs[0]}, {image}, {block}, {dilations}, {pads[:2]}, {strides}),"


def _max_pool(node: Node) -> str | None:
    kernel = [int(n) for n in node.get("kernel_shape", [])]
    axes = len(kernel)
    pads = [int(n) for n in node.get("pads", [0] * (2 * axes))]
    is_plain = (
        axes in (1, 2, 3)
        and pads[:axes] == pads[axes:]
        and not node.get("ceil_mode", 0)
        and not node.get("storage_order", 0)
        and node.get("auto_pad", "NOTSET") == "NOTSET"
        and all(2 * p <= k for p, k in zip(pads[:axes], kernel, strict=True))
        and node.type().dtype.is_float
    )
    if not is_plain:
        return None
    strides, dilations = ([int(n) for n in node.get(name, [1] * axes)] for name in ("strides", "dilations"))
    planes, plane = int(np.prod(node.shape()[:2])), int(np.prod(node.shape()[2:]))
    begin = [*node.shape()[:2], *[1] * axes]
    return (
        f"y, at = torch.nn.functional.max_pool{axes}d({node.inputs[0]}, {kernel}, {strides}, "
        f"{pads[:axes]}, {dilations}, False, True)\n"
        f"begin = {plane} * torch.arange({planes}, device=at.device).reshape({begin})\n"
        f"y, at + begin,"
    )


def _max_unpool(node: Node) -> str | None:
    x, at, out = node.inputs[0], node.inputs[1], node.result().shape
    if node.given(2):  # the positions then refer to a tensor of this shape
        axes = node.rank - 2
        kernel = [int(n) for n in node.get("kernel_shape", [])]
        strides, pads = (
            [int(n) for n in node.get(k, d)] for k, d in (("strides", [1] * axes), ("pads", [0] * 2 * axes))
        )
        if axes not in (1, 2, 3) or pads[:axes] != pads[axes:]:
            return None
        planes, begin = int(np.prod(out[:2])), [*out[:2], *[1] * axes]
        return (
            f"begin = {int(np.prod(out[2:]))} * torch.arange({planes}, device={at}.device).reshape({begin})\n"
            f"at = {at} - begin\n"
            f"torch.nn.functional.max_unpool{axes}d({x}, at, {kernel}, {strides}, {pads[:axes]}, {list(out)}),"
        )
    return (
        f"y = {x}.new_zeros({int(np.prod(out))})\n"
        f"y = y.scatter(0, {at}.reshape(-1), {x}.reshape(-1))\n"
        f"y.reshape({list(out)}),"
    )


ROWS: dict[str, Row] = {
    "AffineGrid": _affine_grid,
    "Col2Im": _col_to_image,
    "GridSample": _grid,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
}
