"""A peer that runs the PyTorch module of a benchmark transformer, compiled by Inductor.

The other engines read the ONNX file that was exported from the module. Inductor compiles the module
itself. The name of the file selects the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.transformers import build_transformer
from korch.report.peers.peer import Arrays, Run, missing, require
from korch.report.peers.pytorch import run_module


@dataclass(frozen=True, slots=True)
class TransformerPeer:
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
        module, _ = build_transformer(model_path.stem)
        return run_module(module, inputs, threads, is_compiled=True)
