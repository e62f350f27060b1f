"""PyTorch on the module of a model's file: eager, or compiled by Inductor with frozen weights.

The module is a translation of the ONNX file (`torch_operators`), or the one from which the file was exported, which the
name of the file selects.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models.experts import module_of
from benchmarks.models.transformers import build_transformer
from korch.report.peers.peer import Arrays, Run, missing, require
from korch.report.peers.pytorch import run_module


@dataclass(frozen=True, slots=True)
class ModulePeer:
    """A peer that runs a module."""

    name: str  # name of the row
    build: Callable[[Path, Arrays], Any]  # returns the module for the path of the model's file and the inputs
    is_compiled: bool = True  # whether Inductor compiles it
    needs: str = "transformers"  # the package that `build` needs besides PyTorch
    is_one_graph: bool = False  # whether Inductor compiles it as one graph

    def is_available(self) -> str | None:
        """Return None if the packages are installed, or what is missing, without importing them."""
        return missing("torch", "torch") or missing("test-torch", self.needs)

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Build the module, and compile it if `is_compiled`."""
        require(self)
        return run_module(self.build(model_path, inputs), inputs, threads, self.is_compiled, self.is_one_graph)


def of_onnx(name: str, *, is_compiled: bool) -> ModulePeer:
    """Return a peer that translates an ONNX file.

    Inductor compiles it as one graph, because an operator that can't be traced would split it into many slow graphs.
    """

    def build(path: Path, inputs: Arrays) -> Any:
        from benchmarks.peers.torch_operators.module import load_module  # imports PyTorch

        return load_module(path, {name: array.shape for name, array in inputs.items()})

    return ModulePeer(name, build, is_compiled, "torch", is_one_graph=True)


def of_experts(name: str, form: str, *, is_compiled: bool = False) -> ModulePeer:
    """Return a peer that runs a block of experts; `form`: the implementation in the library transformers."""
    return ModulePeer(name, lambda path, _: module_of(path.stem.partition("-")[0], form), is_compiled)


def of_transformer() -> ModulePeer:
    """Return a peer that compiles the module of a transformer."""
    return ModulePeer("inductor", lambda path, _: build_transformer(path.stem)[0])
