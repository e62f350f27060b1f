"""Random small instances, and two ways to solve them that share no code with the solver."""

import random
from dataclasses import replace
from itertools import combinations

from ortools.linear_solver import pywraplp

from korch.binary_program.problem import Computation, Port, PricedKernel, Problem


def random_problem(seed: int, kernels: int = 11, layouts: int = 2) -> Problem:
    """Return an instance with alternatives, cycles, recomputation and several outputs."""
    rng = random.Random(seed)
    names = "AB"[:layouts]
    values = rng.randint(2, 6)
    steps = [Computation(v, tuple(sorted(rng.sample(range(v), min(v, rng.randint(1, 2)))))) for v in range(1, values)]
    for _ in range(rng.randint(0, 3)):
        v = rng.randrange(1, values)
        others = [u for u in range(values) if u != v]
        steps.append(Computation(v, tuple(rng.sample(others, min(len(others), rng.randint(1, 2))))))
    made: list[PricedKernel] = []
    for _ in range(20 * kernels):
        if len(made) == kernels:
            break
        cost_ns = rng.randint(0, 20)
        if layouts > 1 and rng.random() < 0.15:
            v, (a, b) = rng.randrange(values), rng.sample(names, 2)
            made.append(PricedKernel(frozenset(), (Port(v, a),), (Port(v, b),), cost_ns))
            continue
        group = rng.sample(range(len(steps)), min(len(steps), rng.choice((1, 1, 1, 2, 2, 3))))
        kernel = _kernel(steps, group, rng, names, cost_ns)
        if kernel is not None:
            made.append(kernel)
    required = rng.sample(range(1, values), rng.randint(1, min(2, values - 1)))
    return Problem(tuple(steps), tuple(made), tuple(Port(v, "A") for v in required), given=frozenset({Port(0, "A")}))


def with_owners(problem: Problem, seed: int) -> Problem:
    """Return the instance with some kernels that own what they read."""
    rng = random.Random(seed)
    kernels = [
        replace(kernel, owns=kernel.inputs, cost_ns=kernel.cost_ns // 4)
        if kernel.steps and rng.random() < 0.8
        else kernel
        for kernel in problem.kernels
    ]
    return replace(problem, kernels=tuple(kernels))


def with_errors(problem: Problem, seed: int) -> Problem:
    """Return the instance with cheaper kernels that add to the error, and a budget for some of them."""
    rng = random.Random(seed)
    kernels = [
        replace(kernel, error=rng.randint(1, 1000), cost_ns=kernel.cost_ns // 3) if rng.random() < 0.6 else kernel
        for kernel in problem.kernels
    ]
    return replace(problem, kernels=tuple(kernels), most_error=rng.randint(0, 1500))


def _kernel(
    steps: list[Computation], group: list[int], rng: random.Random, names: str, cost_ns: int
) -> PricedKernel | None:
    makers = {steps[p].output for p in group}
    if len(makers) < len(group):
        return None
    waiting = set(group)
    while waiting:
        inner = {steps[p].output for p in waiting}
        ready = {p for p in waiting if inner.isdisjoint(steps[p].inputs)}
        if not ready:
            return None
        waiting -= ready
    read = sorted({v for p in group for v in steps[p].inputs} - makers)
    write = rng.sample(sorted(makers), rng.randint(1, len(makers)))
    return PricedKernel(
        frozenset(group),
        tuple(Port(v, rng.choice(names)) for v in read),
        tuple(Port(v, rng.choice(names)) for v in write),
        cost_ns,
    )


def brute_force(problem: Problem, needed: int | None = None) -> int | None:
    """Return the least cost over all subsets of kernels that are plans, with one kernel; None without a plan."""
    best = None
    own = () if needed is None else (problem.kernels[needed],)
    others = [kernel for k, kernel in enumerate(problem.kernels) if k != needed]
    for n in range(len(others) + 1):
        for some in combinations(others, n):
            chosen = (*own, *some)
            cost_ns = sum(kernel.cost_ns for kernel in chosen)
            if (best is None or cost_ns < best) and _runs(problem, chosen):
                best = cost_ns
    return best


def _runs(problem: Problem, chosen: tuple[PricedKernel, ...]) -> bool:
    there = set(problem.given)
    writes = [port for kernel in chosen for port in kernel.outputs]
    owned = [port for kernel in chosen for port in kernel.owns]
    if len(set(writes)) < len(writes) or len(set(owned)) < len(owned):
        return False
    if sum(kernel.error for kernel in chosen) > problem.most_error:
        return False
    if any(sum(p in kernel.steps for kernel in chosen) > 1 for p in problem.once):
        return False
    left = list(chosen)
    while left:
        able = [kernel for kernel in left if there.issuperset(kernel.inputs)]
        if not able:
            return False
        there.update(port for kernel in able for port in kernel.outputs)
        left = [kernel for kernel in left if kernel not in able]
    return there.issuperset(problem.required)


def by_scip(problem: Problem) -> int | None:
    """Return the least cost by another solver: the plain rows, and times that order the kernels."""
    solver = pywraplp.Solver.CreateSolver("SCIP")
    n = len(problem.kernels)
    use = [solver.BoolVar("") for _ in range(n)]
    time = [solver.NumVar(0, n, "") for _ in range(n)]
    ports = {port for kernel in problem.kernels for port in (*kernel.inputs, *kernel.outputs)}
    for port in ports | set(problem.required):
        makers = [k for k in range(n) if port in problem.kernels[k].outputs]
        solver.Add(sum(use[k] for k in makers) <= 1)
        if port in problem.given:
            continue
        if port in problem.required:
            solver.Add(sum(use[k] for k in makers) >= 1)
        for k in range(n):
            if port in problem.kernels[k].inputs:
                solver.Add(sum(use[j] for j in makers) >= use[k])
                for j in makers:
                    solver.Add(time[k] >= time[j] + 1 - (n + 1) * (2 - use[j] - use[k]))
    solver.Minimize(sum(kernel.cost_ns * use[k] for k, kernel in enumerate(problem.kernels)))
    status = solver.Solve()
    return round(solver.Objective().Value()) if status == solver.OPTIMAL else None
