"""A plan with an error budget -> the costs of the best plans within parts of that budget.

The same program is solved again over the measured candidates, with smaller allowed sums of errors. Candidates that
were not measured might give better plans, so these costs are estimates from what the search measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from korch.binary_program.solve import Solver
from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.explanation.savings import SAVINGS_GAP, SAVINGS_SECONDS
from korch.measure.record import Measured
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.system.deadline import Deadline

PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The parts of the error budget. The program adds squared errors, so its limits are the squares of these."""

Curve = tuple[int | None, ...]
"""The cost for each part, in nanoseconds; None if no measured candidates make a plan, or there was no time."""


def times_by_error(
    instance: Instance, steps: Sequence[Candidate], ledger: Ledger, deadline: Deadline | None = None
) -> Curve:
    """Return the costs of the best plans of a graph within parts of its budget; the last is that of the given plan.

    Args:
        instance: the instance that was searched.
        steps: the kernels of the plan.
        ledger: has the costs of candidates.
        deadline: when to stop; the remaining costs are then None.
    """
    errors, cost_ns = instance.errors, sum(ledger.cost_ns(step)[0] for step in steps)
    used = sum(errors.of.get(p, 0) for step in steps for p in step.group.primitives)
    limits, end = ledger.limits, deadline or Deadline()
    measured = [c for c in instance.candidates if isinstance(ledger.known(c), Measured)]
    found: list[int | None] = []
    for part in PARTS[:-1]:
        most = int(errors.most * part**2)
        if used <= most:
            found.append(cost_ns)
            continue
        left_s = end.left_s
        if left_s is not None and left_s < SAVINGS_SECONDS:
            found.append(None)
            continue
        problem = replace(instance, candidates=measured, errors=replace(errors, most=most)).problem(ledger.cost_ns)
        try:
            plan = Solver(problem, limits=limits).solve(seconds=SAVINGS_SECONDS, gap=SAVINGS_GAP)
        except InfeasibleError:
            found.append(None)
            continue
        found.append(plan.certificate.objective_ns)
    return (*found, cost_ns)


def add_curves(parts: Sequence[tuple[Curve, int]], rest_ns: int = 0) -> Curve:
    """Return the curve of a model: the sum of the curves of its blocks times their counts, plus the remaining cost."""
    total: list[int | None] = []
    for costs in zip(*(curve for curve, _ in parts), strict=True):
        known = [cost for cost in costs if cost is not None]
        is_known = len(known) == len(parts)
        times = sum(cost * count for cost, (_, count) in zip(known, parts, strict=True)) if is_known else 0
        total.append(times + rest_ns if is_known else None)
    return tuple(total)
