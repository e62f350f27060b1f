"""Measures candidates in batches until the deadline; the ledger stores the results."""

import logging
from collections.abc import Sequence

from korch.candidate.candidate import Candidate
from korch.measure.record import Measured
from korch.search.ledger import Ledger
from korch.system.deadline import Deadline

logger = logging.getLogger("korch.orchestrate")


def measure_some(ledger: Ledger, candidates: Sequence[Candidate], deadline: Deadline, needed: int = 0) -> int:
    """Measure candidates in order; if some are faster than their bounds, correct the bounds.

    `needed`: the first `needed` candidates form the first plan. It is compiled in any case, so the time for compiling
    it is reserved.

    Returns:
        How many were measured, or failed.
    """
    size, found = ledger.batch, []
    if needed:
        ledger.expect_compiling(ledger.compile_s(candidates[:needed]))
    for start in range(0, len(candidates), size):
        unbuilt = candidates[start:needed]
        if ledger.is_over(deadline.before(ledger.compile_s(unbuilt) if unbuilt else 0.0)):
            ledger.build(unbuilt)  # a first plan that is chosen by estimates has no refused kernels
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
    """Measure again the kernels of a plan that were measured only once, until the deadline.

    Returns:
        Whether any kernel was measured again, so that another plan may now be better.
    """
    size, timed = ledger.batch, 0
    todo = {c.key: c for c in candidates if isinstance(record := ledger.known(c), Measured) and not record.is_confirmed}
    order = list(todo.values())
    while timed < len(order) and not ledger.is_over(deadline):
        ledger.confirm(order[timed : timed + size], deadline)
        timed += size
    return timed > 0
