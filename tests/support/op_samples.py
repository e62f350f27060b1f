"""Compares PyTorch's own samples of its operators, optimized as modules of calls, with eager mode.

    python -m tests.support.op_samples [--results build/op_samples.jsonl] [--samples 8] [--jobs 1] [--only NAME ...]

The samples are those of PyTorch's tests (`op_db`, which needs the package `expecttest`): forward, in float32 and the
types of `DTYPES`. Modules are optimized without measuring. Each operator adds a line to the results, and is not run
again; `--table` prints the sums of all lines.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import korch
from korch.ablation import Ablation
from korch.errors import InaccurateError, ModelError, UnprovidedError, UnsupportedError
from korch.frontend.torch.ties import FirstOfEqual
from korch.limits import SearchLimits
from korch.pytorch.check import OTHERWISE_EXPORTED
from tests.support.torch_calls import difference
from tests.support.workers import answer_lines, run_in_workers

DTYPES = {name: getattr(torch, name) for name in ("float32", "int64", "int32", "uint8", "bool")}
LIMIT_S, LIFE = 300, 100

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


def _run(line: str, count: int) -> dict[str, Any]:
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
                samples = drawn[:: -(-len(drawn) // count) or 1]
                types += [name] * len(samples)
                calls += [((sample.input, *sample.args), sample.kwargs) for sample in samples]
        found = verdicts(operator.op, calls)
    rows = [(dtype, what, text) for dtype, (what, text) in zip(types, found, strict=True)]
    counts = {dtype: Counter(what for own, what, _ in rows if own == dtype) for dtype in types}
    texts = dict.fromkeys(f"{dtype} {what}: {text}" for dtype, what, text in rows if what not in ("right", "none"))
    return {"item": line, "counts": counts, "texts": list(texts)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operators that have no line yet; return 1 if one of them is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.op_samples")
    parser.add_argument("--results", type=Path, default=Path("build/op_samples.jsonl"))
    parser.add_argument("--samples", type=int, default=8, help="at most this number of samples of an operator")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of operators")
    parser.add_argument("--table", action="store_true", help="print the results that there are")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        answer_lines(lambda line: _run(line, args.samples))
        return 0
    args.results.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(row) for row in args.results.open()] if args.results.exists() else []
    if args.table:
        print(_table(rows))
        return 0
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = [o for o in op_db if o.name not in UNDEFINED and (not args.only or o.name in args.only)]
    lines = [json.dumps([o.name, o.variant_test_name]) for o in chosen]
    random.Random(0).shuffle(lines)
    lines = [line for line in lines if line not in {row["item"] for row in rows}]
    command = [sys.executable, "-m", "tests.support.op_samples", "--work", "--samples", str(args.samples)]
    with args.results.open("a") as out:
        for line, answer, failure in run_in_workers(lines, command, args.jobs, LIMIT_S, LIFE):
            rows.append(answer or {"item": line, "counts": {"float32": {"crash": 1}}, "texts": [f"crash: {failure}"]})
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
            if texts := [text for text in rows[-1]["texts"] if " refused: " not in text and " random: " not in text]:
                print(line, *texts, sep="\n  ", flush=True)
    print(_table(rows))
    return int(any({"wrong", "crash"} & set(counts) for row in rows for counts in row["counts"].values()))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many calls of each type have each verdict."""
    sums = {dtype: Counter[str]() for dtype in DTYPES}
    for row in rows:
        for dtype, counts in row["counts"].items():
            sums[dtype].update(counts)
    lines = [f"| type | {' | '.join(VERDICTS)} |", f"| --- |{' ---: |' * len(VERDICTS)}"]
    lines += [f"| {t} | {' | '.join(str(sums[t][what]) for what in VERDICTS)} |" for t in DTYPES]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
