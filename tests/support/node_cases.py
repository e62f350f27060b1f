"""Runs ONNX's operator test cases through the frontend, fission and the reference interpreter."""

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx

from korch.errors import UnsupportedError
from korch.fission import fission_with_report
from korch.frontend import load_model
from korch.primitive.check import check_graph
from korch.primitive.lowering import lower_products
from korch.primitive.op import Array
from korch.primitive.reference import run
from korch.testing.tolerance import assert_same


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one test case."""

    name: str  # the name of the case
    status: str  # passed, opaque (passed, but an operator was not split), unsupported, or failed
    text: str = ""  # the reason of the status


@cache
def node_cases() -> tuple[Any, ...]:
    """Return ONNX's operator test cases, without those that are expanded into functions."""
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings(), open(os.devnull, "w") as sink:  # noqa: PTH123 - no path
        warnings.simplefilter("ignore")
        stdout, sys.stdout = sys.stdout, sink
        try:
            return tuple(c for c in collect_testcases(None) if "_expanded" not in c.name)
        finally:
            sys.stdout = stdout


def run_case(case: Any, exact: bool = False) -> Outcome:
    """Run one case; inputs that determine shapes are stored as constants."""
    for inputs, expected in case.data_sets:
        arrays = _arrays(inputs, [item.name for item in case.model.graph.input])
        if arrays is None:
            return Outcome(case.name, "unsupported", "inputs that are no tensors")
        try:
            model = load_model(with_constants(case.model, arrays))
        except UnsupportedError as error:
            return Outcome(case.name, "unsupported", str(error))
        graph, report = fission_with_report(model)
        graph = lower_products(graph)
        check_graph(graph)
        found = run(graph, {n: a for n, a in arrays.items() if n in model.inputs}, exact=exact)
        try:
            for (name, array), reference in zip(found.items(), _results(expected), strict=True):
                _compare(array, reference, name)
        except AssertionError as error:
            return Outcome(case.name, "failed", str(error))
        if report.kept:
            kept = "; ".join(f"{item.op_type}: {item.reason}" for item in report.kept)
            return Outcome(case.name, "opaque", kept)
    return Outcome(case.name, "passed")


def _compare(array: Array, reference: Array, name: str) -> None:
    assert_same(array, reference, terms=64, name=name)


def _results(expected: Iterable[Any]) -> list[Array]:
    return [
        onnx.numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else np.asarray(item)
        for item in expected
    ]


def _arrays(inputs: Sequence[Any], names: Sequence[str]) -> dict[str, Array] | None:
    arrays = {}
    for name, item in zip(names, inputs, strict=False):
        value = onnx.numpy_helper.to_array(item) if isinstance(item, onnx.TensorProto) else item
        if not isinstance(value, np.ndarray | np.generic):
            return None
        arrays[name] = np.asarray(value)
    return arrays


def with_constants(model: onnx.ModelProto, arrays: dict[str, Array]) -> onnx.ModelProto:
    """Return the model with inputs of some operators, usually all but the first, as constants.

    The test cases pass shapes, axes, pads and indices as inputs; in real models they are constants.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    integer_operators = {
        "Reshape",
        "Expand",
        "Tile",
        "Slice",
        "Pad",
        "Gather",
        "GatherElements",
        "GatherND",
        "Resize",
        "Upsample",
        "Squeeze",
        "Unsqueeze",
        "Split",
        "Trilu",
        "Dropout",
        "ReverseSequence",
        "ConstantOfShape",
        "CumSum",
        "Range",
        "TopK",
        "OneHot",
        "CenterCropPad",
        "Col2Im",
        "AffineGrid",
        "CumProd",
        "DFT",
        "STFT",
        "ScatterElements",
        "ScatterND",
    }
    for node in copy.graph.node:
        is_reduction = node.op_type.startswith("Reduce") and node.op_type != "ReverseSequence"
        if node.op_type not in integer_operators and not is_reduction:
            continue
        first = 0 if node.op_type in ("ConstantOfShape", "Range") else 1
        for name in list(node.input)[first:]:
            if name in arrays and name not in {t.name for t in copy.graph.initializer}:
                copy.graph.initializer.append(onnx.numpy_helper.from_array(arrays[name], name))
    constants = {tensor.name for tensor in copy.graph.initializer}
    kept = [value for value in copy.graph.input if value.name not in constants]
    del copy.graph.input[:]
    copy.graph.input.extend(kept)
    return copy
