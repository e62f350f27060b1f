"""Exports an nn.Module or ExportedProgram as an ONNX model with flat tensors as inputs and outputs.

The module is wrapped so that it takes and returns only tensors, traced by `torch.export`, and
translated by PyTorch's ONNX exporter. Its weights are passed on without a copy. A module whose trace
would not compute the same is refused: in training mode, or with random numbers. New contents of inputs and
buffers that it writes to are further results (`korch.frontend.torch.effects`).
"""

import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._dynamo.convert_frame import compile_lock
from torch.utils import _pytree as pytree

from korch.errors import ModelError, UnsupportedError, quoted
from korch.frontend.onnx import HeldModel
from korch.frontend.torch.convert import decomposed, to_held_model
from korch.frontend.torch.decompose import decompositions
from korch.frontend.torch.effects import NO_EFFECTS, Effects, expose_writes, storage_of
from korch.frontend.torch.experts import experts_as_batches
from korch.frontend.torch.samples import ModuleInputs, samples
from korch.frontend.torch.ties import FirstOfEqual
from korch.frontend.torch.tree import Arguments, Results, Trees
from korch.frontend.torch.trouble import export_trouble, path_of, random_operator

TRACING = compile_lock
"""Tracing changes global state of PyTorch, and torch.compile traces too, so both take this lock."""

NO_AXES: Mapping[tuple[int, int], Any] = {}


@dataclass(frozen=True, eq=False)
class Exported:
    """A module as ONNX."""

    # the model, with an input for each tensor of a call and each state, and an output for each distinct tensor of its
    # result and for each new content of a tensor
    model: HeldModel
    trees: Trees  # the forms of its arguments and of its results
    program: Any  # the ExportedProgram that it was translated from
    tensors: Sequence[Any]  # the tensors of the example call, and the states
    run: Callable[[Sequence[Any]], list[Any]]  # calls the module; returns what the model returns
    # the shapes of the model's inputs by name, if the model leaves sizes open
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    effects: Effects = NO_EFFECTS  # what the module writes to

    def samples(self, limit_s: float) -> Iterator[ModuleInputs]:
        """Yield inputs with the results of the module itself; no further inputs are made after `limit_s` seconds."""
        return samples(self.program, self.tensors, self.run, limit_s)


class _Flat(torch.nn.Module):  # type: ignore[misc]
    """A module that takes and returns flat tensors.

    It passes the form of each result to `note`, because an export undoes changes to the module's own attributes.
    """

    def __init__(self, module: Any, arguments: Arguments, note: Callable[[Results], None]) -> None:
        super().__init__()
        self.module = module
        self.arguments = arguments
        self.note = note

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        args, kwargs = self.arguments.nest(tensors)
        results, found = Results.of(self.module(*args, **kwargs))
        self.note(results)
        return tuple(found)


def is_torch_model(model: Any) -> bool:
    """Return whether a model is an nn.Module or an ExportedProgram."""
    return isinstance(model, torch.nn.Module | torch.export.ExportedProgram)


def export_module(model: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None = None) -> Exported:
    """Return a module as ONNX, for calls like the given one.

    `args`: positional arguments of an example call; None for those that an ExportedProgram was exported with.

    Raises:
        ModelError: the module is in training mode, or returns no tensor.
        UnsupportedError: it is no function of its arguments, PyTorch can't export it, or a part of
            what is needed is not installed.
    """
    return export_call(*example_call(model, args, kwargs or {}), type(model).__name__)


def export_call(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    name: str,
    free: Mapping[tuple[int, int], Any] = NO_AXES,
) -> Exported:
    """Return a module as ONNX, for calls like the given one, without checking that it is in evaluation mode.

    `args`: positional arguments of an example call. `free`: the torch.export.Dim of each axis that may have other sizes
    than in the example call, by the number of the tensor and the axis.

    Raises:
        ModelError: it returns no tensor.
        UnsupportedError: it is no function of its arguments, PyTorch can't export it, or a part of
            what is needed is not installed.
    """
    arguments, tensors = Arguments.of(args, kwargs)
    results: list[Results] = []
    flat = _Flat(module, arguments, results.append)
    require_cpu([*module.parameters(), *module.buffers(), *tensors], name)
    with TRACING, _quiet(), torch.no_grad(), experts_as_batches(flat):
        program = _traced(flat, tensors, name, free)
        _refuse_random(program, name)
        _refuse_complex(program, name)
        effects = expose_writes(program, flat, len(tensors), name)
        if not results or not (results[-1].names or effects.written):
            raise ModelError("it returns no tensor", where=f"module {name}")
        inputs = [*arguments.names(module), *effects.states]
        outputs = [*results[-1].names, *(f"new.{inputs[i]}" for i in effects.written)]
        held = to_held_model(program, name, inputs, outputs)
    trees = Trees(arguments, results[-1])
    given = [*tensors, *(state.detach().clone() for state in effects.states.values())]
    return Exported(held, trees, program, given, partial(_run, module, trees, effects), effects=effects)


def _run(module: Any, trees: Trees, effects: Effects, tensors: Sequence[Any]) -> list[Any]:
    """Call a module with these states; return the distinct tensors of its result and what it has written."""
    states = list(effects.states.values())
    given = [tensor.detach().clone() for tensor in tensors]
    before, count = [state.clone() for state in states], len(given) - len(states)
    args, kwargs = trees.arguments.nest(given[:count])
    with torch.no_grad(), warnings.catch_warnings(), FirstOfEqual():
        warnings.simplefilter("ignore")
        try:
            for state, tensor in zip(states, given[count:], strict=True):
                state.copy_(tensor)
            leaves = pytree.tree_leaves(module(*args, **kwargs))
            found = [leaves[trees.results.tensors.index(k)] for k in range(len(trees.results.names))]
            found += [[*given[:count], *states][i] for i in effects.written]
            return [tensor.clone() for tensor in found] if states else found
        finally:
            for state, tensor in zip(states, before, strict=True):
                state.copy_(tensor)


def example_call(
    model: Any, args: Sequence[Any] | None, kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Return a module, and the positional and keyword arguments of its example call, as `export_module` takes them.

    Raises:
        ModelError: the module is in training mode, or there is no example.
    """
    if isinstance(model, torch.export.ExportedProgram):
        if args is None:
            if model.example_inputs is None:
                raise _no_example("an ExportedProgram without example inputs")
            args, kwargs = model.example_inputs
        return model.module(), args, kwargs
    if args is None:
        raise _no_example("a module")
    # An exported graph has no mode and refuses eval(). Its operators define what it does, and they are checked.
    is_graph = isinstance(model, torch.fx.GraphModule) and "eval" in vars(model)
    training = [] if is_graph else [path for path, part in model.named_modules() if part.training]
    if training:
        path = f": {training[0]}" if training[0] else ""
        raise ModelError(
            "it is in training mode",
            where=f"module {type(model).__name__}{path}",
            expected="evaluation mode",
            hint="Call module.eval() first",
        )
    return model, args, kwargs


def _no_example(what: str) -> ModelError:
    return ModelError(
        f"{what} can't be optimized without example inputs", hint="Call korch.optimize(module, example_inputs)"
    )


def require_cpu(tensors: Sequence[Any], name: str) -> None:
    """Refuse tensors that are not dense or not on the CPU.

    Raises:
        UnsupportedError: there is such a tensor.
    """
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            found = str(tensor.device) if tensor.device.type != "cpu" else str(tensor.layout)
            raise UnsupportedError(
                f"a tensor of it is on {found}"
                if tensor.device.type != "cpu"
                else f"a tensor of it is stored as {found}",
                where=f"module {name}",
                expected="dense tensors on the CPU",
                hint="Call module.cpu() first" if tensor.device.type != "cpu" else "",
            )


def _traced(flat: _Flat, tensors: Sequence[Any], name: str, free: Mapping[tuple[int, int], Any]) -> Any:
    # Two arguments that are the same tensor would be traced as one input; views keep them distinct.
    own = [tensor.detach().view_as(tensor) for tensor in tensors]
    axes = (tuple({axis: free[k, axis] for k, axis in free if k == i} for i in range(len(own))),) if free else None
    flat.training = False
    try:
        program = torch.export.export(flat, tuple(own), strict=False, dynamic_shapes=axes)
        return decomposed(program, decompositions())
    except Exception as error:  # third-party code may raise anything
        shared = _shared_constant(flat) if isinstance(error, AssertionError) else ()
        if not shared:
            raise export_trouble(error, None, name) from error
        raise UnsupportedError(
            f"its tensors {quoted(shared)} have the same memory, so that PyTorch can't export what writes to it",
            where=f"module {name}",
            expected="one buffer for each state",
            hint="torch.export makes two of one with strict=False; use strict=True",
        ) from error


def _shared_constant(flat: _Flat) -> tuple[str, ...]:
    """Return the names of a buffer and of a constant of an exported graph that share memory; none if there are none."""
    buffers = {storage_of(buffer): name for name, buffer in flat.named_buffers()}
    for path, part in flat.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and storage_of(value) in buffers:
                names = buffers[storage_of(value)], f"{path}.{name}"
                return tuple(own.removeprefix("module.") for own in names)
    return ()


def _refuse_random(program: Any, name: str) -> None:
    if found := random_operator(program):
        operator, path = found
        raise UnsupportedError(
            f"the operator {operator} draws random numbers",
            where=f"module {name}{path}",
            expected="a module that returns the same for the same inputs",
            hint="Pass random tensors as inputs",
        )


def _refuse_complex(program: Any, name: str) -> None:
    """Refuse inputs and results of complex numbers, which ONNX's operators do not have."""
    ends = {*program.graph_signature.user_inputs, *program.graph_signature.user_outputs}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.name in ends and isinstance(value, torch.Tensor) and value.is_complex():
            raise UnsupportedError(
                f"the {'input' if node.op == 'placeholder' else 'result'} {node.name!r} has complex numbers",
                where=f"module {name}{path_of(node)}",
                expected="real numbers",
                hint="Pass and return real and imaginary parts: torch.view_as_complex, torch.view_as_real",
            )


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the exporter's own log messages, warnings, and the graphs that it prints when it fails."""
    loggers = [
        logging.getLogger(n)
        for n in (
            "torch.onnx",
            "torch.onnx._internal.exporter",
            "torch.fx.experimental.symbolic_shapes",
            "onnxscript",
            "onnx_ir",
        )
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        sys.stdout.flush()
