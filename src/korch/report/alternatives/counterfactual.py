"""A plan -> for each of its kernels, other groupings of the same work, and their costs.

They show why the primitives are grouped as they are. Two kinds are computed, over kernels that were
measured, with the rest of the plan unchanged:

- *drop in*: another candidate is added to the plan, and the kernels that are then not needed are removed. It may
  compute more than one kernel (and replace several), or the same value with other primitives.
- *take apart*: the cheapest kernels that write the outputs of a kernel, from the values that the plan has without
  it; first with any kernels, then with kernels of one primitive only. It is solved as a small program.

Changes of layout that become necessary are included, if they were measured; otherwise the grouping is left
out. Each grouping is a complete plan, whose cost is that of the plan, minus the removed and plus the new kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from korch.binary_program.problem import Port, Problem
from korch.binary_program.solve import solve
from korch.candidate.candidate import Candidate
from korch.errors import InfeasibleError
from korch.options import Options
from korch.primitive.walks import depth_first, reached
from korch.search.baselines import kernel_size
from korch.search.instance import Instance
from korch.system.deadline import Deadline

GROUPING_SECONDS = 1.0  # time of the solve for one grouping
MISSING = -1  # stands for the kernel that writes a port if there is none

logger = logging.getLogger("korch.orchestrate")


@dataclass(frozen=True)
class Grouping:
    """Kernels that could run instead of some kernels of a plan."""

    kernels: tuple[Candidate, ...]  # the kernels that would run
    instead: tuple[int, ...]  # the indices in the plan of the kernels that they would replace
    cost_ns: int  # the cost of `kernels`
    instead_ns: int  # the cost of the replaced kernels

    @property
    def more_ns(self) -> int:
        """The additional cost of the plan with this grouping."""
        return self.cost_ns - self.instead_ns

    def moved(self, places: Sequence[int | None]) -> Grouping | None:
        """Return it with the replaced kernels renumbered by `places`; None if one of them has no new index."""
        instead = tuple(n for i in self.instead if (n := places[i]) is not None)
        return replace(self, instead=instead) if len(instead) == len(self.instead) else None


Groupings = tuple[tuple[Grouping, ...], ...]
"""For each kernel of a plan, its groupings in ascending order of the additional cost."""


def counterfactual_groupings(
    instance: Instance,
    steps: Sequence[Candidate],
    cost_ns: Callable[[Candidate], tuple[int, bool]],
    options: Options,
    deadline: Deadline | None = None,
) -> Groupings:
    """Return, for each kernel of a plan, the other groupings with the least additional cost.

    Args:
        instance: the instance that was searched.
        steps: the kernels of the plan, which are candidates of the instance.
        cost_ns: returns a candidate's cost, and whether it was measured.
        options: how to solve.
        deadline: when to stop; kernels that were not reached have fewer groupings.
    """
    most = options.search.groupings
    chosen_ids = {id(step) for step in steps}
    known = [c for c in instance.candidates if id(c) in chosen_ids or cost_ns(c)[1]]
    problem = instance.of(known).problem(cost_ns)
    number = {id(candidate): k for k, candidate in enumerate(known)}
    swapper = _Swapper(problem, tuple(number[id(step)] for step in steps))
    place = {k: i for i, k in enumerate(swapper.chosen)}
    found: list[dict[frozenset[int], Grouping]] = [{} for _ in steps]

    def keep(new: Iterable[int]) -> None:
        swap = swapper.swap(tuple(new))
        if swap is None:
            return
        added, gone = swap
        grouping = Grouping(
            tuple(known[k] for k in added),
            tuple(sorted(place[k] for k in gone)),
            *(sum(problem.kernels[k].cost_ns for k in kernels) for kernels in (added, gone)),
        )
        for k in gone:
            found[place[k]][frozenset(added)] = grouping

    end = deadline or Deadline()
    same = {(problem.kernels[k].steps, _values(problem, k)) for k in swapper.chosen}
    for k, kernel in enumerate(problem.kernels):
        if end.is_over:
            break
        is_other = kernel.steps and (kernel.steps, _values(problem, k)) not in same
        if k not in place and is_other:
            keep([k])
    single = {k for k, candidate in enumerate(known) if kernel_size(candidate) <= 1}
    for k in sorted(swapper.chosen, key=lambda k: -problem.kernels[k].cost_ns):
        for allowed in (None, single):
            if end.is_over:
                break
            keep(_taken_apart(problem, swapper, k, allowed, options))
    return tuple(tuple(sorted(rows.values(), key=lambda row: (row.more_ns, len(row.kernels))))[:most] for rows in found)


def _values(problem: Problem, k: int) -> frozenset[int]:
    return frozenset(port.value for port in problem.kernels[k].outputs)


def _taken_apart(
    problem: Problem, swapper: _Swapper, k: int, allowed: set[int] | None, options: Options
) -> tuple[int, ...]:
    """Return the cheapest kernels of other groups that write the outputs of kernel k; empty if there are none."""
    own = problem.kernels[k]
    if not own.steps:
        return ()
    there = problem.given | swapper.ports_without(k)
    required = tuple(port for port in own.outputs if port in swapper.read)

    def is_other(i: int) -> bool:
        is_same = (problem.kernels[i].steps, _values(problem, i)) == (own.steps, _values(problem, k))
        return not is_same and (allowed is None or i in allowed)

    def makers(ports: Iterable[Port]) -> Iterator[int]:
        return (i for port in ports if port not in there for i in problem.producers.get(port, ()) if is_other(i))

    usable = sorted(reached(makers(required), lambda i: makers(problem.needs(i))))
    if not usable:
        return ()
    part = replace(problem, kernels=tuple(problem.kernels[i] for i in usable), required=required, given=there)
    try:
        plan = solve(part, seconds=GROUPING_SECONDS, limits=options.search)
    except InfeasibleError as error:
        logger.debug("a kernel can't be taken apart: %s", error)
        return ()
    return tuple(usable[i] for i in plan.kernels)


class _Swapper:
    """A plan in which kernels are replaced by others."""

    def __init__(self, problem: Problem, chosen: tuple[int, ...]) -> None:
        self.problem = problem
        self.chosen = chosen
        self.makers = {port: k for k in chosen for port in problem.kernels[k].outputs}
        self.layouts: dict[int, list[Port]] = {}
        for port in (*problem.given, *self.makers):
            self.layouts.setdefault(port.value, []).append(port)
        self.read = set(problem.required) | {p for k in chosen for p in problem.needs(k)}
        self.changes: dict[tuple[Port, Port], int] = {}
        for k, kernel in enumerate(problem.kernels):
            if not kernel.steps:
                key = (kernel.inputs[0], kernel.outputs[0])
                best = self.changes.get(key)
                if best is None or kernel.cost_ns < problem.kernels[best].cost_ns:
                    self.changes[key] = k

    def ports_without(self, k: int) -> frozenset[Port]:
        """Return the ports that the plan writes without kernel k and the kernels that depend on it."""
        lost = set(self.problem.kernels[k].outputs)
        kept: set[Port] = set()
        for other in self.chosen:  # in an order in which they can run
            if other == k:
                continue
            outputs = self.problem.kernels[other].outputs
            is_lost = not lost.isdisjoint(self.problem.needs(other))
            (lost if is_lost else kept).update(outputs)
        return frozenset(kept)

    def swap(self, new: tuple[int, ...]) -> tuple[list[int], list[int]] | None:
        """Add kernels to the plan; return the kernels that are added and those that are removed.

        The result is None if the plan is then invalid, does not need all of the new kernels, writes or owns a
        port twice, exceeds the error budget, or still needs all kernels that it needed before.
        """
        if not new or not self._is_near(new):
            return None
        makers = dict(self.makers)
        makers.update((port, k) for k in new for port in self.problem.kernels[k].outputs)
        made = {port: k for k in new for port in self.problem.kernels[k].outputs}
        for port in made:
            self._change_after(port, made, makers)
        for k in new:
            if not all(self._change_before(port, makers) for port in self.problem.needs(k)):
                return None
        needed = self._needed(makers)
        if needed is None or not needed.issuperset(new):
            return None
        written = [port for k in needed for port in self.problem.kernels[k].outputs]
        owned = [port for k in needed for port in self.problem.kernels[k].owns]
        if len(set(written)) < len(written) or len(set(owned)) < len(owned):
            return None
        if sum(self.problem.kernels[k].error for k in needed) > self.problem.most_error:
            return None
        gone = [k for k in self.chosen if k not in needed]
        return (sorted(needed - set(self.chosen)), gone) if gone else None

    def _is_near(self, new: Sequence[int]) -> bool:
        return any(p.value in self.layouts for k in new for p in self.problem.kernels[k].outputs)

    def _change_after(self, port: Port, made: dict[Port, int], makers: dict[Port, int]) -> None:
        """Let changes of layout write, from a new port, the other layouts of its value that the plan reads."""
        for other in self.layouts.get(port.value, ()):
            old = self.makers.get(other)
            if other in made or old is None or not self.problem.kernels[old].steps:
                continue
            change = self.changes.get((port, other))
            if change is not None:
                makers[other] = change

    def _change_before(self, port: Port, makers: dict[Port, int]) -> bool:
        """Ensure that a port is written, adding a change of layout if needed; return False if it can't be written."""
        if port in makers or self.problem.is_given(port):
            return True
        changes = [
            self.changes[other, port] for other in self.layouts.get(port.value, ()) if (other, port) in self.changes
        ]
        if not changes:
            return False
        makers[port] = min(changes, key=lambda k: self.problem.kernels[k].cost_ns)
        return True

    def _needed(self, makers: dict[Port, int]) -> set[int] | None:
        """Return the kernels that the required ports need; None if one is missing or depends on itself."""

        def writing(ports: Iterable[Port]) -> list[int]:
            return [makers.get(port, MISSING) for port in ports if not self.problem.is_given(port)]

        def before(k: int) -> list[int]:
            return writing(self.problem.needs(k)) if k != MISSING else []

        place = {k: i for i, k in enumerate(depth_first(writing(self.problem.required), before))}
        is_cyclic = any(place[other] >= place[k] for k in place for other in before(k))
        return None if MISSING in place or is_cyclic else set(place)
