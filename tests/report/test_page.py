"""The page of a plan: its data, and that the page fetches nothing and its data are escaped."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from korch.costs.rates import MemoryLevel, Rates
from korch.equivalence.saturate import RuleReport, SaturationReport
from korch.errors import UnsupportedError
from korch.report import page as page_module
from korch.report.compare import Row
from korch.report.diff import differences, operator_times
from korch.report.page import page, page_data
from korch.report.profile import KernelTime, Profile
from korch.report.threads import Threads, ThreadSpan, WatchedRun
from korch.report.trace import trace
from korch.runtime.record import PlanRecord
from korch.runtime.report import GroupedKernel, GroupingRecord, OperatorRecord, Report, Rival, RunTimes
from korch.search.result import Round
from korch.segments.record import BlockRecord, PartitionRecord, SearchRecord
from tests.report.report_plans import plan_of, port_of, step_of

FIRST = """graph(%0 "i0": f32[2,8]) -> (%1 "o0")
%1: f32[2,8] = exp(%0)
"""
SECOND = """graph(%0 "i0": f32[2,8], %1 "i1": f32[8,8]) -> (%3 "o0")
%2: f32[2,8] = matmul(%0, %1)
%3: f32[2,8] = tanh(%2)
"""
RULE = RuleReport("low-rank", "", 3, {}, (), False)
SEARCH = SearchRecord(0, 1, "end", 1.5, True, (Round(1, 2, 2, 0.5),))
BLOCK = BlockRecord((0, 3), 1, 1, ("plain", "%1:acdb"), (), (SEARCH,))
GROUPING = GroupingRecord((GroupedKernel("generated", "exp matmul"), GroupedKernel("gemm", "tanh")), (0, 1), 6000, 4000)
REPORT = Report(
    operators=(
        OperatorRecord("Exp a", ("x",), ("y",)),
        OperatorRecord("MatMul b", ("y", "w"), ("z",)),
        OperatorRecord("Tanh c", ("z",), ("out",)),
    ),
    machine=Rates(levels=(MemoryLevel(0, 1e10, 1e10),), rate_flop_per_s=2e11),
    rivals={
        "c2": (Rival("library", "", "(ab) -> (ab)", 6000, True), Rival("x", "", "", 1, False, "crashed: </script>"))
    },
    rules=SaturationReport((RULE,), "saturated", 1, 1, 1, 0, 0.5),
    max_error=2e-7,
    groupings=((), (GROUPING,)),
    rounds=(Round(1, None, 2, 0.5),),
    partition=PartitionRecord(4, 1, blocks=(BLOCK,)),
)


@pytest.fixture
def plan() -> PlanRecord:
    first = step_of(FIRST, origins=("Exp a",), inputs=(port_of(place="INPUT"),), outputs=(port_of(value=1),))
    second = step_of(
        SECOND,
        symbol="k2",
        provider="gemm",
        candidate="c2",
        cost_ns=3000.0,
        origins=("MatMul b", "Tanh c", "by low-rank"),
        workspace_bytes=64,
        work_flop=256,
        inputs=(port_of(value=1), port_of("f32[8,8]", place="CONSTANT", value=5)),
        outputs=(port_of(place="OUTPUT", value=3),),
    )
    memory = {"arena_bytes": 128, "arena_bound_bytes": 128, "weights_bytes": 256}
    return plan_of(first, second, path="m<1>.onnx", options={"gap": 0.1}, **memory)


def test_a_concatenation_in_place_is_no_kernel_and_takes_no_more_memory(plan: PlanRecord) -> None:
    first = replace(plan.steps[0], workspace_bytes=0, outputs=(port_of(value=1),))
    other = replace(first, symbol="k3", outputs=(port_of(value=2, at=64),))
    whole = port_of("f32[4,8]", value=3)
    joined = replace(first, symbol="", provider="in place", inputs=(*first.outputs, *other.outputs), outputs=(whole,))
    late = replace(first, symbol="k4", inputs=other.outputs, outputs=(port_of(place="OUTPUT", value=4),))
    steps = (first, other, joined, replace(late, inputs=(whole,)), late)
    data = page_data(replace(plan, steps=steps), REPORT, {})
    assert data["memory"] == [128] * 5
    assert dict(data["facts"])["Search"] == [("kernels", "4"), ("concatenations in place", "1")]
    assert data["graphs"]["kernels"]["edges"] == [("k0", "k2"), ("k1", "k2"), ("k1", "k4"), ("k2", "k3")]


def test_the_data_of_a_plan(plan: PlanRecord) -> None:
    data = page_data(plan, REPORT, {"k1": "int x;", "other": ""}, [1100.0, 2900.0])
    kernels, graphs = data["kernels"], data["graphs"]
    assert [k["us"] for k in kernels] == [1.0, 3.0] and [k["run_us"] for k in kernels] == [1.1, 2.9]
    assert kernels[1]["rules"] == ["low-rank"] and kernels[1]["origins"] == ["MatMul b", "Tanh c"]
    assert kernels[1]["rivals"][0] == {
        "what": "library (ab) -> (ab)",
        "cost": "6.0 us",
        "more": "+100.0 %",
        "lost": "",
        "instead": "",
    }
    assert data["threads"] == [] and "load" not in kernels[0]
    spans = (ThreadSpan(0, 0, 0, 900, 0), ThreadSpan(0, 1, 100, 1000, 0))
    threads = Threads(2, (WatchedRun((1000, 2000), spans),))
    watched = page_data(plan, REPORT, {}, threads=threads)
    assert watched["threads"] == [[0, 0, 0.0, 0.9], [0, 1, 0.1, 1.0]]
    assert watched["spans_us"] == [1.0, 2.0]
    assert [k["load"] for k in watched["kernels"]] == ["1.00 of the mean, 10.0 % idle", None]
    assert kernels[1]["groupings"] == [
        {
            "what": "generated: exp matmul | gemm: tanh",
            "instead": "#0, #1",
            "cost": "6.0 us instead of 4.0 us",
            "more": "+50.0 %",
            "lost": "",
        }
    ]
    assert kernels[0]["groupings"] == []
    assert [number for number, _ in data["slowest"]] == [1, 0]
    assert [trace["name"] for trace in data["traces"]] == ["the whole model", "block 1 (x 2), end: %1:acdb"]
    assert data["traces"][1]["note"].startswith("recalled from an earlier run 1.5 s")
    assert data["sources"] == {"k1": "int x;", "k2": ""}
    assert graphs["kernels"]["edges"] == [("k0", "k1")]
    nodes = {n["id"]: n for n in graphs["primitives"]["nodes"]}
    assert [n["label"] for n in nodes.values() if "parent" in n] == ["exp", "matmul", "tanh"]
    assert graphs["primitives"]["edges"] == [("k0%1", "k1%2"), ("k1%2", "k1%3")]
    assert graphs["operators"]["edges"] == [("o0", "o1"), ("o1", "o2")]
    assert [n["kernels"] for n in graphs["operators"]["nodes"]] == [[0], [1], [1]]
    assert data["memory"] == [64, 64 + 64]
    assert data["roof"][1] == (10.0, 200.0)


def test_the_headline_has_time_speed_up_and_gap(plan: PlanRecord) -> None:
    report = replace(REPORT, status="feasible", fresh=RunTimes(8.912, 8.5, 9.25), predicted_ms=8.5, gap=0.284)
    gap = ("28 %", "gap between the sum of the kernels' times and its lower bound")
    told = [("8.91 ms", "a run, measured (8.5 to 9.25); 2 threads"), gap]
    data = page_data(plan, report, {})
    assert data["headline"] == told
    assert [title for title, _ in data["facts"]] == ["Time of a run", "Search", "Work, memory, accuracy"]
    shown = replace(report, failed_candidates=3, machine=Rates(launch_ns=2.0, region_ns=545.4))
    facts = dict(pair for _, rows in page_data(plan, shown, {})["facts"] for pair in rows)
    names = ("do not run", "an empty kernel", "an empty parallel region", "lower bound of that memory")
    assert [facts[name] for name in names] == ["3", "2 ns", "545 ns", "0.0 MiB"]
    times_ms = {"korch": 2.0, "onnxruntime": 5.0, "openvino": 4.0}
    peers = [Row(name, ms, ms, ms, 0.0, (int(1e6 * ms),)) for name, ms in times_ms.items()]
    with_peers = page_data(plan, report, {}, peers=peers)["headline"]
    assert with_peers == [told[0], ("2.50×", "as fast as ONNX Runtime"), told[1]]
    unmeasured = page_data(plan, replace(report, fresh=None, plans=(), gap=None), {})["headline"]
    assert unmeasured == [("8.5 ms", "the sum of the kernels, not measured; 2 threads")]


def test_the_page_holds_all_and_fetches_nothing(plan: PlanRecord, monkeypatch) -> None:
    monkeypatch.setattr(
        page_module,
        "_web",
        {
            "page.js": "const a = '</script>';",
            "libraries.js": "",
            "graph.js": "",
            "charts.js": "",
            "page.css": "body { margin: 0 }",
        }.__getitem__,
    )
    text = page(page_data(plan, REPORT, {"k1": "// \\1 {{TITLE}} </script>"}))
    assert "m&lt;1&gt;.onnx" in text and text.count("</script>") == 2
    assert not re.search(r"(src|href)=\"(?!#)", text)
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["sources"]["k1"] == "// \\1 {{TITLE}} </script>"


def test_without_the_libraries_the_error_says_how_to_make_them(plan: PlanRecord, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(page_module, "files", lambda package: tmp_path)
    with pytest.raises(UnsupportedError, match=r"libraries\.js.*make web.*make wheel"):
        page(page_data(plan, REPORT, {}))


def test_what_differs_between_plans(plan: PlanRecord) -> None:
    first, second = plan.steps
    other = replace(
        plan,
        steps=(replace(first, cost_ns=2000.0), replace(second, candidate="c3", provider="library")),
        options={"gap": 0.2},
    )
    text = differences(
        (plan, Report(status="feasible", predicted_ms=1.0)), (other, Report(status="feasible", predicted_ms=2.0))
    )
    assert "x 2.00" in text and "option gap: 0.1 -> 0.2" in text
    assert "kernels in both: 1" in text
    assert "only in the first: 1 kernel, 3.0 us" in text and "1.0 -> 2.0 us" in text
    same = differences((plan, Report()), (plan, Report()))
    assert "only in" not in same and "built differently" not in same


def test_what_differs_by_operator(plan: PlanRecord) -> None:
    first, second = plan.steps
    other = replace(plan, steps=(first, replace(second, candidate="c3", cost_ns=1000.0)))
    found = operator_times(plan, other)
    # Kernel c2 runs MatMul b and Tanh c: half of its cost is each one's.
    assert found[:2] == (("MatMul b", 1500.0, 500.0), ("Tanh c", 1500.0, 500.0))
    assert found[2] == ("Exp a", 1000.0, 1000.0)
    assert differences((plan, Report()), (other, Report())).splitlines()[-2:] == [
        "  1.5 -> 0.5 us  MatMul b",
        "  1.5 -> 0.5 us  Tanh c",
    ]
    ruled = replace(plan, steps=(replace(first, origins=("by low-rank",)), replace(first, origins=())))
    names = [name for name, _, _ in operator_times(ruled, ruled)]
    assert names == ["by low-rank", "changes of layout"]


def test_a_trace_has_a_span_for_each_kernel(plan: PlanRecord) -> None:
    times = [KernelTime(i, "p", "w", 1.0, True, 1000.0 * (i + 1), 1.0, 1.0) for i in range(2)]
    spans = [e for e in trace(plan, Profile(tuple(times), 3000.0, 5))["traceEvents"] if e["ph"] == "X"]
    assert [(s["ts"], s["dur"], s["cat"]) for s in spans] == [(0.0, 1.0, "generated"), (1.0, 2.0, "gemm")]
