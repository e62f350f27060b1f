"""PyTorch's own module of a block of experts as peers: eager and compiled by Inductor, in each form of the library.

The name of the file that other engines read selects the block and the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models.experts import module_of
from korch.report.peers.peer import Array, Arrays, Run, missing, require


@dataclass(frozen=True, slots=True)
class ExpertsPeer:
    """A module in PyTorch.

    Attributes:
        name: of its row.
        form: how the library computes experts.
        is_compiled: whether Inductor compiles it.
    """

    name: str
    form: str
    is_compiled: bool = False

    def is_available(self) -> str | None:
        """Return whether the packages are installed, without importing them."""
        return missing("torch", "torch") or missing("test-torch", "transformers")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Build the module that the file was made from, and compile it if asked for."""
        require(self)
        import torch

        torch.set_num_threads(threads)
        module = module_of(model_path.stem.partition("-")[0], self.form)
        call: Any = torch.compile(module, dynamic=False, options={"freezing": True}) if self.is_compiled else module
        x = torch.from_numpy(inputs["x"].copy())

        def run() -> list[Array]:
            with torch.no_grad():
                return [call(x).numpy()]

        return run


EAGER_LOOP = ExpertsPeer("eager loop", "eager")
EAGER_GROUPED = ExpertsPeer("eager grouped", "grouped_mm")
EAGER_GATHER = ExpertsPeer("eager gather", "batched_mm")
INDUCTOR_GROUPED = ExpertsPeer("inductor grouped", "grouped_mm", True)
INDUCTOR_GATHER = ExpertsPeer("inductor gather", "batched_mm", True)
