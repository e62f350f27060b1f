"""Instance -> the kernels that may be in a best plan, a first plan, and the reason if there is no plan.

No optimum is lost: a kernel is dropped only if no plan can use it, or if another one at no more cost can
replace it in every plan.
"""

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from korch.binary_program.problem import Port, Problem
from korch.binary_program.verify import ready_order
from korch.errors import InfeasibleError
from korch.primitive.walks import reached

Describe = Callable[[int], str]


def reachable_kernels(problem: Problem) -> frozenset[int]:
    """Return the kernels whose inputs can be written, directly or through other kernels."""
    return frozenset(ready_order(problem, range(len(problem.kernels)))[0])


def useful_kernels(problem: Problem) -> tuple[int, ...]:
    """Return the reachable kernels that some required port may need, in order."""
    reachable = reachable_kernels(problem)

    def makers(ports: Iterable[Port]) -> Iterator[int]:
        return (k for port in ports for k in problem.producers.get(port, ()) if k in reachable)

    required = (port for port in problem.required if not problem.is_given(port))
    return tuple(sorted(reached(makers(required), lambda k: makers(problem.needs(k)))))


def dominated_kernels(problem: Problem, costs_ns: Sequence[int], excluded: Collection[int] = ()) -> frozenset[int]:
    """Return the kernels that another kernel can replace in any plan at no more cost.

    The other kernel writes the same ports, reads and owns no port that the first one does not, and its
    error is not larger. Where primitives may run only once, it may run one that another kernel runs; then no kernel
    is said to be dominated.
    """
    if problem.once:
        return frozenset()
    groups: dict[frozenset[Port], list[tuple[int, int, frozenset[Port], frozenset[Port]]]] = {}
    for k, kernel in enumerate(problem.kernels):
        if k in excluded:
            continue
        entry = (costs_ns[k], k, frozenset(problem.needs(k)), frozenset(kernel.owns))
        groups.setdefault(frozenset(kernel.outputs), []).append(entry)
    gone = set()
    for group in groups.values():
        kept: list[tuple[frozenset[Port], frozenset[Port], int]] = []
        for _, k, needs, owns in sorted(group, key=lambda entry: entry[:2]):
            error = problem.kernels[k].error
            if any(less <= needs and owned <= owns and least <= error for less, owned, least in kept):
                gone.add(k)
            else:
                kept.append((needs, owns, error))
    return frozenset(gone)


def diagnose(problem: Problem, describe: Describe | None = None) -> None:
    """Raise an error that explains why there is no plan, if that can be found without a solver.

    `describe`: returns the name of a value for messages; `%12` if not given.

    Raises:
        InfeasibleError: a required port can't be written. The message names the port that is missing,
            following the chain of kernels' inputs.
    """
    reachable = reachable_kernels(problem)
    written = {port for k in reachable for port in problem.kernels[k].outputs}
    name = describe or (lambda value: f"%{value}")
    for required in problem.required:
        if required not in written and not problem.is_given(required):
            root = _root_cause(problem, required, written)
            place = f"value {name(root.value)}"
            if root not in problem.producers:
                raise InfeasibleError(
                    f"no candidate produces {name(root.value)} in layout {root.layout}",
                    where=place,
                    hint=f"The model output {name(required.value)} needs it",
                )
            raise InfeasibleError(
                f"all candidates that produce {name(root.value)} in layout {root.layout} wait for each other",
                where=place,
                hint=f"The model output {name(required.value)} needs it",
            )


def _root_cause(problem: Problem, port: Port, written: set[Port]) -> Port:
    """Return a port that a missing port depends on and that no kernel writes, or the missing port itself."""
    waiting, seen = [port], {port}
    for other in waiting:
        if other not in problem.producers:
            return other
        for k in problem.producers[other]:
            for need in problem.needs(k):
                if need not in written and need not in seen:
                    seen.add(need)
                    waiting.append(need)
    return port


def greedy_plan(problem: Problem, costs_ns: Sequence[int], useful: Iterable[int]) -> set[int]:
    """Return the kernels of some plan, or the empty set if the greedy choice finds none.

    For each needed port it takes the kernel with the least total cost, including all that the kernel
    needs; shared inputs count each time. Ports are ranked by that cost, and a chosen kernel reads only
    ports of a lower rank, so no cycle is possible.
    """
    rank, total = _port_costs(problem, costs_ns, useful)
    waiting = [(-rank[p], p) for p in set(problem.required) if p in rank]
    heapq.heapify(waiting)
    written: set[Port] = set()
    owned: set[Port] = set()
    chosen: set[int] = set()
    while waiting:
        _, port = heapq.heappop(waiting)
        if port in written:
            continue
        able = [
            k
            for k in problem.producers[port]
            if k in total
            and written.isdisjoint(problem.kernels[k].outputs)
            and owned.isdisjoint(problem.kernels[k].owns)
            and all(rank[need] < rank[port] for need in problem.needs(k))
        ]
        if not able:
            return set()
        best = min(able, key=lambda k: (total[k], k))
        chosen.add(best)
        written.update(problem.kernels[best].outputs)
        owned.update(problem.kernels[best].owns)
        for need in problem.needs(best):
            heapq.heappush(waiting, (-rank[need], need))
    return chosen


def _port_costs(
    problem: Problem, costs_ns: Sequence[int], useful: Iterable[int]
) -> tuple[dict[Port, int], dict[int, int]]:
    """Return each port's rank by cost, and each kernel's total cost including all that it needs."""
    kernels = tuple(useful)
    total = {k: costs_ns[k] for k in kernels}
    missing = {k: len(problem.needs(k)) for k in kernels}
    readers: dict[Port, list[int]] = {}
    for k in kernels:
        for port in problem.needs(k):
            readers.setdefault(port, []).append(k)
    heap = [(total[k], k) for k in kernels if missing[k] == 0]
    heapq.heapify(heap)
    rank: dict[Port, int] = {}
    while heap:
        cost_ns, k = heapq.heappop(heap)
        number = len(rank)
        for port in problem.kernels[k].outputs:
            if port in rank:
                continue
            rank[port] = number
            for reader in readers.get(port, ()):
                total[reader] += cost_ns
                missing[reader] -= 1
                if missing[reader] == 0:
                    heapq.heappush(heap, (total[reader], reader))
    return rank, {k: total[k] for k in kernels if missing[k] == 0}
