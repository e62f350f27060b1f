"""ONNX Runtime, on its CPU execution provider with all graph optimizations.

Inputs and outputs are bound once, so a call consists of `Run` alone. The threads of the pool spin
within a run and for some time after it. This is the default and the fastest setting, because the threads need
not be woken for the next run. Before another engine is timed, the comparison waits until they sleep.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from korch.inputs import free_dimensions, read_graph
from korch.report.peers.peer import Array, Arrays, Run, contiguous, missing, require


@dataclass(frozen=True, slots=True)
class OnnxRuntimePeer:
    """ONNX Runtime."""

    name: str = "onnxruntime"

    def is_available(self) -> str | None:
        """Check whether the package is installed, without importing it."""
        return missing("onnxruntime", "onnxruntime")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Create a session for the shapes of `inputs` and bind its inputs and outputs."""
        require(self)
        import onnxruntime as ort

        inputs = contiguous(inputs)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 3
        for name, size in free_dimensions(read_graph(model_path), inputs).items():
            options.add_free_dimension_override_by_name(name, size)
        session = ort.InferenceSession(str(model_path), options, providers=["CPUExecutionProvider"])
        return _BoundSession(session, inputs)


class _BoundSession:
    """A session with bound inputs, and with bound outputs where their shapes are known.

    A CPU OrtValue made from a NumPy array shares the array's memory, but ONNX Runtime does not keep the
    array alive. This object does.
    """

    def __init__(self, session: Any, inputs: Arrays) -> None:
        import onnxruntime as ort

        self._session = session
        self._inputs = inputs
        self._binding = session.io_binding()
        for name, array in inputs.items():
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        self._fixed: list[Array] = []
        for output in session.get_outputs():
            if output.type == "tensor(float)" and all(isinstance(n, int) for n in output.shape):
                array = np.zeros(output.shape, np.float32)
                value = ort.OrtValue.ortvalue_from_numpy(array)
                self._binding.bind_ortvalue_output(output.name, value)
                self._fixed.append(array)
            else:
                self._binding.bind_output(output.name, "cpu")
        self._all_fixed = len(self._fixed) == len(session.get_outputs())

    def __call__(self) -> list[Array]:
        self._session.run_with_iobinding(self._binding)
        return self._fixed if self._all_fixed else list(self._binding.copy_outputs_to_cpu())
