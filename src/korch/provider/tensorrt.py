"""TensorRT on CUDA devices: a product or convolution with the elementwise and layout primitives around it.

This provider is optional: it is disabled if the package `tensorrt` or a device is missing. It builds an
engine for one group, which contains the weights; the engine's launches are part of the plan's CUDA graph.
"""

from collections.abc import Sequence

import onnx

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import around
from korch.cuda.driver import has_driver
from korch.cuda.engine import library_version
from korch.cuda.kernel import CudaKernel, Network
from korch.cuda.network import network_of, refusal_of
from korch.cuda.target import CudaTarget
from korch.provider.content import content_version
from korch.system.content_name import content_name


class TensorRTProvider:
    """Makes TensorRT engines.

    Raises:
        ImportError: TensorRT is not installed, or there is no device to build engines on.
    """

    name = "tensorrt"
    group_shapes = (around("conv", "matmul"),)

    def __init__(self) -> None:
        self.version = f"{library_version()}-{content_version('cuda')}"
        if not has_driver():
            raise ImportError("TensorRT builds engines on a CUDA device, and there is no driver")

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer a group in plain layouts."""
        if target.is_nominal:
            return Refusal("an engine is built on the device that it is for")
        refused = refusal_of(group)
        if refused is not None:
            return refused
        return (Offer(*group.plain_layouts),)

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Return the group as an ONNX model; the engine is built later, when the weights are known."""
        refused = refusal_of(group)
        if refused is not None:
            return refused
        model = network_of(group)
        constants = tuple(sorted(group.constant_inputs))
        text = onnx.printer.to_text(model)
        symbol = content_name("n", f"{text} {constants}")
        return CudaKernel((Network(symbol, text, model.SerializeToString(), constants),))
