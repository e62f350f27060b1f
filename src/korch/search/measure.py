"""Candidates -> answers in the ledger, batch by batch until the deadline."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from korch.candidate.candidate import Candidate
from korch.deadline import Deadline
from korch.measure.record import Measured
from korch.search.ledger import Ledger

logger = logging.getLogger("korch.orchestrate")


def measure_some(ledger: Ledger, candidates: Sequence[Candidate], deadline: Deadline, needed: int = 0) -> int:
    """Measure candidates in order; correct the bounds of those that are faster than their bounds.

    Args:
        ledger: gets the answers.
        candidates: what is measured before the deadline.
        deadline: when there is no time left.
        needed: how many of them, the first ones, make up the first plan: it is compiled in any
            case, so that time must be left for it.

    Returns:
        How many were measured, or failed.
    """
    size, found = ledger.limits.batch, []
    if needed:
        ledger.expect_compiling(ledger.compile_s(candidates[:needed]))
    for start in range(0, len(candidates), size):
        unbuilt = candidates[start:needed]
        if ledger.is_over(deadline.before(ledger.compile_s(unbuilt) if unbuilt else 0.0)):
            break
        batch = candidates[start : start + size]
        records = zip(batch, ledger.measure(batch, deadline), strict=True)
        found += [(c, record) for c, record in records if record is not None]
    measured = [(c, record.time_ns) for c, record in found if isinstance(record, Measured)]
    bounds_ns = ledger.bounds_ns([c for c, _ in measured])
    wrong = [c for (c, time_ns), bound_ns in zip(measured, bounds_ns, strict=True) if time_ns < bound_ns]
    if wrong:  # the machine is faster than it was when it was calibrated
        logger.info("%d kernels are faster than their bounds; the bounds are corrected", len(wrong))
        ledger.correct(wrong)
    return len(found)


def confirm(ledger: Ledger, candidates: Sequence[Candidate], deadline: Deadline) -> bool:
    """Measure a plan's kernels again that were measured once, as far as there is time.

    Returns:
        Whether there were any: then another plan may be better now.
    """
    size, timed = ledger.limits.batch, 0
    todo = {c.key: c for c in candidates if isinstance(record := ledger.known(c), Measured) and not record.is_confirmed}
    order = list(todo.values())
    while timed < len(order) and not ledger.is_over(deadline):
        ledger.confirm(order[timed : timed + size], deadline)
        timed += size
    return timed > 0
