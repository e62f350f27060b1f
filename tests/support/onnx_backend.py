"""Korch as a backend of ONNX's own test suite (`onnx.backend.base.Backend`).

A model is optimized when it is prepared. A model with unknown dimensions is optimized at its first run with
inputs of each shape.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep, namedtupledict

from korch.api import optimize
from korch.errors import ModelError
from korch.host.executable import HostedExecutable
from korch.runtime.executable import Executable

QUICK: Mapping[str, Any] = {"measure": False, "strict": True}
"""The options that are used if none are given: a test suite runs each model once, so nothing is measured."""


class KorchRep(BackendRep):  # type: ignore[misc]
    """A prepared model.

    Attributes:
        executable: the executable that ran last; None before the first run of a model with unknown dimensions.
    """

    def __init__(self, model: onnx.ModelProto, options: Mapping[str, Any]) -> None:
        """Optimize the model, unless its shapes are not known yet."""
        self._model, self._options = model, options
        given = {tensor.name for tensor in model.graph.initializer}
        self._declared = [item for item in model.graph.input if item.name not in given]
        self._prepared: dict[tuple[Any, ...], Executable | HostedExecutable] = {}
        self.executable: Executable | HostedExecutable | None = None
        if all(map(_is_static, self._declared)):
            self._prepare(())

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        """Run the model.

        Args:
            inputs: a value for each input, in the model's order, or by name.

        Returns:
            A named tuple with a value for each output, in the model's order.
        """
        if isinstance(inputs, Mapping):
            inputs = [inputs[item.name] for item in self._declared]
        is_open = not all(map(_is_static, self._declared))
        values = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        key = tuple(np.shape(v) if isinstance(v, np.ndarray) else None for v in values)
        executable = self._prepare(key if is_open else ())
        results = executable(*values)
        names = [item.name for item in self._model.graph.output]
        named: tuple[Any, ...] = namedtupledict("Outputs", names)(*results)
        return named

    def _prepare(self, shapes: Sequence[Any]) -> Executable | HostedExecutable:
        key = tuple(shapes)
        if key not in self._prepared:
            bound = {item.name: shape for item, shape in zip(self._declared, shapes, strict=False) if shape is not None}
            found = optimize(self._model, shapes=bound, **self._options)
            if not isinstance(found, Executable | HostedExecutable):
                raise ModelError("it is no ONNX model", where="model")
            self._prepared[key] = found
        self.executable = self._prepared[key]
        return self._prepared[key]


class KorchBackend(Backend):  # type: ignore[misc]
    """Runs ONNX models on the CPU."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **options: Any) -> KorchRep:
        """Optimize a model.

        Args:
            model: the model.
            device: CPU, the only one.
            **options: options of `korch.optimize`; without any, nothing is measured.

        Raises:
            KorchError: the model or an option is not suitable.
        """
        return KorchRep(model, options or QUICK)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Return whether models can run on a device."""
        return device.split(":")[0] == "CPU"


def _is_static(item: Any) -> bool:
    """Return whether an input has a shape without unknown dimensions, or is not a tensor."""
    if item.type.WhichOneof("value") != "tensor_type":
        return True
    tensor = item.type.tensor_type
    return tensor.HasField("shape") and all(d.HasField("dim_value") for d in tensor.shape.dim)
