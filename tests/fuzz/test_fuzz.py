"""A sample of hostile cases, and checks that the harness detects defects."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from korch.errors import ModelError
from tests.support import fuzz, fuzz_graphs, fuzz_ranges, fuzz_whole
from tests.support.bodies import by_body
from tests.support.fuzz import run_case, run_cases, run_random
from tests.support.fuzz_graphs import batches, opset_of
from tests.support.fuzz_models import mutate
from tests.support.models import parsed
from tests.support.random_onnx import OPSETS, Drawn, model_of, random_onnx
from tests.support.references import onnx_runtime, settled

SAMPLE = range(90)


@pytest.mark.filterwarnings("ignore")
def test_a_sample_gives_the_right_result_or_one_clear_error(tmp_path: Path, calibrated) -> None:
    calibrated(tmp_path / "cache")
    outcomes = [run_case(7, case, tmp_path) for case in SAMPLE]
    assert [o for o in outcomes if o.outcome == "finding"] == []
    assert {o.kind for o in outcomes} == {"mutation", "operators", "artifact", "cache"}
    assert {o.outcome for o in outcomes} == {"right", "refused"}


def test_a_case_is_the_same_whenever_it_is_made() -> None:
    pytest.importorskip("onnxruntime")
    made = [random_onnx(np.random.default_rng(5), OPSETS[0], "g", settled) for _ in range(2)]
    first, again = (model_of([graph], OPSETS[0]).SerializeToString() for graph in made if graph is not None)
    assert first == again
    assert mutate(np.random.default_rng(5), first) == mutate(np.random.default_rng(5), first)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ModelError("it is no model"), "refused"),
        (ModelError("two\nlines"), "finding"),
        (ValueError("from the depths"), "finding"),
        (MemoryError(), "finding"),
    ],
)
def test_only_one_clear_error_is_a_refusal(monkeypatch, tmp_path, error, outcome) -> None:
    def fail(*_: object) -> str:
        raise error

    for name in ("_mutation", "_operators", "_artifact", "_cache"):
        monkeypatch.setattr(fuzz, name, fail)
    assert run_case(0, 0, tmp_path).outcome == outcome


def test_a_crash_and_a_wrong_result_are_findings(monkeypatch, tmp_path: Path) -> None:
    child = tmp_path / "korch_fuzz_crash.py"
    child.write_text("")
    monkeypatch.setattr(fuzz.sys, "executable", "/bin/false")
    (outcome,) = run_cases(0, range(3, 4), 1, tmp_path)
    assert outcome.outcome == "finding" and "ended with code" in outcome.message
    monkeypatch.setattr(fuzz_graphs, "_interpret", lambda *_: np.full((77,), 1e9))
    with pytest.raises(fuzz._WrongError, match="wrong: "):
        fuzz._operators(np.random.default_rng(1), tmp_path)


def test_a_case_that_computes_for_too_long_is_late_and_one_that_waits_for_a_core_is_not(monkeypatch) -> None:
    with pytest.raises(fuzz._LateError), fuzz.limit(0.1):
        while True:
            pass
    with pytest.raises(fuzz._LateError), fuzz.limit(0.1):
        time.sleep(60)
    monkeypatch.setattr(fuzz, "PATIENCE", 1000)  # it may wait for longer than it sleeps
    with fuzz.limit(0.1):
        time.sleep(0.3)


def test_a_late_case_is_a_finding(monkeypatch, tmp_path: Path) -> None:
    def compute(*_: object) -> str:
        while True:
            pass

    monkeypatch.setattr(fuzz, "LIMIT_SECONDS", 0.1)
    for name in ("_mutation", "_operators", "_artifact", "_cache"):
        monkeypatch.setattr(fuzz, name, compute)
    outcome = run_case(0, 0, tmp_path)
    assert (outcome.outcome, outcome.message) == ("finding", "it took too long")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_random_graphs_agree_with_onnx_runtime(tmp_path: Path, cache_folder: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "cache").symlink_to(cache_folder)
    outcomes = [*run_random("graphs", 1, range(8), tmp_path), *run_random("graphs", 1, range(8, 64), tmp_path, every=0)]
    assert [o for o in outcomes if o.outcome == "finding"] == []
    assert [o.case for o in outcomes] == list(range(64))
    assert sum(o.outcome == "right" and not o.message for o in outcomes) > 55


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("form", "cases"),
    [("graphs", range(40)), pytest.param("modules", range(2), marks=pytest.mark.long), ("ranges", range(15, 19))],
)
def test_random_models_are_right_when_they_are_interpreted(form: str, cases: range, tmp_path: Path) -> None:
    for name in ("onnxruntime", "torch")[: 1 + (form != "graphs")]:
        pytest.importorskip(name)
    outcomes = list(run_random(form, 0, cases, tmp_path, every=0))
    assert [o for o in outcomes if o.outcome == "finding"] == []
    assert [o.case for o in outcomes] == list(cases)
    assert sum(o.outcome == "right" and not o.message for o in outcomes) >= len(cases) // 3


def test_a_range_of_which_one_size_is_wrong_is_a_finding(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    right = fuzz_ranges._interpreted

    def interpret(source: Any, sizes: Any, feeds: Any) -> Any:
        first, *others = right(source, sizes, feeds)
        return [*([a] for a in (0 * first[0] - 7,)), *others]

    monkeypatch.setattr(fuzz_ranges, "_interpreted", interpret)
    outcomes = list(run_random("ranges", 0, range(11, 12), tmp_path, every=0))
    assert [(o.outcome, o.message[:7]) for o in outcomes] == [("finding", "wrong: ")]


def test_a_budget_that_is_not_met_is_an_error(monkeypatch, tmp_path: Path) -> None:
    class Late:
        def save(self, path: Path) -> None:
            monkeypatch.setattr(fuzz_whole.time, "monotonic", lambda: 1e9)

    monkeypatch.setattr(fuzz_whole.korch, "optimize", lambda *_, **__: Late())
    with pytest.raises(fuzz_whole.OverrunError, match="of 15 s"):
        fuzz_whole.loaded(b"", folder=tmp_path)


def test_the_load_while_a_budget_is_spent() -> None:
    assert fuzz_whole.mean_load(3.0, 3.0, 20) == pytest.approx(3)
    after = 1.0
    for load, seconds in ((9.0, 10), (5.0, 10)):  # as the system damps its average
        after = load + (after - load) * math.exp(-seconds / 60)
    assert after < 3
    assert fuzz_whole.mean_load(1.0, after, 20) == pytest.approx(7, abs=0.5)


def test_reasons_of_refusals_are_counted_without_names_and_numbers() -> None:
    assert fuzz._reason("Pad g7_1, option --shape n=3..9: size [1, 2] of 'x'") == fuzz._reason(
        "Pad g9_3, option --shape n=1..4: size [5, 7] of 'y'"
    )


def test_random_graphs_that_are_wrong_or_refused_are_findings(monkeypatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    answers: dict[str, Any] = {}

    def run(graphs: list[Any], *_: object, **__: object) -> Any:
        if len(graphs) > 1:
            return "it fails together"
        return answers.get(graphs[0].output[:3], [graphs[0].expected])

    answers["g1_"], answers["g2_"] = "ModelError: refused", [np.zeros((77,))]
    monkeypatch.setattr(fuzz_graphs, "_optimize_and_run", run)
    found = {o.case: o for o in run_random("graphs", 1, range(8), tmp_path)}
    assert {c for c, o in found.items() if o.outcome == "finding"} == {1, 2}
    assert found[1].message.startswith("refused: ") and "ModelError" in found[1].message
    assert found[2].message.startswith("wrong: ") and "float64[77] instead" in found[2].message
    model = onnx.load(tmp_path / "graph-1-2.onnx")
    assert len(model.graph.output) == 1


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([np.nan, 6], "right"),
        ([np.inf, 6], "disputed"),
        ([-np.inf, 6], "wrong"),
        ([5, 6], "wrong"),
        ([np.inf, 7], "wrong"),
    ],
)
def test_a_product_that_underflows_before_infinity_is_disputed(found, verdict: str) -> None:
    pytest.importorskip("onnxruntime")
    x = np.array([[1e-30, 1e-30, np.inf], [1, 2, 3]], np.float32)
    node = onnx.helper.make_node("ReduceProd", ["x", "axis"], ["y"], keepdims=0)
    graph = Drawn({"x": x}, is_special=True, nodes=[node], output="y", expected=np.array([np.nan, 6], np.float32))
    graph.constants = [onnx.numpy_helper.from_array(np.array([1]), "axis")]
    assert fuzz_graphs._judge(np.array(found, np.float32), graph, 18)[0] == verdict


LOOP = """(int64 n, float[3,2] x) => (y) {
  s, y = Loop <body: graph = one (int64 i, bool c, float[3,2] v) => (bool go, float[3,2] t, float[3,2] w) {
    go = Identity (c)
    t = Sigmoid (v)
    w = Neg (v)
  }> (n, , x)
}"""
SCAN = """(float[3] z, float[3,2] x) => (y) {
  s, y = Scan <
    num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [1],
    scan_output_directions = [1], body: graph = one (float[3] a, float[3] b) => (float[3] t, float[3] w) {
      t = Add (a, b)
      w = Identity (t)
    }
  > (z, x)
}"""


@pytest.mark.parametrize(
    ("text", "begin", "shape"),
    [(LOOP, np.array(2), (2, 3, 2)), (LOOP, np.array(0), (0, 3, 2)), (SCAN, np.ones(3, np.float32), (3, 2))],
)
def test_a_loop_node_by_node_agrees_with_the_runtime(text: str, begin, shape) -> None:
    """`onnx.reference` runs no Loop without a condition, and no Scan that writes backwards."""
    pytest.importorskip("onnxruntime")
    model = parsed(text)
    feeds = {model.graph.input[0].name: begin, "x": np.arange(6, dtype=np.float32).reshape(3, 2)}
    (y,), (wanted,) = by_body(model.graph.node[0], feeds, model.opset_import)[1:], onnx_runtime(model, feeds)
    assert y.shape == wanted.shape == shape
    for found in (y, *settled(model, feeds)):
        assert np.allclose(found, wanted)


def test_a_graph_is_the_same_in_whatever_range_it_stands() -> None:
    assert [list(part) for part in batches(range(5, 18))] == [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15], [16, 17]]
    assert opset_of(5) == opset_of(0) != opset_of(8)
    assert list(batches(range(8, 16))) == [range(8, 16)]


@pytest.mark.parametrize(
    ("found", "expected", "text"),
    [
        ([1.0, np.inf], [1.0, np.inf], ""),
        ([1.0], [1.01], "error 0.01 of 1.01"),
        ([np.nan], [1.0], "1 of 1 elements are NaN in one only"),
        ([-np.inf], [np.inf], "infinities differ"),
        ([1e6, 0.0], [1e6, 1.0], ""),
        ([-np.inf], [np.finfo(np.float32).min], ""),
    ],
)
def test_differences(found, expected, text: str) -> None:
    arrays = [np.array(a, np.float32) for a in (found, expected)]
    assert fuzz_graphs.difference(*arrays) == text
