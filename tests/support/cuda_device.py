"""Runs single kernels on this machine's CUDA device, for tests and measurements."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from korch.candidate.candidate import Group, Offer
from korch.cuda.compile import Cubin, CubinCompiler
from korch.cuda.driver import CudaFunction
from korch.cuda.engine import TensorRtEngine, build_engine
from korch.cuda.flags import library_flags
from korch.cuda.kernel import CudaKernel, Network, TorchCall
from korch.cuda.layout import strided
from korch.cuda.measure.device import require_torch
from korch.cuda.module import load_call
from korch.cuda.network import with_constants
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.testing.kernels import KernelError


def run_on_device(
    kernel: CudaKernel, group: Group, offer: Offer, inputs: Sequence[Array], compiler: CubinCompiler
) -> list[Array]:
    """Return a kernel's outputs in the plain layout.

    Raises:
        KernelError: a launch does not compile.
    """
    torch = require_torch()
    packed = [layout.pack(a) for layout, a in zip(offer.inputs, inputs, strict=True)]
    memory = [_moved(torch, array) for array in packed]
    types = group.output_types
    sizes = [
        math.prod(layout.physical_shape(t.shape)) * t.dtype.size_bytes
        for layout, t in zip(offer.outputs, types, strict=True)
    ]
    sizes += [size * dtype.size_bytes for dtype, size in kernel.scratch]
    memory += [torch.full((max(1, n),), 255, dtype=torch.uint8, device="cuda") for n in sizes]
    memory += [_moved(torch, np.array(table, np.int32)) for table in kernel.tables]
    outputs = memory[len(inputs) : len(inputs) + len(types)]
    if kernel.steps and isinstance(kernel.steps[0], TorchCall):
        function = load_call(kernel.steps[0].symbol, kernel.steps[0].source)
        tensors = [
            strided(m.view(_kind(torch, t.dtype.numpy)), t.shape, layout)
            for m, t, layout in zip(memory, group.input_types, offer.inputs, strict=False)
        ]
        with library_flags(torch, allow_tf32=False):
            results = function(torch, *tensors)
        return [_array(torch, result) for result in results]
    if kernel.network is not None:
        return _run_engine(torch, kernel.network, memory, inputs, group)
    cubins = compiler.compile(kernel.launches)
    for launch in kernel.launches:
        cubin = cubins[launch.symbol]
        if not isinstance(cubin, Cubin):
            raise KernelError(f"{cubin.message}\n{launch.source}")
        function = CudaFunction(cubin.image, launch.symbol, cubin.shared_bytes, launch.warps)
        pointers = [memory[i].data_ptr() for i in launch.arguments]
        function.launch(launch.grid, pointers, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    found = []
    for layout, type_, output, size in zip(offer.outputs, types, outputs, sizes, strict=False):
        flat = output.cpu().numpy()[:size].view(type_.dtype.numpy)
        found.append(layout.unpack(flat, type_.shape))
    return found


def _run_engine(
    torch: Any, network: Network, memory: Sequence[Any], inputs: Sequence[Array], group: Group
) -> list[Array]:
    constants = {f"i{i}": inputs[i] for i in network.constants}
    model = with_constants(onnx.ModelProto.FromString(network.model), constants)
    given = [i for i in range(len(inputs)) if i not in network.constants]
    names = [f"i{i}" for i in given] + [f"o{i}" for i in range(len(group.outputs))]
    engine = TensorRtEngine(build_engine(model.SerializeToString(), False), names)
    outputs = memory[len(inputs) : len(inputs) + len(group.outputs)]
    stream = torch.cuda.current_stream().cuda_stream
    engine.run([*(memory[i] for i in given), *outputs], len(given), stream)
    return [
        m.cpu().numpy()[: t.size_bytes].view(t.dtype.numpy).reshape(t.shape)
        for m, t in zip(outputs, group.output_types, strict=True)
    ]


def _moved(torch: Any, array: Array) -> Any:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return torch.from_numpy(data.copy() if data.size else np.zeros(1, np.uint8)).cuda()


def _array(torch: Any, tensor: Any) -> Array:
    """Return a result of PyTorch as an array; bfloat16 is converted by its bits, because NumPy does not have it."""
    found: Array
    if tensor.dtype is torch.bfloat16:
        found = tensor.view(torch.uint16).cpu().numpy().view(DType.BF16.numpy)
    else:
        found = tensor.cpu().numpy()
    return found


def _kind(torch: Any, dtype: Any) -> Any:
    return getattr(torch, "bfloat16" if dtype.name == "bfloat16" else dtype.name)
