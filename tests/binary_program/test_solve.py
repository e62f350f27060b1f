"""The solver, compared with brute force, another solver and hand-written tables."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from korch.binary_program.problem import Computation, Port, PricedKernel, Problem, Status
from korch.binary_program.solve import Solver, solve
from korch.binary_program.text import format_problem, parse_problem
from korch.binary_program.verify import verify_plan
from korch.errors import InfeasibleError, InvalidGraphError
from korch.limits import SearchLimits
from tests.small_problems import brute_force, by_scip, random_problem, with_errors, with_owners
from tests.support.instances import Severity, make_instance

FEASIBLE_SEEDS = [seed for seed in range(12) if brute_force(random_problem(seed, kernels=11)) is not None]


def optimum(problem: Problem) -> int | None:
    try:
        plan = solve(problem, limits=SearchLimits(solver_workers=1), seconds=30)
    except InfeasibleError:
        return None
    assert plan.certificate.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert verify_plan(problem, plan) == plan.kernels
    return plan.certificate.objective_ns


@pytest.mark.parametrize("seed", range(150))
def test_agrees_with_brute_force(seed: int) -> None:
    problem = random_problem(seed, kernels=11, layouts=1 + seed % 2)
    assert optimum(problem) == brute_force(problem)


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_brute_force_where_kernels_own_ports(seed: int) -> None:
    problem = with_owners(random_problem(seed, kernels=11, layouts=1 + seed % 2), seed)
    assert optimum(problem) == brute_force(problem)
    assert parse_problem(format_problem(problem)) == problem


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_brute_force_where_kernels_add_to_the_error(seed: int) -> None:
    problem = with_errors(random_problem(seed, kernels=11, layouts=1 + seed % 2), seed)
    expected = brute_force(problem)
    assert (None if expected is None else optimum(problem)) == expected
    assert parse_problem(format_problem(problem)) == problem


@pytest.mark.parametrize("seed", range(60))
def test_agrees_with_brute_force_where_primitives_run_once(seed: int) -> None:
    problem = random_problem(seed, kernels=11, layouts=1 + seed % 2)
    problem = replace(problem, once=frozenset(range(seed % 2, len(problem.steps), 1 + seed % 2)))
    assert optimum(problem) == brute_force(problem)
    assert parse_problem(format_problem(problem)) == problem


def test_a_relaxation_without_solution_bounds_nothing_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    solver = Solver(random_problem(FEASIBLE_SEEDS[0], kernels=11))
    costs_ns = [solver.problem.kernels[k].cost_ns for k in solver.kept]
    assert solver.relaxer.solve(costs_ns, (), 10).bound_ns > 0
    assert solver.relaxer.solve(costs_ns, range(len(costs_ns)), 10).bound_ns == 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seed", FEASIBLE_SEEDS)
def test_plans_with_a_kernel_cost_at_least_its_slack_more_than_the_bound(seed: int) -> None:
    problem = random_problem(seed, kernels=11)
    useful = Solver(problem).kept[:2]
    dearer = (replace(problem.kernels[k], cost_ns=problem.kernels[k].cost_ns + 5) for k in useful)
    problem = replace(problem, kernels=(*problem.kernels, *dearer))
    bound_ns, slack_ns = Solver(problem).relax([kernel.cost_ns for kernel in problem.kernels])
    least_ns = {k: brute_force(problem, needed=k) for k in slack_ns}
    assert max(slack_ns) >= 11 and any(slack_ns.values())
    assert all(least is None or least >= bound_ns + slack_ns[k] for k, least in least_ns.items())


def test_the_budget_of_errors_matters_in_some_of_these() -> None:
    problems = [with_errors(random_problem(seed, kernels=11, layouts=1 + seed % 2), seed) for seed in range(60)]
    free = [replace(problem, most_error=10**6) for problem in problems]
    differ = [brute_force(a) != brute_force(b) for a, b in zip(problems, free, strict=True)]
    assert sum(differ) > 5 and sum(brute_force(problem) is not None for problem in problems) > 20


def test_owners_matter_in_some_of_these() -> None:
    problems = [random_problem(seed, kernels=11, layouts=1 + seed % 2) for seed in range(60)]
    owned = [with_owners(problem, seed) for seed, problem in enumerate(problems)]
    free = [replace(problem, kernels=tuple(replace(k, owns=()) for k in problem.kernels)) for problem in owned]
    differ = [brute_force(a) != brute_force(b) for a, b in zip(owned, free, strict=True)]
    assert sum(differ) > 1


def test_agrees_with_another_solver() -> None:
    for seed in range(1000, 1100):
        problem = random_problem(seed, kernels=16)
        assert optimum(problem) == by_scip(problem), seed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_dearer_kernels_never_make_a_cheaper_plan(seed: int, data: st.DataObject) -> None:
    problem = random_problem(seed, kernels=10)
    try:
        solver = Solver(problem, limits=SearchLimits(solver_workers=1))
    except InfeasibleError:
        return
    before = solver.solve()
    costs_ns = [kernel.cost_ns for kernel in problem.kernels]
    k = data.draw(st.integers(0, len(costs_ns) - 1))
    costs_ns[k] += data.draw(st.integers(0, 30))
    bound_ns = before.certificate.bound_ns
    after = solver.solve(costs_ns, hint=before.kernels, lower_bound_ns=bound_ns)
    assert after.certificate.objective_ns == brute_force(problem.with_costs(costs_ns))
    if before.certificate.objective_ns is not None:
        assert after.certificate.objective_ns is not None
        assert after.certificate.objective_ns >= before.certificate.objective_ns


def test_random_small_instances_have_all_that_makes_them_hard() -> None:
    problems = [random_problem(seed, kernels=11) for seed in range(150)]
    assert sum(brute_force(problem) is not None for problem in problems) > 75
    assert any(len(makers) > 1 for p in problems for makers in p.alternatives.values())


TABLES = {
    "fusing is cheaper than two launches": (
        "k0: p0 | %0:A -> %1:A | 10 bound\nk1: p1 | %1:A -> %2:A | 10 bound\nk2: p0 p1 | %0:A -> %2:A | 15 bound\n",
        15,
        {2},
    ),
    "fusing is dearer than two launches": (
        "k0: p0 | %0:A -> %1:A | 10 bound\nk1: p1 | %1:A -> %2:A | 10 bound\nk2: p0 p1 | %0:A -> %2:A | 21 bound\n",
        20,
        {0, 1},
    ),
    "a change of layout pays": (
        "k0: p0 | %0:A -> %1:A | 10 bound\nk1: p1 | %1:A -> %2:A | 50 bound\n"
        "k2: p1 | %1:B -> %2:A | 20 bound\nk3:  | %1:A -> %1:B | 5 bound\n",
        35,
        {0, 2, 3},
    ),
    "a cycle of layout changes costs nothing but writes nothing": (
        "k0:  | %2:B -> %2:A | 0 bound\nk1:  | %2:A -> %2:B | 0 bound\nk2: p0 p1 | %0:A -> %2:A | 9 bound\n",
        9,
        {2},
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_hand_written_tables(name: str) -> None:
    kernels, cost_ns, chosen = TABLES[name]
    text = f"given %0:A\np0: %1 = %0\np1: %2 = %1\nrequire %2:A\n{kernels}"
    plan = solve(parse_problem(text))
    assert plan.certificate.objective_ns == cost_ns
    assert set(plan.kernels) == chosen


def test_a_port_is_a_part_of_one_other_only() -> None:
    problem = parse_problem(
        "given %0:A\np0: %1 = %0\np1: %2 = %1\np2: %3 = %1\nrequire %2:A\nrequire %3:A\n"
        "k0: p0 | %0:A -> %1:A | 10 bound\n"
        "k1: p1 | %1:A -> %2:A | 4 bound\nk2: p1 | %1:A -> %2:A | 0 bound owns %1:A\n"
        "k3: p2 | %1:A -> %3:A | 5 bound\nk4: p2 | %1:A -> %3:A | 0 bound owns %1:A\n"
    )
    plan = solve(problem)
    assert plan.certificate.objective_ns == 14
    assert set(plan.kernels) == {0, 1, 4}


def test_recomputes_where_that_is_cheaper_than_writing() -> None:
    problem = parse_problem(
        "given %0:A\np0: %1 = %0\np1: %2 = %1\np2: %3 = %1\nrequire %2:A\nrequire %3:A\n"
        "k0: p0 | %0:A -> %1:A | 30 bound\nk1: p1 | %1:A -> %2:A | 10 bound\n"
        "k2: p2 | %1:A -> %3:A | 10 bound\nk3: p0 p1 | %0:A -> %2:A | 12 bound\n"
        "k4: p0 p2 | %0:A -> %3:A | 12 bound\n"
    )
    assert set(solve(problem).kernels) == {3, 4}


def test_recomputes_a_value_from_what_was_computed_from_it() -> None:
    # %2 undoes to %1: k0 computes %1 and writes only %2, k1 recomputes %1 from it.
    problem = parse_problem(
        "given %0:A\np0: %1 = %0\np1: %2 = %1\np2: %1 = %2\np3: %3 = %1\n"
        "require %2:A\nrequire %3:A\n"
        "k0: p0 p1 | %0:A -> %2:A | 10 bound\nk1: p2 p3 | %2:A -> %3:A | 5 bound\n"
        "k2: p0 p3 | %0:A -> %3:A | 9 bound\n"
    )
    plan = solve(problem)
    assert plan.kernels == (0, 1)
    assert plan.certificate.objective_ns == 15


def test_constants_are_there_in_every_layout() -> None:
    problem = parse_problem("constant %0\np0: %1 = %0\nrequire %1:A\nk0: p0 | %0:B -> %1:A | 7 bound\n")
    assert solve(problem).kernels == (0,)


def test_nothing_required_needs_no_kernel() -> None:
    problem = parse_problem("given %0:A\nrequire %0:A\n")
    plan = solve(problem)
    assert plan.kernels == ()
    assert plan.certificate.status is Status.OPTIMAL


def test_names_the_value_that_nothing_produces() -> None:
    problem = parse_problem("given %0:A\np0: %1 = %0\np1: %2 = %1\nrequire %2:A\nk0: p1 | %1:B -> %2:A | 1 bound\n")
    with pytest.raises(InfeasibleError) as info:
        solve(problem, describe=lambda value: f"%{value} (Relu_{value})")
    assert str(info.value) == (
        "value %1 (Relu_1): no candidate produces %1 (Relu_1) in layout B. The model output %2 (Relu_2) needs it"
    )


def test_says_that_candidates_wait_for_each_other() -> None:
    problem = parse_problem(
        "given %0:A\np0: %1 = %2\np1: %2 = %1\nrequire %2:A\n"
        "k0: p0 | %2:A -> %1:A | 1 bound\nk1: p1 | %1:A -> %2:A | 1 bound\n"
    )
    with pytest.raises(InfeasibleError, match="wait for each other"):
        solve(problem)


def test_two_writers_of_one_port_are_proven_infeasible() -> None:
    problem = parse_problem(
        "given %0:A\np0: %1 = %0\np1: %2 = %0\np2: %3 = %0\nrequire %1:A\nrequire %3:A\n"
        "k0: p0 p1 | %0:A -> %1:A %2:A | 1 bound\nk1: p1 p2 | %0:A -> %2:A %3:A | 1 bound\n"
    )
    plan = solve(problem)
    assert plan.certificate.status is Status.INFEASIBLE
    assert plan.kernels == ()
    assert plan.certificate.gap is None


@pytest.mark.parametrize("seed", FEASIBLE_SEEDS)
def test_excluded_kernels_are_not_used(seed: int) -> None:
    problem = random_problem(seed, kernels=11)
    solver = Solver(problem, limits=SearchLimits(solver_workers=1))
    plan = solver.solve()
    for k in plan.kernels:
        rest = problem.without([k])[0]
        try:
            other = solver.solve(excluded=[k])
        except InfeasibleError:
            assert brute_force(rest) is None
            continue
        assert k not in other.kernels
        assert other.certificate.objective_ns == brute_force(rest)
    assert plan.kernels


def test_without_time_a_plan_is_feasible_with_its_gap() -> None:
    problem = make_instance(Severity(40, alternatives=0.3, layouts=2, sets_per_primitive=0.5))
    plan = solve(problem, seconds=1e-9)
    assert plan.certificate.status is Status.FEASIBLE
    assert plan.certificate.gap is not None
    assert 0 < plan.certificate.gap <= 1
    best = solve(problem)
    assert best.certificate.status is Status.OPTIMAL
    assert plan.certificate.bound_ns <= (best.certificate.objective_ns or 0)


def test_a_known_bound_proves_a_hint_at_once() -> None:
    problem = make_instance(Severity(40, alternatives=0.3, layouts=2, sets_per_primitive=0.5))
    best = solve(problem)
    again = solve(problem, hint=best.kernels[::-1], lower_bound_ns=best.certificate.bound_ns, seconds=1e-9)
    assert again.certificate.status is Status.OPTIMAL
    assert set(again.kernels) == set(best.kernels)


def test_a_wrong_hint_does_no_harm() -> None:
    problem = random_problem(FEASIBLE_SEEDS[0], kernels=11)
    plan = solve(problem, hint=[0, 0, 10, 9])
    assert plan.certificate.objective_ns == brute_force(problem)


def test_equal_arguments_give_equal_plans() -> None:
    problem = make_instance(Severity(40, layouts=2, sets_per_primitive=0.5), seed=3)
    assert solve(problem, limits=SearchLimits(solver_workers=1)) == solve(
        problem, limits=SearchLimits(solver_workers=1)
    )


def test_medium_instances_with_everything_are_proven() -> None:
    severity = Severity(40, alternatives=0.3, cycles=0.1, layouts=3, sets_per_primitive=0.3)
    for seed in range(2):
        plan = solve(make_instance(severity, seed))
        assert plan.certificate.status is Status.OPTIMAL


def test_generated_instances_are_the_same_each_time() -> None:
    severity = Severity(20, alternatives=0.3, cycles=0.1, layouts=2)
    assert make_instance(severity, 1) == make_instance(severity, 1)
    assert format_problem(make_instance(severity, 1)) != format_problem(make_instance(severity, 2))


def test_says_over_what_the_certificate_holds() -> None:
    steps = (Computation(1, (0,)),)
    kernel = PricedKernel(frozenset({0}), (Port(0, "A"),), (Port(1, "A"),), 5, is_measured=True)
    problem = Problem(steps, (kernel,), (Port(1, "A"),), frozenset({Port(0, "A")}))
    certificate = solve(problem).certificate
    assert (certificate.kernels, certificate.measured, certificate.is_measured) == (1, 1, True)


def test_refuses_an_instance_that_is_wrong() -> None:
    lacking = parse_problem("given %0:A\np0: %1 = %0\np1: %2 = %1\nrequire %2:A\nk0: p1 |  -> %2:A | 1 bound\n")
    with pytest.raises(InvalidGraphError, match="needs %1, which it neither has nor reads"):
        solve(lacking)
