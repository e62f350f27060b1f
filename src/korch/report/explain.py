"""Plan and report -> text: which kernels run, what each costs, how far it is from its bound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from korch.runtime.record import PlanRecord, StepRecord


def summary(report: Mapping[str, Any]) -> str:
    """Return a few lines on an optimization, for a person."""
    gap = report.get("gap") or 0.0
    proof = "proven optimal" if report["status"] == "optimal" else f"proven to {100 * gap:.1f} %"
    return "\n".join(
        (
            f"{report['artifact']}: {report['kernels']} kernels, "
            f"{report['measured_ms']:.3f} ms measured, {report['predicted_ms']:.3f} ms predicted "
            f"({proof} over {report['candidates']} candidates, bound "
            f"{report['lower_bound_ms']:.3f} ms)",
            f"{report['primitives']} primitives, {report['alternatives']} alternatives; "
            f"{report['measured_candidates']} of {report['distinct_candidates']} different "
            f"candidates measured; {report['seconds']:.1f} s",
            f"error against the float64 reference {report['max_error']:.1e} (of the largest "
            f"element); arena {_size(report['arena_bytes'])}",
        )
    )


def explain(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    """Return the whole explanation of a plan.

    Args:
        plan: the kernels in order.
        report: how the plan was found; it may be empty.
    """
    parts = [_head(plan, report)]
    if report.get("contest"):
        parts.append(_contest(report))
    if rules := _rules(plan, report):
        parts.append(rules)
    parts.append(_kernels(plan))
    return "\n\n".join(parts)


def _head(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    target = plan.target
    lines = [f"{plan.model.path or 'model'} on {target.get('cpu', '?')}, "
             f"{target.get('isa', '?')}, {plan.threads} threads"]  # fmt: skip
    if report:
        lines.append(summary({"artifact": "plan", **report}))
        stages = report.get("stages_s", {})
        if stages:
            lines.append("stages: " + ", ".join(f"{k} {v:.1f} s" for k, v in stages.items()))
        if report.get("limits_hit"):
            lines.append("limits that bound the candidates: " + ", ".join(report["limits_hit"]))
    return "\n".join(lines)


def _contest(report: Mapping[str, Any]) -> str:
    lines = ["whole plans, timed in turn:",
             f"  {'plan':14}{'kernels':>8}{'predicted':>12}{'median':>10}{'p10':>9}{'p90':>9}"
             f"{'error':>10}"]  # fmt: skip
    for row in report["contest"]:
        mark = "*" if row["plan"] == report.get("plan") else " "
        if row["measured_ms"] is None:
            lines.append(f"{mark} {row['plan']:14}{row['kernels']:>8}  out: {row['refusal']}")
            continue
        lines.append(
            f"{mark} {row['plan']:14}{row['kernels']:>8}{row['predicted_ms']:>9.3f} ms"
            f"{row['measured_ms']:>7.3f} ms{row['p10_ms']:>9.3f}{row['p90_ms']:>9.3f}"
            f"{row['max_error']:>10.1e}"
        )
    return "\n".join(lines)


def _rules(plan: PlanRecord, report: Mapping[str, Any]) -> str:
    used: dict[str, int] = {}
    for step in plan.steps:
        for origin in step.origins:
            if origin.startswith("by "):
                used[origin[3:]] = used.get(origin[3:], 0) + 1
    fired = {
        rule["name"]: rule["fired"]
        for rule in report.get("rules", {}).get("rules", ())
        if rule["fired"]
    }
    if not fired and not used:
        return ""
    lines = ["equivalences: alternatives added, kernels of the plan that use them"]
    for name in sorted({*fired, *used}):
        lines.append(f"  {name:36}{fired.get(name, 0):>4} added {used.get(name, 0):>4} kernels")
    return "\n".join(lines)


def _kernels(plan: PlanRecord) -> str:
    total_ns = sum(step.cost_ns for step in plan.steps) or 1.0
    lines = [
        f"{'#':>3} {'cost':>10} {'share':>6} {'x bound':>8} {'bytes':>9} {'FLOP':>8}  provider  "
        "what it computes"
    ]
    for number, step in enumerate(plan.steps):
        ratio = step.cost_ns / step.bound_ns if step.bound_ns else float("inf")
        lines.append(
            f"{number:>3} {step.cost_ns / 1e3:>7.1f} us {100 * step.cost_ns / total_ns:>5.1f}% "
            f"{ratio:>8.1f} {_size(step.size_bytes):>9} {_count(step.work_flop):>8}  "
            f"{step.provider:<9} {operations(step)}  {_layouts(step)}"
        )
        origins = [origin for origin in step.origins if origin]
        if origins:
            lines.append(" " * 59 + "from " + _cut(", ".join(origins), 90))
    return "\n".join(lines)


def operations(step: StepRecord) -> str:
    """Return the names of what a kernel computes, in order, equal neighbours counted."""
    names = re.findall(r"^%\d+: \S+ = (\w+)\(", step.primitives, re.MULTILINE)
    names = [name for name in names if name != "broadcast"]
    if not names:
        return "layout change" if step.inputs and step.inputs[0].layout != "" else "copy"
    runs: list[list[Any]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    return _cut(" ".join(n if k == 1 else f"{n} x{k}" for n, k in runs), 70)


def _layouts(step: StepRecord) -> str:
    inputs = [port.layout for port in step.inputs if port.place != "CONSTANT"]
    return f"({', '.join(inputs)} -> {', '.join(port.layout for port in step.outputs)})"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024 or unit == "GiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"


def _count(number: float) -> str:
    for unit in ("", "K", "M", "G"):
        if number < 1000 or unit == "G":
            break
        number /= 1000
    return f"{number:.0f}{unit}" if number >= 100 or not unit else f"{number:.1f}{unit}"
