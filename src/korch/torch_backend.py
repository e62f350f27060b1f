"""A graph of torch.compile -> a callable that runs it in Korch, or in PyTorch where it must.

    torch.compile(module, backend="korch", options={"budget": 10})

PyTorch cuts a program into graphs and guards them. A graph is optimized when it is first called,
for the shapes of that call; further shapes get plans of their own. Parameters and buffers are
constants of a plan: each call checks that they are still the same tensors with the same contents.

A graph runs in PyTorch, which is said once as a `KorchFallbackWarning`, if Korch can't run it, or
could not run it with the same effects: gradients, random numbers, writes to inputs, and results
that share memory.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from korch.errors import KorchError, OptionError
from korch.frontend.torch import export_call
from korch.options import Options, unknown_option
from korch.torch_module import ModuleExecutable, build_module

STATIC = "_dynamo_static_input_type"
"""With this key in a placeholder's tensor_dict, PyTorch says: a parameter or a buffer."""

DEFAULT_MAX_SHAPES = 8

SAID: set[str] = set()
"""The warnings so far: PyTorch compiles one graph often, and each reason is said once."""


class KorchFallbackWarning(UserWarning):
    """A graph runs in PyTorch; the text says why."""


def korch(
    graph: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph of torch.compile.

    Args:
        graph: a torch.fx.GraphModule.
        example_inputs: its inputs, as PyTorch traced them.
        options: `budget` in seconds, `max_shapes`, and the fields of `korch.options.Options`.
        mode: PyTorch's presets; there is none for Korch.

    Returns:
        What PyTorch calls instead of the graph.

    Raises:
        OptionError: there is no such option, or its value makes no sense.
    """
    if mode not in (None, "default"):
        raise OptionError(
            f"there is no mode {mode!r}", where="torch.compile", expected="none", hint="Pass options instead"
        )
    record, max_shapes = _options(options or {})
    compiled = CompiledGraph(graph, record, max_shapes)
    if reason := _why_not(graph, example_inputs):
        compiled.give_up(reason)
    return compiled


@dataclass(frozen=True, eq=False)
class _Plan:
    """An executable for one set of shapes, and the weights that it was built from."""

    executable: ModuleExecutable
    weights: tuple[tuple[int, Any, int, int], ...]  # position, tensor, address, version

    def is_fresh(self, args: Sequence[Any]) -> bool:
        """Return whether the weights of a call are those of the plan, unchanged."""
        return all(
            args[i] is weight and weight.data_ptr() == address and _version(weight) == version
            for i, weight, address, version in self.weights
        )


class CompiledGraph:
    """A graph that runs in Korch where it can. It may be called from several threads.

    Attributes:
        reason: why the whole graph runs in PyTorch; "" if it does not.
    """

    def __init__(self, graph: Any, options: Options, max_shapes: int) -> None:
        """Prepare a graph; nothing is optimized before it is called."""
        self.reason = ""
        self._graph, self._options, self._max_shapes = graph, options, max_shapes
        self._static = [STATIC in (node.meta.get("tensor_dict") or {}) for node in _inputs(graph)]
        self._names = [node.name for node in _inputs(graph)]
        self._plans: dict[Any, _Plan | None] = {}
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        if self.reason:
            return self._graph(*args)
        key = tuple(map(_key, args))
        if key not in self._plans:
            with self._lock:
                if key not in self._plans:
                    self._plans[key] = self._plan(args)
        plan = self._plans[key]
        if plan is None:
            return self._graph(*args)
        if not plan.is_fresh(args):
            self._say(
                "a parameter or buffer was changed or replaced after it was compiled; "
                "torch.compiler.reset() compiles anew"
            )
            return self._graph(*args)
        dynamic = [arg for arg, static in zip(args, self._static, strict=True) if not static]
        return plan.executable(*dynamic)

    @property
    def plans(self) -> list[ModuleExecutable]:
        """The executables so far, one for each set of shapes."""
        return [plan.executable for plan in self._plans.values() if plan is not None]

    def give_up(self, reason: str) -> None:
        """Run the whole graph in PyTorch from now on, and say why."""
        self.reason = reason
        self._say(reason)

    def _plan(self, args: Sequence[Any]) -> _Plan | None:
        """Return a plan for inputs like these; None if they are for PyTorch."""
        if len(self._plans) >= self._max_shapes:
            self._say(
                f"it was called with more than {self._max_shapes} different shapes; the option max_shapes allows more"
            )
            return None
        weights = [
            (i, arg, arg.data_ptr(), _version(arg))
            for i, (arg, static) in enumerate(zip(args, self._static, strict=True))
            if static
        ]
        try:
            with torch.inference_mode(False), torch.no_grad():
                bound = _Bound(self._graph, self._names, {i: w for i, w, *_ in weights})
                example = [_like(a) for a, s in zip(args, self._static, strict=True) if not s]
                exported = export_call(bound, example, {}, "graph")
            return _Plan(build_module(exported, self._options), tuple(weights))
        except OptionError:
            raise
        except KorchError as error:
            self._say(str(error))
            return None

    def _say(self, reason: str) -> None:
        count = sum(node.op.startswith("call") for node in self._graph.graph.nodes)
        text = f"a graph with {count} operations runs in PyTorch, not in Korch: {reason}"
        if text not in SAID:
            SAID.add(text)
            warnings.warn(text, KorchFallbackWarning, stacklevel=3)


class _Bound(torch.nn.Module):  # type: ignore[misc]
    """A graph with its weights bound, so that they are constants of what is exported."""

    def __init__(self, graph: Any, names: Sequence[str], weights: Mapping[int, Any]) -> None:
        super().__init__()
        self.graph = graph
        self._of = {i: f"weight_{names[i]}" for i in weights}
        self._count = len(names)
        for i, weight in weights.items():
            if isinstance(weight, torch.nn.Parameter):
                self.register_parameter(self._of[i], weight)
            else:
                self.register_buffer(self._of[i], weight)

    def forward(self, *dynamic: Any) -> Any:
        rest = iter(dynamic)
        return self.graph(*(getattr(self, self._of[i]) if i in self._of else next(rest) for i in range(self._count)))


def _options(options: Mapping[str, Any]) -> tuple[Options, int]:
    given = dict(options)
    max_shapes = given.pop("max_shapes", DEFAULT_MAX_SHAPES)
    for name in {"budget", "superopt"} & given.keys():
        given[f"{name}_s"] = given.pop(name)
    known = [field.name for field in fields(Options)]
    if unknown := [name for name in given if name not in known]:
        raise unknown_option(unknown[0], ["budget", "superopt", "max_shapes", *known], "torch.compile")
    if not isinstance(max_shapes, int) or max_shapes < 1:
        raise OptionError(
            f"the value {max_shapes!r} is no number of shapes", where="option max_shapes", expected="at least 1"
        )
    return Options(**given), max_shapes


def _why_not(graph: Any, example_inputs: Sequence[Any]) -> str:
    """Return why a graph must run in PyTorch; "" if nothing is known against it."""
    tensors = [arg for arg in example_inputs if isinstance(arg, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it needs gradients; call it under torch.no_grad() or torch.inference_mode()"
    if torch.is_autocast_enabled("cpu"):
        return "torch.autocast is on"
    given = {_storage(node) for node in _inputs(graph)} - {None}
    seen: list[tuple[Any, int, int]] = []
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    for node in output.all_input_nodes:
        storage = _storage(node)
        if storage is None:
            continue
        if storage in given:
            return "a result shares memory with an input"
        tensor = node.meta["example_value"]
        span = (storage, *_span(tensor))
        if any(span[0] == s and span[1] < stop and start < span[2] for s, start, stop in seen):
            return "two results share memory"
        seen.append(span)
    return ""


def _inputs(graph: Any) -> list[Any]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def _storage(node: Any) -> Any:
    """Return what tells the memory of a node's tensor from others'; None if it is no tensor."""
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _span(tensor: Any) -> tuple[int, int]:
    """Return the first element of a tensor in its memory and the one behind its last."""
    start, sizes = _size(tensor.storage_offset()), list(map(_size, tensor.shape))
    if 0 in sizes:
        return start, start
    reach = ((n - 1) * _size(s) for n, s in zip(sizes, tensor.stride(), strict=True))
    return start, start + sum(reach) + 1


def _size(size: Any) -> int:
    """Return a size; of a symbolic one that of the example, for which no guard is made."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def _key(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return (tuple(arg.shape), arg.dtype, tuple(arg.stride()))
    return (type(arg), arg)


def _like(arg: Any) -> Any:
    """Return a tensor of the same form with no history; what is no tensor is returned as it is."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)


def _version(tensor: Any) -> int:
    """Return the number of writes to a tensor; inference tensors do not count theirs."""
    return 0 if tensor.is_inference() else int(tensor._version)
