"""ONNX model -> PyTorch module.

The model's shapes are fixed first, and everything that depends only on constants and shapes is computed in
advance. So the module's `forward` is a linear sequence of PyTorch calls. Values are dropped after their
last use, as in a hand-written module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.torch_operators import TRANSLATORS
from benchmarks.peers.torch_operators.node import OperatorNode, TensorFunction
from korch import fission
from korch.errors import UnsupportedError
from korch.frontend.fold import evaluate
from korch.frontend.onnx import load_model
from korch.frontend.operator import Operator, OperatorGraph
from korch.report.peers.peer import Array, Arrays


@dataclass(frozen=True, slots=True)
class _Step:
    function: TensorFunction
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_uses: tuple[str, ...]  # values that no later step reads


class OnnxModule(torch.nn.Module):  # type: ignore[misc]
    """Runs the steps in order. Weights are buffers, which Inductor's freezing turns into constants."""

    def __init__(self, inputs: Sequence[str], outputs: Sequence[str], steps: Sequence[_Step], weights: Arrays) -> None:
        super().__init__()
        self._input_names = tuple(inputs)
        self._output_names = tuple(outputs)
        self._steps = tuple(steps)
        self._buffer_names = {name: f"weight_{i}" for i, name in enumerate(weights)}
        for name, array in weights.items():
            self.register_buffer(self._buffer_names[name], torch.from_numpy(array.copy()))

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Run the model on one tensor for each input."""
        values = dict(zip(self._input_names, tensors, strict=True))
        for name, buffer_name in self._buffer_names.items():
            values[name] = getattr(self, buffer_name)
        for step in self._steps:
            results = step.function(*[values[name] for name in step.inputs])
            results = results if isinstance(results, tuple | list) else (results,)
            for name, result in zip(step.outputs, results, strict=False):
                values[name] = result
            for name in step.last_uses:
                del values[name]
        return tuple(values[name].contiguous() for name in self._output_names)


def load_module(model_path: Path, shapes: Mapping[str, Sequence[int]]) -> OnnxModule:
    """Translate a model for inputs of the given shapes.

    Raises:
        UnsupportedError: an operator, or a form of it, has no translation.
        ModelError: the model can't be read.
    """
    graph = load_model(model_path, shapes)
    constants = dict(graph.constants)
    translated = []
    for operator in graph.operators:
        if all(name in constants for name in operator.inputs if name) and _fold(operator, graph, constants):
            continue
        if operator.domain or operator.op_type not in TRANSLATORS:
            raise UnsupportedError(
                f"the PyTorch peers have no operator {operator.op_type}",
                where=operator.name,
                hint="Compare with the other peers",
            )
        view = OperatorNode(operator, constants)
        translated.append((TRANSLATORS[operator.op_type](view), view.tensor_inputs, operator.outputs))
    steps = _with_last_uses(translated, graph.outputs)
    used = {name for step in steps for name in step.inputs} | {*graph.outputs}
    weights = {name: array for name, array in constants.items() if name in used}
    return OnnxModule(graph.inputs, graph.outputs, steps, weights)


def _fold(operator: Operator, graph: OperatorGraph, constants: dict[str, Array]) -> bool:
    """Evaluate an operator whose inputs are constants, which the frontend did not fold; return whether it succeeded."""
    results = fission.evaluate(operator, graph.types, constants) or evaluate(
        operator.node, {operator.domain: operator.version}, constants
    )
    constants |= dict(zip(operator.outputs, results or (), strict=False))
    return results is not None


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
