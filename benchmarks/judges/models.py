"""The models of PyTorch's benchmark runners through torch.compile: timm, torchvision and transformers.

Each is called with two inputs, in eager mode and compiled. A result is right if it is within the tolerance of
`docs/numerics.md`: 1e-3 of the largest element from eager mode, or at most twice eager mode's error against float64.
That error is the largest of several runs, in which the results of modules are disturbed like by a few roundings.
The packages timm and torchvision are in no extra, because their versions follow PyTorch's.
"""

import copy
import resource
import shutil
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from benchmarks.judges import OF_MODELS, Judge
from benchmarks.judges.lists import Listed, build, items
from korch import torch_backend
from korch.frontend.torch.ties import FirstOfEqual
from korch.numerics import FACTOR, SAMPLES, TOLERANCE, difference

OPTIONS = {"budget": 4, "background": False, "threads": 1}
"""How a graph is optimized to be judged."""

TIMED = {"budget": 20, "background": False, "threads": 2}
"""How a graph is optimized to be timed."""

TURN_S, TURNS = 0.3, 9
"""How long the calls of one engine are timed at a stretch, and how often."""

SETTLED_S = 0.02
"""How long the idle threads of an engine may spin after a call, during which they would slow another engine down."""

KINDS = ("of_largest", "rms")
"""The kinds of errors that are limited."""

EXACT = (
    torch.nn.Identity,
    torch.nn.Dropout,
    torch.nn.ReLU,
    torch.nn.MaxPool2d,
    torch.nn.Flatten,
    torch.nn.Embedding,
    torch.nn.ZeroPad2d,
)
"""Modules whose results are not rounded."""

ROUNDINGS = 4 * 2.0**-24
"""The largest change of an element in a disturbed run, relative to it: four roundings of float32."""

MEMORY = 14 << 30
"""The most address space of a process, in bytes."""


def _called(model: Any, given: dict[str, Any]) -> list[Any]:
    """Return the tensors and numbers that a model returns."""
    rest = {key: value for key, value in given.items() if key != "args"}
    with torch.no_grad():
        found = model(*given.get("args", ()), **rest)
    return [leaf for leaf in pytree.tree_leaves(_plain(found)) if isinstance(leaf, torch.Tensor | float | int)]


def _plain(value: Any) -> Any:
    """Return a result in lists; the caches of transformers are no containers for PyTorch."""
    if hasattr(value, "to_legacy_cache") or hasattr(value, "layers"):
        return [[vars(layer)] for layer in getattr(value, "layers", [])]
    if isinstance(value, dict):
        return [_plain(value[key]) for key in value]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return [vars(value)] if hasattr(value, "conv_states") else value


def wrong(
    found: Sequence[Any],
    own: Sequence[Any],
    exact: Callable[[], Sequence[Any]],
    disturbed: Callable[[int], Sequence[Any]] | None = None,
) -> str:
    """Return how results differ from eager mode's by more than the tolerance; "" if they don't.

    `own`: eager mode's results. `exact`: returns those in float64. `disturbed`: returns results of a run that is
    disturbed by random numbers of a seed.
    """
    if len(found) != len(own):
        return f"{len(found)} results instead of {len(own)}"
    for i, (a, b) in enumerate(zip(map(_array, found), map(_array, own), strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"result {i} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        off = difference(a, b).of_largest
        if off == 0 or (a.dtype.kind == "f" and off <= TOLERANCE):
            continue
        e = _array(exact()[i])
        error, mine = difference(a, e, b), [difference(b, e, b)]
        runs = iter(range(SAMPLES if disturbed is not None and a.dtype.kind == "f" else 0))
        while error.of_largest > TOLERANCE:
            finite = [run for run in mine if run.of_largest < np.inf]
            limit, rms = (FACTOR * max((getattr(run, kind) for run in finite), default=0) for kind in KINDS)
            if error.of_largest <= limit and error.rms <= rms:
                break
            if (seed := next(runs, None)) is None or disturbed is None:
                return f"result {i} is off by {off:.2e}; from float64 by {error.of_largest:.2e}, limit {limit:.2e}"
            mine.append(difference(_array(disturbed(seed)[i]), e, b))
    return ""


def _array(leaf: Any) -> Any:
    return np.asarray(
        leaf.detach().float() if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bfloat16 else leaf
    )


def _disturbed(listed: Listed, given: dict[str, Any], seed: int) -> list[Any]:
    """Return eager mode's results if each result of a module that rounds is changed like by four roundings."""
    torch.manual_seed(seed)

    def changed(x: Any) -> Any:
        return x * (1 + ROUNDINGS * (2 * torch.rand_like(x) - 1)) if x.is_floating_point() else x

    def disturb(module: Any, inputs: Any, found: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, changed, found)

    leaves = [module for module in listed.module.modules() if not list(module.children())]
    handles = [module.register_forward_hook(disturb) for module in leaves if not isinstance(module, EXACT)]
    try:
        return _called(listed.module, given)
    finally:
        for handle in handles:
            handle.remove()


def _in_float64(listed: Listed, given: dict[str, Any]) -> list[Any]:
    model = copy.deepcopy(listed.module).double()
    wide = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, given)
    torch.set_default_dtype(torch.float64)  # tables that a model computes
    try:
        return _called(model, wide)
    finally:
        torch.set_default_dtype(torch.float32)


def _run(item: str) -> dict[str, Any]:
    library = item.partition("/")[0]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    facts: dict[str, Any] = {}
    verdict, text = _judge(item, facts)
    return {
        "item": item,
        "counts": {library: {verdict: 1}},
        "texts": [f"{verdict}: {text}", *torch_backend.FALLBACKS],
    } | facts


def _judge(item: str, facts: dict[str, Any]) -> tuple[str, str]:
    """Return the verdict on a model, and a message; add what was found to `facts`."""
    try:
        listed = build(item)
        calls = [listed.inputs(seed) for seed in (1, 2)]
        with FirstOfEqual():
            own = [_called(listed.module, given) for given in calls]
    except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
        return "none", f"{type(error).__name__}: {error}"[:300]
    facts["cut"] = listed.cut
    facts["parameters"] = sum(p.numel() for p in listed.module.parameters())
    compiled, begun_s = torch.compile(listed.module, backend="korch", options=OPTIONS), time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = [_called(compiled, given) for given in calls]
        except Exception as error:  # noqa: BLE001 - a crash, which is what is looked for
            where = [
                f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-6:]
            ]
            return "crash", f"{type(error).__name__}: {error} {where}"[:800]
    facts |= {
        "seconds": round(time.monotonic() - begun_s, 1),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "break_reasons": [reason[:200] for reason in counters["graph_break"]],
        "fallbacks": dict(torch_backend.FALLBACKS),
    }
    for mine, right, given in zip(found, own, calls, strict=True):
        exact, disturbed = partial(_in_float64, listed, given), partial(_disturbed, listed, given)
        if text := wrong(mine, right, exact, disturbed):
            return "wrong", text
    reasons = " ".join(torch_backend.FALLBACKS)
    is_noticed = "computes something else" in reasons or "something else than it computes" in reasons
    verdict = "noticed" if is_noticed else "partly" if reasons or not facts["graphs"] else "right"
    return verdict, f"{facts['graphs']} graphs, {facts['breaks']} breaks, {facts['seconds']} s"


def _time(item: str) -> dict[str, float]:
    """Return the median over turns of the time of a call in milliseconds, by engine; the engines take turns."""
    torch.set_num_threads(TIMED["threads"])
    listed = build(item)
    given, frozen = listed.inputs(1), {"freezing": True}
    engines = {
        "eager": listed.module,
        "korch": torch.compile(listed.module, backend="korch", options=TIMED),
        "inductor": torch.compile(listed.module, dynamic=False, options=frozen) if shutil.which("g++") else None,
    }
    calls = {name: partial(_called, engine, given) for name, engine in engines.items() if engine is not None}
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(_turn(call))
    return {name: round(1e3 * statistics.median(own), 3) for name, own in times.items()}


def _turn(call: Callable[[], Any]) -> float:
    """Return the mean time in seconds of calls, after one that is not timed, as if no other engine were there."""
    time.sleep(SETTLED_S)
    call()
    begun_s, n = time.perf_counter(), 0
    while n == 0 or time.perf_counter() - begun_s < TURN_S:
        call()
        n += 1
    return (time.perf_counter() - begun_s) / n


JUDGE = Judge(items, _run, OF_MODELS, limit_s=600, life=1, time=_time)
