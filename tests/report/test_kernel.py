"""The explanation of a kernel: what limits its speed, and which candidates lost against it."""

from dataclasses import replace
from functools import partial

import pytest

from korch.costs.rates import MemoryLevel, Rates
from korch.errors import OptionError
from korch.report.kernel import kernel_text, limit_of, nearest_rival, rival_row, slowest, why
from korch.runtime.record import PlanRecord, StepRecord
from korch.runtime.report import GroupedKernel, GroupingRecord, Report, Rival
from korch.search.result import PlanName
from tests.report.report_plans import plan_of, port_of, step_of

BODY = """graph(%0 "i0": f32[256,256], %1 "i1": f32[256,256]) -> (%2 "o0")
%2: f32[256,256] = matmul(%0, %1)
"""
MACHINE = Rates(levels=(MemoryLevel(2**20, 1e12, 1e12), MemoryLevel(0, 1e10, 1e10)), rate_flop_per_s=1e11)
SQUARE = 4 * 256 * 256


@pytest.fixture
def step() -> StepRecord:
    square = partial(port_of, "f32[256,256]")
    return step_of(
        BODY,
        provider="gemm",
        variant="wide",
        origins=("MatMul a", "by low-rank"),
        inputs=(square(), square(place="CONSTANT")),
        outputs=(square(),),
        cost_ns=400_000.0,
        bound_ns=336_000.0,
        size_bytes=3 * SQUARE,
        work_flop=2 * 256**3,
    )


@pytest.fixture
def plan(step: StepRecord) -> PlanRecord:
    small = replace(step, cost_ns=2000.0, bound_ns=200.0, candidate="c2", work_flop=100)
    return plan_of(small, step, small, small)


def test_the_limit_is_read_off_the_bound(step: StepRecord) -> None:
    assert limit_of(step, MACHINE) == "operations"
    assert why(step, MACHINE) == "limited by arithmetic, at 84 % of the machine's peak"
    above = why(step, replace(MACHINE, margin=1.15))
    assert above == "limited by arithmetic, at 97 % of the machine's peak"
    assert "at 100 %" in why(step, replace(MACHINE, margin=1.5))
    cached = replace(step, bound_ns=600.0, cost_ns=800.0)
    assert why(cached, MACHINE) == "limited by the bandwidth of L1, at 75 % of the bandwidth of L1"
    far = replace(step, size_bytes=2**21, bound_ns=184_000.0, cost_ns=920_000.0)
    assert why(far, MACHINE) == (
        "at 20 % of the bandwidth of memory: moving its 2.0 MiB alone would take 184.0 us, so a "
        "faster kernel may be possible"
    )
    short = why(replace(far, cost_ns=4000.0, bound_ns=1000.0), MACHINE)
    assert short.startswith("so short that starting it takes most of the time; at 25 % of ")
    assert why(step, Rates()) == "at 1.2 times its lower bound"
    device = Rates(copy_bytes_per_s=1e9, rate_flop_per_s=1e12)
    assert limit_of(replace(step, bound_ns=786_432.0), device) == "memory"
    assert limit_of(replace(step, bound_ns=900_000.0), device) == "operations"
    assert why(replace(step, is_measured=False), MACHINE).startswith("not measured")


def test_the_nearest_rival_is_the_one_that_takes_least_more(plan: PlanRecord) -> None:
    def other(cost_ns: int, layouts: str = "(ab, ab) -> (ab)", *, measured: bool = True) -> Rival:
        return Rival("library", "", layouts, cost_ns, measured)

    grouping = GroupingRecord((GroupedKernel("gemm", "matmul"),) * 2, (1,), 420_000, 400_000)
    assert nearest_rival(1, plan, Report()) == ""
    cheap = (other(1, "(ba, ab) -> (ab)"), other(1, measured=False), other(500_000))
    report = Report(rivals={"c1": cheap})
    assert nearest_rival(1, plan, report) == "nearest rival +25.0 %, library"
    report = replace(report, groupings=((), (grouping,)))
    assert nearest_rival(1, plan, report) == "nearest rival +5.0 %, 2 kernels instead of it"
    report = replace(report, groupings=((), (replace(grouping, cost_ns=380_000),)), stopped_by_budget=True)
    told = nearest_rival(1, plan, report)
    assert told == (
        "faster by itself, but not in the plan: −5.0 %, 2 kernels instead of it; the budget ended "
        "the search before it was used; a longer search may use it"
    )


def test_what_is_faster_alone_says_why_it_lost(plan: PlanRecord) -> None:
    def lost(row: Rival, report: Report, gap: float = 0.0) -> str:
        return rival_row(row, plan.steps[1], replace(plan, options={"search": {"gap": gap}}), report).lost

    rival = Rival("x", "", "(ab, ab) -> (ab)", 300_000, True)
    assert lost(replace(rival, cost_ns=500_000), Report()) == lost(replace(rival, is_measured=False), Report()) == ""
    assert lost(replace(rival, failure="crashed"), Report()) == ""
    assert lost(replace(rival, layouts="(ba, ab) -> (ab)"), Report()).startswith("it uses other layouts")
    kept = lost(rival, Report(plan=PlanName.SPLIT))
    assert kept.startswith("this plan was kept because it ran faster as a ")
    assert lost(rival, Report(stopped_by_budget=True)).startswith("the budget ended the search")
    near = lost(rival, Report(plan=PlanName.SEARCHED), gap=0.5)
    assert near.startswith("it would save 24.6 % of the plan, ")
    assert "rose when the plan's kernels were measured again" in lost(rival, Report())
    text = kernel_text(plan, Report(rivals={"c1": (rival,)}), 1)
    assert "−25.0 %    300.0 us  x (ab, ab) -> (ab)\n             not in the plan: the sea" in text


def test_the_slowest_come_first(plan: PlanRecord) -> None:
    rows = slowest(plan, Report(machine=MACHINE))
    assert [number for number, _ in rows] == [1, 0, 2]
    assert rows[0][1] == (
        "400.0 us, 99 % of the time: matmul, made by gemm",
        "limited by arithmetic, at 84 % of the machine's peak",
    )
    assert slowest(replace(plan, steps=()), Report()) == []


def test_all_of_one_kernel(plan: PlanRecord) -> None:
    failed = Rival("x", "", "", 1, False, "crashed: signal 11")
    grouping = GroupingRecord((GroupedKernel("gemm", "matmul"),), (1, 2), 804_000, 402_000)
    report = Report(rivals={"c1": (failed,)}, groupings=((), (grouping,), (), ()))
    text = kernel_text(plan, report, 1)
    assert text.startswith("kernel 1 of 4: matmul\nmade by    gemm, wide\n")
    assert "from       MatMul a\nrules      low-rank\n" in text
    assert "  crashed: signal 11       fails  x\n" in text
    assert "   +100.0 %  804.0 us instead of 402.0 us, instead of #1, #2:\n" in text
    assert text.endswith(BODY.rstrip())
    assert kernel_text(plan, Report(), 0).count("  none") == 2
    for number in (-1, 4):
        with pytest.raises(OptionError) as info:
            kernel_text(plan, Report(), number)
        assert str(info.value) == f"option --kernel: there is no kernel {number}; expected 0 to 3"
