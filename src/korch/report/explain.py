"""Plan and report -> text: the kernels, their costs, and how far these are from their bounds.

A cost that was not measured is its lower bound and is marked by ≥. The plan that was kept, because it was
the fastest in complete runs, is distinguished from the optimum that the search found.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.costs.calibrated import LEVEL
from korch.equivalence.rule import rule_of
from korch.primitive.dispute import Dispute
from korch.report.costs import cost_lines, size_lines
from korch.report.kernel import operations, slowest
from korch.report.units import count_text, cut, milliseconds, size_text, time_text
from korch.runtime.record import PlanRecord, PortRecord, StepRecord
from korch.runtime.report import AnyReport, PrecisionRecord, Report, ShapedReport
from korch.runtime.text import counted
from korch.search.result import PlanName

MOST_OUTPUTS = 8
"""The most outputs whose errors are printed in the terminal: those with the largest errors."""

MOST_ROWS = 10
"""The most kernels that did not compile whose names are printed."""

WHICH_TIME = (
    "  Rely on the median of complete runs. If they were disturbed, rely on the expected time, which is made of the\n"
    "  kernels' own samples. The sum is what the search minimizes and what the bound is for: it compares plans."
)

MOST_ROUNDS = 8
"""The most rounds of the search that are printed in the terminal, including the first and the last."""


def summary(name: str, report: Report) -> str:
    """Return a few lines about an optimization.

    `name`: the name of the artifact or of a part of it.
    """
    distinct = report.distinct_candidates
    share = 100 * report.measured_candidates / max(1, distinct)
    in_place = f"{counted(report.in_place, 'concatenation')} in place, " if report.in_place else ""
    lines = [
        f"{name}: {counted(report.kernels, 'kernel')}, {in_place}{_run_time(report)}, "
        + (f"error {report.max_error:.1e} of the largest element, " if report.plans else "not run yet, ")
        + f"arena {size_text(report.arena_bytes)}",
        *_won(report),
        f"search: {_found(report)}; "
        f"{counted(report.candidates, 'candidate')}, {distinct} different, "
        f"{report.measured_candidates} measured ({share:.1f} %)"
        + (f", {report.failed_candidates} do not run" if report.failed_candidates else ""),
        f"model: {counted(report.primitives, 'primitive')}, {counted(report.alternatives, 'alternative')}; "
        f"{report.seconds:.1f} s",
        *quality(report),
        *faults(report),
    ]
    if report.rejected:
        lines.append(f"rejected: {report.rejected}; searched again with --strict")
    lines += bound_sentences(report)
    if report.partition is not None:
        lines.append(
            f"segments: {report.partition.segments}, {report.partition.different} of them different; the "
            "bound holds for plans in which no kernel crosses a cut"
        )
    if times := report.schedule:
        chosen, other = ("tasks", "joins") if times.runs_tasks else ("joins", "tasks")
        texts = {"tasks": milliseconds(times.tasks_ms), "joins": milliseconds(times.joins_ms)}
        lines.append(f"schedule: {chosen}, {texts[chosen]} for a run; with {other} {texts[other]}")
    if precision := report.precision:
        lines += precision_lines(precision, report.rule_savings_ms)
    if report.stopped_by_budget:
        lines.append("the budget ended the search; more time may find a better plan")
    return "\n".join([*lines, *uncompiled_lines(report), *warnings(report)])


def _run_time(report: Report) -> str:
    """Return the time of a run with its spread, and how it was measured."""
    times = report.times
    if times is None:
        return "not timed"
    how = "in a process of its own" if report.fresh else "in turn with other plans"
    spread = f"{milliseconds(times.p10_ms)} to {milliseconds(times.p90_ms)}"
    return f"{milliseconds(times.median_ms)} for a run ({spread}, {how}{', disturbed' * times.is_disturbed})"


def _won(report: Report) -> list[str]:
    """Return a line about the search's own plan if another plan was kept."""
    found = next((row for row in report.plans if row.plan is PlanName.SEARCHED), None)
    if found is None or report.plan in (None, PlanName.SEARCHED):
        return []
    result = f"took {milliseconds(found.measured_ms or 0.0)}"
    if found.refusal:
        result = f"is rejected: {found.refusal}"
    return [f"the plan {report.plan.value!r} is the fastest: the searched plan {result}"]


def _found(report: Report) -> str:
    """Return the result of the search; without a gap if some kernels of the plan were not measured."""
    bound = f"bound {milliseconds(report.lower_bound_ms)}"
    if report.doubt:
        bound += f" (which may be too high: {report.doubt})"
    if report.untimed:
        return f"chosen by estimates, as no time was left to measure {report.untimed} of the plan's kernels; {bound}"
    total = milliseconds(report.predicted_ms)
    return f"{report.status}, sum of the kernels {total}, {bound}, gap {100 * (report.gap or 0.0):.1f} %"


def bound_sentences(report: Report) -> list[str]:
    """Return a sentence for each bound of the sum of the kernels' times: by the hardware, and calibrated."""
    if report.gap is None:
        return []
    lines = [
        f"hard bound: another choice of kernels can save at most {100 * report.gap:.1f} % of that sum: none moves "
        "bytes or computes faster than this machine does"
    ]
    if report.calibrated_gap is not None:
        lines.append(
            f"calibrated bound: it can save at most {100 * report.calibrated_gap:.1f} % if no kernel that is not timed "
            f"is faster, compared with its prediction, than {10_000 * LEVEL:,.0f} of 10,000 that were timed before"
        )
    return lines


def warnings(report: Report) -> list[str]:
    """Return lines about reasons to doubt a plan or its times: references that differ, disturbances, predictions."""
    lines = dispute_lines(report.disputes)
    disturbed = report.disturbed
    if runs := disturbed.kernel_runs + disturbed.plan_runs:
        text = f"the machine was busy: {counted(runs, 'timed run')} without a core for all threads, dropped"
        if disturbed.kernels:
            text += f"; kernels of the plan with estimated times, as too few runs are left: {disturbed.kernels}"
        if disturbed.is_plan_disturbed:
            text += "; no run of the whole plan was undisturbed"
        lines.append(text)
    if report.discrepancy is not None:
        lines.append(f"warning: {report.discrepancy.to_text()}")
    return lines


def dispute_lines(disputes: Sequence[Dispute]) -> list[str]:
    """Return lines about the nodes on which references differed."""
    return [f"references {'differ' if dispute.others else 'missing'}: {dispute.text}" for dispute in disputes]


def uncompiled_lines(report: Report) -> list[str]:
    """Return lines about the kernels that did not compile."""
    rows = report.not_compiled
    if not rows:
        return []
    lines = [
        f"{counted(len(rows), 'kernel')} did not compile, and the search went on without: that is a bug of Korch; "
        "please report it with the files named here, which contain the compiler's output"
    ]
    lines += [f"  {row.candidate}: {row.file or row.message}" for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f"  and {len(rows) - MOST_ROWS} more")
    return lines


def faults(report: Report) -> list[str]:
    """Return a line for each error of a rule or a provider; the search went on without what failed."""
    rules = [f"rule {rule.name} failed {error}" for rule in report.rule_reports for error in rule.failures]
    providers = [f"{text} ({counted(count, 'group')})" for text, count in report.provider_faults.items()]
    return [f"a fault, please report it with the model: {line}" for line in (*rules, *providers)]


def explain(plan: PlanRecord, report: Report) -> str:
    """Return the whole explanation of a plan.

    `plan`: the kernels in order.
    """
    parts = [
        _head(plan, report),
        _slowest(plan, report),
        _search_trace(report),
        _plans(report),
        _rules(plan, report),
        _kernels(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(plan: PlanRecord, report: Report) -> str:
    target = plan.target
    lines = [
        f"{plan.model.path or 'a model'} on {target.get('cpu', 'an unknown CPU')}, "
        f"{target.get('isa', 'generic')}, {counted(plan.threads, 'thread')}"
    ]
    if report.is_known:
        lines.append(summary("plan", report))
        if report.stages_s:
            lines += [*report.provider_reports, *_stages(report)]
        if report.limits_hit:
            lines.append("limits that bound the candidates: " + ", ".join(report.limits_hit))
    return "\n".join([*lines, *waiting_lines(plan)])


def _stages(report: Report) -> list[str]:
    """Return a table of the seconds of the stages, and what a longer search is expected to bring."""
    whole_s = sum(report.stages_s.values()) or 1.0
    lines = ["where the seconds went (idle: share of the cores without work of any process):"]
    for stage, spent_s in report.stages_s.items():
        idle = f"{100 * report.idle[stage]:.0f} %" if stage in report.idle else "-"
        lines.append(f"  {stage:16}{spent_s:>8.1f} s{100 * spent_s / whole_s:>5.0f} %{idle:>7} idle")
        if stage == "orchestrate":
            lines += (f"    {kind:14}{s:>8.1f} s{100 * s / whole_s:>5.0f} %" for kind, s in report.search_s.items())
    if (more := _more(report)) is not None and report.stopped_by_budget:
        lines.append(
            f"a longer search is expected to make the sum of the kernels {100 * more:.1f} % shorter, "
            "by estimates of kernels that were not measured"
        )
    return lines


def _more(report: Report) -> float | None:
    """Return the share of the sum of the kernels' times that a longer search is expected to save; None if not known."""
    last = report.rounds[-1] if report.rounds else None
    if last is None or last.expected_ns is None or not last.incumbent_ns:
        return None
    return max(0.0, 1 - last.expected_ns / last.incumbent_ns)


def waiting_lines(plan: PlanRecord) -> list[str]:
    """Return the share of the threads' time that is waiting in a simulated run, and the longest waits."""
    if plan.waiting is None:
        return []
    rest = "tasks" if plan.waiting.runs_tasks else "joins"
    lines = [f"waiting: {100 * plan.waiting.share:.1f} % of the threads' time in a simulated run with {rest}"]
    for wait in plan.waiting.waits[:3]:
        step, waited = plan.steps[wait.step], plan.steps[wait.waited]
        where = f"kernel {wait.step} ({operations(step)})"
        what = f"{where} for kernel {wait.waited} ({operations(waited)})" if wait.step != wait.waited else where
        cause = "before" if wait.step != wait.waited else "for the last thread of"
        lines.append(f"    {100 * wait.share:.1f} % {cause} {what}")
    return lines


def _slowest(plan: PlanRecord, report: Report) -> str:
    rows = slowest(plan, report)
    if not rows:
        return ""
    lines = ["the slowest kernels, and why (more: korch explain --kernel NUMBER):"]
    lines += (f"  #{number:<4}{'; '.join(texts)}" for number, texts in rows)
    return "\n".join(lines)


def quality(report: Report) -> list[str]:
    """Return lines about the errors and the operations of a plan, compared with the model as given."""
    if report.plan is None:
        return []
    lines = [
        f"rounding error: {report.max_error:.1e} of the largest element; the original model, operator by "
        f"operator: {report.given_error:.1e}",
        f"       {report.rms_error:.1e} of the outputs' root mean square (RMS); the original model, operator by "
        f"operator: {report.given_rms_error:.1e}",
    ]
    if report.output_errors:
        lines.append(_outputs(output_rows(report)))
    lines.append(
        f"operations: {count_text(report.given_flop)} FLOP as given, {count_text(report.flop)} FLOP in the plan "
        f"({report.given_flop / max(1, report.flop):.2f}x fewer)"
    )
    return lines


def output_rows(report: Report) -> list[tuple[str, ...]]:
    """Return, for each output, its name, its errors, and the error of the model as given; the worst output is first.

    The errors are the largest error relative to the largest element, the largest error relative to the root
    mean square of the elements, and the root mean square of all errors relative to that of the elements.
    """
    rows = sorted(report.output_errors, key=lambda row: -row.error.of_largest)
    return [
        (
            row.output,
            *(f"{number:.1e}" for number in (row.error.of_largest, row.error.of_rms, row.error.rms)),
            f"{row.given.of_largest:.1e}",
        )
        for row in rows
    ]


def _outputs(rows: Sequence[Sequence[str]]) -> str:
    lines = ["       per output: largest error / largest element, largest error / RMS, RMS of the errors / RMS:"]
    for name, of_largest, of_rms, rms, _ in rows[:MOST_OUTPUTS]:
        lines.append(f"       {cut(name, 30):32}{of_largest:>9}{of_rms:>9}{rms:>9}")
    if len(rows) > MOST_OUTPUTS:
        lines.append(f"       and {len(rows) - MOST_OUTPUTS} outputs with smaller errors")
    return "\n".join(lines)


def _search_trace(report: Report) -> str:
    """Return a table of the bound and the best plan over the time of the search, for some of its rounds."""
    rounds = report.rounds
    if len(rounds) < 2:
        return ""
    count = min(len(rounds), MOST_ROUNDS)
    picked = [rounds[round(i * (len(rounds) - 1) / (count - 1))] for i in range(count)]
    lines = [
        "the search over time" + (", in the run that did it" if report.recalled else "") + ":",
        f"  {'seconds':>9}{'no plan below':>16}{'best plan':>14}{'gap':>9}{'measured':>10}",
    ]
    for entry in picked:
        best_ns, bound_ns = entry.incumbent_ns, entry.bound_ns
        best, gap = "-", "-"
        if best_ns is not None:
            best = milliseconds(best_ns / 1e6)
            gap = f"{100 * (best_ns - bound_ns) / (best_ns or 1):.1f} %"
        lines.append(f"  {entry.seconds:>9.1f}{milliseconds(bound_ns / 1e6):>16}{best:>14}{gap:>9}{entry.measured:>10}")
    return "\n".join(lines)


def _plans(report: Report) -> str:
    if not report.plans:
        return ""
    lines = [
        "whole plans, timed in turn (* is kept):",
        f"  {'plan':14}{'kernels':>8}{'sum':>12}{'expected':>12}{'its p10':>12}"
        f"{'its p90':>12}{'median':>12}{'p10':>12}{'p90':>12}{'error':>10}",
    ]
    for row in report.plans:
        line = f"{'*' if row.plan is report.plan else ' '} {row.plan:14}{row.kernels:>8}"
        if row.measured_ms is None or row.max_error is None:
            lines.append(f"{line}  rejected: {row.refusal}")
            continue
        least = "" if row.is_measured else "> "  # for kernels that were not measured, only bounds are known
        line += f"{least + milliseconds(row.predicted_ms):>12}"
        expected = (row.expected_ms, row.expected_p10_ms, row.expected_p90_ms)
        times = (*expected, row.measured_ms, row.p10_ms, row.p90_ms)
        line += "".join(f"{'-' if ms is None else milliseconds(ms):>12}" for ms in times)
        note = f"  rejected: {row.refusal}" if row.refusal else ""
        lines.append(f"{line}{row.max_error:>10.1e}{note}")
    lines.append(WHICH_TIME)
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class RuleRow:
    """A rule that fired or is used in a plan."""

    name: str  # the name of the rule
    fired: int  # the number of alternatives that it added
    kernels: int  # the number of the plan's kernels that use it; `cost_ns` is their total cost
    cost_ns: float
    saves: str  # the additional cost of the best plan without it, as text


def precision_lines(precision: PrecisionRecord, saved_ms: Mapping[str, float | None]) -> list[str]:
    """Return how the error budget was used: each less precise product of the plan, its error and its saving."""
    return [
        f"precision: error {precision.error:.1e} of at most {precision.budget:g}; {len(precision.forms)} of "
        f"{counted(precision.offered, 'product')} less precise; calibrated on {precision.source}",
        *(
            f"  {form.name:44} error {form.error:.1e}  {_saved(saved_ms, form.name)}".rstrip()
            for form in precision.forms
        ),
    ]


def rule_rows(plan: PlanRecord, report: Report) -> list[RuleRow]:
    """Return a row for each rule that fired or is used in the plan."""
    used: dict[str, list[float]] = {}
    for step in plan.steps:
        for rule in filter(None, {rule_of(origin) for origin in step.origins}):
            used.setdefault(rule, []).append(step.cost_ns)
    fired = {rule.name: rule.fired for rule in report.rule_reports if rule.fired}
    rows = []
    for name in sorted({*fired, *used}):
        costs_ns = used.get(name, [])
        saves = _saved(report.rule_savings_ms, name) if costs_ns else ""
        rows.append(RuleRow(name, fired.get(name, 0), len(costs_ns), sum(costs_ns), saves))
    return rows


def _rules(plan: PlanRecord, report: Report) -> str:
    rows = rule_rows(plan, report)
    if not rows:
        return ""
    lines = [
        "equivalences: alternatives added, kernels of the plan that use them and their cost, and\n"
        "what the best plan without each rule costs more, as far as its kernels are measured:"
    ]
    for row in rows:
        used = f"{row.kernels:>4} kernel{'s' * (row.kernels != 1)}"
        if row.kernels:
            used += f" {time_text(row.cost_ns):>10}  {row.saves}".rstrip()
        lines.append(f"  {row.name:36}{row.fired:>4} added {used}")
    return "\n".join(lines)


def _saved(saved_ms: Mapping[str, float | None], rule: str) -> str:
    if rule not in saved_ms:
        return ""
    saved = saved_ms[rule]
    if saved is None:
        return "no measured plan without it"
    return f"saves {time_text(1e6 * saved)}" if saved else "saves nothing by itself"


def _kernels(plan: PlanRecord) -> str:
    total_ns = sum(step.cost_ns for step in plan.steps) or 1.0
    lines = [
        f"{'#':>3} {'cost':>10} {'share':>6} {'x bound':>8} {'bytes':>10} {'FLOP':>6}  "
        f"{'provider':11} what it computes (layouts)"
    ]
    for number, step in enumerate(plan.steps):
        cost, ratio = f"≥{time_text(step.cost_ns)}", "-"
        if step.is_measured:
            cost = time_text(step.cost_ns)
            ratio = f"{step.cost_ns / step.bound_ns:.1f}" if step.bound_ns > 0 else "-"
        lines.append(
            f"{number:>3} {cost:>10} {100 * step.cost_ns / total_ns:>5.1f}% {ratio:>8} "
            f"{size_text(step.size_bytes):>10} {count_text(step.work_flop):>6}  "
            f"{step.provider:<11} {operations(step)} {_layouts(step)}"
        )
        if origins := [origin for origin in step.origins if origin]:
            lines.append(" " * 62 + "from " + cut(", ".join(origins), 90))
    unmeasured = sum(not step.is_measured for step in plan.steps)
    lines.append(
        f"sum {'≥' * (unmeasured > 0) + time_text(sum(s.cost_ns for s in plan.steps)):>10} {'':15} "
        f"{size_text(sum(s.size_bytes for s in plan.steps)):>10} "
        f"{count_text(sum(s.work_flop for s in plan.steps)):>6}"
    )
    if unmeasured:
        lines.append(
            f"{unmeasured} of {counted(len(plan.steps), 'kernel')} not measured: ≥ marks a bound instead of a time"
        )
    return "\n".join(lines)


def _layouts(step: StepRecord) -> str:
    return f"({_ports(step.inputs)} -> {_ports(step.outputs)})"


def _ports(ports: Sequence[PortRecord]) -> str:
    """Return the layouts of ports; constants are only counted, in brackets."""
    texts = [port.layout or "scalar" for port in ports if port.place != "CONSTANT"]
    constants = len(ports) - len(texts)
    if constants:
        texts.append("[constant]" if constants == 1 else f"[{constants} constants]")
    return ", ".join(texts)


def describe(name: str, report: AnyReport) -> str:
    """Return lines about an artifact: about its plan, or about its several plans or segments."""
    if isinstance(report, Report):
        return summary(name, report)
    if isinstance(report, ShapedReport):
        return "\n".join(
            [
                *(summary(f"inputs of {shapes}", plan) for shapes, plan in report.plans.items()),
                f"shared: weights of {size_text(report.weights_bytes)} in "
                f"{size_text(report.shared_weights_bytes)}, {counted(report.kernels, 'kernel')}, "
                f"{report.shared_kernels} of them different",
                *size_lines(report.sizes),
                *(line for shapes, rows in report.costs.items() for line in cost_lines(shapes, rows)),
            ]
        )
    lines = [summary(f"native segment {number}", segment) for number, segment in enumerate(report.segments)]
    if report.host:
        lines.append(f"{counted(len(report.host), 'operator')} run on the host:")
    lines += [f"    {item.node}: {item.engine}, because {item.reason} ({item.checked})" for item in report.host]
    lines += dispute_lines(report.disputes)
    return "\n".join(lines)
