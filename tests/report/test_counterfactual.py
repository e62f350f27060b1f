"""Counterfactual groupings: each is a plan, none is better than an optimal plan, and known ones are found."""

import pytest

from korch.binary_program.problem import Certificate, Computation, Plan, Port, PricedKernel, Problem, Status
from korch.binary_program.solve import solve
from korch.binary_program.verify import verify_plan
from korch.errors import InfeasibleError
from korch.options import Options
from korch.primitive.text import parse_graph
from korch.report.alternatives.counterfactual import _Swapper, counterfactual_groupings
from korch.search.instance import Instance
from korch.system.deadline import Deadline
from tests.report.test_savings import PRODUCTS, Costs, best, candidates_of
from tests.small_problems import random_problem

OPTIONS = Options()


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_with_another_kernel_runs_and_costs_no_less(seed: int) -> None:
    problem = random_problem(seed, kernels=14)
    try:
        chosen = solve(problem).kernels
    except InfeasibleError:
        return
    swapper = _Swapper(problem, chosen)
    for k in range(len(problem.kernels)):
        swap = swapper.swap((k,)) if k not in chosen else None
        if swap is None:
            continue
        added, gone = swap
        assert k in added and gone and set(gone) <= set(chosen)
        kernels = sorted({*chosen, *added} - set(gone))
        total_ns = sum(problem.kernels[i].cost_ns for i in kernels)
        optimum_ns = sum(problem.kernels[i].cost_ns for i in chosen)
        assert total_ns >= optimum_ns
        certificate = Certificate(Status.FEASIBLE, total_ns, -1, len(problem.kernels), 0, is_measured=False)
        assert sorted(verify_plan(problem, Plan(tuple(kernels), certificate))) == kernels


def test_some_random_plans_have_other_kernels() -> None:
    found = 0
    for seed in range(60):
        problem = random_problem(seed, kernels=14)
        try:
            chosen = solve(problem).kernels
        except InfeasibleError:
            continue
        swapper = _Swapper(problem, chosen)
        others = set(range(len(problem.kernels))) - set(chosen)
        found += sum(swapper.swap((k,)) is not None for k in others)
    assert found > 50


def chain(*costs_ns: int, change_ns: int | None = None) -> Problem:
    """Return x -> a -> b as kernels a, b and both; both writes b in another layout, or not."""
    layout = "B" if change_ns is not None else "A"
    ports = [Port(v, "A") for v in range(3)]
    kernels = [
        PricedKernel(frozenset({0}), (ports[0],), (ports[1],), costs_ns[0]),
        PricedKernel(frozenset({1}), (ports[1],), (ports[2],), costs_ns[1]),
        PricedKernel(frozenset({0, 1}), (ports[0],), (Port(2, layout),), costs_ns[2]),
    ]
    if change_ns is not None:
        kernels.append(PricedKernel(frozenset(), (Port(2, "B"),), (ports[2],), change_ns))
    return Problem((Computation(1, (0,)), Computation(2, (1,))), tuple(kernels), (ports[2],), frozenset(ports[:1]))


def test_what_one_kernel_makes_superfluous_falls_away() -> None:
    assert _Swapper(chain(1, 1, 5), (0, 1)).swap((2,)) == ([2], [0, 1])
    assert _Swapper(chain(1, 1, 5), (2,)).swap((0, 1)) == ([0, 1], [2])
    assert _Swapper(chain(1, 1, 5), (2,)).swap((0,)) is None  # nothing reads it
    assert _Swapper(chain(1, 1, 5), (2,)).swap((1,)) is None  # nothing writes what it reads


def test_a_change_of_layout_that_becomes_necessary_counts() -> None:
    assert _Swapper(chain(1, 1, 5, change_ns=3), (0, 1)).swap((2,)) == ([2, 3], [0, 1])
    without = chain(1, 1, 5, change_ns=3).without([3])[0]
    assert _Swapper(without, (0, 1)).swap((2,)) is None


def test_fused_kernels_are_taken_apart_and_single_ones_fused() -> None:
    graph = parse_graph(PRODUCTS)
    candidates, costs = candidates_of(graph), Costs()
    _, steps = best(graph, candidates, costs)
    (tail,) = (n for n, step in enumerate(steps) if len(step.group.primitives) == 2)
    found = counterfactual_groupings(Instance(graph, candidates), steps, costs.cost_ns, OPTIONS)
    assert len(found) == len(steps)
    apart = [row for row in found[tail] if row.instead == (tail,) and len(row.kernels) == 2]
    assert {len(c.group.primitives) for c in apart[0].kernels} == {1}
    assert apart[0].more_ns >= 0
    for rows in found:
        assert [row.more_ns for row in rows] == sorted(row.more_ns for row in rows)
        for row in rows:
            assert row.cost_ns == sum(costs.cost_ns(c)[0] for c in row.kernels)
            assert row.instead_ns == sum(costs.cost_ns(steps[n])[0] for n in row.instead)
    single = [c for c in candidates if len(c.group.primitives) == 1]
    _, split = best(graph, single, costs)
    fused = counterfactual_groupings(Instance(graph, candidates), split, costs.cost_ns, OPTIONS)
    assert any(len(row.instead) == 2 and len(row.kernels) == 1 for rows in fused for row in rows)


def test_what_is_not_measured_is_no_rival_and_no_time_means_no_solves() -> None:
    graph = parse_graph(PRODUCTS)
    candidates, costs = candidates_of(graph), Costs()
    _, steps = best(graph, candidates, costs)
    others = Costs(frozenset(c.key for c in candidates) - {step.key for step in steps})
    assert counterfactual_groupings(Instance(graph, candidates), steps, others.cost_ns, OPTIONS) == ((),) * len(steps)
    late = counterfactual_groupings(Instance(graph, candidates), steps, costs.cost_ns, OPTIONS, deadline=Deadline(0.0))
    assert all(len(row.kernels) == 1 for rows in late for row in rows)


def test_a_grouping_moves_with_its_segment() -> None:
    graph = parse_graph(PRODUCTS)
    candidates, costs = candidates_of(graph), Costs()
    _, steps = best(graph, candidates, costs)
    row = next(
        row
        for rows in counterfactual_groupings(Instance(graph, candidates), steps, costs.cost_ns, OPTIONS)
        for row in rows
    )
    moved = row.moved([n + 10 for n in range(len(steps))])
    assert moved is not None and moved.instead == tuple(n + 10 for n in row.instead)
    assert row.moved([None] * len(steps)) is None
