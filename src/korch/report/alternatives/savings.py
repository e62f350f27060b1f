"""The saving of each rule: the additional cost of the best plan without it.

The same program is solved again over the measured candidates, without those that contain primitives from the
rule. Candidates that were not measured might give a better plan without the rule, so a saving is an estimate, not a
bound. Savings of several rules do not add up: if two rules have the same effect, neither alone saves anything.
"""

import json
import logging
from collections.abc import Mapping, Sequence

from korch.binary_program.solve import Solver
from korch.candidate.candidate import Candidate
from korch.equivalence.rule import rule_of
from korch.errors import InfeasibleError
from korch.measure.record import Measured
from korch.options import Options
from korch.search.instance import Instance
from korch.search.ledger import Ledger
from korch.search.recall import instance_key
from korch.system.deadline import Deadline

SAVINGS_SECONDS = 2.0  # time of the solve without one rule
SAVINGS_GAP = 0.002  # gap at which it ends

logger = logging.getLogger("korch.orchestrate")

Savings = Mapping[str, int | None]
"""The savings by rule, in nanoseconds; None if no measured candidates make a plan without the rule."""


def rule_savings(
    instance: Instance, steps: Sequence[Candidate], ledger: Ledger, options: Options, deadline: Deadline | None = None
) -> Savings:
    """Return the savings of the rules of a plan; empty if plans are not compared, or not measured.

    `ledger`: has the costs of candidates; complete results are stored in its database.
    """
    limits, candidates = options.search, instance.candidates
    wrote = [rule_of(origin) for origin in instance.graph.origins]
    used = sorted({wrote[p] for step in steps for p in step.group.primitives} - {""})
    if not (used and options.measure and options.ablation.baselines):
        return {}
    cost_ns = sum(ledger.cost_ns(step)[0] for step in steps)
    name = instance_key(candidates, options, f"savings {instance.interface} {cost_ns} {used}{instance.errors}")
    kept = ledger.fact(name)
    if kept is not None:
        found: dict[str, int | None] = json.loads(kept)
        return found
    if deadline is not None and deadline.is_over:
        return {}
    measured = [c for c in candidates if isinstance(ledger.known(c), Measured)]
    if not {c.key for c in steps} <= {c.key for c in measured}:
        return {}
    solver = Solver(instance.of(measured).problem(ledger.cost_ns), limits=limits)
    saved: dict[str, int | None] = {}
    for rule in used:
        left_s = None if deadline is None else deadline.left_s
        if left_s is not None and left_s < SAVINGS_SECONDS:
            return saved
        excluded = [k for k, c in enumerate(measured) if any(wrote[p] == rule for p in c.group.primitives)]
        saved[rule] = None
        try:
            plan = solver.solve(excluded=excluded, seconds=SAVINGS_SECONDS, gap=SAVINGS_GAP)
        except InfeasibleError as error:
            logger.debug("without %s: %s", rule, error)
            continue
        if plan.certificate.objective_ns is not None:
            saved[rule] = max(0, plan.certificate.objective_ns - cost_ns)
    ledger.put_fact(name, json.dumps(saved))
    return saved


def add_savings(parts: Sequence[tuple[Savings, int]]) -> Savings:
    """Return the savings in a model: the sum of the savings in its blocks, each times the block's count."""
    total: dict[str, int | None] = {}
    for savings, count in parts:
        for rule, saved_ns in savings.items():
            before = total.get(rule, 0)
            none = before is None or saved_ns is None
            total[rule] = None if none else (before or 0) + count * (saved_ns or 0)
    return dict(sorted(total.items()))
