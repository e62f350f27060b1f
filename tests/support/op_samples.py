"""Compares PyTorch's own samples of its operators, exported as modules of calls, with eager mode.

    python -m tests.support.op_samples [--results build/op_samples.jsonl] [--samples 8] [--jobs 1] [--only NAME ...]

The samples are those of PyTorch's tests (`op_db`, which needs the package `expecttest`): forward, in float32 and int64.
Modules are interpreted as they are exported. Each operator adds a line to the results, and is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from korch.errors import KorchError
from tests.support.torch_calls import difference, exported_results
from tests.support.workers import answer_lines, run_in_workers

DTYPES = {"float32": torch.float32, "int64": torch.int64}
LIMIT_S = 300

UNORDERED = ("kthvalue", "topk")
"""Operators that choose any of equal elements, which samples of integers have: their values are compared, sorted."""

_Call = tuple[Sequence[Any], Any]
"""The leaves of the arguments of a call, and their form."""


class _Calls(torch.nn.Module):  # type: ignore[misc]
    """Calls of a function: tensors are inputs, and all other arguments are constants."""

    def __init__(self, function: Any, calls: Sequence[_Call]) -> None:
        super().__init__()
        self.function, self.calls = function, calls

    def forward(self, *tensors: Any) -> Any:
        given, results = iter(tensors), []
        for leaves, spec in self.calls:
            own = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(own, spec)
            results.append(self.function(*args, **kwargs))
        return results


def verdicts(function: Any, samples: Sequence[tuple[Sequence[Any], dict[str, Any]]]) -> list[tuple[str, str]]:
    """Return what becomes of calls of a function.

    Args:
        function: an operator.
        samples: the arguments of the calls, and their keyword arguments.

    Returns:
        For each call right, refused, random (refused for that reason), wrong, crash or none (PyTorch itself fails), and
        a message.
    """
    calls = [pytree.tree_flatten((tuple(args), kwargs)) for args, kwargs in samples]
    eager = [_eager(function, call) for call in calls]
    computed = [(call, right) for call, (right, error) in zip(calls, eager, strict=True) if error is None]
    found = iter(_verdicts(function, computed))
    return [next(found) if error is None else ("none", error) for _, error in eager]


def _eager(function: Any, call: _Call) -> tuple[Any, str | None]:
    """Return what PyTorch computes, and its error, if there is one."""
    with torch.no_grad():
        try:
            return _Calls(function, [call])(*_tensors([call]))[0], None
        except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
            return None, f"{error}"[:200]


def _tensors(calls: Sequence[_Call]) -> list[Any]:
    return [leaf.detach().clone() for leaves, _ in calls for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _verdicts(function: Any, calls: Sequence[tuple[_Call, Any]]) -> list[tuple[str, str]]:
    """Return the verdicts on calls with PyTorch's results; they are exported together if that is possible."""
    if not calls:
        return []
    own = [call for call, _ in calls]
    try:
        found = exported_results(_Calls(function, own).eval(), _tensors(own))
        texts = [difference(result, right) for result, (_, right) in zip(found, calls, strict=True)]
    except Exception as error:  # noqa: BLE001 - a refusal, or a crash, which is what is looked for
        if len(calls) > 1:
            middle = len(calls) // 2
            return _verdicts(function, calls[:middle]) + _verdicts(function, calls[middle:])
        if isinstance(error, KorchError):
            return [("random" if "draws random numbers" in str(error) else "refused", f"{error}"[:300])]
        return [("crash", f"{type(error).__name__}: {error}"[:300])]
    return [("wrong", text) if text else ("right", "") for text in texts]


def _of_operator(name: str, variant: str, dtype: str, count: int) -> list[tuple[str, str]]:
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = (o for o in op_db if o.name == name and o.variant_test_name == variant)
    if not operator.supports_dtype(DTYPES[dtype], "cpu"):
        return []
    function = operator.op
    if name in UNORDERED and dtype == "int64":
        function = lambda *args, **kwargs: operator.op(*args, **kwargs)[0].flatten().sort()[0]  # noqa: E731
    samples = islice(operator.sample_inputs("cpu", DTYPES[dtype]), count)
    return verdicts(function, [((sample.input, *sample.args), sample.kwargs) for sample in samples])


def _run(line: str, count: int) -> dict[str, Any]:
    name, variant, dtype = json.loads(line)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _of_operator(name, variant, dtype, count)
    texts = dict.fromkeys(f"{what}: {text}" for what, text in found if what in ("wrong", "crash", "refused"))
    return {"item": line, "counts": Counter(what for what, _ in found), "texts": list(texts)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the operators that have no line yet; return 1 if one of them is wrong or crashes."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.op_samples")
    parser.add_argument("--results", type=Path, default=Path("build/op_samples.jsonl"))
    parser.add_argument("--samples", type=int, default=8, help="at most this number of samples of an operator")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="names of operators")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        answer_lines(lambda line: _run(line, args.samples))
        return 0
    from torch.testing._internal.common_methods_invocations import op_db

    args.results.parent.mkdir(parents=True, exist_ok=True)
    done = {json.loads(row)["item"] for row in args.results.open()} if args.results.exists() else set()
    chosen = [o for o in op_db if not args.only or o.name in args.only]
    lines = [json.dumps([o.name, o.variant_test_name, dtype]) for o in chosen for dtype in DTYPES]
    command = [sys.executable, "-m", "tests.support.op_samples", "--work", "--samples", str(args.samples)]
    counts: Counter[str] = Counter()
    with args.results.open("a") as out:
        for line, answer, failure in run_in_workers([i for i in lines if i not in done], command, args.jobs, LIMIT_S):
            row = answer or {"item": line, "counts": {"crash": 1}, "texts": [f"crash: {failure}"]}
            counts.update(row["counts"])
            out.write(json.dumps(row) + "\n")
            out.flush()
            if {"wrong", "crash"} & set(row["counts"]):
                print(line, *row["texts"], sep="\n  ", flush=True)
    print(dict(counts))
    return int(bool(counts["wrong"] or counts["crash"]))


if __name__ == "__main__":
    sys.exit(main())
