"""Times the solver of the binary linear program on random instances, and writes JSON.

python -m benchmarks.solver [--quick] [--seconds S] [--workers N] [--output FILE | --write FOLDER]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.instances import Severity, make_instance
from benchmarks.rows import machine
from korch.binary_program.candidate_file import CandidateFile, format_candidates
from korch.binary_program.solve import Solver
from korch.limits import SearchLimits

_QUICK = (
    Severity(50),
    Severity(100, layouts=3, sets_per_primitive=0.5),
    Severity(50, alternatives=0.3, cycles=0.05, layouts=2, sets_per_primitive=0.5),
)
_FULL = (
    *_QUICK,
    Severity(100),
    Severity(300),
    Severity(1000),
    Severity(200, layouts=3, sets_per_primitive=0.33),
    Severity(200, layouts=3),
    Severity(300, layouts=2),
    Severity(500, layouts=3, sets_per_primitive=0.5),
    Severity(1000, layouts=3, sets_per_primitive=0.5),
    Severity(200, width=6, layouts=3, sets_per_primitive=0.33),
    Severity(100, alternatives=0.3),
    Severity(250, alternatives=0.3, cycles=0.05),
    Severity(1000, alternatives=0.1, cycles=0.02),
    Severity(100, alternatives=0.3, cycles=0.05, layouts=3, sets_per_primitive=0.5),
    Severity(200, alternatives=0.1, cycles=0.02, layouts=3, sets_per_primitive=0.33),
    Severity(200, alternatives=0.3, cycles=0.05, layouts=3, sets_per_primitive=0.33),
)


def run_one(severity: Severity, seconds: float, workers: int) -> dict[str, Any]:
    """Return the row of one instance: solved from scratch, and again after its plan's costs rose by 20 %."""
    problem = make_instance(severity)
    start_s = time.perf_counter()
    solver = Solver(problem, limits=SearchLimits(solver_workers=workers))
    build_s = time.perf_counter() - start_s
    plan = solver.solve(seconds=seconds)
    certificate = plan.certificate
    costs_ns = [kernel.cost_ns for kernel in problem.kernels]
    for k in plan.kernels:
        costs_ns[k] += costs_ns[k] // 5
    again = solver.solve(costs_ns, seconds=seconds, hint=plan.kernels, lower_bound_ns=certificate.bound_ns).certificate
    return {
        "severity": asdict(severity),
        "primitives": len(problem.steps),
        "candidates": len(problem.kernels),
        "status": certificate.status.value,
        "objective_ns": certificate.objective_ns,
        "bound_ns": certificate.bound_ns,
        "gap": certificate.gap,
        "kernels_chosen": len(plan.kernels),
        "build_s": round(build_s, 3),
        "solve_s": round(certificate.seconds, 3),
        "again_status": again.status.value,
        "again_gap": again.gap,
        "again_s": round(again.seconds, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; print a line for each instance."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three small instances")
    parser.add_argument("--seconds", type=float, default=60.0, help="longest time for one solve")
    parser.add_argument("--workers", type=int, default=2, help="threads of CP-SAT")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--write", type=Path, help="folder in which each instance is written for `korch orchestrate`")
    options = parser.parse_args(arguments)
    result = {"machine": machine(), "seconds": options.seconds, "workers": options.workers}
    rows = []
    for number, severity in enumerate(_QUICK if options.quick else _FULL):
        if options.write is not None:
            options.write.mkdir(parents=True, exist_ok=True)
            file = CandidateFile.of_problem(make_instance(severity))
            (options.write / f"{number}.json").write_text(format_candidates([file]))
            continue
        row = run_one(severity, options.seconds, options.workers)
        rows.append(row)
        print(
            f"{row['primitives']:5} primitives {row['candidates']:6} candidates "
            f"{severity.layouts} layouts {severity.alternatives:.0%} alternatives: "
            f"{row['status']} gap {row['gap']:.2%} build {row['build_s']} s "
            f"solve {row['solve_s']} s, again {row['again_status']} {row['again_s']} s",
            flush=True,
        )
        if options.output is not None:
            options.output.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
