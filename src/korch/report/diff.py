"""The differences between two plans, as text."""

from collections import Counter, defaultdict

from korch.equivalence.rule import rule_of
from korch.report.kernel import operations
from korch.report.units import cut
from korch.runtime.record import PlanRecord, StepRecord
from korch.runtime.report import Report
from korch.runtime.text import counted

NOTICEABLE = 0.05
"""The least relative difference between two costs of a kernel that is shown."""

MOST_OPERATORS = 20
"""The most operators that are shown, those with the largest change first."""

Built = tuple[PlanRecord, Report]
"""A plan and the report on how it was found."""


def differences(first: Built, second: Built) -> str:
    """Return the differences between two plans as text."""
    (a, _), (b, _) = first, second
    counts = [Counter(step.candidate for step in plan.steps) for plan in (a, b)]
    lines = [f"{'':16}{'first':>14}{'second':>14}"]
    for name, x, y, ratio in _facts(first, second):
        lines.append(f"{name:16}{x:>14}{y:>14}" + f"  {ratio}" * bool(ratio))
    if changed := _options(a, b):
        lines += ["", "built differently:"]
        lines += [f"  {name}: {old} -> {new}" for name, old, new in changed]
    lines += ["", f"kernels in both: {sum((counts[0] & counts[1]).values())}"]
    for title, plan, other in (("first", a, counts[1]), ("second", b, counts[0])):
        if alone := _alone(plan, other):
            total_us = sum(step.cost_ns for _, step in alone) / 1e3
            lines.append(f"only in the {title}: {counted(len(alone), 'kernel')}, {total_us:.1f} us")
            lines += [f"  {_line(number, step)}" for number, step in alone]
    again = {step.candidate: step for step in b.steps}
    moved = [
        (step, again[step.candidate])
        for step in {s.candidate: s for s in a.steps}.values()
        if step.candidate in again and abs(again[step.candidate].cost_ns - step.cost_ns) > NOTICEABLE * step.cost_ns
    ]
    if moved:
        lines.append("in both, with other costs:")
        lines += [
            f"  {old.cost_ns / 1e3:.1f} -> {new.cost_ns / 1e3:.1f} us  {old.provider} {operations(old)}"
            for old, new in moved
        ]
    if shown := [(name, x, y) for name, x, y in operator_times(a, b) if abs(y - x) > NOTICEABLE * max(x, y)]:
        lines.append("by the model's operators, each with an equal share of its kernels' costs:")
        lines += [f"  {x / 1e3:.1f} -> {y / 1e3:.1f} us  {name}" for name, x, y in shown[:MOST_OPERATORS]]
    return "\n".join(lines)


def _facts(first: Built, second: Built) -> tuple[tuple[str, str, str, str], ...]:
    (one, a), (other, b) = first, second
    rows = [("kernels", str(one.kernel_count), str(other.kernel_count), "")]
    if not (a.is_known and b.is_known):
        return tuple(rows)
    numbers: list[tuple[str, str, float, float | None, float | None]] = [
        ("ms predicted", "{:.3f}", 1.0, a.predicted_ms, b.predicted_ms),
        ("ms expected", "{:.3f}", 1.0, a.expected_ms, b.expected_ms),
        ("ms measured", "{:.3f}", 1.0, a.measured_ms, b.measured_ms),
        ("ms at least", "{:.3f}", 1.0, a.lower_bound_ms, b.lower_bound_ms),
        ("% gap", "{:.1f}", 100.0, a.gap, b.gap),
        ("GFLOP", "{:.2f}", 1e-9, a.flop, b.flop),
        ("MiB of arena", "{:.1f}", 2.0**-20, a.arena_bytes, b.arena_bytes),
        ("error", "{:.1e}", 1.0, a.max_error, b.max_error),
        ("candidates", "{:.0f}", 1.0, a.candidates, b.candidates),
        ("measured", "{:.0f}", 1.0, a.measured_candidates, b.measured_candidates),
        ("s to optimize", "{:.1f}", 1.0, a.seconds, b.seconds),
    ]
    for name, form, scale, x, y in numbers:
        if x is not None and y is not None:
            ratio = f"x {y / x:.2f}" if x else ""
            rows.append((name, form.format(scale * x), form.format(scale * y), ratio))
    return tuple(rows)


def _options(first: PlanRecord, second: PlanRecord) -> tuple[tuple[str, str, str], ...]:
    rows: list[tuple[str, object, object]] = [
        ("korch", first.korch_version, second.korch_version),
        ("model", first.model.path, second.model.path),
    ]
    for side, x, y in (("option", first.options, second.options), ("target", first.target, second.target)):
        rows += [(f"{side} {key}", x.get(key), y.get(key)) for key in sorted({*x, *y})]
    return tuple((name, str(x), str(y)) for name, x, y in rows if x != y)


def _alone(plan: PlanRecord, other: Counter[str]) -> tuple[tuple[int, StepRecord], ...]:
    left = Counter(other)
    found = []
    for number, step in enumerate(plan.steps):
        if left[step.candidate] > 0:
            left[step.candidate] -= 1
        else:
            found.append((number, step))
    return tuple(found)


def operator_times(first: PlanRecord, second: PlanRecord) -> tuple[tuple[str, float, float], ...]:
    """Return the model's operators with their nanoseconds in both plans, those with the largest change first.

    A kernel's cost is divided evenly among the operators that it runs some part of.
    """
    costs: list[dict[str, float]] = []
    for plan in (first, second):
        own: dict[str, float] = defaultdict(float)
        for step in plan.steps:
            told = [origin for origin in step.origins if origin]
            names = [o for o in told if not rule_of(o)] or told or ["changes of layout"]
            for name in names:
                own[name] += step.cost_ns / len(names)
        costs.append(own)
    rows = [(name, costs[0].get(name, 0.0), costs[1].get(name, 0.0)) for name in dict.fromkeys((*costs[0], *costs[1]))]
    return tuple(sorted(rows, key=lambda row: -abs(row[2] - row[1])))


def _line(number: int, step: StepRecord) -> str:
    return f"{number:>3} {step.cost_ns / 1e3:>8.1f} us  {step.provider:<11} {operations(step)}  from {_origins(step)}"


def _origins(step: StepRecord) -> str:
    return cut(", ".join(origin for origin in step.origins if origin), 80)
