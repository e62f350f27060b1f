"""A peer that runs the PyTorch module of a benchmark transformer, compiled by Inductor.

The other engines read the ONNX file that was exported from the module. Inductor compiles the module
itself. The name of the file selects the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.transformers import build_transformer
from korch.report.peers.peer import Array, Arrays, Run, missing, require


@dataclass(frozen=True, slots=True)
class ModulePeer:
    """A peer that runs a module compiled by Inductor.

    Attributes:
        name: name of the row.
    """

    name: str = "inductor"

    def is_available(self) -> str | None:
        """Return None if the packages are installed, or what is missing, without importing them."""
        return missing("torch", "torch") or missing("test-torch", "transformers")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Build the module from which the file was exported, and compile it with frozen weights."""
        require(self)
        import torch

        torch.set_num_threads(threads)
        module, examples = build_transformer(model_path.stem)
        tensors = {name: torch.from_numpy(inputs[name].copy()) for name in examples}
        call = torch.compile(module, dynamic=False, options={"freezing": True})

        def run() -> list[Array]:
            with torch.no_grad():  # freezing needs it in every call, also in the first one, which compiles
                return [output.numpy() for output in call(**tensors).to_tuple()]

        return run


INDUCTOR = ModulePeer()
