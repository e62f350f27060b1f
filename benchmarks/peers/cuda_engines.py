"""TensorRT and ONNX Runtime as peers on CUDA devices."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.captured import locked_capture
from korch.cuda.measure.lock import device_lock


def tensorrt(module: Any, model: Any, inputs: list[Any], precision: str) -> Callable[[], Any]:
    """Return a run of the module compiled by TensorRT, through torch_tensorrt or, if that is missing, through ONNX.

    Raises:
        ImportError: no package for this model and precision is installed.
    """
    import torch

    try:
        import torch_tensorrt
    except ImportError:
        if precision == "float16" or not hasattr(model, "SerializeToString"):
            raise
        return _tensorrt_of_onnx(model, inputs, precision == "tf32")

    kind = torch.float16 if precision == "float16" else torch.float32
    with device_lock():
        compiled = torch_tensorrt.compile(
            module, ir="dynamo", inputs=inputs, enabled_precisions={kind}, disable_tf32=precision == "float32"
        )
    return lambda: compiled(*inputs)


def _tensorrt_of_onnx(model: Any, inputs: list[Any], allow_tf32: bool) -> Callable[[], Any]:
    """Return a run that replays a CUDA graph of the TensorRT engine of an ONNX model."""
    import torch

    from korch.cuda.engine import TensorRtEngine, build_engine

    outputs = [
        torch.empty([d.dim_value for d in o.type.tensor_type.shape.dim], device="cuda") for o in model.graph.output
    ]
    names = [item.name for item in (*model.graph.input, *model.graph.output)]
    with device_lock():
        engine = TensorRtEngine(build_engine(model.SerializeToString(), allow_tf32), names)
    tensors = [t.reshape(-1).view(torch.uint8) for t in (*inputs, *outputs)]
    return locked_capture(torch, lambda: engine.run(tensors, len(inputs), torch.cuda.current_stream().cuda_stream))


def onnxruntime(model: Any, inputs: list[Any], precision: str) -> Callable[[], Any]:
    """Return a run of the model by ONNX Runtime's CUDA provider, its tensors on the device.

    Raises:
        RuntimeError: the CUDA provider is missing, or the model is not an ONNX model of float32.
    """
    import onnxruntime as ort

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise RuntimeError("this ONNX Runtime has no CUDA provider")
    if precision == "float16" or not hasattr(model, "SerializeToString"):
        raise RuntimeError("it is run on ONNX models of float32 only")
    options = {"use_tf32": int(precision == "tf32"), "cudnn_conv_algo_search": "EXHAUSTIVE"}
    session = ort.InferenceSession(model.SerializeToString(), providers=[("CUDAExecutionProvider", options)])
    binding = session.io_binding()
    for described, tensor in zip(session.get_inputs(), inputs, strict=True):
        kind = str(tensor.dtype).removeprefix("torch.")
        binding.bind_input(described.name, "cuda", 0, np.dtype(kind), tuple(tensor.shape), tensor.data_ptr())
    for described in session.get_outputs():
        binding.bind_output(described.name, "cuda")
    return lambda: session.run_with_iobinding(binding)
