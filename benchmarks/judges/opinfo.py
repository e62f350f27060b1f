"""PyTorch's own samples of its operators, optimized as modules of calls, compared with eager mode.

The samples are those of PyTorch's tests (`op_db`, which needs the package `expecttest`): forward, in float32 and the
types of `DTYPES`. Modules are optimized without measuring.
"""

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree

import korch
from benchmarks.judges import Judge
from korch.ablation import Ablation
from korch.errors import InaccurateError, ModelError, UnprovidedError, UnsupportedError
from korch.frontend.torch.ties import FirstOfEqual
from korch.limits import SearchLimits
from korch.pytorch.check import OTHERWISE_EXPORTED
from tests.support.torch_calls import difference

DTYPES = {name: getattr(torch, name) for name in ("float32", "int64", "int32", "uint8", "bool")}
SAMPLES = 4
"""The most samples of an operator in each type."""

UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators whose results are whatever the memory contains; they are left out."""

DRAWN = 200
"""The most samples that are drawn, of which some that are spread over all of them are run."""

VERDICTS = {
    "right": "the results are those of eager mode",
    "refused": "an error with the reason",
    "random": "an error: the operator draws random numbers",
    "noticed": "an error: what is exported or built computes something else",
    "wrong": "the results are not those of eager mode",
    "crash": "any other error",
    "none": "PyTorch itself fails",
}

_Call = tuple[Sequence[Any], Any]
"""The leaves of the arguments of a call, and their form."""


class _Calls(torch.nn.Module):  # type: ignore[misc]
    """Calls of a function: tensors are inputs, and all other arguments are constants. Complex numbers are pairs."""

    def __init__(self, function: Any, calls: Sequence[_Call]) -> None:
        super().__init__()
        self.function, self.calls = function, calls

    def forward(self, *tensors: Any) -> Any:
        given, results = iter(tensors), []
        for leaves, spec in self.calls:
            own = [_as(leaf, next(given)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(own, spec)
            results.append(pytree.tree_map_only(torch.Tensor, _real, self.function(*args, **kwargs)))
        return results


def _real(x: Any) -> Any:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _as(leaf: Any, x: Any) -> Any:
    return torch.view_as_complex(x) if leaf.is_complex() else x


def verdicts(function: Any, samples: Sequence[tuple[Sequence[Any], dict[str, Any]]]) -> list[tuple[str, str]]:
    """Return what becomes of calls of a function.

    Args:
        function: an operator.
        samples: the arguments of the calls, and their keyword arguments.

    Returns:
        For each call one of `VERDICTS`, and a message.
    """
    calls = [pytree.tree_flatten((tuple(args), kwargs)) for args, kwargs in samples]
    eager = [_eager(function, call) for call in calls]
    computed = [(call, right) for call, (right, error) in zip(calls, eager, strict=True) if error is None]
    found = iter(_verdicts(function, computed))
    return [next(found) if error is None else ("none", error) for _, error in eager]


def _eager(function: Any, call: _Call) -> tuple[Any, str | None]:
    """Return what PyTorch computes, and its error, if there is one."""
    with torch.no_grad(), FirstOfEqual():
        try:
            return _Calls(function, [call])(*_tensors([call]))[0], None
        except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
            return None, f"{error}"[:200]


def _tensors(calls: Sequence[_Call]) -> list[Any]:
    return [_real(leaf.detach()).clone() for leaves, _ in calls for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _verdicts(function: Any, calls: Sequence[tuple[_Call, Any]]) -> list[tuple[str, str]]:
    """Return the verdicts on calls with PyTorch's results; they are exported together if that is possible."""
    if not calls:
        return []
    own = [call for call, _ in calls]
    try:
        found = results(_Calls(function, own).eval(), _tensors(own))
        texts = [difference(result, right) for result, (_, right) in zip(found, calls, strict=True)]
    except Exception as error:  # noqa: BLE001 - a refusal, or a crash, which is what is looked for
        if len(calls) == 1:
            return [(_kind(error), f"{type(error).__name__}: {error}"[:400])]
        middle = len(calls) // 2
        left = _verdicts(function, calls[:middle])
        if left[0][0] in ("refused", "random") and len(set(left)) == 1 and _verdicts(function, calls[-1:]) == left[:1]:
            return left[:1] * len(calls)  # the others are most probably refused for the same reason
        return left + _verdicts(function, calls[middle:])
    return [("wrong", text) if text else ("right", "") for text in texts]


def _kind(error: Exception) -> str:
    """Return the verdict on a call that raises an error."""
    if isinstance(error, InaccurateError) or OTHERWISE_EXPORTED in str(error):
        return "noticed"
    if not isinstance(error, ModelError | UnsupportedError | UnprovidedError):
        return "crash"
    return "random" if "draws random numbers" in str(error) else "refused"


def results(module: Any, tensors: Sequence[Any]) -> Any:
    """Return what the executable of a module returns, whose plan is chosen without measuring."""
    search = SearchLimits(gap=0.9, max_primitives=6, solver_seconds=5.0)
    executable = korch.optimize(
        module, tuple(tensors), threads=1, measure=False, search=search, ablation=Ablation(baselines=False)
    )
    return executable(*tensors)


def _run(line: str) -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    name, variant = json.loads(line)
    (operator,) = (o for o in op_db if o.name == name and o.variant_test_name == variant)
    types, calls = list[str](), list[tuple[Sequence[Any], dict[str, Any]]]()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, dtype in DTYPES.items():
            if operator.supports_dtype(dtype, "cpu"):
                drawn = list(islice(operator.sample_inputs("cpu", dtype), DRAWN))
                samples = drawn[:: -(-len(drawn) // SAMPLES) or 1]
                types += [name] * len(samples)
                calls += [((sample.input, *sample.args), sample.kwargs) for sample in samples]
        found = verdicts(operator.op, calls)
    rows = [(dtype, what, text) for dtype, (what, text) in zip(types, found, strict=True)]
    counts = {dtype: Counter(what for own, what, _ in rows if own == dtype) for dtype in types}
    texts = dict.fromkeys(f"{dtype} {what}: {text}" for dtype, what, text in rows if what not in ("right", "none"))
    return {"item": line, "counts": counts, "texts": list(texts)}


def _items() -> list[str]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [json.dumps([o.name, o.variant_test_name]) for o in op_db if o.name not in UNDEFINED]


JUDGE = Judge(_items, _run, VERDICTS, limit_s=300)
