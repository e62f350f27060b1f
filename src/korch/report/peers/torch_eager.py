"""PyTorch, eager or compiled by Inductor with frozen weights.

Both run the same module (`torch_operators`), which calls a PyTorch function for each ONNX operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from korch.report.peers.peer import Array, Arrays, Run, contiguous, missing, require


@dataclass(frozen=True, slots=True)
class TorchPeer:
    """PyTorch.

    Attributes:
        name: "eager" or "inductor".
        is_compiled: whether `torch.compile` is applied. Freezing makes the weights constants, which
            lets Inductor fold them and choose their layout.
    """

    name: str
    is_compiled: bool

    def is_available(self) -> str | None:
        """Check whether the package is installed, without importing it."""
        return missing("torch", "torch")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Translate the model to a PyTorch module, and compile it if `is_compiled`."""
        require(self)
        import torch

        from korch.report.peers.torch_operators.module import load_module

        torch.set_num_threads(threads)
        module = load_module(model_path, {name: a.shape for name, a in inputs.items()})
        tensors = [torch.from_numpy(array) for array in contiguous(inputs).values()]
        call = module
        if self.is_compiled:
            # fullgraph, because an operator that can't be traced would split the model into many slow graphs.
            call = torch.compile(module, fullgraph=True, dynamic=False, options={"freezing": True})

        def run() -> list[Array]:
            # Freezing needs no_grad in the call that compiles and in all later calls.
            with torch.no_grad():
                return [output.numpy() for output in call(*tensors)]

        return run
