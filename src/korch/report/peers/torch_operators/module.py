"""ONNX model -> PyTorch module.

The model's shapes are fixed first, and what follows from constants and shapes alone is computed in
advance; so the module's forward is a straight list of PyTorch calls. Values are dropped after their
last use, as a hand-written module would do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx.reference import ReferenceEvaluator

from korch.errors import UnsupportedError
from korch.report.peers.peer import Array, Arrays
from korch.report.peers.torch_operators import TRANSLATORS
from korch.report.peers.torch_operators.node import OperatorNode, TensorFunction


@dataclass(frozen=True, slots=True)
class _Step:
    function: TensorFunction
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_uses: tuple[str, ...]  # values that no later step reads


class OnnxModule(torch.nn.Module):  # type: ignore[misc]
    """Runs the steps in order. Weights are buffers, which freezing makes constants."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], steps: Sequence[_Step], weights: Arrays) -> None:
        super().__init__()
        self._input_names = tuple(inputs)
        self._output_names = tuple(outputs)
        self._steps = tuple(steps)
        self._buffer_names = {name: f"weight_{i}" for i, name in enumerate(weights)}
        for name, array in weights.items():
            self.register_buffer(self._buffer_names[name], torch.from_numpy(array.copy()))

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Run the model on one tensor an input."""
        values = dict(zip(self._input_names, tensors, strict=True))
        for name, buffer_name in self._buffer_names.items():
            values[name] = getattr(self, buffer_name)
        for step in self._steps:
            results = step.function(*[values[name] for name in step.inputs])
            if len(step.outputs) == 1 and not isinstance(results, tuple | list):
                results = (results,)
            for name, result in zip(step.outputs, results, strict=False):
                values[name] = result
            for name in step.last_uses:
                del values[name]
        return tuple(values[name].contiguous() for name in self._output_names)


def load_module(model_path: Path, shapes: Mapping[str, Sequence[int]]) -> OnnxModule:
    """Translate a model for inputs of the given shapes.

    Raises:
        UnsupportedError: an operator, or a form of it, has no translation.
    """
    model = onnx.load(str(model_path))
    graph = model.graph
    opset = next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx"))
    constants = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
    inputs = [i.name for i in graph.input if i.name not in constants]
    nodes = _fold(model, opset, constants, shapes)
    outputs = [o.name for o in graph.output]
    translated = []
    for node in nodes:
        if node.domain not in ("", "ai.onnx") or node.op_type not in TRANSLATORS:
            raise UnsupportedError(
                f"the PyTorch peers have no operator {node.op_type}",
                where=node.name or node.output[0],
                hint="Compare with the other peers",
            )
        view = OperatorNode(node, constants, opset)
        function = TRANSLATORS[node.op_type](view)
        translated.append((function, view.tensor_inputs, tuple(n for n in node.output if n)))
    steps = _with_last_uses(translated, outputs)
    used = {name for step in steps for name in step.inputs} | set(outputs)
    weights = {name: array for name, array in constants.items() if name in used}
    return OnnxModule(inputs, outputs, steps, weights)


def _with_last_uses(
    translated: Sequence[tuple[TensorFunction, tuple[str, ...], tuple[str, ...]]], outputs: Sequence[str]
) -> list[_Step]:
    seen = set(outputs)
    steps = []
    for function, reads, writes in reversed(translated):
        last_uses = tuple(dict.fromkeys(n for n in (*reads, *writes) if n not in seen))
        seen.update(reads)
        steps.append(_Step(function, reads, writes, last_uses))
    return steps[::-1]


def _fold(
    model: onnx.ModelProto, opset: int, constants: dict[str, Array], shapes: Mapping[str, Sequence[int]]
) -> list[onnx.NodeProto]:
    """Compute nodes that need no input of the model into `constants`; return the other nodes."""
    known = _known_shapes(model, shapes)
    rest = []
    for node in model.graph.node:
        names = [name for name in node.input if name]
        if node.op_type == "Shape" and names[0] in known:
            start, end = (_integer(node, "start", 0), _integer(node, "end", None))
            constants[node.output[0]] = np.array(known[names[0]][start:end], np.int64)
        elif all(name in constants for name in names) and "Random" not in node.op_type:
            results = _evaluate(node, opset, {name: constants[name] for name in names})
            constants |= dict(zip(node.output, results, strict=True))
        else:
            rest.append(node)
    return rest


def _evaluate(node: onnx.NodeProto, opset: int, inputs: Arrays) -> list[Array]:
    """Run one node in ONNX's reference implementation, in the form of the given opset."""
    graph = onnx.helper.make_graph(
        [node],
        "one_node",
        [onnx.ValueInfoProto(name=name) for name in inputs],
        [onnx.ValueInfoProto(name=name) for name in node.output],
    )
    opsets = [onnx.helper.make_opsetid("", opset)]
    evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=opsets))
    return [np.asarray(result) for result in evaluator.run(None, inputs)]


def _known_shapes(model: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Name of each value whose shape follows from those of the inputs -> its shape."""
    for declared in model.graph.input:
        if declared.name in shapes:
            declared.CopyFrom(
                onnx.helper.make_tensor_value_info(
                    declared.name, declared.type.tensor_type.elem_type, shapes[declared.name]
                )
            )
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    known = {}
    for value in (*inferred.input, *inferred.value_info, *inferred.output):
        tensor_type = value.type.tensor_type
        dimensions = tensor_type.shape.dim
        if tensor_type.HasField("shape") and all(d.HasField("dim_value") for d in dimensions):
            known[value.name] = tuple(d.dim_value for d in dimensions)
    return known


def _integer(node: onnx.NodeProto, name: str, default: int | None) -> int | None:
    return next((a.i for a in node.attribute if a.name == name), default)
