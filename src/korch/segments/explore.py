"""Blocks of a model -> measurements of the candidates in the plan that is best according to estimates.

Each block has a few interfaces, and a plan uses only one or a few of them. So before any interface is
searched, the relaxations of all of them are solved with estimated costs, and the model's layouts are chosen
by the results. Only the plans of the chosen interfaces are measured, together with other candidates of large
expected improvement, for all blocks together in full batches. This is repeated, as each round improves the
estimates. It proves nothing, but finds a good plan within a small budget.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.search.estimate import Kind
from korch.search.measure import measure_some
from korch.search.propose import Exploration
from korch.segments.assemble import Assembly
from korch.segments.block_search import BlockInterface, BlockSearch

ROUNDS = 12  # most rounds
FIRST_CANDIDATES = 24  # candidates measured in the first round in addition to those of the plan
CANDIDATES = 72  # the same in later rounds
BLOCK_SHARE = 1 / 3  # largest share of a round's candidates that is from one block
# From the third round on, an interface whose estimate is more than this many times that of the block's best is not
# estimated again.
NEAR = 1.3
BATCH_SECONDS = 5.0  # a round is begun only if at least this time remains for it
SOLVE_SECONDS = 0.7  # time of the solve of one interface by estimates
GAP = 0.03  # gap at which that solve ends
AHEAD = 48  # candidates that are compiled while the next round is chosen
INTERFACES = 60  # with more interfaces, exploration is skipped: the programs need too much memory
QUIET = 0.004  # a round that gains a smaller share is the last

logger = logging.getLogger("korch.orchestrate")


def explore(search: BlockSearch, assembly: Assembly) -> bool:
    """Measure the candidates of a good plan of the model; nothing if an earlier run has plans of all interfaces.

    If a block has several interfaces, the plain one is seldom the best, and is left out.

    Returns:
        Whether time is left for more.
    """
    if search.is_kept():
        return True
    interfaces = [one for block in search.blocks for one in block[min(1, len(block) - 1) :]]
    if len(interfaces) > INTERFACES:
        return True
    try:
        return _explore(search, assembly, interfaces)
    finally:
        search.ledger.meter.rest()


def _explore(search: BlockSearch, assembly: Assembly, interfaces: list[BlockInterface]) -> bool:
    """Measure in rounds; return whether time is left for more."""
    before_ns: int | None = None
    estimated_ns: dict[BlockInterface, int] = {}
    solving_s, batch_s, bias = 0.0, 0.0, 1.0
    uses: Counter[BlockInterface] = Counter()
    for turn in range(ROUNDS):
        left_s = search.ledger.left_s(search.deadline)
        needed_s = solving_s + max(batch_s, BATCH_SECONDS)
        if before_ns is not None and left_s is not None and left_s < needed_s:
            _explore_in_turn(search, uses)
            return False
        began_s = search.ledger.now_s()
        early: Mapping[BlockInterface, Exploration] = {}
        if turn == 0:
            early = _estimate_first(search, interfaces, estimated_ns)
        else:
            _estimate(search, interfaces, estimated_ns, NEAR if turn > 1 else math.inf)
        if {one.key[0] for one in estimated_ns} != set(range(len(search.blocks))):
            return True  # a block has no plan; its first search reports the reason
        uses, expected_ns = _preferred(search, assembly, estimated_ns)
        if not uses:
            return True
        changes_ns = expected_ns - sum(count * estimated_ns[one] for one, count in uses.items())
        found = _explorations(search, uses, early)
        # The first round also builds the programs, so its time is halved.
        solving_s = (search.ledger.now_s() - began_s) * (1 if turn else 0.5)
        batch_s = _measure(search, uses, found, CANDIDATES if turn else FIRST_CANDIDATES)
        for one, exploration in found.items():
            search.open(one).try_plan(exploration.kernels)
        for one in uses.keys() - found.keys():
            interfaces.remove(one)
            del estimated_ns[one]
        total_ns = _total_ns(search, uses)
        whole_ns = None if total_ns is None else total_ns + changes_ns
        search.trace.record_estimate(whole_ns, int(bias * expected_ns))
        # Plans of the least estimates take longer than these, as the kernels that seem fastest are chosen.
        bias = bias if whole_ns is None else max(1.0, whole_ns / max(1, expected_ns))
        is_known = len(found) == len(uses) and not any(exploration.unknown for exploration in found.values())
        is_known = is_known and before_ns is not None and total_ns is not None
        if is_known and (total_ns or 0) > (1 - QUIET) * (before_ns or 0):
            return True
        before_ns = total_ns
    return True


def _preferred(
    search: BlockSearch, assembly: Assembly, estimated_ns: dict[BlockInterface, int]
) -> tuple[Counter[BlockInterface], int]:
    """Return the best interfaces by estimates with their numbers of uses, and the estimate of the whole.

    There are none if no choice is feasible.
    """
    try:
        choice = assembly.prefer({one.key: ns for one, ns in estimated_ns.items()})
    except InfeasibleError as error:
        logger.info("no layouts are preferred: %s", error)
        return Counter(), 0
    return assembly.uses(choice, search.blocks), choice.objective_ns


def _explorations(
    search: BlockSearch,
    interfaces: Iterable[BlockInterface],
    known: Mapping[BlockInterface, Exploration] = MappingProxyType({}),
) -> dict[BlockInterface, Exploration]:
    """Explore the interfaces that are not in `known`, and begin to build the plans' kernels.

    Interfaces without a plan are skipped.
    """
    found = dict[BlockInterface, Exploration]()
    for one in interfaces:
        try:
            found[one] = known.get(one) or search.open(one).explore(SOLVE_SECONDS, GAP)
        except InfeasibleError as error:
            logger.info("block %d has no plan for its interface %d: %s", *one.key, error)
            continue
        search.ledger.begin([one.task.candidates[k] for k in found[one].unknown])
    return found


def _explore_in_turn(search: BlockSearch, uses: Counter[BlockInterface]) -> None:
    """Explore one block after the other, the most expensive first, because there is no time for all."""
    costs_ns = {one: best.cost_ns if (best := search.open(one).best) else 0 for one in uses}
    for one in sorted(uses, key=lambda one: -uses[one] * costs_ns[one]):
        left_s = search.ledger.left_s(search.deadline)
        if left_s is None or left_s < BATCH_SECONDS:
            return
        found = _explorations(search, (one,))
        _measure(search, uses, found, FIRST_CANDIDATES)
        for exploration in found.values():
            search.open(one).try_plan(exploration.kernels)


def _estimate_first(
    search: BlockSearch, interfaces: list[BlockInterface], estimated_ns: dict[BlockInterface, int]
) -> dict[BlockInterface, Exploration]:
    """Estimate the costs of all interfaces for the first time; return the exploration of the best one of each block.

    The kernels of these plans are compiled in parallel while the programs of the other blocks are built.
    """
    found: dict[BlockInterface, Exploration] = {}
    for b in range(len(search.blocks)):
        own = [one for one in interfaces if one.key[0] == b]
        left = own[: 1 if search.ledger.is_over(search.deadline) else None]
        _estimate(search, left, estimated_ns, math.inf)
        for one in own:
            if one not in estimated_ns:
                interfaces.remove(one)
        found |= _explorations(search, sorted(left, key=lambda one: (estimated_ns[one], one.key))[:1])
    return found


def _estimate(
    search: BlockSearch, interfaces: list[BlockInterface], estimated_ns: dict[BlockInterface, int], near: float
) -> None:
    """Update the estimated costs of interfaces that are within a factor `near` of the best of their block.

    Interfaces that have no plan are dropped.
    """
    least_ns: dict[int, int] = {}
    for one, ns in estimated_ns.items():
        least_ns[one.key[0]] = min(ns, least_ns.get(one.key[0], ns))
    for one in list(interfaces):
        if one in estimated_ns and estimated_ns[one] > near * least_ns[one.key[0]]:
            continue
        try:
            estimated_ns[one] = search.open(one).estimated_ns()
        except InfeasibleError:
            logger.info("block %d has no plan for its interface %d", *one.key)
            interfaces.remove(one)
            estimated_ns.pop(one, None)


def _measure(
    search: BlockSearch, uses: Counter[BlockInterface], found: dict[BlockInterface, Exploration], most: int
) -> float:
    """Measure the kernels of plans, and the best of the other candidates; return the seconds per batch."""
    ledger = search.ledger
    plans: dict[str, Candidate] = {}
    needed: set[str] = set()
    for one, exploration in found.items():
        own = [one.task.candidates[k] for k in exploration.unknown]
        plans |= {c.key: c for c in own}
        if search.open(one).best is None:
            needed |= {c.key for c in own}
    todo, later = _selected(search, uses, found, plans, most)
    began_s = ledger.now_s()
    order = sorted(todo, key=lambda c: c.key not in needed)
    measured = measure_some(ledger, order, search.deadline, needed=len(needed))
    if measured == len(order):  # else there is no time to measure more
        ledger.begin(later)
    return (ledger.now_s() - began_s) / max(1.0, measured / search.limits.batch)


def _selected(
    search: BlockSearch,
    uses: Counter[BlockInterface],
    found: dict[BlockInterface, Exploration],
    plans: dict[str, Candidate],
    most: int,
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates to measure (of plans and others), and candidates to compile in advance."""
    limits = search.limits
    others = [
        (uses[one] * gain_ns, one.key[0], one.task.candidates[k])
        for one, exploration in found.items()
        for gain_ns, k in exploration.improvements
    ]
    others.sort(key=lambda entry: -entry[0])
    todo = dict(plans)
    later: list[Candidate] = []
    taken: Counter[Kind | int] = Counter()
    for _, b, candidate in others:
        kind = search.ledger.experience.kinds_of(candidate)[0]
        is_enough = taken[kind] == limits.same_kind or taken[b] >= BLOCK_SHARE * most
        if candidate.key in todo or is_enough:
            continue
        if len(todo) < len(plans) + most:
            taken.update((kind, b))
            todo[candidate.key] = candidate
        elif len(later) < AHEAD:
            later.append(candidate)
    return list(todo.values()), later


def _total_ns(search: BlockSearch, uses: Counter[BlockInterface]) -> int | None:
    """Return the total cost of the best plans; None if an interface has no plan yet."""
    best = {one: search.open(one).best for one in uses}
    if any(plan is None for plan in best.values()):
        return None
    return sum(uses[one] * plan.cost_ns for one, plan in best.items() if plan is not None)
