"""Blocks of a model -> measurements of what estimates say its best plan has.

Each block has a few interfaces, and only one of them is in a plan. So before any is surveyed, the
relaxations of all of them are solved over estimates, the model's layouts are chosen by that, and
only what the plans of the chosen interfaces have is measured, with what else is expected to gain
most: for all blocks together, in full batches. Then again, as the estimates are better by now. It
proves nothing; under a budget it finds most of what is to be found.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable

from korch.assembly.assemble import Assembly
from korch.assembly.blocks import BlockSearch
from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.search.estimate import Kind
from korch.search.lazy import BATCH, Look, measure_some

logger = logging.getLogger("korch.orchestrate")

ROUNDS = 12
"""Most rounds."""

FIRST_KERNELS = 24
"""Candidates of the first round beside those of the preferred plan: nothing alike is known yet."""

ROUND_KERNELS = 72
"""The same of other rounds."""

ALIKE = 6
"""Of these, most of a kind: by then it is known what the kind takes."""

OF_BLOCK = 1 / 3
"""Of these, the largest share for one block, so that one of large kernels does not take all."""

NEAR = 1.3
"""An interface of a block that is thought to cost more than this times the best, when something is
known of its kernels' times, is not looked at again."""

BATCH_SECONDS = 5.0
"""A round that can't measure so long is not begun."""

LOOK_SECONDS = 0.7
LOOK_GAP = 0.03
"""For a plan by estimates: they are off by more."""

NEXT_KERNELS = 48
"""Candidates that are compiled while it is thought about what to measure next: they may be it."""

MOST_PROGRAMS = 60
"""With more interfaces the programs would take gigabytes; then blocks are surveyed one by one."""

QUIET = 0.004
"""A round that betters the plan by a smaller share is the last."""

Key = tuple[int, int]


def scout(search: BlockSearch, assembly: Assembly) -> bool:
    """Measure what a good plan of the model may have; nothing if all was searched before.

    The plain interface is seldom the best where there are others, and is left out.

    Returns:
        Whether time is left for more.
    """
    keys = [
        (b, j)
        for b, task in enumerate(search.tasks)
        for j in range(min(1, len(task.interfaces) - 1), len(task.interfaces))
    ]
    if len(keys) > MOST_PROGRAMS or search.is_kept():
        return True
    try:
        return _scout(search, assembly, keys)
    finally:
        search.meter.rest()


def _scout(search: BlockSearch, assembly: Assembly, keys: list[Key]) -> bool:
    """Measure in rounds; return whether time is left for more."""
    before_ns: int | None = None
    outlooks_ns: dict[Key, int] = {}
    looking_s = batch_s = 0.0
    uses: Counter[Key] = Counter()
    for turn in range(ROUNDS):
        left_s = search.deadline.left_s
        needed_s = looking_s + max(batch_s, BATCH_SECONDS)
        if before_ns is not None and left_s is not None and left_s < needed_s:
            _hurry(search, uses)
            return False
        began_s = time.monotonic()
        _look_out(search, keys, outlooks_ns, NEAR if turn > 1 else math.inf)
        if {b for b, _ in outlooks_ns} != set(range(len(search.tasks))):
            return True  # the survey says why
        uses = _preferred(search, assembly, outlooks_ns)
        if not uses:
            return True
        looks = _looks(search, uses)
        # In the first round the programs are written, too.
        looking_s = (time.monotonic() - began_s) * (1 if turn else 0.5)
        batch_s = _measure(search, uses, looks, ROUND_KERNELS if turn else FIRST_KERNELS)
        for key, look in looks.items():
            search.loop(*key).try_plan(look.kernels)
        for key in uses.keys() - looks.keys():
            keys.remove(key)
            del outlooks_ns[key]
        total_ns = _total_ns(search, uses)
        is_known = len(looks) == len(uses) and not any(look.unknown for look in looks.values())
        is_known = is_known and before_ns is not None and total_ns is not None
        if is_known and (total_ns or 0) > (1 - QUIET) * (before_ns or 0):
            return True
        before_ns = total_ns
    return True


def _preferred(search: BlockSearch, assembly: Assembly, outlooks_ns: dict[Key, int]) -> Counter[Key]:
    """Return the interfaces thought to be best, and how often; none if they don't fit together."""
    try:
        choice = assembly.prefer(outlooks_ns, search.estimate_ns)
    except InfeasibleError as error:
        logger.info("no layouts are preferred: %s", error)
        return Counter()
    places = enumerate(choice.interfaces)
    return Counter((assembly.block_of[i], j) for i, j in places if j >= 0)


def _looks(search: BlockSearch, keys: Iterable[Key]) -> dict[Key, Look]:
    """Look at interfaces; those are left out that have no plan, as their kernels fail."""
    found: dict[Key, Look] = {}
    for key in keys:
        try:
            found[key] = search.loop(*key).look(LOOK_SECONDS, LOOK_GAP)
        except InfeasibleError as error:
            logger.info("block %d has no plan for its interface %d: %s", *key, error)
            continue
        own = search.tasks[key[0]].candidates
        search.meter.begin([own[k] for k in found[key].unknown])
    return found


def _hurry(search: BlockSearch, uses: Counter[Key]) -> None:
    """Look at some blocks only, those that cost most first: there is no time for all."""
    for key in sorted(uses, key=lambda key: -uses[key] * (search.loop(*key).best or (0,))[0]):
        left_s = search.deadline.left_s
        if left_s is None or left_s < BATCH_SECONDS:
            return
        looks = _looks(search, (key,))
        _measure(search, uses, looks, FIRST_KERNELS)
        for look in looks.values():
            search.loop(*key).try_plan(look.kernels)


def _look_out(search: BlockSearch, keys: list[Key], outlooks_ns: dict[Key, int], near: float) -> None:
    """Tell anew what the interfaces are thought to cost; those without a plan are dropped."""
    least_ns: dict[int, int] = {}
    for (b, _), outlook_ns in outlooks_ns.items():
        least_ns[b] = min(outlook_ns, least_ns.get(b, outlook_ns))
    for key in list(keys):
        if key in outlooks_ns and outlooks_ns[key] > near * least_ns[key[0]]:
            continue
        try:
            outlooks_ns[key] = search.loop(*key).outlook_ns()
        except InfeasibleError:
            logger.info("block %d has no plan for its interface %d", *key)
            keys.remove(key)
            outlooks_ns.pop(key, None)


def _measure(search: BlockSearch, uses: Counter[Key], looks: dict[Key, Look], most: int) -> float:
    """Measure plans, and what is expected to gain most of all that they could have instead.

    Returns:
        The seconds that a batch took.
    """
    todo: dict[str, Candidate] = {}
    needed: set[str] = set()
    hopes: list[tuple[float, int, Candidate]] = []
    for key, look in looks.items():
        own = search.tasks[key[0]].candidates
        todo |= {own[k].key: own[k] for k in look.unknown}
        if search.loop(*key).best is None:
            needed |= {own[k].key for k in look.unknown}
        hopes += ((uses[key] * gain_ns, key[0], own[k]) for gain_ns, k in look.hopes)
    hopes.sort(key=lambda hope: -hope[0])
    plans = list(todo.values())
    later: list[Candidate] = []
    taken: Counter[Kind | int] = Counter()
    for _, b, candidate in hopes:
        kind = search.experience.kinds_of(candidate)[0]
        if candidate.key in todo or taken[kind] == ALIKE or taken[b] >= OF_BLOCK * most:
            continue
        if len(todo) < len(plans) + most:
            taken.update((kind, b))
            todo[candidate.key] = candidate
        elif len(later) < NEXT_KERNELS:
            later.append(candidate)

    began_s = time.monotonic()
    order = sorted(todo.values(), key=lambda c: c.key not in needed)
    found, is_corrected = measure_some(search.meter, order, search.deadline, needed=len(needed))
    search.take(found, is_corrected)
    search.meter.begin(later)
    return (time.monotonic() - began_s) / max(1.0, len(found) / BATCH)


def _total_ns(search: BlockSearch, uses: Counter[Key]) -> int | None:
    """Return what the best plans cost; None if an interface has none yet."""
    best = {key: search.loop(*key).best for key in uses}
    if any(one is None for one in best.values()):
        return None
    return sum(uses[key] * one[0] for key, one in best.items() if one is not None)
