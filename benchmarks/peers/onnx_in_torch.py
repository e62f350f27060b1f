"""PyTorch on an ONNX file: eager, or compiled by Inductor with frozen weights.

Both run the same module (`torch_operators`), which calls a PyTorch function for each ONNX operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from korch.report.peers.peer import Arrays, Run, missing, require
from korch.report.peers.pytorch import run_module


@dataclass(frozen=True, slots=True)
class OnnxInTorch:
    """A peer that translates an ONNX file to a PyTorch module.

    Attributes:
        name: "eager" or "inductor".
        is_compiled: whether `torch.compile` is applied.
    """

    name: str
    is_compiled: bool

    def is_available(self) -> str | None:
        """Check whether the package is installed, without importing it."""
        return missing("torch", "torch")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Translate the model to a PyTorch module, and compile it if `is_compiled`."""
        require(self)
        from benchmarks.peers.torch_operators.module import load_module

        module = load_module(model_path, {name: a.shape for name, a in inputs.items()})
        # As one graph, because an operator that can't be traced would split the model into many slow graphs.
        return run_module(module, inputs, threads, self.is_compiled, fullgraph=True)
