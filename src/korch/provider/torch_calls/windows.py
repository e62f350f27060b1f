"""Operators on windows, on images, and on spectra (Fourier transforms)."""

from __future__ import annotations

import numpy as np

from korch.primitive.types import DType
from korch.provider.torch_calls.node import Node, Row


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
    if node.given(2):  # the positions then refer to a tensor of another shape
        return None
    out = node.result().shape
    return (
        f"y = {node.inputs[0]}.new_zeros({int(np.prod(out))})\n"
        f"y = y.scatter(0, {node.inputs[1]}.reshape(-1), {node.inputs[0]}.reshape(-1))\n"
        f"y.reshape({list(out)}),"
    )


def _spectrum(node: Node) -> str | None:
    if node.given(1) and node.numbers(1) is None:
        return None
    if node.version >= 20:
        where = node.numbers(2) if node.given(2) else [-2]
    else:
        where = [int(node.get("axis", 1))]
    if where is None or node.type().dtype not in (DType.F32, DType.F64):
        return None
    axis, parts = where[0] % node.rank, node.shape()[-1]
    length = (node.numbers(1) or [node.shape()[axis]])[0]
    inverse, one_sided = node.get("inverse", 0), node.get("onesided", 0)
    if axis == node.rank - 1 or (one_sided and (inverse or parts != 1)):
        return None
    x = node.inputs[0]
    values = f"{x}.squeeze(-1)" if parts == 1 else f"torch.view_as_complex({x}.contiguous())"
    function = "ifft" if inverse else "rfft" if one_sided else "fft"
    spectrum = f"torch.fft.{function}({values}, {length}, {axis})"
    return f"torch.view_as_real({spectrum}.resolve_conj()),"


def _short_spectra(node: Node) -> str | None:
    step = node.numbers(1)
    size = node.numbers(3) if node.given(3) else None
    if size is None and node.given(2):
        size = [node.shape(2)[0]]
    is_real = node.rank == 2 or node.shape()[-1] == 1
    if step is None or size is None or node.type().dtype not in (DType.F32, DType.F64):
        return None
    one_sided = node.get("onesided", 1)
    bins = size[0] // 2 + 1 if one_sided else size[0]
    if not is_real or node.result().shape[-2] != bins:  # ONNX's shape inference ignores `onesided`
        return None
    x = node.inputs[0] if node.rank == 2 else f"{node.inputs[0]}.squeeze(-1)"
    window = f" * {node.inputs[2]}" if node.given(2) else ""
    function = "rfft" if one_sided else "fft"
    return (
        f"frames = {x}.unfold(1, {size[0]}, {step[0]}){window}\n"
        f"torch.view_as_real(torch.fft.{function}(frames).resolve_conj()),"
    )


ROWS: dict[str, Row] = {
    "AffineGrid": _affine_grid,
    "Col2Im": _col_to_image,
    "DFT": _spectrum,
    "GridSample": _grid,
    "MaxPool": _max_pool,
    "MaxUnpool": _max_unpool,
    "STFT": _short_spectra,
}
