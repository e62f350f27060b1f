"""PyTorch: a module of the user, eager or compiled by Inductor with frozen weights.

`--against eager:package.module:OBJECT` names the module, or a function without arguments that returns it. Its
arguments are the inputs of the model that Korch optimized: by keyword if the module has parameters of all
these names, else in their order.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from korch.errors import OptionError
from korch.report.peers.peer import Array, Arrays, Run, contiguous, import_object, missing, require


@dataclass(frozen=True, slots=True)
class TorchPeer:
    """PyTorch."""

    name: str  # "eager" or "inductor"
    is_compiled: bool  # whether `torch.compile` is applied
    module: str = ""  # "package.module:OBJECT", the module or a function that returns it

    def with_module(self, module: str) -> TorchPeer:
        """Return the peer that runs this module."""
        return replace(self, module=module)

    def is_available(self) -> str | None:
        """Check whether a module is named and the package is installed, without importing either."""
        if not self.module:
            return f"no module is named; write {self.name}:package.module:OBJECT, with a PyTorch module or its builder"
        return missing("torch", "torch")

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Import the module and compile it if `is_compiled`; the file of the model is not read."""
        require(self)
        import torch

        found = import_object(self.module)
        module = found if isinstance(found, torch.nn.Module) else found()
        if not isinstance(module, torch.nn.Module):
            raise OptionError(f"it is a {type(module).__name__}", f"peer {self.name}:{self.module}", "a PyTorch module")
        return run_module(module.eval(), inputs, threads, self.is_compiled)


def run_module(module: Any, inputs: Arrays, threads: int, is_compiled: bool, fullgraph: bool = False) -> Run:
    """Return a call that runs a PyTorch module on the inputs and returns its tensors.

    Args:
        module: the module, in evaluation mode.
        inputs: its arguments, by keyword if it has parameters of all these names, else in order.
        threads: number of threads.
        is_compiled: whether Inductor compiles it. Freezing makes the weights constants, which lets Inductor fold
            them and choose their layout.
        fullgraph: fail if Inductor can't compile the module as one graph.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    torch.set_num_threads(threads)
    tensors = {name: torch.from_numpy(array) for name, array in contiguous(inputs).items()}
    is_by_name = tensors.keys() <= inspect.signature(module.forward).parameters.keys()
    args, kwargs = ((), tensors) if is_by_name else (tuple(tensors.values()), {})
    call = module
    if is_compiled:
        call = torch.compile(module, fullgraph=fullgraph, dynamic=False, options={"freezing": True})

    def run() -> list[Array]:
        with torch.no_grad():  # freezing needs it in every call, also in the first one, which compiles
            return [t.numpy() for t in tree_leaves(call(*args, **kwargs)) if isinstance(t, torch.Tensor)]

    return run
