"""Builds ONNX models from layers with seeded random weights.

The benchmark models are written with `GraphWriter` as ONNX nodes, without a training framework, so
building a model needs only NumPy and onnx. The same seed gives the same bytes. Weights are scaled by
their fan-in, so that activations stay near a magnitude of one at any depth.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

OPSET = 17
IR_VERSION = 8  # the first version with opset 17; ONNX Runtime refuses versions newer than those it knows
LARGEST_MESSAGE_BYTES = 2_000_000_000  # a larger model is saved with its weights as external data


class GraphWriter:
    """Collects nodes and initializers in order, and names their outputs.

    Attributes:
        rng: the source of all weights, which are drawn in the order in which layers are written.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> str:
        """Declare an input of the model; return its name. A dimension given as a name is dynamic."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, value: str, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> None:
        """Declare `value` as the model's output called `name`."""
        self.op("Identity", value, output=name)
        self._outputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def constant(self, array: NDArray[np.generic], hint: str) -> str:
        """Store an initializer; return its name, which begins with `hint`."""
        name = f"{hint}_{len(self._initializers)}"
        self._initializers.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def scalar(self, value: float, hint: str) -> str:
        """Store one float32 number; return its name."""
        return self.constant(np.array([value], np.float32), hint)

    def integers(self, values: Sequence[int], hint: str) -> str:
        """Store an int64 vector (a shape, paddings); return its name."""
        return self.constant(np.array(values, np.int64), hint)

    def normal(self, shape: Sequence[int], deviation: float, hint: str) -> str:
        """Store float32 weights drawn from a normal distribution around 0; return their name."""
        array = self.rng.standard_normal(tuple(shape)) * deviation
        return self.constant(array.astype(np.float32), hint)

    def uniform(self, count: int, low: float, high: float, hint: str) -> str:
        """Store float32[count] drawn uniformly between `low` and `high`; return its name."""
        return self.constant(self.rng.uniform(low, high, count).astype(np.float32), hint)

    def op(self, op_type: str, *inputs: str, output: str = "", **attributes: object) -> str:
        """Append a node with one output; return the output's name, which by default is made from the type."""
        name = f"{op_type}_{len(self._nodes)}"
        output = output or f"{name}_out"
        self._nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        return output

    def conv(
        self,
        x: str,
        channels: tuple[int, int],
        kernel: int,
        *,
        stride: int = 1,
        pad: int = 0,
        groups: int = 1,
        bias: bool = True,
        gain: float = math.sqrt(2.0),
    ) -> str:
        """Append a square convolution from `channels[0]` to `channels[1]` channels."""
        per_group = channels[0] // groups
        weight = self.normal(
            (channels[1], per_group, kernel, kernel), gain / math.sqrt(per_group * kernel * kernel), "weight"
        )
        biases = (self.uniform(channels[1], -0.1, 0.1, "bias"),) if bias else ()
        return self.op(
            "Conv",
            x,
            weight,
            *biases,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[pad] * 4,
            group=groups,
        )

    def batch_norm(self, x: str, channels: int) -> str:
        """Append a batch normalization whose statistics do not make it the identity."""
        scale = self.uniform(channels, 0.6, 1.4, "scale")
        shift = self.uniform(channels, -0.3, 0.3, "shift")
        mean = self.uniform(channels, -0.2, 0.2, "mean")
        variance = self.uniform(channels, 0.7, 1.3, "variance")
        return self.op("BatchNormalization", x, scale, shift, mean, variance, epsilon=1e-5)

    def layer_norm(self, x: str, width: int) -> str:
        """Append a normalization of the last axis."""
        scale = self.uniform(width, 0.6, 1.4, "scale")
        shift = self.uniform(width, -0.3, 0.3, "shift")
        return self.op("LayerNormalization", x, scale, shift, axis=-1, epsilon=1e-6)

    def gelu(self, x: str) -> str:
        """Append x * (1 + erf(x / sqrt 2)) / 2, as exporters write it."""
        inner = self.op("Erf", self.op("Div", x, self.scalar(math.sqrt(2.0), "sqrt2")))
        shifted = self.op("Add", inner, self.scalar(1.0, "one"))
        return self.op("Mul", self.op("Mul", x, shifted), self.scalar(0.5, "half"))

    def resize(self, x: str, scale: float, mode: str = "nearest") -> str:
        """Append an enlargement of an image: nearest, linear or cubic."""
        scales = self.constant(np.array([1, 1, scale, scale], np.float32), "scales")
        if mode == "nearest":
            return self.op(
                "Resize", x, "", scales, mode=mode, nearest_mode="floor", coordinate_transformation_mode="asymmetric"
            )
        return self.op("Resize", x, "", scales, mode=mode, coordinate_transformation_mode="half_pixel")

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """Append a reshape."""
        return self.op("Reshape", x, self.integers(shape, "shape"))

    def slice(self, x: str, axis: int, start: int, end: int, step: int = 1) -> str:
        """Append a slice of one axis."""
        parts = (self.integers((n,), "part") for n in (start, end, axis, step))
        return self.op("Slice", x, *parts)

    def dense(self, x: str, width_in: int, width_out: int, *, gain: float = 1.0) -> str:
        """Append `x @ W + b` over the last axis, as MatMul and Add."""
        weight = self.normal((width_in, width_out), gain / math.sqrt(width_in), "weight")
        bias = self.uniform(width_out, -0.1, 0.1, "bias")
        return self.op("Add", self.op("MatMul", x, weight), bias)

    def finish(self, *domains: str) -> onnx.ModelProto:
        """Return the model, checked if it fits into one message; `domains`: those of operators beside ONNX's."""
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._initializers)
        model = helper.make_model(
            graph,
            producer_name="korch-benchmarks",
            opset_imports=[helper.make_opsetid("", OPSET), *(helper.make_opsetid(name, 1) for name in domains)],
            ir_version=IR_VERSION,
        )
        if _is_one_message(model):
            onnx.checker.check_model(model, full_check=True)
        return model


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; the weights of a large one go to a file beside it."""
    if _is_one_message(model):
        path.write_bytes(model.SerializeToString(deterministic=True))
    else:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data")


def _is_one_message(model: onnx.ModelProto) -> bool:
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) < LARGEST_MESSAGE_BYTES
