"""What differs between two plans, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from korch.report.kernel import operations
from korch.runtime.record import PlanRecord, StepRecord

NOTICEABLE = 0.05
"""Costs of one kernel that differ by a smaller share are not told."""

_FACTS = (
    ("predicted_ms", "ms predicted", "{:.3f}", 1.0), ("measured_ms", "ms measured", "{:.3f}", 1.0),
    ("lower_bound_ms", "ms at least", "{:.3f}", 1.0), ("gap", "% gap", "{:.1f}", 100.0),
    ("flop", "GFLOP", "{:.2f}", 1e-9), ("arena_bytes", "MiB of arena", "{:.1f}", 2.0**-20),
    ("max_error", "error", "{:.1e}", 1.0), ("candidates", "candidates", "{:.0f}", 1.0),
    ("measured_candidates", "measured", "{:.0f}", 1.0), ("seconds", "s to optimize", "{:.1f}", 1.0),
)  # fmt: skip


def differences(
    first: PlanRecord, first_report: Mapping[str, Any], second: PlanRecord,
    second_report: Mapping[str, Any],
) -> str:  # fmt: skip
    """Return what differs: facts, options, kernels that only one plan has, costs."""
    parts = [
        _facts(first, first_report, second, second_report), _options(first, second),
        _kernels(first, second),
    ]  # fmt: skip
    return "\n\n".join(part for part in parts if part)


def _facts(first: PlanRecord, a: Mapping[str, Any], second: PlanRecord, b: Mapping[str, Any]
           ) -> str:  # fmt: skip
    lines = [f"{'':16}{'first':>14}{'second':>14}",
             f"{'kernels':16}{len(first.steps):>14}{len(second.steps):>14}"]  # fmt: skip
    for key, name, form, scale in _FACTS:
        if a.get(key) is None or b.get(key) is None:
            continue
        x, y = scale * a[key], scale * b[key]
        ratio = f"  x {y / x:.2f}" if x else ""
        lines.append(f"{name:16}{form.format(x):>14}{form.format(y):>14}{ratio}")
    return "\n".join(lines)


def _options(first: PlanRecord, second: PlanRecord) -> str:
    rows: list[tuple[str, Any, Any]] = [("korch", first.korch_version, second.korch_version),
            ("model", first.model.path, second.model.path)]  # fmt: skip
    for side, x, y in (("option", first.options, second.options),
                       ("target", first.target, second.target)):  # fmt: skip
        rows += [(f"{side} {key}", x.get(key), y.get(key)) for key in sorted({*x, *y})]
    told = [f"{name}: {x} -> {y}" for name, x, y in rows if x != y]
    return "\n".join(["built differently:", *(f"  {line}" for line in told)]) if told else ""


def _kernels(first: PlanRecord, second: PlanRecord) -> str:
    lines: list[str] = []
    counts = [Counter(step.candidate for step in plan.steps) for plan in (first, second)]
    for title, plan, other in (("only in the first:", first, counts[1]),
                               ("only in the second:", second, counts[0])):  # fmt: skip
        left = Counter(other)
        alone = []
        for number, step in enumerate(plan.steps):
            if left[step.candidate] > 0:
                left[step.candidate] -= 1
            else:
                alone.append((number, step))
        if alone:
            total = sum(step.cost_ns for _, step in alone)
            lines.append(f"{title} {len(alone)} kernels, {total / 1e3:.1f} us")
            lines += [f"  {_line(number, step)}" for number, step in alone]
    again = {step.candidate: step for step in second.steps}
    moved = [
        (step, again[step.candidate]) for step in {s.candidate: s for s in first.steps}.values()
        if step.candidate in again
        and abs(again[step.candidate].cost_ns - step.cost_ns) > NOTICEABLE * step.cost_ns
    ]  # fmt: skip
    if moved:
        lines.append("in both, with other costs:")
        lines += [
            f"  {a.cost_ns / 1e3:.1f} -> {b.cost_ns / 1e3:.1f} us  {a.provider} {operations(a)}"
            for a, b in moved
        ]
    common = sum((counts[0] & counts[1]).values())
    return "\n".join([f"kernels in both: {common}", *lines])


def _line(number: int, step: StepRecord) -> str:
    origins = ", ".join(origin for origin in step.origins if origin)
    return (f"{number:>3} {step.cost_ns / 1e3:>8.1f} us  {step.provider:<11} {operations(step)}"
            f"  from {origins[:80]}")  # fmt: skip
