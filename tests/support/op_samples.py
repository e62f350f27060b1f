"""Compares PyTorch's own samples of its operators, each as a module of one call, with eager mode.

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
from collections.abc import Iterator, Sequence
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


class _Call(torch.nn.Module):  # type: ignore[misc]
    """A call of an operator: tensors are inputs, and all other arguments are constants."""

    def __init__(self, function: Any, leaves: Sequence[Any], spec: Any) -> None:
        super().__init__()
        self.function, self.leaves, self.spec = function, leaves, spec

    def forward(self, *tensors: Any) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


def verdict(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return what becomes of one call: right, refused, wrong, crash or none (PyTorch itself fails), and a message."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    module = _Call(function, leaves, spec).eval()
    tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    try:
        with torch.no_grad():
            wanted = module(*(tensor.clone() for tensor in tensors))
    except Exception as error:  # noqa: BLE001 - foreign code, whose errors have no base
        return "none", f"{error}"[:200]
    try:
        text = difference(exported_results(module, [tensor.clone() for tensor in tensors]), wanted)
    except KorchError as error:
        return "refused", f"{error}"[:300]
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        return "crash", f"{type(error).__name__}: {error}"[:300]
    return ("wrong", text) if text else ("right", "")


def _verdicts(name: str, variant: str, dtype: str, count: int) -> Iterator[tuple[str, str]]:
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = (o for o in op_db if o.name == name and o.variant_test_name == variant)
    if not operator.supports_dtype(DTYPES[dtype], "cpu"):
        return
    for sample in islice(operator.sample_inputs("cpu", DTYPES[dtype]), count):
        yield verdict(operator.op, (sample.input, *sample.args), sample.kwargs)


def _run(line: str, count: int) -> dict[str, Any]:
    name, variant, dtype = json.loads(line)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = list(_verdicts(name, variant, dtype, count))
    texts = dict.fromkeys(f"{what}: {text}" for what, text in found if what in ("wrong", "crash", "refused"))
    return {"item": line, "counts": Counter(what for what, _ in found), "texts": list(texts)[:4]}


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
