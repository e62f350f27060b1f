"""Resize as a call of PyTorch's `interpolate`, for the forms that it supports."""

from torch.nn import functional

from benchmarks.peers.torch_operators.node import OperatorNode, TensorFunction, Translator

_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_HALF_PIXEL = ("half_pixel", "pytorch_half_pixel")


def _resize(node: OperatorNode) -> TensorFunction:
    mode = node.expect("mode", ("nearest", "linear", "cubic"), "nearest")
    node.expect("cubic_coeff_a", (-0.75,), -0.75)
    node.expect("exclude_outside", (0,), 0)
    node.expect("antialias", (0,), 0)
    node.expect("axes", (None,), None)
    node.expect("keep_aspect_ratio_policy", ("stretch",), "stretch")
    node.constant(1)  # the region of interest; it is used only in a mode that is refused below
    array, sizes = node.constant(2), node.integers(3)
    scales = None if array is None or array.size == 0 else [float(s) for s in array]
    transformation = node.attributes.text("coordinate_transformation_mode", "half_pixel")
    rounding = node.attributes.text("nearest_mode", "round_prefer_floor")
    if mode != "nearest":
        if transformation not in (*_HALF_PIXEL, "align_corners"):
            raise node.unsupported(f"mode={mode!r} and {transformation}")
        return _interpolate(node, mode, scales, sizes, transformation == "align_corners")
    # PyTorch truncates i / scale. For integer scales, rounding half-pixel centres gives the same result.
    is_whole = scales is not None and all(scale.is_integer() for scale in scales)
    rounds = rounding.startswith("round")
    if not (transformation == "asymmetric" and rounding == "floor") and not (
        is_whole and rounds and transformation in _HALF_PIXEL
    ):
        raise node.unsupported(f"mode='nearest', {transformation} and {rounding}")
    return _interpolate(node, mode, scales, sizes)


def _interpolate(
    node: OperatorNode, mode: str, scales: list[float] | None, sizes: list[int] | None, aligns_corners: bool = False
) -> TensorFunction:
    rank = len(scales or sizes or ()) - 2
    if rank not in _LINEAR or (mode == "cubic" and rank != 2):
        raise node.unsupported(f"{rank} spatial axes")
    if scales is not None and scales[:2] != [1.0, 1.0]:
        raise node.unsupported("a scale of the batch or the channels")
    factors = None if scales is None else tuple(scales[2:])
    size = None if scales is not None or sizes is None else tuple(sizes[2:])
    kind = {"nearest": mode, "cubic": "bicubic"}.get(mode, _LINEAR[rank])
    corners = None if mode == "nearest" else aligns_corners
    return lambda x: functional.interpolate(x, size, factors, kind, corners)


RESIZE: dict[str, Translator] = {"Resize": _resize}
