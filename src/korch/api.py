"""The Python interface to optimize a model."""

from __future__ import annotations

import inspect
import logging
import operator
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import onnx

from korch.backend import builder_of
from korch.cuda.measure.device import require_device
from korch.cuda.runtime.executable import CudaExecutable
from korch.errors import ModelError, OptionError, UnknownSizeError, UnprovidedError, UnsupportedError
from korch.frontend.onnx import LoadedModel, ModelSource, read_model
from korch.host.executable import HostedExecutable
from korch.host.optimize import optimize_with_host, several_with_host
from korch.options import Options, default_threads, unknown_option
from korch.pipeline import Progress, Watch, optimize_model, untold
from korch.pipeline.assumed import assumed, assumed_text, fixed
from korch.pipeline.background import BackgroundExecutable, has_background
from korch.pipeline.ranges import optimize_ranges
from korch.pipeline.source import onnx_source
from korch.pipeline.stateful import fixed_rows, optimize_stateful, state_sizes
from korch.ranges.binding import Bound, has_range, is_open, static
from korch.ranges.state import PAST, ROWS
from korch.report.progress import shown
from korch.runtime import shaped
from korch.runtime.build import model_record
from korch.runtime.combine import combine
from korch.runtime.executable import Executable
from korch.runtime.machine import best_isa
from korch.runtime.ranged import RangedExecutable
from korch.runtime.record import ModelRecord
from korch.runtime.runnable import Runnable
from korch.runtime.shaped import ShapedExecutable
from korch.runtime.stateful import StatefulExecutable
from korch.system.deadline import Deadline

if TYPE_CHECKING:
    import torch

    from korch.pytorch.module import ModuleExecutable

logger = logging.getLogger("korch.api")

Shapes = Mapping[str, Sequence[int | range] | int | range | str]
Binding = Mapping[str, tuple[Bound, ...]]


@overload
def optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    *,
    target: str = "cpu",
    threads: int | None = None,
    budget: float | None = None,
    superopt: float | None = None,
    shapes: Shapes | Sequence[Shapes] | None = None,
    strict: bool = False,
    progress: Progress | bool | None = None,
    background: bool = False,
    **options: Any,
) -> Runnable: ...


@overload
def optimize(
    model: torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    target: str = "cpu",
    threads: int | None = None,
    budget: float | None = None,
    superopt: float | None = None,
    strict: bool = False,
    progress: Progress | bool | None = None,
    background: bool = False,
    **options: Any,
) -> ModuleExecutable: ...


def optimize(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | torch.nn.Module | torch.export.ExportedProgram,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    target: str = "cpu",
    threads: int | None = None,
    budget: float | None = None,
    superopt: float | None = None,
    shapes: Shapes | Sequence[Shapes] | None = None,
    strict: bool = False,
    progress: Progress | bool | None = None,
    background: bool = False,
    **options: Any,
) -> Runnable | ModuleExecutable:
    """Optimize a model for this machine.

    Args:
        model: the path of an ONNX file, its bytes, an `onnx.ModelProto`, or a `torch.nn.Module` in
            evaluation mode or an `ExportedProgram` of PyTorch.
        example_inputs: for a PyTorch module only: a tensor, a tuple of arguments, or a dict of keyword
            arguments. The executable is built for their shapes and types.
        example_kwargs: for a PyTorch module only: keyword arguments in addition to `example_inputs`.
        target: the device to build for.
        threads: threads of the executable; by default all cores that this process may use.
        budget: seconds after which the executable is returned, with the best plan found so far.
        superopt: seconds for the search for kernels with several products or sums, such as normalizations.
        shapes: for unknown dimensions: shapes by input name or sizes by dimension name; a size may be a `range` of
            sizes, or the name of another dimension. Sizes that are not given are assumed, as a warning says. A
            sequence of such bindings gives one executable with a plan for each.
        strict: use only rewrites and algorithms that keep the order of operations, except within reductions.
        progress: whether to show the current step, the best plan so far and the remaining time on stderr, or a function
            that is called with each `korch.pipeline.Update`. By default they are shown on a terminal and in a notebook.
        background: return with a first plan, chosen by estimates, and search in a thread, for `budget` seconds;
            the plan that it finds replaces the first one between two calls. `wait()` waits for it. On CPUs only; until
            then, the model or the weights of the module must not be changed.
        **options: further fields of `korch.options.Options`.

    Returns:
        The executable. Call it with arrays, or use its `run` like that of an ONNX Runtime session; outputs are NumPy
        arrays. The executable of a PyTorch module is called like the module, with tensors, and returns what it returns.

    Raises:
        KorchError: the model, an option or the machine is not suitable; the message says what to do.
    """
    _refuse_unknown(options)
    record = Options(
        target=target,
        threads=default_threads() if threads is None else threads,
        budget_s=budget,
        strict=strict,
        superopt_s=superopt,
        **options,
    )
    with shown(progress, budget) as tell:
        is_served = background and has_background(record)
        return _optimized(model, (example_inputs, example_kwargs), record, shapes, tell, is_served=is_served)


def _optimized(
    model: Any,
    examples: tuple[Any, Mapping[str, Any] | None],
    options: Options,
    shapes: Shapes | Sequence[Shapes] | None,
    progress: Progress,
    *,
    is_served: bool,
) -> Runnable | ModuleExecutable:
    """Optimize a model of either kind.

    `examples`: the arguments and the keyword arguments of a module. `is_served`: return a first plan, and search on.
    """
    if not _is_torch_model(model):
        _check_onnx(model, has_examples=examples[0] is not None or bool(examples[1]))
        source = Path(model) if isinstance(model, os.PathLike) else model
        bindings = _bindings(shapes)
        if not is_served:
            return build(source, options, bindings, progress)

        def make(own: Options, tell: Progress, deadline: Deadline) -> Runnable:
            return build(source, own, bindings, tell, deadline)

        return cast(Runnable, BackgroundExecutable(make, options, progress))
    if shapes:
        raise OptionError("a module takes its shapes from the example inputs", where="option shapes")
    if options.state != "float32":
        raise OptionError("a module has no sessions", "option state", hint="Export it to an ONNX file")
    if len(options.isas) > 1:
        raise OptionError("a module is built for one instruction set", "option isa", hint="Export it to an ONNX file")
    from korch.pytorch.module import optimize_module

    if options.is_cuda and options.measure:
        require_device(options.target)
    return optimize_module(model, *examples, options, progress, is_served=is_served)


def _refuse_unknown(options: Mapping[str, Any]) -> None:
    """Refuse keyword arguments of `optimize` that are not fields of `Options`."""
    known = inspect.signature(optimize).parameters.keys() | {f.name for f in fields(Options)}
    known -= {"budget_s", "superopt_s", "model", "options"}
    if unknown := [name for name in options if name not in known]:
        raise unknown_option(unknown[0], known, "korch.optimize")


def _check_onnx(model: object, *, has_examples: bool) -> None:
    """Refuse example inputs for an ONNX model, and models of other types."""
    if has_examples:
        raise OptionError(
            "only modules of PyTorch take example inputs",
            where="example_inputs",
            hint="Bind the shapes of an ONNX model with shapes={name: shape}",
        )
    if not isinstance(model, str | os.PathLike | bytes | onnx.ModelProto):
        raise ModelError(
            f"the model is of type {type(model).__name__}",
            expected="the path of an ONNX file, its bytes, an onnx.ModelProto, or a module of "
            "PyTorch, which must be installed",
        )


def _bindings(shapes: Shapes | Sequence[Shapes] | None) -> list[dict[str, tuple[Bound, ...]]]:
    if shapes is None or isinstance(shapes, Mapping):
        return [_bound(shapes or {})]
    if isinstance(shapes, str) or not isinstance(shapes, Iterable):
        raise _unclear(shapes)
    return [_bound(binding) for binding in shapes]


def _bound(shapes: Shapes) -> dict[str, tuple[Bound, ...]]:
    if not isinstance(shapes, Mapping):
        raise _unclear(shapes)
    return {name: _shape(name, shape) for name, shape in shapes.items()}


def _shape(name: str, shape: Sequence[int | range] | int | range | str) -> tuple[Bound, ...]:
    """Return a shape as a tuple of Python integers and ranges; a single size becomes a shape of one dimension."""
    if isinstance(shape, range | str):
        return (_sizes(name, shape) if isinstance(shape, range) else shape,)
    try:
        return (operator.index(shape),)  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return tuple(_sizes(name, n) if isinstance(n, range) else operator.index(n) for n in shape)  # type: ignore[union-attr]
    except TypeError as error:
        raise _unclear({name: shape}) from error


def _sizes(name: str, sizes: range) -> Bound:
    """Return a range of sizes; a range with only one size is returned as this size."""
    if not sizes or sizes.step < 1:
        raise OptionError(f"{name!r} is {sizes!r}", where="option shapes", expected="sizes that grow, as range(1, 513)")
    return sizes if len(sizes) > 1 else sizes[0]


def _unclear(shapes: object) -> OptionError:
    return OptionError(
        f"{shapes!r} is no binding",
        where="option shapes",
        expected="like {'batch': 2} or {'x': (1, 3, 224, 224)}, or several of them",
    )


def build(
    source: ModelSource,
    options: Options,
    bindings: Sequence[Binding],
    progress: Progress | None = None,
    deadline: Deadline | None = None,
    watch: Watch | None = None,
) -> Runnable:
    """Optimize an ONNX model for one binding of its shapes, or for several.

    Args:
        source: a path, the bytes of an ONNX file, or an `onnx.ModelProto`.
        options: how to optimize.
        bindings: one or more; each has shapes by input name and sizes by dimension name. A binding with
            ranges of sizes must be the only one.
        progress: called with each step.
        deadline: the time at which the artifact must be on disk; by default the end of the budget, counted from now.
        watch: called after each stage.

    Raises:
        KorchError: the model, an option or the machine is not suitable; the message says what to do.
    """
    is_ranged = check_bindings(bindings)
    if options.is_cuda and (len(bindings) > 1 or is_ranged):
        raise UnsupportedError(
            "an artifact for a CUDA device has one plan", "option --shape", hint="Build an artifact for each binding"
        )
    if options.is_cuda and options.measure:
        require_device(options.target)
    deadline = deadline or Deadline.after(options.budget_s, time.monotonic())
    job = _Job(source, options, progress or untold, deadline, watch)
    if len(options.isas) == 1:
        return job.build(bindings)
    count = len(options.isas)
    found = {isa: job.part(i, count, "isa", isa=isa).build(bindings) for i, isa in enumerate(options.isas)}
    best = found[best_isa(found)]
    best.others = found
    return best


def check_bindings(bindings: Sequence[Binding]) -> bool:
    """Return whether there are ranges of sizes.

    Raises:
        OptionError: there is no binding, two are equal, or there are ranges and several bindings.
    """
    if not bindings:
        raise OptionError("there is no binding", where="option shapes", expected="at least one")
    if any(binding in bindings[:i] for i, binding in enumerate(bindings)):
        raise OptionError("two bindings are equal", where="option --shape", expected="different ones")
    is_ranged = any(map(has_range, bindings))
    if is_ranged and len(bindings) > 1:
        expected = "ranges, or sizes separated by commas"
        raise OptionError("there are ranges of sizes and several bindings", "option --shape", expected)
    return is_ranged


@dataclass(frozen=True, slots=True)
class _Job:
    """What all plans of one call of `build` have in common."""

    source: ModelSource
    options: Options
    progress: Progress
    deadline: Deadline
    watch: Watch | None

    def part(self, number: int, count: int, kind: str = "", **options: Any) -> _Job:
        """Return search `number` of `count` searches of a kind that share the time that is left."""
        own = replace(self.options.for_search(number, kind), **options)
        return replace(self, options=own, deadline=self.deadline.shared(count - number))

    def build(self, bindings: Sequence[Binding]) -> Runnable:
        """Return an executable for all bindings."""
        first = bindings[0]
        # Only a free dimension counts rows of a state; other models are not read twice.
        if has_range(first) and (found := self._stateful(read_model(self.source), first)):
            return found
        if any({PAST, ROWS} & binding.keys() for binding in bindings):
            loaded = read_model(self.source)
            bindings = [fixed_rows(loaded, binding) for binding in bindings]
        try:
            if len(bindings) > 1 or not is_open(first):
                return self._bound(bindings)
        except UnknownSizeError:
            if len(bindings) > 1:
                raise
        loaded = read_model(self.source)
        found = None if self.options.is_cuda else self._stateful(loaded, first)
        return found or self._assumed(loaded, fixed_rows(loaded, first))

    def _stateful(self, model: LoadedModel, binding: Binding) -> StatefulExecutable | None:
        """Optimize a model with states for sessions; return None if it has none, or if their rows are fixed."""
        sizes = state_sizes(model, binding)
        if sizes is None:
            return None
        if sizes.text:
            logger.warning("%s", sizes.text)
        record = model_record(self.source) if isinstance(self.source, str | Path) else ModelRecord()
        return optimize_stateful(sizes, self.options, self.progress, self.deadline, self.watch, record)

    def _assumed(self, model: LoadedModel, binding: Binding) -> Runnable:
        """Optimize a model for ranges of the sizes that the binding leaves open, or else for one size of each."""
        self._refuse_state()
        sizes = assumed(model.declared, binding)
        try:
            if not sizes:
                return self._bound([binding])
            if not (self.options.is_cuda or self.options.error):
                logger.warning("%s", assumed_text(sizes))
                return self._bound([{**binding, **sizes}])
        except (UnsupportedError, ModelError) as error:
            logger.warning("the model is optimized for one size of each dimension: %s", error)
        sizes = fixed(sizes)
        logger.warning("%s", assumed_text(sizes))
        return self._bound([{**binding, **sizes}])

    def _refuse_state(self) -> None:
        if self.options.state != "float32":
            raise OptionError(
                "the model is not optimized for sessions: it has no states, or their rows have one number",
                "option state",
                hint="Remove --state, or give a range of earlier rows such as --shape past=0..1023",
            )

    def _bound(self, bindings: Sequence[Binding]) -> Runnable:
        self._refuse_state()
        if any(map(has_range, bindings)):
            return self._ranged(bindings[0])
        count = len(bindings)
        found = [self.part(i, count)._static(static(binding)) for i, binding in enumerate(bindings)]
        if count == 1:
            return found[0]
        native = [executable for executable in found if isinstance(executable, Executable)]
        if len(native) < count:
            raise several_with_host()
        shaped.check_different(native)
        return ShapedExecutable(*combine(native, builder_of(self.options)))

    def _ranged(self, binding: Binding) -> RangedExecutable:
        source = onnx_source(self.source, binding)
        return optimize_ranges(source, self.options, self.progress, self.deadline, self.watch)

    def _static(self, shapes: Mapping[str, tuple[int, ...]]) -> Executable | CudaExecutable | HostedExecutable:
        try:
            return optimize_model(self.source, self.options, shapes, self.progress, self.deadline, self.watch)
        except (UnsupportedError, UnprovidedError):
            if not self.options.ablation.host:
                raise
        # A part of the model is not a graph of static tensors, or no provider supports its types.
        return optimize_with_host(self.source, self.options, shapes, self.progress, deadline=self.deadline)


def _is_torch_model(model: object) -> bool:
    """Return whether `model` is a PyTorch model. PyTorch is not imported: a caller with a module has imported it."""
    if "torch" not in sys.modules or isinstance(model, str | os.PathLike | bytes):
        return False
    from korch.frontend.torch import is_torch_model

    return is_torch_model(model)
