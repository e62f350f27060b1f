"""Candidates that lost, as plain data.

Other providers, layouts and variants for exactly the same primitives, and other groupings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from korch.candidate.candidate import Candidate
from korch.explanation.counterfactual import Groupings
from korch.measure.record import Failed, Measured
from korch.report.kernel import operations_of
from korch.search.ledger import Ledger

MOST_RIVALS = 6
"""Of each kernel: the cheapest."""


def rivals_of(
    chosen: Iterable[Candidate], candidates: Iterable[Candidate], ledger: Ledger
) -> dict[str, list[dict[str, Any]]]:
    """Return what else could have run what some candidates run, by the candidates' keys.

    Args:
        chosen: the candidates of plans.
        candidates: all that there are.
        ledger: what is known of their costs.

    Returns:
        Rows with provider, variant, layouts, `cost_ns`, whether that is measured, and why a
        candidate is out, cheapest first.
    """
    wanted = {candidate.group.key: None for candidate in chosen}
    same: dict[str, dict[str, Candidate]] = {key: {} for key in wanted}
    for candidate in candidates:
        if candidate.group.key in same:
            same[candidate.group.key][candidate.key] = candidate
    found: dict[str, list[dict[str, Any]]] = {}
    for candidate in chosen:
        others = [c for k, c in same[candidate.group.key].items() if k != candidate.key]
        rows = sorted((_row(other, ledger) for other in others), key=_order)
        found[candidate.key] = rows[:MOST_RIVALS]
    return found


def grouping_rows(groupings: Groupings) -> list[list[dict[str, Any]]]:
    """Return, per kernel of a plan, the groupings that lost: what runs, instead of which places."""
    return [
        [
            {
                "kernels": [{"provider": c.provider, "operations": operations_of(c.group.text)} for c in row.kernels],
                "instead": list(row.instead),
                "cost_ns": row.cost_ns,
                "instead_ns": row.instead_ns,
            }
            for row in rows
        ]
        for rows in groupings
    ]


def _row(candidate: Candidate, ledger: Ledger) -> dict[str, Any]:
    record = ledger.known(candidate)
    inputs, outputs = (", ".join(map(str, layouts)) for layouts in (candidate.offer.inputs, candidate.offer.outputs))
    is_measured = isinstance(record, Measured)
    return {
        "provider": candidate.provider,
        "variant": candidate.offer.variant,
        "layouts": f"({inputs}) -> ({outputs})",
        "cost_ns": ledger.cost_ns(candidate)[0],
        "is_measured": is_measured,
        "failure": f"{record.kind}: {record.message}"[:120] if isinstance(record, Failed) else "",
    }


def _order(row: dict[str, Any]) -> tuple[bool, bool, int]:
    return bool(row["failure"]), not row["is_measured"], row["cost_ns"]
