"""Plan and report -> text: which kernels run, what each costs, how far it is from its bound.

What was measured and what was not are never mixed up: a cost that is only a bound is marked by ≥
and has no distance from its bound. The plan that was fastest as a whole is distinguished from the
result of the search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from korch.equivalence.rule import rule_of
from korch.report.kernel import operations, slowest
from korch.report.units import count_text, cut, milliseconds, size_text, time_text
from korch.runtime.record import PlanRecord, PortRecord, StepRecord
from korch.search.result import PlanName

MOST_OUTPUTS = 8
"""Most outputs whose errors are printed in the terminal: those with the largest errors."""

MOST_ROWS = 10
"""Most kernels that do not compile whose names are printed."""

MOST_ROUNDS = 8
"""Most rounds of the search that are printed in the terminal, including the first and the last."""


def summary(report: Mapping[str, Any]) -> str:
    """Return a few lines on an optimization, for a person."""
    rows = {row["plan"]: row for row in report.get("contest", ())}
    distinct = report["distinct_candidates"]
    share = 100 * report["measured_candidates"] / max(1, distinct)
    lines = [
        f"{report['artifact']}: {report['kernels']} kernels, {_in_place(report)}"
        f"{milliseconds(report['measured_ms'])} measured, {_expected(report)}"
        f"error {report['max_error']:.1e} of the largest element, "
        f"arena {size_text(report['arena_bytes'])}",
        f"search: {_found(report)}; "
        f"{report['candidates']} candidates, {distinct} different, "
        f"{report['measured_candidates']} measured ({share:.1f} %)",
        f"model: {report['primitives']} primitives, {report['alternatives']} alternatives; {report['seconds']:.1f} s",
    ]
    lines += quality(report)
    lines += faults(report)
    if report.get("rejected"):
        lines.append(f"rejected: {report['rejected']}; searched again with --strict")
    if partition := report.get("partition"):
        lines.append(
            f"segments: {partition['segments']}, {partition['different']} of them different; the "
            "bound holds for plans in which no kernel crosses a cut"
        )
    won = report.get("plan", PlanName.OPTIMAL)
    if won != PlanName.OPTIMAL and PlanName.OPTIMAL in rows:
        found = rows[PlanName.OPTIMAL]
        told = f"is out: {found['refusal']}" if found["refusal"] else f"took {milliseconds(found['measured_ms'])}"
        lines.insert(1, f"as a whole the plan {won!r} won: the optimum of the search {told}")
    if beside := report.get("side_by_side"):
        lines.append(
            f"side by side: {beside['kernels']} kernels run {beside['parts']} of the optimum's, "
            f"each on a share of the threads, {milliseconds(beside['predicted_ms'])} predicted; "
            "the bound holds for plans whose kernels run one after the other"
        )
    if report.get("stopped_by_budget"):
        lines.append("the budget ended the search; more time may find a better plan")
    return "\n".join([*lines, *uncompiled_lines(report), *warnings(report)])


def _found(report: Mapping[str, Any]) -> str:
    """Return what the search found; without a gap if some kernels of the plan were not measured."""
    bound = f"bound {milliseconds(report['lower_bound_ms'])}"
    if untimed := report.get("untimed"):
        return f"chosen by estimates, as no time was left to measure {untimed} of the plan's kernels; {bound}"
    predicted = milliseconds(report["predicted_ms"])
    return f"{report['status']}, {predicted} predicted, {bound}, gap {100 * (report['gap'] or 0.0):.1f} %"


def warnings(report: Mapping[str, Any]) -> list[str]:
    """Return what makes a plan or its times doubtful: other processes, or a wrong prediction."""
    lines = []
    disturbed = report.get("disturbed") or {}
    if runs := disturbed.get("kernel_runs", 0) + disturbed.get("plan_runs", 0):
        text = f"the machine was busy: in {runs} timed runs a thread had no core; they were dropped"
        if count := disturbed["kernels"]:
            text += f"; times of kernels in the plan that are estimates for want of others: {count}"
        if disturbed["is_plan_disturbed"]:
            text += "; no run of the whole plan was undisturbed"
        lines.append(text)
    if doubt := report.get("doubt"):
        lines.append(f"warning: {doubt['text']}")
    return lines


def uncompiled_lines(report: Mapping[str, Any]) -> list[str]:
    """Return lines on the kernels that did not compile: none, if all is well."""
    rows = report.get("not_compiled", ())
    if not rows:
        return []
    count = f"{len(rows)} kernels do" if len(rows) > 1 else "1 kernel does"
    lines = [
        f"{count} not compile, and the search went on without: that is a bug of Korch; please "
        "report it with the files named here, which hold the compiler's output"
    ]
    lines += [f"  {row['candidate']}: {row['file'] or row['message']}" for row in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f"  and {len(rows) - MOST_ROWS} more")
    return lines


def faults(report: Mapping[str, Any]) -> list[str]:
    """Return a line for each rule that raised errors, which the search survived."""
    rules = report.get("rules", {}).get("rules", ())
    return [
        f"a fault of Korch, please report it with the model: rule {rule['name']} failed {error}"
        for rule in rules
        for error in rule.get("failures", ())
    ]


def _in_place(report: Mapping[str, Any]) -> str:
    """Return how many concatenations take no kernel; "" if none."""
    count = report.get("in_place", 0)
    return f"{count} concatenation{'s' * (count > 1)} in place, " if count else ""


def explain(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    """Return the whole explanation of a plan.

    Args:
        plan: the kernels in order.
        report: how the plan was found; it may be empty.
    """
    parts = [
        _head(plan, report),
        "\n".join(warnings(report)),
        _slowest(plan, report),
        _story(report),
        _contest(report),
        _rules(plan, report),
        _kernels(plan),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    target = plan.target
    threads = f"{plan.threads} thread" + ("s" if plan.threads > 1 else "")
    lines = [
        f"{plan.model.path or 'a model'} on {target.get('cpu', 'an unknown CPU')}, "
        f"{target.get('isa', 'generic')}, {threads}"
    ]
    if report:
        lines.append(summary({"artifact": "plan", **report}))
        if stages := report.get("stages_s"):
            lines.append("seconds: " + ", ".join(f"{k} {v:.1f}" for k, v in stages.items()))
        if report.get("limits_hit"):
            lines.append("limits that bound the candidates: " + ", ".join(report["limits_hit"]))
    return "\n".join(lines)


def _slowest(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    rows = slowest(plan, report)
    if not rows:
        return ""
    lines = ["the slowest kernels, and why (more: korch explain --kernel NUMBER):"]
    lines += (f"  #{number:<4}{'; '.join(texts)}" for number, texts in rows)
    return "\n".join(lines)


def quality(report: Mapping[str, Any]) -> list[str]:
    """Return lines on what a plan computes and how exactly, beside the model as given."""
    lines = []
    if "given_error" in report:
        lines.append(
            f"error: {report['max_error']:.1e} of the largest element; the model as given has "
            f"{report['given_error']:.1e} in its own types"
        )
    if report.get("rms_error") is not None:
        lines.append(
            f"       {report['rms_error']:.1e} of the outputs' root mean square; the model as "
            f"given has {report['given_rms_error']:.1e}"
        )
    if report.get("output_errors"):
        lines.append(_outputs(output_rows(report)))
    if "given_flop" in report:
        given, done = report["given_flop"], report["flop"]
        lines.append(
            f"operations: {count_text(given)}FLOP as given, {count_text(done)}FLOP in the plan "
            f"({given / max(1, done):.2f}x fewer)"
        )
    return lines


def output_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return, per output, the worst first: name, errors, and the error of the model as given.

    The errors are the largest one relative to the largest element, the same relative to the root
    of the mean square, and the root of the mean square of all, relative to the latter.
    """
    rows = sorted(report.get("output_errors", ()), key=lambda row: -float(row["of_largest"]))
    return [
        (
            row["output"],
            *(f"{float(row[key]):.1e}" for key in ("of_largest", "of_rms", "rms")),
            f"{float(row['given']['of_largest']):.1e}",
        )
        for row in rows
    ]


def _outputs(rows: Sequence[Sequence[str]]) -> str:
    lines = ["       largest error, of the largest element and of the RMS; RMS of all errors, of the RMS:"]
    for name, of_largest, of_rms, rms, _ in rows[:MOST_OUTPUTS]:
        lines.append(f"       {cut(name, 30):32}{of_largest:>9}{of_rms:>9}{rms:>9}")
    if len(rows) > MOST_OUTPUTS:
        lines.append(f"       and {len(rows) - MOST_OUTPUTS} outputs with smaller errors")
    return "\n".join(lines)


def _story(report: Mapping[str, Any]) -> str:
    """Return the bound and the best plan over the seconds of the search, a few rounds of it."""
    rounds = report.get("rounds", ())
    if len(rounds) < 2:
        return ""
    count = min(len(rounds), MOST_ROUNDS)
    picked = [rounds[round(i * (len(rounds) - 1) / (count - 1))] for i in range(count)]
    lines = [
        "the search over time" + (", in the run that did it" if report.get("recalled") else "") + ":",
        f"  {'seconds':>9}{'no plan below':>16}{'best plan':>14}{'gap':>9}{'measured':>10}",
    ]
    for entry in picked:
        best_ns, bound_ns = entry["incumbent_ns"], entry["bound_ns"]
        best, gap = "-", "-"
        if best_ns is not None:
            best = milliseconds(best_ns / 1e6)
            gap = f"{100 * (best_ns - bound_ns) / (best_ns or 1):.1f} %"
        lines.append(
            f"  {entry['seconds']:>9.1f}{milliseconds(bound_ns / 1e6):>16}{best:>14}{gap:>9}{entry['measured']:>10}"
        )
    return "\n".join(lines)


def _expected(report: Mapping[str, Any]) -> str:
    expected_ms = report.get("expected_ms")
    return "" if expected_ms is None else f"{milliseconds(expected_ms)} expected, "


def _contest(report: Mapping[str, Any]) -> str:
    if not report.get("contest"):
        return ""
    lines = [
        "whole plans, timed in turn (* is kept):",
        f"  {'plan':14}{'kernels':>8}{'predicted':>12}{'expected':>12}{'median':>12}{'p10':>12}"
        f"{'p90':>12}{'error':>10}",
    ]
    for row in report["contest"]:
        mark = "*" if row["plan"] == report.get("plan") else " "
        line = f"{mark} {row['plan']:14}{row['kernels']:>8}"
        if row["measured_ms"] is None:
            lines.append(f"{line}  out: {row['refusal']}")
            continue
        # Of kernels that were not measured only bounds are known.
        least = "" if row.get("is_measured", True) else "> "
        line += f"{least + milliseconds(row['predicted_ms']):>12}"
        times = (row.get("expected_ms"), row["measured_ms"], row["p10_ms"], row["p90_ms"])
        line += "".join(f"{'-' if ms is None else milliseconds(ms):>12}" for ms in times)
        note = f"  out: {row['refusal']}" if row["refusal"] else ""
        lines.append(f"{line}{row['max_error']:>10.1e}{note}")
    return "\n".join(lines)


def rule_rows(plan: PlanRecord, report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return, per rule that fired or is used: alternatives, kernels, their cost, what it saves."""
    used: dict[str, list[float]] = {}
    for step in plan.steps:
        for rule in filter(None, {rule_of(origin) for origin in step.origins}):
            used.setdefault(rule, []).append(step.cost_ns)
    rules = report.get("rules", {}).get("rules", ())
    fired = {rule["name"]: rule["fired"] for rule in rules if rule["fired"]}
    saved_ms = report.get("rule_savings_ms", {})
    return [
        {
            "name": name,
            "fired": fired.get(name, 0),
            "kernels": len(used.get(name, ())),
            "cost_ns": sum(used.get(name, ())),
            "saves": _saved(saved_ms, name) if name in used else "",
        }
        for name in sorted({*fired, *used})
    ]


def _rules(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    rows = rule_rows(plan, report)
    if not rows:
        return ""
    lines = [
        "equivalences: alternatives added, kernels of the plan that use them and their cost, and\n"
        "what the best plan without each rule costs more, as far as its kernels are measured:"
    ]
    for row in rows:
        told = f"{row['kernels']:>4} kernels"
        if row["kernels"]:
            told += f" {time_text(row['cost_ns']):>10}  {row['saves']}".rstrip()
        lines.append(f"  {row['name']:36}{row['fired']:>4} added {told}")
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
            f"{unmeasured} of {len(plan.steps)} kernels were not measured: ≥ marks the bound that stands for their time"
        )
    return "\n".join(lines)


def _layouts(step: StepRecord) -> str:
    return f"({_ports(step.inputs)} -> {_ports(step.outputs)})"


def _ports(ports: Sequence[PortRecord]) -> str:
    """Return layouts; a constant's is in brackets, and several constants are counted."""
    texts = [port.layout or "scalar" for port in ports if port.place != "CONSTANT"]
    constants = len(ports) - len(texts)
    if constants:
        texts.append("[constant]" if constants == 1 else f"[{constants} constants]")
    return ", ".join(texts)


def describe(report: Mapping[str, Any]) -> str:
    """Return what is known of an executable of several parts: plans for shapes, or segments."""
    lines = []
    for shapes, plan in report.get("plans", {}).items():
        lines += summary({"artifact": f"inputs of {shapes}", **plan}).splitlines()
    if "plans" in report:
        lines.append(
            f"shared: weights of {size_text(report['weights_bytes'])} in "
            f"{size_text(report['shared_weights_bytes'])}, {report['kernels']} steps with "
            f"{report['shared_kernels']} different kernels"
        )
    for number, segment in enumerate(report.get("segments", ())):
        lines += summary({"artifact": f"native segment {number}", **segment}).splitlines()
    hosted = report.get("host", ())
    if hosted:
        lines.append(f"{len(hosted)} operators run on the host:")
    lines += [f"    {item['node']}: {item['engine']}, because {item['reason']}" for item in hosted]
    return "\n".join(lines)
