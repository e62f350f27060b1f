"""The printed explanation of a plan: its whole text, and that unmeasured times are marked as such."""

from dataclasses import replace

import pytest

from korch.equivalence.saturate import RuleReport, SaturationReport
from korch.measure.uncompiled import Uncompiled
from korch.numerics import Difference
from korch.report.explain import explain, summary
from korch.report.kernel import operations
from korch.runtime.record import ModelRecord, PlanRecord
from korch.runtime.report import Disturbance, OutputError, PlanResult, Report, RunTimes, ScheduleTimes
from korch.search.result import PlanName, Round
from korch.segments.record import PartitionRecord
from tests.report.report_plans import plan_of, port_of, step_of

NORM = """graph(%0 "i0": f32[2,8]) -> (%4 "o0")
%1: f32[2] = reduce_sum(%0) {axes=[1]}
%2: f32[2,8] = broadcast(%1) {shape=[2,8], axes=[0]}
%3: f32[2,8] = sub(%0, %2)
%4: f32[2,8] = sub(%3, %2)
"""
RULES = SaturationReport(
    rules=tuple(RuleReport(name, "", fired, {}, (), False) for name, fired in (("reshapes-compose", 2), ("idle", 0))),
    stopped="saturated",
    iterations=1,
    primitives_before=5,
    primitives_after=6,
    alternatives=1,
    seconds=0.5,
)
SPLIT = PlanResult(
    plan=PlanName.SPLIT,
    kernels=2,
    predicted_ms=0.014,
    measured_ms=1.5,
    expected_ms=1.375,
    expected_p10_ms=1.35,
    expected_p90_ms=1.45,
    p10_ms=1.25,
    p90_ms=1.75,
    max_error=1.5e-07,
)
OPTIMAL = PlanResult(PlanName.SEARCHED, 1, 0.012, 1.75, 1.5, 2.0, 2e-07)
BY_RULES = PlanResult(PlanName.BY_RULES, 1, 0.02, None, None, None, None, "it crashes")
REPORT = Report(
    status="feasible",
    predicted_ms=0.012,
    lower_bound_ms=0.009,
    gap=0.25,
    calibrated_ms=0.0114,
    calibrated_gap=0.05,
    primitives=5,
    alternatives=1,
    candidates=40,
    distinct_candidates=20,
    given_flop=5_000_000,
    flop=2_500_512,
    measured_candidates=4,
    failed_candidates=3,
    kernels=2,
    arena_bytes=2048,
    max_error=1.5e-07,
    rms_error=3e-07,
    given_error=1.25e-07,
    given_rms_error=2.5e-07,
    seconds=3.25,
    measured_ms=1.5,
    plan=PlanName.SPLIT,
    expected_ms=1.375,
    stages_s={"frontend": 0.01, "orchestrate": 2.0},
    idle={"orchestrate": 0.26},
    search_s={"compiling": 0.75, "timing": 1.0, "other": 0.25},
    limits_hit=("max_outputs",),
    rules=RULES,
    rule_savings_ms={"reshapes-compose": 0.0035},
    plans=(OPTIMAL, SPLIT, BY_RULES),
)


@pytest.fixture
def plan() -> PlanRecord:
    norm = step_of(
        NORM,
        origins=("LayerNormalization norm", "by reshapes-compose"),
        outputs=(port_of(layout="ba"),),
        cost_ns=9000.0,
        bound_ns=3000.0,
        size_bytes=1536,
        work_flop=2_500_000,
    )
    constant = port_of(layout="", place="CONSTANT")
    matmul = step_of(
        "%2: f32[2,8] = matmul(%0, %1)\n",
        symbol="k2",
        provider="onnxruntime",
        origins=("",),
        bound_ns=1000.0,
        is_measured=False,
        inputs=(port_of(layout="ba"), constant, constant),
        outputs=(port_of(layout=""),),
        work_flop=512,
        size_bytes=100,
    )
    target = {"cpu": "A CPU", "isa": "avx2"}
    return plan_of(norm, matmul, arena_bytes=2048, arena_bound_bytes=2048, target=target)


WHOLE = """\
m.onnx on A CPU, avx2, 2 threads
plan: 2 kernels, 1.500 ms for a run (1.250 ms to 1.750 ms, in turn with other plans), error 1.5e-07 of the \
largest element, arena 2.0 KiB
the plan 'split' is the fastest: the searched plan took 1.750 ms
search: feasible, sum of the kernels 0.0120 ms, bound 0.0090 ms, gap 25.0 %; 40 candidates, 20 different, \
4 measured (20.0 %), 3 do not run
model: 5 primitives, 1 alternative; 3.2 s
rounding error: 1.5e-07 of the largest element; the original model, operator by operator: 1.2e-07
       3.0e-07 of the outputs' root mean square (RMS); the original model, operator by operator: 2.5e-07
operations: 5.0M FLOP as given, 2.5M FLOP in the plan (2.00x fewer)
hard bound: another choice of kernels can save at most 25.0 % of that sum: none moves bytes or computes faster than \
this machine does
calibrated bound: it can save at most 5.0 % if no kernel that is not timed is faster, compared with its prediction, \
than 9,993 of 10,000 that were timed before
where the seconds went (idle: share of the cores without work of any process):
  frontend             0.0 s    0 %      - idle
  orchestrate          2.0 s  100 %   26 % idle
    compiling          0.8 s   37 %
    timing             1.0 s   50 %
    other              0.2 s   12 %
limits that bound the candidates: max_outputs

the slowest kernels, and why (more: korch explain --kernel NUMBER):
  #0   9.0 us, 90 % of the time: reduce_sum sub x2, made by generated; at 3.0 times its lower \
bound: its work alone would take 3.0 us, so a faster kernel may be possible
  #1   ≥1.0 us, 10 % of the time: matmul, made by onnxruntime; not measured: its bound stands \
for its time

whole plans, timed in turn (* is kept):
  plan           kernels         sum    expected     its p10     its p90      median         p10         p90     error
  searched             1   0.0120 ms           -           -           -    1.750 ms    1.500 ms    2.000 ms   2.0e-07
* split                2   0.0140 ms    1.375 ms    1.350 ms    1.450 ms    1.500 ms    1.250 ms    1.750 ms   1.5e-07
  by-rules             1  rejected: it crashes
  Rely on the median of complete runs. If they were disturbed, rely on the expected time, which is made of the
  kernels' own samples. The sum is what the search minimizes and what the bound is for: it compares plans.

equivalences: alternatives added, kernels of the plan that use them and their cost, and
what the best plan without each rule costs more, as far as its kernels are measured:
  reshapes-compose                       2 added    1 kernel     9.0 us  saves 3.5 us

  #       cost  share  x bound      bytes   FLOP  provider    what it computes (layouts)
  0     9.0 us  90.0%      3.0    1.5 KiB   2.5M  generated   reduce_sum sub x2 (ab -> ba)
                                                              from LayerNormalization norm, \
by reshapes-compose
  1    ≥1.0 us  10.0%        -      100 B    512  onnxruntime matmul \
(ba, [2 constants] -> scalar)
sum   ≥10.0 us                    1.6 KiB   2.5M
1 of 2 kernels not measured: ≥ marks a bound instead of a time"""


def test_the_whole_text(plan: PlanRecord) -> None:
    assert explain(plan, REPORT) == WHOLE


def test_a_busy_machine_is_told_once(plan: PlanRecord) -> None:
    text = explain(plan, replace(REPORT, disturbed=Disturbance(kernel_runs=3)))
    assert text.count("the machine was busy: 3 timed runs without a core for all threads, dropped") == 1


def test_the_time_of_a_process_of_its_own_comes_first(plan: PlanRecord) -> None:
    report = replace(REPORT, fresh=RunTimes(1.125, 1.0, 1.25, is_disturbed=True))
    text = "plan: 2 kernels, 1.125 ms for a run (1.000 ms to 1.250 ms, in a process of its own, disturbed), error"
    assert text in explain(plan, report)


def test_the_reason_to_doubt_a_bound_is_told(plan: PlanRecord) -> None:
    text = explain(plan, replace(REPORT, doubt="the clock stood still"))
    assert "bound 0.0090 ms (which may be too high: the clock stood still), gap 25.0 %" in text


def test_without_a_report_only_the_kernels_are_told(plan: PlanRecord) -> None:
    text = explain(replace(plan, model=ModelRecord(), threads=1), Report())
    assert text.startswith("a model on A CPU, avx2, 1 thread\n\nthe slowest kernels")
    assert "whole plans" not in text and "search:" not in text


def test_a_measured_plan_has_no_mark(plan: PlanRecord) -> None:
    text = explain(replace(plan, steps=plan.steps[:1]), Report())
    assert "≥" not in text and "not measured" not in text


def test_a_plan_of_nothing(plan: PlanRecord) -> None:
    assert explain(replace(plan, steps=()), Report()).splitlines()[-1].split() == ["sum", "0", "ns", "0", "B", "0"]


def test_operations_of_a_layout_change_and_of_many(plan: PlanRecord) -> None:
    step = plan.steps[0]
    assert operations(replace(step, primitives="graph() -> ()\n")) == "layout change"
    lone = "%1: f32[2,8] = broadcast(%0) {shape=[2,8], axes=[0]}\n"
    assert operations(replace(step, primitives=lone)) == "broadcast"
    many = "".join(f"%{i}: f32[2] = {'exp' if i % 2 else 'log'}(%0)\n" for i in range(30))
    assert len(operations(replace(step, primitives=many))) == 70


def test_the_summary_of_an_optimum_says_nothing_of_other_plans() -> None:
    text = summary("a.korch", replace(REPORT, plan=PlanName.SEARCHED))
    assert text.startswith("a.korch: 2 kernels, 1.750 ms for a run") and "fastest" not in text


def test_the_summary_counts_concatenations_in_place() -> None:
    for count, text in ((1, "2 kernels, 1 concatenation in place, "), (2, "2 kernels, 2 concatenations in place, ")):
        assert text in summary("plan", replace(REPORT, in_place=count))
    assert "in place" not in summary("plan", replace(REPORT, in_place=0))


def test_the_summary_names_what_ended_the_search_and_what_was_wrong() -> None:
    refused = replace(OPTIMAL, measured_ms=None, refusal="its error is 1.00e+00")
    text = summary("a.korch", replace(REPORT, stopped_by_budget=True, plans=(refused,)))
    assert "the searched plan is rejected: its error is 1.00e+00" in text
    assert text.endswith("the budget ended the search; more time may find a better plan")


def test_kernels_that_do_not_compile_are_named_at_the_end() -> None:
    rows = tuple(Uncompiled(f"c{i}", "no", "a/b.txt" * (i > 0)) for i in range(12))
    text = summary("a.korch", replace(REPORT, not_compiled=rows))
    told = text.splitlines()[-12:]
    assert told[0] == (
        "12 kernels did not compile, and the search went on without: that is a bug of Korch; please "
        "report it with the files named here, which contain the compiler's output"
    )
    assert told[1:3] == ["  c0: no", "  c1: a/b.txt"] and told[-1] == "  and 2 more"
    assert "\n1 kernel did not compile, " in summary("a.korch", replace(REPORT, not_compiled=rows[:1]))


def test_the_summary_says_for_which_plans_a_bound_in_segments_holds() -> None:
    text = summary("a.korch", replace(REPORT, partition=PartitionRecord(24, 3)))
    assert text.splitlines()[-1] == (
        "segments: 24, 3 of them different; the bound holds for plans in which no kernel crosses a cut"
    )


def test_errors_are_told_by_output_the_worst_first() -> None:
    def row(output: str, error: float) -> OutputError:
        return OutputError(output, Difference(error, 2 * error, error / 2), Difference(1e-7, 1e-7, 1e-7))

    report = replace(REPORT, output_errors=(row("a", 1e-6), row("boxes", 1e-5)))
    lines = summary("a.korch", report).splitlines()
    (at,) = (i for i, line in enumerate(lines) if "RMS of the errors / RMS:" in line)
    assert [line.split() for line in lines[at + 1 : at + 3]] == [
        ["boxes", "1.0e-05", "2.0e-05", "5.0e-06"],
        ["a", "1.0e-06", "2.0e-06", "5.0e-07"],
    ]
    rows = (*(row(f"y{i}", 1e-6) for i in range(10)), row("lost", float("inf")))
    text = summary("a.korch", replace(report, output_errors=rows))
    assert "lost                                  inf" in text
    assert "and 3 outputs with smaller errors" in text


def test_the_trace_of_a_search_has_its_first_and_its_last_round(plan: PlanRecord) -> None:
    rounds = tuple(Round(1000 * i, 200_000 if i else None, 10 * i, float(i)) for i in range(101))
    text = explain(plan, replace(REPORT, rounds=rounds, recalled=True))
    trace = text.partition("the search over time, in the run that did it:\n")[2].split("\n\n")[0]
    head, *rows = (line.split() for line in trace.splitlines())
    assert head[0] == "seconds" and len(rows) == 8
    assert rows[0] == ["0.0", "0.0000", "ms", "-", "-", "0"]
    assert rows[-1] == ["100.0", "0.1000", "ms", "0.2000", "ms", "50.0", "%", "1000"]
    assert "over time" not in explain(plan, replace(REPORT, rounds=rounds[:1]))


def test_what_a_longer_search_is_expected_to_bring(plan: PlanRecord) -> None:
    rounds = (Round(0, None, 0, 0.0), Round(1000, 200_000, 1, 1.0, 190_000))
    text = explain(plan, replace(REPORT, rounds=rounds, stopped_by_budget=True))
    assert "is expected to make the sum of the kernels 5.0 % shorter, by estimates" in text
    assert "is expected" not in explain(plan, replace(REPORT, rounds=rounds))  # the search was done
    assert "is expected" not in explain(plan, replace(REPORT, rounds=rounds[:1], stopped_by_budget=True))


def test_the_times_of_both_schedules_are_told() -> None:
    for runs_tasks, expected in (
        (True, "schedule: tasks, 1.000 ms for a run; with joins 1.100 ms"),
        (False, "schedule: joins, 1.100 ms for a run; with tasks 1.000 ms"),
    ):
        times = ScheduleTimes(joins_ms=1.1, tasks_ms=1.0, runs_tasks=runs_tasks)
        text = summary("a.korch", replace(REPORT, plan=PlanName.SEARCHED, schedule=times))
        assert text.splitlines()[-1] == expected
