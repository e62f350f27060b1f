"""Candidates that are not in the plan, as records of the report.

These are other providers, layouts and variants for exactly the same primitives, and other groupings.
"""

from collections.abc import Iterable

from korch.candidate.candidate import Candidate
from korch.errors import excerpt
from korch.measure.record import Failed, Measured
from korch.report.alternatives.counterfactual import Grouping, Groupings
from korch.report.kernel import operations_of
from korch.runtime.report import GroupedKernel, GroupingRecord, Rival
from korch.search.ledger import Ledger

MOST_RIVALS = 6
"""The most rivals that are recorded for each kernel: the cheapest ones."""


def rivals_of(
    chosen: Iterable[Candidate], candidates: Iterable[Candidate], ledger: Ledger
) -> dict[str, tuple[Rival, ...]]:
    """Return, for each chosen candidate, the other candidates for the same primitives.

    Returns:
        The cheapest of them, by the keys of the chosen candidates; those that do not run come last.
    """
    wanted = {candidate.group.key: None for candidate in chosen}
    same: dict[str, dict[str, Candidate]] = {key: {} for key in wanted}
    for candidate in candidates:
        if candidate.group.key in same:
            same[candidate.group.key][candidate.key] = candidate
    found: dict[str, tuple[Rival, ...]] = {}
    for candidate in chosen:
        others = [c for k, c in same[candidate.group.key].items() if k != candidate.key]
        rows = sorted((_row(other, ledger) for other in others), key=_order)
        found[candidate.key] = tuple(rows[:MOST_RIVALS])
    return found


def grouping_rows(groupings: Groupings) -> tuple[tuple[GroupingRecord, ...], ...]:
    """Return, for each kernel of a plan, the records of its other groupings."""
    return tuple(tuple(map(_grouping, rows)) for rows in groupings)


def _grouping(row: Grouping) -> GroupingRecord:
    kernels = tuple(GroupedKernel(c.provider, operations_of(c.group.text)) for c in row.kernels)
    return GroupingRecord(kernels, row.instead, row.cost_ns, row.instead_ns)


def _row(candidate: Candidate, ledger: Ledger) -> Rival:
    record = ledger.known(candidate)
    failure = excerpt(f"{record.kind}: {record.message}", 120) if isinstance(record, Failed) else ""
    cost_ns = ledger.cost_ns(candidate)[0]
    offer = candidate.offer
    return Rival(candidate.provider, offer.variant, offer.layouts, cost_ns, isinstance(record, Measured), failure)


def _order(row: Rival) -> tuple[bool, bool, int]:
    return bool(row.failure), not row.is_measured, row.cost_ns
