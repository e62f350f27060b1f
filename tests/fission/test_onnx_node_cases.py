import collections

import pytest

from korch.fission import RULES
from tests.support.node_cases import node_cases, run_case

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


@pytest.mark.long
def test_onnx_s_own_operator_tests_pass():
    cases = [case for case in node_cases() if case.name not in EXCLUDED]
    outcomes = [run_case(case) for case in cases]
    failed = [f"{o.name}: {o.text}" for o in outcomes if o.status == "failed"]
    assert not failed, "\n".join(failed)
    counts = collections.Counter(outcome.status for outcome in outcomes)
    print(f"ONNX operator tests: {dict(counts)} of {len(node_cases())}")
    assert counts["passed"] >= LEAST_PASSED, counts


def test_no_operator_with_a_rule_is_unsupported_where_its_types_are_known():
    ruled = {rule.operator for rule in RULES}
    foreign = ("elements of type", "has elements of type", "uses opset", "no tensors", "sequence", "optional")
    foreign += ("node 'res_y' (Loop)",)  # its number of iterations is an input
    lost = [
        f"{outcome.name}: {outcome.text}"
        for case in node_cases()
        if case.name not in EXCLUDED
        and len(case.model.graph.node) == 1
        and case.model.graph.node[0].op_type in ruled
        and (outcome := run_case(case)).status == "unsupported"
        and not any(text in outcome.text for text in foreign)
    ]
    assert not lost, "\n".join(lost)


def test_exclusions_name_cases_that_exist():
    assert EXCLUDED.keys() <= {case.name for case in node_cases()}
