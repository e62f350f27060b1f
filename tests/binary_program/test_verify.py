"""Each check of an instance, a plan and a certificate fails for an input that violates it."""

import random
from collections.abc import Sequence

import pytest

from korch.binary_program.problem import Certificate, Plan, Port, PricedKernel, Problem, Status
from korch.binary_program.text import format_plan, format_problem, parse_problem
from korch.binary_program.verify import check_problem, ready_order, verify_plan
from korch.errors import InvalidGraphError
from tests.small_problems import random_problem

INSTANCE = """\
given %0:A
constant %9
p0: %1 = %0 %9
p1: %2 = %1
p2: %1 = %2
require %2:A
k0: p0 | %0:A -> %1:A | 10 bound
k1: p1 | %1:A -> %2:A | 20 measured
k2: p0 p1 | %0:A -> %2:A | 40 bound
k3: p2 | %2:A -> %1:A | 1 bound
k4:  | %1:A -> %1:B | 1 bound
k5: p1 | %1:A -> %2:B | 0 measured owns %1:A
k6: p1 | %1:A -> %2:A | 0 measured owns %1:A
"""
PROBLEM = parse_problem(INSTANCE)


def plan(*kernels: int, cost_ns: int | None = None, is_measured: bool = False) -> Plan:
    if cost_ns is None:
        cost_ns = sum(PROBLEM.kernels[k].cost_ns for k in kernels if 0 <= k < 7)
    return Plan(kernels, Certificate(Status.OPTIMAL, cost_ns, cost_ns, 7, 1, is_measured))


def test_a_right_plan_is_put_in_order() -> None:
    assert verify_plan(PROBLEM, plan(4, 1, 0)) == (0, 4, 1)
    assert verify_plan(PROBLEM, plan(0, 1)) == (0, 1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(2, 2), "the plan has a kernel twice"),
        (plan(7), "kernel k7: there are only 7 kernels"),
        (plan(0, 1, 2), "kernel k2: it writes %2:A, as kernel k1 does"),
        (plan(0, 5, 6), "kernel k6: it owns %1:A, as kernel k5 does"),
        (plan(0), "%2:A: no chosen kernel writes a model output"),
        (plan(1), "kernel k1: it reads %1:A, which no chosen kernel writes"),
        (plan(1, 3), "the chosen kernels k1, k3 wait for each other"),
        (plan(0, 1, cost_ns=29), "the plan's kernels cost 30 ns, but its certificate says 29 ns"),
        (plan(0, 1, is_measured=True), "kernel k0: its cost is a bound, but the certificate says measured"),
        (Plan((1,), Certificate(Status.UNKNOWN, None, 0, 5, 1, False)), "a plan that is unknown has kernels"),
    ],
)
def test_wrong_plans_are_refused(wrong: Plan, message: str) -> None:
    with pytest.raises(InvalidGraphError) as info:
        verify_plan(PROBLEM, wrong)
    assert str(info.value) == message


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("p0 | %0:A ->  | 1 bound", "it writes no port, or one twice"),
        ("p0 | %0:A -> %1:A %1:A | 1 bound", "it writes no port, or one twice"),
        ("p7 | %0:A -> %1:A | 1 bound", "it runs a primitive that does not exist"),
        ("p1 | %0:A -> %2:A | 1 bound", "primitive p1 needs %1, which it neither has nor reads"),
        ("p0 | %0:A -> %1:A | 1 bound owns %2:A", "it owns a port of a value that it does not read"),
        ("p0 | %0:A -> %2:A | 1 bound", "it writes %2:A, which it neither computes nor reads"),
        ("p1 p2 | %0:A -> %2:A | 1 bound", "its primitives wait for each other"),
    ],
)
def test_wrong_kernels_are_refused(kernel: str, message: str) -> None:
    check_problem(PROBLEM)
    with pytest.raises(InvalidGraphError) as info:
        check_problem(parse_problem(f"{INSTANCE}k7: {kernel}\n"))
    assert str(info.value) == f"kernel k7: {message}"


def test_negative_costs_are_refused() -> None:
    kernel = PricedKernel(frozenset(), (Port(0, "A"),), (Port(0, "B"),), -1)
    with pytest.raises(InvalidGraphError, match="its cost is -1 ns"):
        check_problem(Problem((), (kernel,), (), frozenset({Port(0, "A")})))


@pytest.mark.parametrize(
    ("status", "objective_ns", "bound_ns"),
    [
        (Status.OPTIMAL, 10, 9),
        (Status.FEASIBLE, 10, 10),
        (Status.FEASIBLE, 10, 11),
        (Status.OPTIMAL, None, 0),
        (Status.INFEASIBLE, 3, 0),
        (Status.UNKNOWN, 3, 0),
    ],
)
def test_certificates_that_contradict_themselves_are_refused(
    status: Status, objective_ns: int | None, bound_ns: int
) -> None:
    with pytest.raises(InvalidGraphError, match="a certificate says"):
        Certificate(status, objective_ns, bound_ns, 1, 0, False)


def test_the_gap_is_relative_to_the_objective() -> None:
    assert Certificate(Status.FEASIBLE, 200, 150, 1, 0, False).gap == 0.25
    assert Certificate(Status.OPTIMAL, 0, 0, 1, 0, False).gap == 0
    assert Certificate(Status.UNKNOWN, None, 5, 1, 0, False).gap is None


def test_texts() -> None:
    assert format_problem(PROBLEM) == INSTANCE
    unknown = Plan((), Certificate(Status.UNKNOWN, None, 3, 5, 1, False))
    assert format_plan(unknown) == "plan unknown objective=none bound=3 kernels=5 measured=1 bound-costs\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text has no line 'require PORT'"),
        ("given %0\n", "line 1: can't read '%0'"),
        ("p1: %1 = %0\n", "line 1: can't read 'p1: %1 = %0'"),
        ("# a comment\nkernel\n", "line 2: can't read 'kernel'"),
        ("k0: p0 | %0 -> %1:A | 3 bound\n", "line 1: can't read '%0'"),
    ],
)
def test_unreadable_instances_are_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidGraphError) as info:
        parse_problem(text)
    assert str(info.value) == message


def by_passes(problem: Problem, kernels: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order of repeated passes over the kernels, each of which takes those that are ready."""
    order: list[int] = []
    written: set[Port] = set()
    waiting = list(kernels)
    while True:
        later = []
        for k in waiting:
            if written.issuperset(problem.needs(k)):
                order.append(k)
                written.update(problem.kernels[k].outputs)
            else:
                later.append(k)
        if len(later) == len(waiting):
            return tuple(order), tuple(waiting)
        waiting = later


@pytest.mark.parametrize("seed", range(40))
def test_the_order_is_that_of_repeated_passes(seed: int) -> None:
    problem = random_problem(seed, kernels=40)
    rng = random.Random(seed)
    kernels = rng.sample(range(len(problem.kernels)), rng.randint(1, len(problem.kernels)))
    assert ready_order(problem, kernels) == by_passes(problem, kernels)
