"""Checks that Korch runs the random ONNX graphs that ONNX Runtime runs, with the same results.

Several graphs are optimized together in one model, because compilers take most of the time. If such a
model fails, its graphs are optimized one by one. Each graph gets a verdict:

- right: the results agree with those of ONNX Runtime, whose optimizations are off;
- disputed: they agree with `onnx.reference`, which differs from ONNX Runtime;
- wrong: they agree with neither;
- refused: Korch raises an error, but ONNX Runtime has a result;
- hang: it took too long.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from korch.ablation import Ablation
from korch.errors import UnsupportedError
from korch.primitive.op import Array
from tests.support.random_onnx import OPSETS, Drawn, model_of, random_onnx

BATCH = 8
"""The number of graphs in one model."""

FAR = {2: 2e-2, 4: 1e-3, 8: 1e-3}
"""The largest difference of results, relative to the largest element or to 1, by the bytes of an element."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one graph.

    Attributes:
        case: the number of the case.
        verdict: right, disputed, wrong, refused or hang.
        message: what is wrong; "" if nothing is wrong.
        operators: the types of the graph's nodes.
    """

    case: int
    verdict: str
    message: str
    operators: tuple[str, ...]


def onnx_runtime(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Any] | None:
    """Return ONNX Runtime's results without its optimizations; None if it can't run the model."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return list(session.run(None, feeds))
    except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
        return None


def batches(cases: range) -> list[range]:
    """Return the parts of a range whose graphs are optimized together; all graphs of a part have the same opset."""
    ends = range((cases.start // BATCH + 1) * BATCH, cases.stop + BATCH, BATCH)
    starts = [cases.start, *ends[:-1]]
    return [range(a, min(b, cases.stop)) for a, b in zip(starts, ends, strict=True)]


def opset_of(case: int) -> int:
    """Return the opset of a case's graph."""
    return OPSETS[case // BATCH % len(OPSETS)]


def check_batch(seed: int, cases: range, folder: Path, *, built: bool = True) -> Iterator[Verdict]:
    """Draw graphs and yield a verdict on each; write models with other verdicts than right and disputed to a folder.

    Args:
        seed: the seed; it determines a graph together with the case's number.
        cases: the numbers of the cases, one of the parts that `batches` returns.
        folder: the folder for models and for the cache of kernels.
        built: whether kernels are built and run; otherwise the primitives are interpreted, with the
            alternatives that rules add.
    """
    opset = opset_of(cases.start)
    drawn = {
        case: random_onnx(np.random.default_rng((seed, case, 9)), opset, f"g{case}", onnx_runtime) for case in cases
    }
    graphs = {case: graph for case, graph in drawn.items() if graph is not None}
    verdicts = judge(graphs, opset, folder, built=built)
    for case in cases:
        verdict, message = verdicts.get(case, ("right", "nothing drawn"))
        if verdict not in ("right", "disputed"):
            path = folder / f"graph-{seed}-{case}.onnx"
            path.write_bytes(model_of([graphs[case]], opset).SerializeToString())
        operators = graphs[case].operators if case in graphs else ()
        yield Verdict(case, verdict, message, tuple(operators))


def judge(graphs: dict[int, Drawn], opset: int, folder: Path, *, built: bool) -> dict[int, tuple[str, str]]:
    """Return verdicts and messages by case; `built` and `folder` are as in `check_batch`."""
    if not built:
        return {c: _judge(_interpret(g, opset), g, opset) for c, g in graphs.items()}
    found: dict[int, tuple[str, str]] = {}
    # Rewrites may turn infinities into NaN; `strict` uses only those that do not.
    for is_special in (False, True):
        chosen = {c: g for c, g in graphs.items() if g.is_special is is_special}
        if not chosen:
            continue
        results = _optimize_and_run(list(chosen.values()), opset, folder, strict=is_special)
        for i, (case, graph) in enumerate(chosen.items()):
            result = results if isinstance(results, str) else results[i]
            if isinstance(results, str) and len(chosen) > 1:
                again = _optimize_and_run([graph], opset, folder, strict=is_special)
                result = again if isinstance(again, str) else again[0]
            found[case] = _judge(result, graph, opset)
    return found


def _interpret(graph: Drawn, opset: int) -> Any:
    """Return the result of interpreting the primitives, or the error as text."""
    from korch.equivalence.saturate import saturate
    from korch.fission import fission
    from korch.frontend.onnx import load_model
    from korch.primitive import reference
    from korch.primitive.lowering import lower_products

    try:
        primitives = lower_products(fission(load_model(model_of([graph], opset))))
        if any(primitive.op == "opaque" for primitive in primitives.primitives):
            return graph.expected
        with_alternatives, _ = saturate(primitives, strict=graph.is_special)
        with np.errstate(all="ignore"):
            (found,) = reference.run(with_alternatives, graph.feeds).values()
            return found.astype(graph.expected.dtype)
    except UnsupportedError:  # the host would run this graph
        return graph.expected
    except Exception as error:  # noqa: BLE001 - whatever it is, ONNX Runtime has a result
        return f"{type(error).__name__}: {error}"[:400]


def _optimize_and_run(graphs: list[Drawn], opset: int, folder: Path, *, strict: bool) -> list[Any] | str:
    """Return the results of the graphs in one executable, or the error as text."""
    from korch.api import optimize

    model = model_of(graphs, opset)
    feeds = {name: array for graph in graphs for name, array in graph.feeds.items()}
    try:
        executable: Any = optimize(
            model,
            measure=False,
            threads=1,
            strict=strict,
            cache_folder=folder / "cache",
            ablation=Ablation(baselines=False),
        )
        return list(executable.run(None, feeds))
    except Exception as error:  # noqa: BLE001 - whatever it is, ONNX Runtime has a result
        return f"{type(error).__name__}: {error}"[:400]


def _judge(found: Any, graph: Drawn, opset: int) -> tuple[str, str]:
    if isinstance(found, str):
        return "refused", found
    text = difference(found, graph.expected)
    if not text:
        return "right", ""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            (other,) = ReferenceEvaluator(model_of([graph], opset)).run(None, graph.feeds)
    except Exception:  # noqa: BLE001 - foreign code, whose errors have no base
        return "wrong", text
    return ("disputed" if not difference(found, other) else "wrong"), text


def difference(found: Array, expected: Array) -> str:
    """Return how an array differs from the expected one; "" if it does not."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if found.dtype.kind != "f":
        count = int((found != expected).sum())
        return f"{count} of {found.size} elements differ" if count else ""
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if found.dtype == np.float32:  # this is ONNX Runtime's maximum of no elements
        b = np.where(b == np.finfo(np.float32).min, -np.inf, b)
    if (np.isnan(a) != np.isnan(b)).any():
        return f"{int((np.isnan(a) != np.isnan(b)).sum())} of {a.size} elements are NaN in one only"
    infinite = np.isinf(a) | np.isinf(b)
    if (a[infinite] != b[infinite]).any():
        return "infinities differ"
    finite = np.isfinite(a) & np.isfinite(b)
    error = np.abs(a[finite] - b[finite]).max(initial=0.0)
    size = np.abs(b[finite]).max(initial=1.0)
    return f"error {error:.3g} of {size:.3g}" if error > FAR[found.dtype.itemsize] * size else ""
