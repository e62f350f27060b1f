"""Checks that Korch runs the random ONNX graphs that ONNX Runtime runs, with the same results.

Several graphs are optimized together in one model, because compilers take most of the time. If such a
model fails, its graphs are optimized one by one. Each graph gets a verdict:

- right: the results agree with those of ONNX Runtime, whose optimizations are off, or where it differs from
  `onnx.reference`, the third opinion of another reference (`references.py`);
- disputed: there is no third opinion, and they agree with one of the two, or only the range of an element's type, and
  the order of a product in it, make it another number;
- wrong: they agree with neither;
- refused: Korch raises an error, but ONNX Runtime has a result.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from korch.equivalence.saturate import saturate
from korch.errors import UnsupportedError
from korch.fission import fission, fission_with_report
from korch.frontend.onnx import load_model, load_segments
from korch.frontend.operator import OperatorGraph
from korch.frontend.segments import HostSegment
from korch.host.engine import HostEngine
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.lowering import lower_products
from korch.primitive.op import Array
from tests.support.fuzz_whole import loaded
from tests.support.random_onnx import OPSETS, Drawn, model_of, random_onnx
from tests.support.references import FAR, difference, onnx_runtime, settled

BATCH = 8
"""The number of graphs in one model."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one graph or module."""

    case: int  # the number of the case
    verdict: str  # right, disputed, unsupported, wrong or refused
    message: str  # the graph's steps and what is wrong; "" if nothing is wrong


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
    drawn = {case: random_onnx(np.random.default_rng((seed, case, 9)), opset, f"g{case}", settled) for case in cases}
    graphs = {case: graph for case, graph in drawn.items() if graph is not None}
    verdicts = judge(graphs, opset, folder, built=built)
    for case in cases:
        verdict, message = verdicts.get(case, ("right", ""))
        if verdict not in ("right", "disputed"):
            path = folder / f"graph-{seed}-{case}.onnx"
            path.write_bytes(model_of([graphs[case]], opset).SerializeToString())
        operators = " ".join(graphs[case].operators) if case in graphs else "nothing drawn"
        yield Verdict(case, verdict, f"{operators}: {message}" if message else "")


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


def _interpret(graph: Drawn, opset: int, roundings: np.random.Generator | None = None) -> Any:
    """Return the result of interpreting the primitives, or the error as text.

    Args:
        graph: the model.
        opset: its opset.
        roundings: the generator of rounding errors in the model's own types; None to compute in float64.
    """
    try:
        operators = load_model(model_of([graph], opset))
        if names := _kept(operators):
            return _interpret_parts(graph, opset, dict.fromkeys(names, "kept"), roundings)
        primitives, _ = saturate(lower_products(fission(operators)), strict=graph.is_special)
        return _evaluate(primitives, graph.values, roundings)[graph.output]
    except UnsupportedError:
        return _interpret_parts(graph, opset, {}, roundings)
    except Exception as error:  # noqa: BLE001 - whatever it is, ONNX Runtime has a result
        return f"{type(error).__name__}: {error}"[:400]


def _evaluate(
    primitives: PrimitiveGraph, feeds: dict[str, Array], roundings: np.random.Generator | None
) -> dict[str, Array]:
    """Return the outputs of primitives, in their types."""
    types = {name: primitives.types[value].dtype.numpy for name, value in primitives.outputs}
    with np.errstate(all="ignore"):
        given = {name: feeds[name] for name, _ in primitives.inputs}
        found = reference.run(primitives, given, exact=roundings is None, roundings=roundings)
        return {name: array.astype(types[name]) for name, array in found.items()}


def _interpret_parts(graph: Drawn, opset: int, kept: dict[str, str], roundings: np.random.Generator | None) -> Any:
    """Return the result of a model of which the host runs some nodes, or the error as text.

    Args:
        graph: the model.
        opset: its opset.
        kept: names of nodes without a rule, with a reason; ONNX Runtime runs these in kernels, too.
        roundings: as for `_interpret`.
    """
    known: dict[str, Any] = dict(graph.values)
    try:
        segmented = load_segments(model_of([graph], opset), None, kept)
        natives = [segment for segment in segmented.segments if not isinstance(segment, HostSegment)]
        if more := {name: "kept" for segment in natives for name in _kept(segment)}:
            return _interpret_parts(graph, opset, kept | more, roundings)
        known |= segmented.constants
        for segment in segmented.segments:
            if isinstance(segment, HostSegment):
                known |= HostEngine(segment.model, 1).run({n: known[n] for n in segment.inputs})
            else:
                known |= _evaluate(lower_products(fission(segment)), known, roundings)
        return np.asarray(known[graph.output])
    except Exception as error:  # noqa: BLE001 - whatever it is, ONNX Runtime has a result
        return f"{type(error).__name__}: {error}"[:400]


def _kept(operators: OperatorGraph) -> list[str]:
    """Return the names of the operators without a rule."""
    labels = {item.operator for item in fission_with_report(operators)[1].kept}
    return [operator.name for operator in operators.operators if operator.label in labels]


def _optimize_and_run(graphs: list[Drawn], opset: int, folder: Path, *, strict: bool) -> list[Any] | str:
    """Return the results of the graphs in one executable, or the error as text."""
    feeds = {name: array for graph in graphs for name, array in graph.given.items()}
    try:
        return list(loaded(model_of(graphs, opset), folder=folder, strict=strict).run(None, feeds))
    except Exception as error:  # noqa: BLE001 - whatever it is, ONNX Runtime has a result
        return f"{type(error).__name__}: {error}"[:400]


def _judge(found: Any, graph: Drawn, opset: int) -> tuple[str, str]:
    if isinstance(found, str):
        return "refused", found
    text = difference(found, graph.expected)
    if not text:
        return ("right", "") if graph.other is None else ("disputed", difference(graph.other, found))
    if graph.other is not None and not difference(found, graph.other):
        return "disputed", text
    if _is_open(found, graph, opset):
        return "disputed", text
    whole = onnx_runtime(model_of([graph], opset), graph.given)  # node by node, roundings add up otherwise
    return "right" if whole is not None and not difference(found, whole[0]) else "wrong", text


def _is_open(found: Any, graph: Drawn, opset: int) -> bool:
    """Return whether results differ only at elements that are other numbers in the model's own types than in float64.

    At these elements both results must be one of the two: 0 * infinity is NaN where small factors have become 0.
    """
    meanings = [_interpret(graph, opset, roundings) for roundings in (None, np.random.default_rng(0))]
    if any(isinstance(array, str) or array.shape != graph.expected.shape for array in (found, *meanings)):
        return False
    exact, own = meanings
    is_apart = ~_near(exact, own)
    for array in (found, graph.expected):
        is_apart &= _near(array, exact) | _near(array, own)
    return not difference(np.where(is_apart, graph.expected, found), graph.expected)


def _near(a: Array, b: Array) -> Array:
    """Return which elements are equal but for roundings."""
    far = FAR.get(a.dtype.itemsize, 0.0) if a.dtype.kind == "f" else 0.0
    return np.isclose(a, b, rtol=far, atol=0.0, equal_nan=True)
