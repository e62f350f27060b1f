"""Cache of search results: the same candidates with the same options are not searched twice.

A cached plan is stored as positions in the list of candidates. The cache key is a hash of that list and of
the options, so a changed model, rule, provider or option never matches an old entry.
"""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from korch.binary_program.problem import Certificate
from korch.candidate.candidate import Candidate
from korch.limits import DISAGREEMENT
from korch.measure.record import Measured
from korch.options import Options
from korch.records import plain, read_record
from korch.search.ledger import Ledger
from korch.search.result import Orchestration, Round
from korch.search.tried import distinct_measured

logger = logging.getLogger("korch.orchestrate")

SCHEMA = 5


@dataclass(frozen=True, slots=True)
class Solved:
    """The plan of a search, and the plans to compare it with."""

    found: Orchestration  # the plan, and how it was found
    plans: Mapping[str, tuple[Candidate, ...]]  # the plans to compare with, by name


def instance_key(candidates: Sequence[Candidate], options: Options, tag: str = "") -> str:
    """Return the cache key of an instance: a hash of its candidates, in order, and of the search options.

    Time limits are not part of the key. A search that the time budget did not cut short does not
    depend on them, and a search that was cut short is not cached.
    """
    digest = hashlib.sha256(
        f"{SCHEMA} {options.search.gap} {options.search.patience} {options.search.max_measured} {tag}".encode()
    )
    for candidate in candidates:
        text = f"{candidate.key} {candidate.group.primitives} {candidate.group.outputs}\n"
        digest.update(text.encode())
    return f"plan {digest.hexdigest()[:32]}"


def keep_solved(
    ledger: Ledger, candidates: Sequence[Candidate], options: Options, solved: Solved, tag: str = ""
) -> None:
    """Cache the plans of a search that was not stopped by its time budget."""
    if solved.found.stopped_by_budget:
        return
    number = {id(candidate): i for i, candidate in enumerate(candidates)}
    plans = {name: [number[id(c)] for c in steps] for name, steps in solved.plans.items()}
    found = {entry.name: getattr(solved.found, entry.name) for entry in fields(Orchestration)}
    data = {**found, "steps": [number[id(c)] for c in solved.found.steps], "plans": plans, "rates": ledger.rates()}
    ledger.put_fact(instance_key(candidates, options, tag), json.dumps(plain(data)))


def recall_solved(ledger: Ledger, candidates: Sequence[Candidate], options: Options, tag: str = "") -> Solved | None:
    """Return the plans of an earlier search over the same candidates, or None."""
    text = ledger.fact(instance_key(candidates, options, tag))
    if text is None:
        return None
    try:
        data: dict[str, Any] = json.loads(text)
        if data.pop("rates") != ledger.rates():
            return None  # bounds are others since the plan was cached
        data["corrections"] = ledger.corrections
        steps = tuple(candidates[i] for i in data["steps"])
        plans = {name: tuple(candidates[i] for i in numbers) for name, numbers in data.pop("plans").items()}
        data["certificate"] = read_record(Certificate, data["certificate"], "certificate")
        data["rounds"] = tuple(read_record(Round, entry, "round") for entry in data["rounds"])
        found = Orchestration(**{**data, "steps": steps, "costs_ns": tuple(data["costs_ns"])})
    except (ValueError, KeyError, TypeError, IndexError) as error:
        logger.warning("a kept plan is damaged (%s); the search is done again", error)
        return None
    if options.is_recorded:  # records may have been imported since
        ledger.look_up(candidates)
        if distinct_measured(ledger, candidates) != found.distinct_measured:
            return None
    ledger.look_up(steps)
    known = [record for c in steps if isinstance(record := ledger.known(c), Measured)]
    if len(known) < len(steps):
        return None
    sums_ns = sorted((sum(record.time_ns for record in known), sum(found.costs_ns)))
    if found.costs_ns and sums_ns[1] > DISAGREEMENT * sums_ns[0]:
        return None  # kernels were measured again since the plan was cached, with other times
    return Solved(found, plans)
