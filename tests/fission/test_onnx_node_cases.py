import collections
import re

import numpy as np
import pytest

from korch.errors import UnsupportedError
from korch.fission import RULES, fission
from korch.frontend import load_model
from korch.primitive import reference
from korch.primitive.agreed import NUMPY, largest_difference, opinions_of
from korch.primitive.as_onnx import OnnxNodes
from korch.primitive.definitions import DEFINITIONS
from korch.testing.tolerance import assert_same
from tests.support.bodies import by_body
from tests.support.models import in_onnxruntime
from tests.support.node_cases import _arrays, node_cases, run_case, with_constants

# Cases that can't be compared, each with its reason.
EXCLUDED = {
    "test_averagepool_2d_ceil_last_window_starts_on_pad": "expected values have four digits",
    "test_roialign_aligned_false": "expected values have four digits",
    "test_roialign_aligned_true": "expected values have four digits",
    "test_scan_sum": "ONNX's reference evaluator can't run Scan-8, which stays opaque",
    "test_scatter_with_axis": "ONNX's reference evaluator has no Scatter-9, which stays opaque",
    "test_scatter_without_axis": "ONNX's reference evaluator has no Scatter-9",
}
LEAST_PASSED = 800
FOREIGN = ("elements of type", "has elements of type", "uses opset", "no tensors", "sequence", "optional")
FOREIGN += ("node 'res_y' (Loop)",)  # its number of iterations is an input
"""What reasons say of operators that no rule could split."""


@pytest.mark.long
def test_onnx_s_own_operator_tests_pass():
    cases = [case for case in node_cases() if case.name not in EXCLUDED]
    outcomes = [run_case(case) for case in cases]
    failed = [f"{o.name}: {o.text}" for o in outcomes if o.status == "failed"]
    assert not failed, "\n".join(failed)
    counts = collections.Counter(outcome.status for outcome in outcomes)
    print(f"ONNX operator tests: {dict(counts)} of {len(node_cases())}")
    assert counts["passed"] >= LEAST_PASSED, counts
    # No operator with a rule is unsupported where its types are known.
    ruled = {rule.operator for rule in RULES}
    lost = [
        f"{outcome.name}: {outcome.text}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type in ruled
        and outcome.status == "unsupported"
        and not any(text in outcome.text for text in FOREIGN)
    ]
    assert not lost, "\n".join(lost)


@pytest.mark.filterwarnings("ignore")
def test_definitions_compute_the_cases_of_the_standard() -> None:
    cases = [case for case in node_cases() if [n.op_type for n in case.model.graph.node if n.op_type in DEFINITIONS]]
    computed = 0
    for case in cases:
        ((given, wanted),) = case.data_sets
        names = [item.name for item in case.model.graph.input]
        found = opinions_of(case.model, dict(zip(names, given, strict=False)))[NUMPY](None)
        computed += found is not None
        assert found is None or largest_difference([*found], [*wanted]) <= 1, case.name
    assert computed > 190 and computed > 0.95 * len(cases)


def test_bodies_node_by_node_compute_the_cases_of_the_standard() -> None:
    names = ("test_loop11", "test_scan9_sum", "test_scan9_multi_state", "test_scan9_scalar", "test_if")
    for case in [case for case in node_cases() if case.name in names]:
        ((given, wanted),), (node,) = case.data_sets, case.model.graph.node
        values = dict(zip((item.name for item in case.model.graph.input), given, strict=True))
        found = by_body(node, values, case.model.opset_import)
        assert found is not None and largest_difference(found, [*wanted]) <= 1, case.name


# What ONNX Runtime refuses of the models of primitives, by the names of cases: each has a reason.
REFUSED = {
    "test_(adagrad|adam|momentum|nesterov_momentum)": "it has no operators for training",
    "test_bitcast_bool_to_uint8": "it has no BitCast of these types",
    "test_bitshift_(left|right)_int": "it shifts unsigned numbers alone",
    "test_cast_FLOAT_to_BFLOAT16": "it can't return bfloat16 to Python",
    "test_optional_get_element_tensor": "it has no operators on optional values of this opset",
    "test_reduce_max_empty_set_bool": "it has no largest element of nothing",
    "test_roialign": "it has no RoiAlign of opset 22",
    "test_scan_sum": "it can't infer types of Scan-8",
    "test_top_k_uint64": "it orders no uint64",
}


@pytest.mark.long
def test_primitives_as_onnx_have_the_same_results() -> None:
    """Cases with chance (dropout) or ties (rounding of computed scales) can't be compared."""
    refused, same = set(), 0
    for case in node_cases():
        if re.match(r"test_(training|dynamicquantize)", case.name):
            continue
        arrays = _arrays(case.data_sets[0][0], [item.name for item in case.model.graph.input])
        if arrays is None or any(array.dtype.kind not in "biuf" for array in arrays.values()):
            continue
        try:
            graph = fission(load_model(with_constants(case.model, arrays)))
        except UnsupportedError:
            continue
        model = OnnxNodes(graph, case.name).model()
        feeds = {name: array for name, array in arrays.items() if name in dict(graph.inputs)}
        try:
            results = in_onnxruntime(model, feeds)
        except Exception:  # noqa: BLE001  it raises classes without a common base
            refused.add(case.name)
            continue
        for found, (name, right) in zip(results, reference.run(graph, feeds).items(), strict=True):
            assert_same(np.asarray(found), right, terms=100, name=f"{case.name} {name}")
        same += 1
    assert not [name for name in refused if not any(re.match(pattern, name) for pattern in REFUSED)]
    assert same > 1100
    assert all(any(re.match(pattern, name) for name in refused) for pattern in REFUSED)


def test_exclusions_name_cases_that_exist():
    assert EXCLUDED.keys() <= {case.name for case in node_cases()}
