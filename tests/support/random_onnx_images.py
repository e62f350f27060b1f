"""Random operators on images: samples, regions, resizes, inverses of pools and convolutions."""

from typing import Any

import numpy as np
from onnx import helper

from korch.primitive.op import Array
from tests.support.random_onnx_fragment import Writer
from tests.support.random_onnx_shapes import Rng, floats, ints, pick


def grid(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim not in (4, 5) or x.dtype != np.float32 or not x.size or opset < 17 or (x.ndim == 5 and opset < 20):
        return False
    names = ("linear", "nearest", "cubic") if opset >= 20 else ("bilinear", "nearest", "bicubic")
    sizes = ints(rng, 1, 4, x.ndim - 2)
    places = rng.uniform(-1.4, 1.4, (x.shape[0], *sizes, x.ndim - 2)).astype(np.float32)
    given = {
        "mode": names[int(rng.integers(2 if x.ndim == 5 else 3))],
        "padding_mode": pick(rng, "zeros", "border", "reflection"),
        "align_corners": int(rng.integers(2)),
    }
    w.node("GridSample", [source, w.constant(places)], last=True, **given)
    return True


def regions(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim != 4 or x.dtype != np.float32 or not x.size or opset < 16:
        return False
    count = int(rng.integers(1, 4))
    corners = np.sort(rng.uniform(0, max(x.shape[2:]), (count, 2, 2)), axis=1).reshape(count, 4).astype(np.float32)
    rows = w.constant(rng.integers(0, x.shape[0], count).astype(np.int64))
    given = {
        "mode": pick(rng, "avg", "max") if opset >= 22 else "avg",
        "output_height": int(rng.integers(1, 4)),
        "output_width": int(rng.integers(1, 4)),
        "sampling_ratio": int(rng.integers(0, 3)),
        "coordinate_transformation_mode": pick(rng, "half_pixel", "output_half_pixel"),
    }
    w.node("RoiAlign", [source, w.constant(corners), rows], last=True, **given)
    return True


def resized(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    """Add a resize of some axes, with a policy for the aspect ratio or with a region."""
    if x.ndim < 2 or x.dtype != np.float32 or not x.size or opset < 18:
        return False
    axes = sorted(int(a) for a in rng.permutation(x.ndim)[: int(rng.integers(1, min(3, x.ndim + 1)))])
    sizes = w.constant(np.array([int(rng.integers(1, 2 * x.shape[a] + 2)) for a in axes], np.int64))
    given: dict[str, Any] = {"mode": pick(rng, "nearest", "linear"), "axes": axes}
    region = ""
    if rng.integers(2):
        given["keep_aspect_ratio_policy"] = pick(rng, "stretch", "not_larger", "not_smaller")
    else:
        ends = np.sort(rng.uniform(-0.2, 1.2, (2, len(axes))), axis=0).reshape(-1).astype(np.float32)
        region = w.constant(ends)
        given |= {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 0.5}
    w.node("Resize", [source, region, "", sizes], last=True, **given)
    return True


def unpooled(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim != 4 or x.dtype != np.float32 or min(x.shape[2:], default=0) < 2 or len(np.unique(x)) < x.size:
        return False
    window: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [2, 2]}
    w.fragment.nodes.append(helper.make_node("MaxPool", [source], [f"{w.out}_v", f"{w.out}_i"], **window))
    w.node("MaxUnpool", [f"{w.out}_v", f"{w.out}_i"], last=True, **window)
    return True


def columns(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim != 3 or not x.size or opset < 18 or x.shape[1] % 4:
        return False
    height = next(h for h in range(int(x.shape[2] ** 0.5), 0, -1) if x.shape[2] % h == 0)
    image = np.array([height + 1, x.shape[2] // height + 1], np.int64)
    w.node("Col2Im", [source, w.constant(image), w.constant(np.array([2, 2], np.int64))], last=True)
    return True


def conv_transpose(rng: Rng, w: Writer, x: Array, source: str, opset: int) -> bool:
    if x.ndim not in (3, 4) or x.dtype != np.float32 or not x.size:
        return False
    rank = x.ndim - 2
    kernel, strides = ints(rng, 1, 4, rank), ints(rng, 1, 3, rank)
    groups = pick(rng, 1, x.shape[1])
    weights = w.constant(floats(rng, x, x.shape[1], int(rng.integers(1, 3)), *kernel))
    given: dict[str, Any] = {"strides": strides, "group": groups}
    whole = [s * (n - 1) + k for n, s, k in zip(x.shape[2:], strides, kernel, strict=True)]
    match int(rng.integers(3)):
        case 0:
            given["output_shape"] = [
                max(1, n - int(rng.integers(0, k + 2))) for n, k in zip(whole, kernel, strict=True)
            ]
        case 1:
            given["pads"] = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
            given["output_padding"] = [int(rng.integers(0, s)) for s in strides]
        case _:
            # ONNX's shape inference contradicts its text if a stride of SAME is larger than the kernel.
            is_same = all(k >= s for k, s in zip(kernel, strides, strict=True))
            given["auto_pad"] = pick(rng, "SAME_UPPER", "SAME_LOWER", "VALID") if is_same else "VALID"
    w.node("ConvTranspose", [source, weights], last=True, **given)
    return True
