"""PyTorch module -> executable that takes and returns what the module does.

Tensors go in and out without a copy: both sides see the same memory. Arguments may be nested as the
module's are; if all tensors of a call are NumPy arrays, so are the results.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import ml_dtypes
import numpy as np
import torch

from korch.deadline import Deadline
from korch.errors import InputError, UnprovidedError, UnsupportedError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.frontend.torch import Exported, Trees, export_module
from korch.frontend.torch.free import FreeModule
from korch.host import HostedExecutable, optimize_with_host
from korch.options import Options
from korch.pipeline import Progress, optimize_model
from korch.pipeline.ranges import optimize_ranges
from korch.pipeline.source import Source
from korch.primitive.op import Array
from korch.runtime.cuda.executable import CudaExecutable
from korch.runtime.executable import Executable
from korch.runtime.ranged import RangedExecutable
from korch.runtime.record import PlanRecord
from korch.runtime.report import Report
from korch.runtime.runnable import TensorInfo, Timing


class ModuleExecutable:
    """An optimized module: call it as the module is called.

    It may be called from several threads; the calls wait for each other. Gradients do not flow
    through it. The weights are those that the module had when it was optimized.

    Attributes:
        flat: the executable below, with arrays in and out; a `HostedExecutable`, which has no
            single plan, where a part runs in ONNX Runtime; a `RangedExecutable` of an ExportedProgram with
            dynamic dimensions.
        trees: how a call and its result are nested.
    """

    def __init__(self, flat: Executable | HostedExecutable | RangedExecutable, trees: Trees) -> None:
        """Wrap an executable.

        Args:
            flat: takes the tensors of a call and returns the different tensors of a result.
            trees: how a call and its result are nested.
        """
        self.flat = cast(Executable, flat)  # the other has all of it but plan, sources and time
        self.trees = trees

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Args:
            args: as in the example inputs; each tensor may be a NumPy array instead.
            kwargs: as in the example inputs.

        Returns:
            What the module returns, without gradients.

        Raises:
            InputError: the call is not nested like the example, or a tensor has another shape or
                type or lies on a device.
            ProviderError: a kernel failed.
        """
        tensors = self.trees.arguments.flatten(args, kwargs)
        if isinstance(self.flat, CudaExecutable):  # it takes tensors as they are, and gives some
            return self.trees.results.nest(list(self.flat(*tensors)))
        results = run_tensors(self.flat, tensors)
        if tensors and all(isinstance(t, np.ndarray) for t in tensors):
            return self.trees.results.nest(results)
        if not isinstance(self.flat, Executable):
            results = tuple(map(np.array, results))  # one may be a constant of it
        return self.trees.results.nest(list(map(as_tensor, results)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.flat!r}>"

    @property
    def report(self) -> Report:
        """How the plan was found."""
        return self.flat.report

    @property
    def plan(self) -> PlanRecord:
        """The kernels in order, and all else that is known of the plan."""
        return self.flat.plan

    @property
    def sources(self) -> Mapping[str, str]:
        """The C++ sources by file name."""
        return self.flat.sources

    def get_inputs(self) -> list[TensorInfo]:
        """Describe the tensors that it reads, in order."""
        return self.flat.get_inputs()

    def get_outputs(self) -> list[TensorInfo]:
        """Describe the tensors that it returns, in order."""
        return self.flat.get_outputs()

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: None = None
    ) -> list[Array]:
        """Run it as an ONNX Runtime session, by the names of `get_inputs` and `get_outputs`."""
        return self.flat.run(output_names, feeds, run_options)

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Run several times and take the time of each run and of each kernel in it."""
        return self.flat.time([as_array(array, "an input") for array in arrays], repeat)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one file; `load` gives an executable with flat arrays in and out."""
        self.flat.save(path)


def optimize_module(
    module: Any,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    options: Options,
    progress: Progress | None = None,
) -> ModuleExecutable:
    """Export and optimize a module.

    Args:
        module: an nn.Module in evaluation mode, or an ExportedProgram; of one with dynamic dimensions, all sizes.
        example_inputs: a tensor, or a tuple or list of positional arguments, or a dict of keyword
            arguments; None for what an ExportedProgram was exported with.
        example_kwargs: further keyword arguments.
        options: how to optimize.
        progress: told of each stage.

    Raises:
        KorchError: the module can't be exported, or not be optimized.
    """
    args, kwargs = _example(example_inputs)
    both = {**kwargs, **(example_kwargs or {})}
    free = FreeModule.of(module) if args is None and not both and not options.is_cuda else None
    if free is not None:
        return build_ranged(free, options, progress)
    return build_module(export_module(module, args, both), options, progress)


def build_ranged(free: FreeModule, options: Options, progress: Progress | None = None) -> ModuleExecutable:
    """Optimize a module for all sizes of its dynamic dimensions.

    Raises:
        KorchError: it can't be optimized, or not for all of them.
    """
    source = Source(
        free.dimensions,
        lambda sizes: fission(load_model(free.at(sizes).model)),
        lambda sizes: (free.at(sizes).model, {}),
    )
    threads = torch.get_num_threads()
    deadline = Deadline.after(options.budget_s, time.monotonic())
    try:
        flat = optimize_ranges(source, options, progress or (lambda stage, text: None), deadline)
    finally:
        torch.set_num_threads(threads)
    return ModuleExecutable(flat, free.at(tuple(d.high for d in free.dimensions)).trees)


def build_module(exported: Exported, options: Options, progress: Progress | None = None) -> ModuleExecutable:
    """Optimize what was exported.

    Raises:
        KorchError: it can't be optimized.
    """
    threads = torch.get_num_threads()
    flat: Any
    try:
        flat = optimize_model(exported.model, options, {}, progress)
    except (UnsupportedError, UnprovidedError):
        if not options.ablation.host:
            raise
        flat = optimize_with_host(exported.model.stored(), options, {}, progress)
    finally:
        # PyTorch may have the same OpenMP, whose threads measuring sets.
        torch.set_num_threads(threads)
    return ModuleExecutable(flat, exported.trees)


def run_tensors(flat: Any, tensors: Sequence[Any]) -> tuple[Array, ...]:
    """Call an executable with PyTorch's or NumPy's arrays.

    Raises:
        InputError: one has another shape or type, or lies on a device.
    """
    names = [tensor.name for tensor in flat.get_inputs()]
    results: tuple[Array, ...] = flat(*(as_array(t, n) for t, n in zip(tensors, names, strict=True)))
    return results


def as_array(tensor: Any, name: str) -> Any:
    """Return a tensor's memory as an array; what is no tensor of PyTorch is returned as it is.

    Raises:
        InputError: it does not lie in this machine's memory.
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise InputError(
            f"it lies on {tensor.device}, stored as {tensor.layout}",
            where=f"input {name!r}",
            expected="a dense tensor on the CPU",
            hint="Call tensor.cpu() first",
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.dtype is torch.bfloat16:
        return plain.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def as_tensor(array: Array) -> Any:
    """Return an array's memory as a tensor of PyTorch."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _example(example: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Return example inputs as positional and keyword arguments."""
    if example is None:
        return None, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}
