"""PyTorch's own module of a benchmark transformer as a peer, compiled by Inductor.

The other engines read the ONNX file that was exported from the module. Inductor gets the module
itself. The name of the file selects it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.transformers import build_transformer
from korch.report.peers.peer import Array, Arrays, Run, missing, require


@dataclass(frozen=True, slots=True)
class ModulePeer:
    """A compiled module.

    Attributes:
        name: of its row.
    """

    name: str = "inductor"

    def is_available(self) -> str | None:
        """Return whether the packages are installed, without importing them."""
        return missing("torch", "torch") or missing("test-torch", "transformers")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Build the module that the file was made from, and compile it with frozen weights."""
        require(self)
        import torch

        torch.set_num_threads(threads)
        module, examples = build_transformer(model_path.stem)
        tensors = {name: torch.from_numpy(inputs[name].copy()) for name in examples}
        call = torch.compile(module, dynamic=False, options={"freezing": True})

        def run() -> list[Array]:
            with torch.no_grad():  # freezing needs it, in the call that compiles as in all others
                return [output.numpy() for output in call(**tensors).to_tuple()]

        return run


INDUCTOR = ModulePeer()
