"""The differences between two plans, as text."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Changes:
    """The differences between two plans.

    Attributes:
        facts: name, first, second, and the ratio of the second to the first, or "".
        options: the options that differ: name, first, second.
        common: the number of kernels in both.
        alone: the kernels that only the first plan has, and those that only the second has, with their indices.
        moved: the kernels of both plans with noticeably different costs.
        operators: the model's operators, each with the time in the first and in the second plan, in
            nanoseconds; those with the largest change first.
    """

    facts: tuple[tuple[str, str, str, str], ...]
    options: tuple[tuple[str, str, str], ...]
    common: int
    alone: tuple[tuple[tuple[int, StepRecord], ...], tuple[tuple[int, StepRecord], ...]]
    moved: tuple[tuple[StepRecord, StepRecord], ...]
    operators: tuple[tuple[str, float, float], ...]


def changes(first: Built, second: Built) -> Changes:
    """Return the differences between two plans.

    A kernel's cost is divided evenly among the operators that it runs some part of.
    """
    (a, _), (b, _) = first, second
    counts = [Counter(step.candidate for step in plan.steps) for plan in (a, b)]
    again = {step.candidate: step for step in b.steps}
    moved = tuple(
        (step, again[step.candidate])
        for step in {s.candidate: s for s in a.steps}.values()
        if step.candidate in again and abs(again[step.candidate].cost_ns - step.cost_ns) > NOTICEABLE * step.cost_ns
    )
    return Changes(
        _facts(first, second),
        _options(a, b),
        sum((counts[0] & counts[1]).values()),
        (_alone(a, counts[1]), _alone(b, counts[0])),
        moved,
        _operators(a, b),
    )


def differences(first: Built, second: Built) -> str:
    """Return the differences between two plans as text."""
    found = changes(first, second)
    lines = [f"{'':16}{'first':>14}{'second':>14}"]
    for name, x, y, ratio in found.facts:
        lines.append(f"{name:16}{x:>14}{y:>14}" + f"  {ratio}" * bool(ratio))
    if found.options:
        lines += ["", "built differently:"]
        lines += [f"  {name}: {x} -> {y}" for name, x, y in found.options]
    lines += ["", f"kernels in both: {found.common}"]
    for title, alone in zip(("first", "second"), found.alone, strict=True):
        if alone:
            total_us = sum(step.cost_ns for _, step in alone) / 1e3
            lines.append(f"only in the {title}: {counted(len(alone), 'kernel')}, {total_us:.1f} us")
            lines += [f"  {_line(number, step)}" for number, step in alone]
    if found.moved:
        lines.append("in both, with other costs:")
        lines += [
            f"  {x.cost_ns / 1e3:.1f} -> {y.cost_ns / 1e3:.1f} us  {x.provider} {operations(x)}" for x, y in found.moved
        ]
    if shown := [(name, x, y) for name, x, y in found.operators if abs(y - x) > NOTICEABLE * max(x, y)]:
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


def _operators(first: PlanRecord, second: PlanRecord) -> tuple[tuple[str, float, float], ...]:
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
