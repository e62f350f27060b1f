"""OpenVINO's CPU plugin, in float32 and tuned for latency.

The precision is set to float32: on CPUs with bfloat16 units, OpenVINO otherwise computes in
bfloat16, and the engines would not do the same computation.

Source: OpenVINO documentation, "CPU Device" and "High-level Performance Hints".
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from korch.report.peers.arrays import BFLOAT16, as_bits, from_bits
from korch.report.peers.peer import Array, Arrays, Run, contiguous, missing, require


@dataclass(frozen=True, slots=True)
class OpenVinoPeer:
    """OpenVINO."""

    name: str = "openvino"

    def is_available(self) -> str | None:
        """Check whether the package is installed, without importing it."""
        return missing("openvino", "openvino")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Compile the model for the shapes of `inputs` and bind them to a request."""
        require(self)
        import openvino as ov

        inputs = contiguous(inputs)
        core = ov.Core()
        model = core.read_model(str(model_path))
        if model.is_dynamic():
            model.reshape({name: list(array.shape) for name, array in inputs.items()})
        compiled = core.compile_model(
            model,
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_PRECISION_HINT": "f32",
            },
        )
        return _BoundRequest(compiled, inputs)


class _BoundRequest:
    """A request with bound inputs. It keeps their arrays alive, which OpenVINO does not do."""

    def __init__(self, compiled: Any, inputs: Arrays) -> None:
        import openvino as ov

        self._inputs = inputs
        self._request = compiled.create_infer_request()
        self._outputs = range(len(compiled.outputs))
        for name, array in inputs.items():
            tensor = ov.Tensor(array, shared_memory=True) if array.dtype != BFLOAT16 else _bfloat16(array)
            self._request.set_tensor(name, tensor)

    def __call__(self) -> list[Array]:
        self._request.infer()
        tensors = [self._request.get_output_tensor(index) for index in self._outputs]
        # OpenVINO returns bfloat16 elements as float16 with the same bits.
        return [from_bits(t.data) if t.element_type.get_type_name() == "bf16" else t.data for t in tensors]


def _bfloat16(array: Array) -> Any:
    """Return a tensor that shares the memory of a bfloat16 array."""
    import openvino as ov

    return ov.Tensor(as_bits(array), array.shape, ov.Type.bf16)
