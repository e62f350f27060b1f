"""Solved instances are kept: the same candidates with the same options need no second search.

What is kept are positions in the list of candidates, under a hash of that list, so that a changed
model, rule, provider or option finds nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from korch.candidate.candidate import Candidate
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.program.problem import Certificate, Status
from korch.search.lazy import Orchestration, Round

logger = logging.getLogger("korch.orchestrate")

SCHEMA = 1

DISAGREEMENT = 1.5
"""Times that differ by a larger factor are not of the same thing, or one of them is wrong."""


class Memory(Protocol):
    """Where facts are kept by name, and what is known of candidates."""

    def fact(self, name: str) -> str | None:
        """Return a fact, or None."""
        ...

    def put_fact(self, name: str, value: str) -> None:
        """Keep a fact."""
        ...

    def record(self, candidate: str) -> Measured | Failed | None:
        """Return what is known of a candidate's cost."""
        ...


@dataclass(frozen=True, slots=True)
class Solved:
    """The plan of a search, and the plans to hold it against.

    Attributes:
        found: the plan, and how it was found.
        plans: by name.
        is_recalled: whether an earlier run found it: then the seconds are that run's.
    """

    found: Orchestration
    plans: Mapping[str, tuple[Candidate, ...]]
    is_recalled: bool = field(default=False, compare=False)


def instance_key(candidates: Sequence[Candidate], options: Options, tag: str = "") -> str:
    """Return a name for an instance: its candidates with their places, and what steers the search.

    Seconds are left out, but for the budget: a search that was not cut short does not depend on
    them, and one that was is not kept.
    """
    digest = hashlib.sha256(
        f"{SCHEMA} {options.gap} {options.search.patience} {options.search.max_measured} {tag}".encode()
    )
    for candidate in candidates:
        text = f"{candidate.key} {candidate.group.primitives} {candidate.group.outputs}\n"
        digest.update(text.encode())
    return f"plan {digest.hexdigest()[:32]}"


def keep_solved(
    memory: Memory, candidates: Sequence[Candidate], options: Options, solved: Solved, tag: str = ""
) -> None:
    """Keep the plans of a search that ended by itself."""
    if solved.found.stopped_by_budget:
        return
    number = {id(candidate): i for i, candidate in enumerate(candidates)}
    plans = {name: [number[id(c)] for c in steps] for name, steps in solved.plans.items()}
    found = solved.found
    data = {
        "steps": [number[id(c)] for c in found.steps],
        "plans": plans,
        "costs": found.costs_ns,
        "certificate": {**asdict(found.certificate), "status": found.certificate.status.value},
        "rounds": [asdict(entry) for entry in found.rounds],
        "measured": found.measured,
        "distinct_measured": found.distinct_measured,
        "failed": found.failed,
    }
    memory.put_fact(instance_key(candidates, options, tag), json.dumps(data))


def recall_solved(memory: Memory, candidates: Sequence[Candidate], options: Options, tag: str = "") -> Solved | None:
    """Return the plans of an earlier search over the same candidates, or None."""
    text = memory.fact(instance_key(candidates, options, tag))
    if text is None:
        return None
    try:
        data: dict[str, Any] = json.loads(text)
        steps = tuple(candidates[i] for i in data["steps"])
        plans = {name: tuple(candidates[i] for i in numbers) for name, numbers in data["plans"].items()}
        fields = data["certificate"]
        certificate = Certificate(**{**fields, "status": Status(fields["status"])})
        found = Orchestration(
            steps=steps,
            certificate=certificate,
            costs_ns=tuple(data["costs"]),
            rounds=tuple(Round(**entry) for entry in data["rounds"]),
            measured=data["measured"],
            distinct_measured=data["distinct_measured"],
            failed=data["failed"],
            stopped_by_budget=False,
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        logger.warning("a kept plan is damaged (%s); the search is done again", error)
        return None
    known = [record for c in steps if isinstance(record := memory.record(c.key), Measured)]
    if len(known) < len(steps):
        return None
    sums_ns = sorted((sum(record.time_ns for record in known), sum(found.costs_ns)))
    if found.costs_ns and sums_ns[1] > DISAGREEMENT * sums_ns[0]:
        return None  # kernels were timed again since
    return Solved(found, plans, is_recalled=True)
