"""A graph of torch.compile -> a callable that runs it in Korch, or in PyTorch if Korch can't run it.

    torch.compile(module, backend="korch", options={"budget": 10})

PyTorch cuts a program into graphs and guards them. A graph is optimized at its first call: for all
sizes of its symbolic dimensions if it has any, else for the shapes of that call. Other shapes get
plans of their own. The first plan is chosen by estimates; the search goes on in a thread, and its plan is swapped in
between two calls. Parameters and buffers are constants of a plan: each call checks that they are
still the same tensors with the same contents.

What a graph writes to its inputs is computed as further results, and written after a run. A result that is a view of
an input is made from the input.

A graph runs in PyTorch if Korch can't run it, or can't reproduce its effects: gradients, random
numbers, and results that share memory. A `KorchFallbackWarning` then says so, once; `FALLBACKS` counts all such calls.

PyTorch cuts programs at nn.RNN, nn.LSTM and nn.GRU and runs them itself, without a word. So loading this module sets
`torch._dynamo.config.allow_rnn`, which PyTorch offers to no backend alone.
"""

import logging
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.symbolic_convert import TensorifyState
from torch.utils._sympy.symbol import SymT, symbol_is_type

from korch.errors import InputError, KorchError, ModelError, OptionError, ProviderError, UnsupportedError
from korch.frontend.torch import Exported, export_call
from korch.frontend.torch.alias import Aliases, aliases_of
from korch.frontend.torch.effects import shares_memory, written_inputs
from korch.frontend.torch.graph import (
    BoundGraph,
    FreeGraph,
    as_input,
    free_graph,
    inputs_of,
    like,
    numbers_of,
    shapes_of,
    with_tensors,
)
from korch.options import Options, unknown_option
from korch.pipeline.background import Make, has_background
from korch.pytorch.least import announce_call
from korch.pytorch.module import ModuleExecutable, build_module, build_ranged, served
from korch.report.progress import Progress, shown
from korch.system.deadline import Deadline

STATIC = "_dynamo_static_input_type"
"""The key in a placeholder's tensor_dict with which PyTorch marks a parameter or a buffer."""

torch._dynamo.config.allow_rnn = True

logger = logging.getLogger("korch.torch_backend")

DEFAULT_BUDGET_S = 30.0
"""The budget of a search, if none is given."""

MOST_BUDGETS = 4
"""No search of a graph is begun after the earlier ones have taken this many times the budget."""

DEFAULT_MAX_SHAPES = 8

DEFAULT_MAX_SIZE = 512
"""The largest size assumed for a symbolic dimension without an upper bound."""

LESS, LEAST_SIZE = 4, 32
"""The factor by which the largest size is reduced that the graph doesn't take, and the least that is tried."""

SAID: set[str] = set()
"""The warnings so far: PyTorch compiles a graph repeatedly, and each warning is issued once."""


FALLBACKS: Counter[str] = Counter()
"""The number of calls of graphs that ran in PyTorch, by the reason; a filter may hide warnings, but none of these."""

APART = "`torch.compiler.disable` on the part with it lets the other parts run in Korch"
"""What to do about a graph that can't be compiled, if the error does not say it."""


class KorchFallbackWarning(UserWarning):
    """A graph runs in PyTorch; the text says why."""


class KorchShapesWarning(UserWarning):
    """A graph with symbolic dimensions gets a plan for each shape; the text says why one plan can't serve all."""


def korch(
    graph: Any, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph of torch.compile.

    Args:
        graph: a torch.fx.GraphModule.
        example_inputs: its inputs, as PyTorch traced them.
        options: `budget` in seconds, `max_shapes`, `max_size`, `background`, and the fields of `korch.options.Options`.
        mode: a preset of PyTorch's; Korch has none, so only None and "default" are allowed.

    Returns:
        The callable that PyTorch calls instead of the graph.

    Raises:
        OptionError: there is no such option, or its value makes no sense.
    """
    if mode not in (None, "default"):
        raise OptionError(
            f"there is no mode {mode!r}", where="torch.compile", expected="none", hint="Pass options instead"
        )
    record, limits = _options(options or {})
    if record.budget_s is None:
        record = replace(record, budget_s=DEFAULT_BUDGET_S)
        _warn_once(
            f"each graph is searched for {DEFAULT_BUDGET_S:g} s, while its first plan is in use; torch.compile(..., "
            "options={'budget': SECONDS, 'background': False}) gives another budget, and waits for the search",
            logger.warning,
        )
    _fix_floats(graph)
    compiled = CompiledGraph(graph, record, limits)
    compiled.reason = _why_not(example_inputs) or compiled.aliases.reason
    return compiled


@dataclass(frozen=True)
class Limits:
    """How many plans a graph may have, and how large they are.

    Attributes:
        shapes: the most plans that are each for one set of shapes.
        size: the largest size assumed for a symbolic dimension without an upper bound.
        background: whether a first plan is used at once, and searched for a better one in a thread.
    """

    shapes: int = DEFAULT_MAX_SHAPES
    size: int = DEFAULT_MAX_SIZE
    background: bool = True


@dataclass(frozen=True, eq=False)
class _Plan:
    """An executable for one set of shapes or for ranges of them, and the weights that it was built from."""

    executable: ModuleExecutable
    weights: tuple[tuple[int, Any, int, int], ...]  # position, tensor, address, version
    free: FreeGraph | None = None
    given: frozenset[int] = frozenset()  # the positions of numbers that are passed as tensors

    def is_fresh(self, args: Sequence[Any]) -> bool:
        """Return whether the weights of a call are the plan's weights, unchanged."""
        return all(
            args[i] is weight and weight.data_ptr() == address and weight._version == version
            for i, weight, address, version in self.weights
        )

    def run(self, args: Sequence[Any], is_static: Sequence[bool]) -> Any:
        """Return the result of a call."""
        places = [i for i, static in enumerate(is_static) if not static] if self.free is None else self.free.tensors
        return self.executable(*(as_input(args[i]) if i in self.given else args[i] for i in places))


class CompiledGraph:
    """A graph that runs in Korch if possible. It may be called from several threads.

    Attributes:
        reason: why the whole graph runs in PyTorch; "" if it does not.
        aliases: the results that share memory.
    """

    def __init__(self, graph: Any, options: Options, limits: Limits) -> None:
        """Prepare a graph; nothing is optimized before it is called."""
        self.reason = ""
        self._graph, self._options, self._limits = graph, options, limits
        self._is_served = limits.background and has_background(options)
        self.aliases: Aliases = aliases_of(graph)
        self._static = [STATIC in (node.meta.get("tensor_dict") or {}) for node in inputs_of(graph)]
        self._written: frozenset[int] | None = None  # the inputs that it writes to; None before its first call
        self._numbers = numbers_of(graph)
        self._given = self._numbers  # the numbers that are passed as tensors
        self._plans: dict[Any, _Plan | str] = {}  # or why there is none
        self._ranges: list[_Plan] = []
        self._seen: list[list[Any]] = []  # the shapes of the calls for which ranges were searched
        self._has_range = True
        self._spent_s = 0.0
        self._lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """Run the graph."""
        if not self.reason and self._leaves_nothing(args):
            return self._graph(*args)  # views of inputs, numbers, or nothing
        plan = self.reason or self._plan(args)
        if isinstance(plan, str):
            return self._in_torch(plan, args)
        if self._written and shares_memory(args, self._written):
            return self._in_torch("an input that it writes to shares memory with another input", args)
        if not plan.is_fresh(args):
            reason = "a parameter or buffer was changed or replaced after it was compiled"
            return self._in_torch(f"{reason}; torch.compiler.reset() compiles anew", args)
        try:
            found = plan.run(args, self._static)
        except (InputError, ProviderError) as error:  # such as an index out of range; nothing has been written
            return self._in_torch(_reason(error), args)
        return self.aliases.joined(found, args)

    def _leaves_nothing(self, args: Sequence[Any]) -> bool:
        """Return whether the graph has neither a tensor to compute nor an input to write to."""
        if self._written is None:
            with self._lock:
                self._written = written_inputs(self._graph, args)
                self._static = [
                    static and i not in self._written and not args[i].is_inference()  # which do not count writes
                    for i, static in enumerate(self._static)
                ]
        return not self._written and self.aliases.is_whole

    def _in_torch(self, reason: str, args: Sequence[Any]) -> Any:
        """Run a call in PyTorch, and say why; not while PyTorch compiles, when a warning may be hidden."""
        FALLBACKS[reason] += 1
        self._warn(f"runs in PyTorch, not in Korch: {reason}", KorchFallbackWarning)
        return self._graph(*args)

    @property
    def plans(self) -> list[ModuleExecutable]:
        """The executables so far: those for ranges of sizes, and those for one set of shapes."""
        return [plan.executable for plan in (*self._ranges, *self._plans.values()) if isinstance(plan, _Plan)]

    def _plan(self, args: Sequence[Any]) -> _Plan | str:
        """Return the plan for a call, or why it runs in PyTorch."""
        if (plan := self._ranged(args)) is not None or (key := self._key(args)) in self._plans:
            return plan or self._plans[key]
        with self._lock:
            if (plan := self._ranged(args)) is None and self._key(args) not in self._plans:
                self._search(args)
        return self._ranged(args) or self._plans[self._key(args)]

    def _key(self, args: Sequence[Any]) -> Any:
        """Return what a plan for one set of shapes depends on."""
        return tuple(None if i in self._given else _key(arg) for i, arg in enumerate(args))

    def _ranged(self, args: Sequence[Any]) -> _Plan | None:
        """Return the plan for ranges that include the sizes of a call; None if there is none."""
        return next((plan for plan in self._ranges if plan.free is not None and plan.free.takes(args)), None)

    def _search(self, args: Sequence[Any]) -> None:
        """Search a plan for a call: for ranges of sizes if possible, else for its shapes."""
        begun_s, budget_s = time.monotonic(), self._options.budget_s
        deadline = Deadline.after(budget_s, begun_s)
        with shown(None, budget_s) as progress:
            plan = None
            if self._has_range and all(plan.free is not None and plan.free.is_left(args) for plan in self._ranges):
                plan = self._for_ranges(args, progress, deadline)
            if plan is not None:
                self._ranges.append(plan)
            else:
                self._plans[self._key(args)] = self._for_shapes(args, progress, deadline)
        self._spent_s += time.monotonic() - begun_s

    def _made(self, make: Make[ModuleExecutable], progress: Progress, deadline: Deadline) -> ModuleExecutable:
        """Return a plan; with a search in the background, a first one."""
        if self._is_served:
            return served(make, self._options, progress)
        return make(self._options, progress, deadline)

    def _weights(self, args: Sequence[Any]) -> dict[int, Any]:
        return {i: arg for i, (arg, static) in enumerate(zip(args, self._static, strict=True)) if static}

    def _bound(self) -> Any:
        """Return the graph that is optimized."""
        return with_tensors(self.aliases.graph) if self._given else self.aliases.graph

    def _for_ranges(self, args: Sequence[Any], progress: Progress, deadline: Deadline) -> _Plan | None:
        """Return a plan for all sizes of the symbolic dimensions; None if there are none or no such plan exists."""
        weights, most, reason = self._weights(args), self._limits.size, ""
        while self._has_range:
            try:
                free = free_graph(self._bound(), args, weights, most, self._seen, self._given)
                self._has_range = free is not None
                if free is None or (reason and self._numbers & free.numbers.keys()):
                    break
                module = free.module
                if not self._is_served:
                    announce_call(module.module, module.args, module.kwargs, module.dimensions, self._options, deadline)
                _refuse_states(module.exported)
                made = self._made(partial(build_ranged, module), progress, deadline)
                self._seen.append(shapes_of(args))
                return _Plan(made, _noted(weights), free, self._given)
            except OptionError:
                raise
            except ModelError as error:  # such as a table of positions that ends before the largest size
                most //= LESS
                self._has_range, reason = most >= LEAST_SIZE, _reason(replace(error, hint=""))
            except KorchError as error:
                self._has_range, reason = bool(self._given), _reason(replace(error, hint=""))
                self._given = frozenset()  # a number may be the size of a tensor in the graph
        if reason:
            self._has_range, self._given = False, self._numbers
            self._warn(f"gets a plan for each shape: {reason}", KorchShapesWarning)
        return None

    def _for_shapes(self, args: Sequence[Any], progress: Progress, deadline: Deadline) -> _Plan | str:
        """Return a plan for inputs with these shapes, or why they run in PyTorch."""
        if len(self._plans) >= self._limits.shapes:
            return (
                f"it was called with more than {self._limits.shapes} different shapes; "
                "the option max_shapes allows more"
            )
        budget_s = self._options.budget_s or 0.0
        if self._spent_s > MOST_BUDGETS * budget_s:
            return (
                f"the searches for its shapes have taken {MOST_BUDGETS} times the budget of {budget_s:g} s; "
                "a larger budget allows more"
            )
        weights = self._weights(args)
        while True:
            try:
                dynamic = [(i, arg) for i, arg in enumerate(args) if not self._static[i]]
                with torch.inference_mode(False), torch.no_grad():
                    example = [like(as_input(arg) if i in self._given else arg) for i, arg in dynamic]
                    bound = BoundGraph(self._bound(), weights, {}, {})
                    if not self._is_served:
                        announce_call(bound, example, {}, (), self._options, deadline)
                    exported = export_call(bound, example, {}, "graph")
                _refuse_states(exported)
                made = self._made(partial(build_module, exported), progress, deadline)
                return _Plan(made, _noted(weights), given=self._given)
            except OptionError:
                raise
            except KorchError as error:
                if not self._given:
                    return _reason(replace(error, hint=error.hint or APART))
                self._given = frozenset()  # a number may be the size of a tensor in the graph

    def _warn(self, what: str, kind: type[UserWarning]) -> None:
        count = sum(node.op.startswith("call") for node in self._graph.graph.nodes)
        _warn_once(what, lambda text: warnings.warn(f"a graph with {count} operations {text}", kind, stacklevel=5))


def _refuse_states(exported: Exported) -> None:
    """Refuse a graph that writes to a weight in a way that the operation does not tell (`written_inputs`)."""
    if exported.effects.states:
        raise UnsupportedError(f"it writes to {next(iter(exported.effects.states))!r}", where="graph")


def _warn_once(text: str, warn: Callable[[str], None]) -> None:
    if text not in SAID:
        SAID.add(text)
        warn(text)


def _reason(error: KorchError) -> str:
    """Return an error as one line."""
    return " ".join(str(error).split())


def _fix_floats(graph: Any) -> None:
    """Trace a graph again if it reads Python's floats, so that they are constants on which PyTorch guards.

    With dynamic shapes, PyTorch passes the floats of a program, such as the epsilon of a normalization, as tensors.

    Raises:
        TensorifyScalarRestartAnalysis: it reads floats; PyTorch catches this, and traces it again.
    """
    memos = (getattr(node.meta.get("example_value"), "item_memo", None) for node in inputs_of(graph))
    symbols = [memo.node._expr for memo in memos if isinstance(memo, torch.SymFloat)]
    if names := [symbol.name for symbol in symbols if symbol.is_Symbol and symbol_is_type(symbol, SymT.FLOAT)]:
        for name in names:
            TensorifyState.specialize(name)
        raise TensorifyScalarRestartAnalysis


def _noted(weights: Mapping[int, Any]) -> tuple[tuple[int, Any, int, int], ...]:
    return tuple((i, weight, weight.data_ptr(), weight._version) for i, weight in weights.items())


def _options(options: Mapping[str, Any]) -> tuple[Options, Limits]:
    given = dict(options)
    limits = Limits(
        _positive("max_shapes", given.pop("max_shapes", DEFAULT_MAX_SHAPES), "number of shapes"),
        _positive("max_size", given.pop("max_size", DEFAULT_MAX_SIZE), "size"),
        bool(given.pop("background", True)),
    )
    for name in {"budget", "superopt"} & given.keys():
        given[f"{name}_s"] = given.pop(name)
    known = [field.name for field in fields(Options)]
    if unknown := [name for name in given if name not in known]:
        own = ["budget", "superopt", "max_shapes", "max_size", "background"]
        raise unknown_option(unknown[0], [*own, *known], "torch.compile")
    return Options(**given), limits


def _positive(name: str, value: Any, what: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise OptionError(f"the value {value!r} is no {what}", where=f"option {name}", expected="at least 1")
    return value


def _why_not(example_inputs: Sequence[Any]) -> str:
    """Return why a graph must run in PyTorch; "" if no reason is known."""
    tensors = [arg for arg in example_inputs if isinstance(arg, torch.Tensor)]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return "it needs gradients; call it under torch.no_grad() or torch.inference_mode()"
    if torch.is_autocast_enabled("cpu"):
        return "torch.autocast is on; convert the module instead, such as by .to(torch.bfloat16)"
    return ""


def _key(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return (tuple(arg.shape), arg.dtype, tuple(arg.stride()))
    return (type(arg), arg)
