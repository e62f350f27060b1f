"""CP-SAT without OR-Tools' own interface: the same answers, and pandas is not imported."""

import random
import subprocess
import sys

import pytest
from ortools.sat.python import cp_model

from korch.binary_program.cp_sat import CpSatModel, CpStatus

SETTINGS = {"num_workers": 1, "random_seed": 0}


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_that_of_the_other_interface(seed: int) -> None:
    rng = random.Random(seed)
    most = [rng.randint(1, 3) for _ in range(8)]
    costs = [rng.randint(1, 10**6) for _ in most]
    rows = [
        ([rng.randrange(8) for _ in range(3)], [rng.randint(-2, 4) for _ in range(3)], rng.randint(0, 4))
        for _ in range(5)
    ]
    model, other = CpSatModel(), cp_model.CpModel()
    ours = [model.variable(0, n) for n in most]
    theirs = [other.new_int_var(0, n, "") for n in most]
    for columns, factors, least in rows:
        model.add([ours[c] for c in columns], factors, least)
        other.add(cp_model.LinearExpr.weighted_sum([theirs[c] for c in columns], factors) >= least)
    model.minimize(ours, costs)
    other.minimize(cp_model.LinearExpr.weighted_sum(theirs, costs))
    model.hint(ours[0], 1)
    found, solver = model.solve(10.0, SETTINGS), cp_model.CpSolver()
    status = solver.solve(other)
    assert (found.status is CpStatus.OPTIMAL) == (status == cp_model.OPTIMAL)
    assert (found.status is CpStatus.INFEASIBLE) == (status == cp_model.INFEASIBLE)
    if found.values:
        cost = sum(v * c for v, c in zip(found.values, costs, strict=True))
        assert cost == pytest.approx(solver.objective_value, abs=0.5) and cost == pytest.approx(found.bound, abs=0.5)
        assert all(sum(f * found.values[c] for c, f in zip(cs, fs, strict=True)) >= least for cs, fs, least in rows)


def test_rectangles_are_apart() -> None:
    model = CpSatModel()
    size = model.variable(0, 20)
    shapes = [(0, 2, 3), (1, 2, 4), (2, 2, 3), (3, 1, 6)]  # begin and length on the fixed axis, and height
    places = [model.variable(0, 20) for _ in shapes]
    for place, (_, _, height) in zip(places, shapes, strict=True):
        model.add((size, place), (1, -1), height)
    model.apart((begin, length, place, height) for place, (begin, length, height) in zip(places, shapes, strict=True))
    model.minimize((size,), (1,))
    found = model.solve(10.0, SETTINGS)
    assert found.status is CpStatus.OPTIMAL and found.values[size] == found.bound == 9
    for i, (b, n, h) in enumerate(shapes):
        for j, (c, m, g) in enumerate(shapes[:i]):
            if b < c + m and c < b + n:
                low, high = found.values[places[i]], found.values[places[j]]
                assert low + h <= high or high + g <= low


def test_numbers_that_are_too_large_are_refused() -> None:
    model = CpSatModel()
    both = [model.variable(0, 1 << 62), model.variable(0, 1 << 62)]
    model.add(both, [4, 4], 0)
    model.minimize(both, [4, 4])
    found = model.solve(1.0, SETTINGS)
    assert found.status is CpStatus.INVALID and not found.values


def test_a_solve_imports_no_pandas() -> None:
    code = (
        "import sys\nfrom korch.binary_program.cp_sat import CpSatModel\nm = CpSatModel()\nx = m.variable(1, 3)\n"
        "m.minimize([x], [1])\nassert m.solve(5.0, {}).values == (1,)\nassert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
