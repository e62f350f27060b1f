"""PyTorch module -> executable that is called like the module and returns the same structure of results.

Tensors are passed in both directions without a copy, as views of the same memory. Arguments may be nested
like the module's. If all tensors of a call are NumPy arrays, the results are NumPy arrays too.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from korch.cuda.runtime.executable import CudaExecutable
from korch.errors import InputError, UnprovidedError, UnsupportedError
from korch.frontend.torch import Exported, Trees, export_call
from korch.frontend.torch.effects import NO_EFFECTS, Effects, shares_memory
from korch.frontend.torch.export import example_call
from korch.frontend.torch.free import FreeModule
from korch.host.executable import HostedExecutable
from korch.host.optimize import optimize_with_host
from korch.options import Options
from korch.pipeline import Progress, optimize_model, untold
from korch.pipeline.background import BackgroundSearch, Make, first_plan, search_on
from korch.pipeline.ranges import optimize_ranges
from korch.pipeline.source import Source
from korch.primitive.op import Array
from korch.pytorch.check import check_module, limit_s
from korch.pytorch.least import announce_call
from korch.pytorch.tensors import as_array, as_tensor
from korch.runtime.executable import NO_MEMORY, Executable
from korch.runtime.ranged import RangedExecutable
from korch.runtime.record import PlanRecord
from korch.runtime.report import Report
from korch.runtime.runnable import TensorInfo, Timing
from korch.system.alignment import ALIGNMENT
from korch.system.deadline import Deadline


class ModuleExecutable:
    """An optimized module, which is called like the module.

    It may be called from several threads; the calls wait for each other. It does not support gradients.
    Its weights are those that the module had when it was optimized.

    Attributes:
        flat: the underlying executable, with flat lists of arrays as inputs and outputs. It is a
            `HostedExecutable`, which has no single plan, if a part runs in ONNX Runtime, and a
            `RangedExecutable` for an ExportedProgram with dynamic dimensions.
        trees: how the arguments and the result of a call are nested.
        background: the search for a better plan, which will replace `flat` between two calls; None without one.
        states: by name, the buffers that the module writes to, such as a cache; each call reads and changes them.
    """

    def __init__(
        self, flat: Executable | HostedExecutable | RangedExecutable, trees: Trees, effects: Effects = NO_EFFECTS
    ) -> None:
        """Wrap an executable.

        Args:
            flat: the executable that takes the tensors of a call and the states, and returns the distinct tensors of a
                result and the new contents of tensors.
            trees: how the arguments and the result of a call are nested.
            effects: what the module writes to.
        """
        self.flat = cast(Executable, flat)  # the other classes have the same members except plan, sources and time
        self.trees = trees
        self.background: BackgroundSearch | None = None
        self._effects = effects
        dense = torch.contiguous_format
        self.states = {name: state.detach().clone(memory_format=dense) for name, state in effects.states.items()}
        self._first = {name: state.clone() for name, state in self.states.items()}
        self._memory = {state.untyped_storage().data_ptr() for state in self.states.values()}
        self._turn = threading.Lock() if self.states else nullcontext()

    def reset(self) -> None:
        """Give the states the contents that they had when the module was optimized."""
        with self._turn:
            for name, state in self._first.items():
                self.states[name].copy_(state)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Args:
            args: as in the example inputs; each tensor may be a NumPy array instead.
            kwargs: as in the example inputs.

        Returns:
            What the module returns, without gradients.

        Raises:
            InputError: the call is not nested like the example, or a tensor has another shape or
                type or is on another device, or one that is written to shares memory with another.
            ProviderError: a kernel failed.
        """
        tensors, flat = self.trees.arguments.flatten(args, kwargs), self.flat
        with self._turn:
            given = [*tensors, *self.states.values()]
            self._check_memory(tensors)
            into = self._in_place(flat, given)
            # an executable for CUDA takes and returns tensors directly
            found = flat(*given) if isinstance(flat, CudaExecutable) else run_tensors(flat, given, into)
            results, contents = self._effects.split(found)
            for k, (i, content) in enumerate(zip(self._effects.written, contents, strict=True), len(results)):
                if k not in into:
                    _write(given[i], content)
        if isinstance(flat, CudaExecutable) or (tensors and all(isinstance(t, np.ndarray) for t in tensors)):
            return self.trees.results.nest(list(results))
        if not isinstance(flat, Executable):
            results = tuple(map(np.array, results))  # a result may be a constant of the executable
        return self.trees.results.nest(list(map(as_tensor, results)))

    def _check_memory(self, tensors: Sequence[Any]) -> None:
        """Refuse an argument that is written to and shares memory with another one, which would change with it."""
        written = frozenset(i for i in self._effects.written if i < len(tensors))  # the others are states
        if written and shares_memory(tensors, written):
            raise InputError(
                "an argument that the module writes to shares memory with another one",
                where="call",
                hint="Pass a copy of one of them",
            )

    def _in_place(self, flat: Any, given: Sequence[Any]) -> dict[int, Array]:
        """Return the memory of tensors in which an executable can write their new contents, by output.

        `given`: the tensors of a call, and the states.
        """
        if not isinstance(flat, Executable) or not flat.plan.in_place:
            return {}
        count = len(given) - len(self.states)
        if not all(isinstance(tensor, torch.Tensor) for tensor in given):
            return {}
        memory = [tensor.untyped_storage().data_ptr() for tensor in given[:count]]
        if len(set(memory)) < count or not self._memory.isdisjoint(memory):
            return {}
        pairs, first = set(flat.plan.in_place), len(flat.plan.outputs) - len(self._effects.written)
        return {
            k: as_array(given[i], "a state")
            for k, i in enumerate(self._effects.written, first)
            if (k, i) in pairs and given[i].is_contiguous() and given[i].data_ptr() % ALIGNMENT == 0
        }

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the search in the background has ended, at most some seconds; return whether it has."""
        return self.background is None or self.background.wait(seconds)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.flat!r}>"

    @property
    def report(self) -> Report:
        """How the plan was found."""
        return self.flat.report

    @property
    def plan(self) -> PlanRecord:
        """The plan: its kernels in order, and all other facts recorded about it."""
        return self.flat.plan

    @property
    def sources(self) -> Mapping[str, str]:
        """The sources by file name."""
        return self.flat.sources

    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the input tensors, in order."""
        return self.flat.get_inputs()

    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the output tensors, in order."""
        return self.flat.get_outputs()

    def run(
        self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: None = None
    ) -> list[Array]:
        """Run it like an ONNX Runtime session, with the names of `get_inputs` and `get_outputs`."""
        return self.flat.run(output_names, feeds, run_options)

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Run `repeat` times, and return the time of each run and of each kernel in it."""
        return self.flat.time([as_array(array, "an input") for array in arrays], repeat)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one file. `load` returns an executable with flat lists of arrays as inputs and outputs."""
        self.flat.save(path)


def optimize_module(
    module: Any,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None,
    options: Options,
    progress: Progress = untold,
    *,
    is_served: bool = False,
) -> ModuleExecutable:
    """Export and optimize a module.

    Args:
        module: an nn.Module in evaluation mode, or an ExportedProgram, which is optimized for all sizes of its
            dynamic dimensions.
        example_inputs: a tensor, or a tuple or list of positional arguments, or a dict of keyword
            arguments; None for the arguments that an ExportedProgram was exported with.
        example_kwargs: further keyword arguments.
        options: how to optimize.
        progress: called in each stage.
        is_served: return a first plan, and search a better one in the background.

    Raises:
        KorchError: the module can't be exported or optimized.
    """
    args, kwargs = _example(example_inputs)
    both = {**kwargs, **(example_kwargs or {})}
    deadline = Deadline.after(options.budget_s, time.monotonic())
    free = FreeModule.of(module) if args is None and not both and not options.is_cuda else None
    if free is None:
        called, given, named = example_call(module, args, both)
        if not is_served:
            announce_call(called, given, named, (), options, deadline)
        make = partial(build_module, export_call(called, given, named, type(module).__name__))
        return served(make, options, progress) if is_served else make(options, progress, deadline)
    if not is_served:
        announce_call(free.module, free.args, free.kwargs, free.dimensions, options, deadline)
    if any(isinstance(leaf, torch.SymInt) for leaf in free.exported.trees.results.leaves):
        raise UnsupportedError("it returns a number that is computed from sizes", "module")
    make = partial(build_ranged, free)
    return served(make, options, progress) if is_served else make(options, progress, deadline)


def served(make: Make[ModuleExecutable], options: Options, progress: Progress) -> ModuleExecutable:
    """Return a first plan, which is replaced when the search in the background has found a better one.

    Raises:
        KorchError: the module can't be optimized.
    """
    first = first_plan(make, options, progress)
    first.background = search_on(first, "flat", lambda *asked: make(*asked).flat, options)
    return first


def build_ranged(
    free: FreeModule, options: Options, progress: Progress | None = None, deadline: Deadline | None = None
) -> ModuleExecutable:
    """Optimize a module for all sizes of its dynamic dimensions, until `deadline`, by default the budget from now on.

    Raises:
        KorchError: the module can't be optimized, or not for all sizes.
    """
    model = free.exported.model
    source = Source.of(model, free.dimensions, lambda sizes: free.at(sizes).shapes)
    threads = torch.get_num_threads()
    deadline = deadline or Deadline.after(options.budget_s, time.monotonic())
    try:
        tell = progress or untold
        flat = optimize_ranges(source, options, tell, deadline.before(2 * limit_s(options)))
        for sizes in (tuple(d.low for d in free.dimensions), tuple(d.high for d in free.dimensions)):
            check_module(free.at(sizes), options, flat)
    finally:
        torch.set_num_threads(threads)
    return ModuleExecutable(flat, free.exported.trees, free.exported.effects)


def build_module(
    exported: Exported, options: Options, progress: Progress | None = None, deadline: Deadline | None = None
) -> ModuleExecutable:
    """Optimize an exported module until `deadline`, by default the budget from now on; compare it with the module.

    Raises:
        KorchError: the module can't be optimized, or PyTorch exported something else.
    """
    threads = torch.get_num_threads()
    flat: Any
    check_module(exported, options)
    try:
        deadline = (deadline or Deadline.after(options.budget_s, time.monotonic())).before(limit_s(options))
        flat = optimize_model(exported.model, options, {}, progress, deadline)
    except (UnsupportedError, UnprovidedError):
        if not options.ablation.host:
            raise
        flat = optimize_with_host(exported.model.stored(), options, {}, progress, deadline)
    finally:
        # PyTorch may use the same OpenMP library, whose number of threads the measurements change.
        torch.set_num_threads(threads)
    if not options.is_cuda:
        check_module(exported, options, flat)
    return ModuleExecutable(flat, exported.trees, exported.effects)


def run_tensors(flat: Any, tensors: Sequence[Any], into: Mapping[int, Array] = NO_MEMORY) -> tuple[Array, ...]:
    """Call an executable with PyTorch tensors or NumPy arrays; `into` as for `Executable.compute`.

    Raises:
        InputError: one has another shape or type, or is not in the memory of the CPU.
    """
    names = [tensor.name for tensor in flat.get_inputs()]
    arrays = [as_array(t, n) for t, n in zip(tensors, names, strict=True)]
    results: tuple[Array, ...] = flat.compute(arrays, into) if into else flat(*arrays)
    return results


def _write(target: Any, content: Any) -> None:
    """Write to a tensor or an array of a call."""
    if isinstance(target, torch.Tensor):
        with torch.no_grad():
            target.copy_(content if isinstance(content, torch.Tensor) else as_tensor(content))
    else:
        target[...] = content


def _example(example: Any) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Return example inputs as positional and keyword arguments."""
    if example is None:
        return None, {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, tuple | list):
        return tuple(example), {}
    return (example,), {}
