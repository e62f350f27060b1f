"""Peers that run PyTorch's module for a block of experts, in each form of the library: eager or compiled by Inductor.

The name of the model file that the other engines read selects the block; the inputs set the number of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.models.experts import module_of
from korch.report.peers.peer import Arrays, Run, missing, require
from korch.report.peers.pytorch import run_module


@dataclass(frozen=True, slots=True)
class ExpertsPeer:
    """A peer that runs the module in PyTorch.

    Attributes:
        name: name of the row.
        form: the implementation of experts in the library transformers.
        is_compiled: whether Inductor compiles it.
    """

    name: str
    form: str
    is_compiled: bool = False

    def is_available(self) -> str | None:
        """Return None if the packages are installed, or what is missing, without importing them."""
        return missing("torch", "torch") or missing("test-torch", "transformers")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Build the module from which the file was made, and compile it if `is_compiled`."""
        require(self)
        module = module_of(model_path.stem.partition("-")[0], self.form)
        return run_module(module, inputs, threads, self.is_compiled)


EAGER_LOOP = ExpertsPeer("eager loop", "eager")
EAGER_GROUPED = ExpertsPeer("eager grouped", "grouped_mm")
EAGER_GATHER = ExpertsPeer("eager gather", "batched_mm")
INDUCTOR_GROUPED = ExpertsPeer("inductor grouped", "grouped_mm", True)
INDUCTOR_GATHER = ExpertsPeer("inductor gather", "batched_mm", True)
