"""Measures the gain from choosing rewrites and kernels jointly, and from each family of rewrites.

    python -m benchmarks.ablation [--models candy,segformer] [--budget 300] [--rounds 15]
                                  [--variants "no blocked layouts,one layout"]
                                  [--folder build/ablation] [--output FILE.json]

A model is optimized in these variants: the joint choice; rewrites chosen before the kernels, by the
cost of their operations (`rewrites="first"`); no rewrites; all families of rewrites but one; and
fewer layouts (`layouts`). All searches share one cache, so a kernel has the same
measured time in each of them. Afterwards all plans are timed interleaved in one run. A family is skipped
if the joint search applied none of its rules. Variants whose results are in the folder are not searched
again, so an interrupted run can be continued.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.models import PAPER, build
from benchmarks.rows import in_process, write_rows
from korch.ablation import Ablation
from korch.api import optimize
from korch.equivalence.rules import FAMILIES
from korch.inputs import random_inputs
from korch.options import default_threads
from korch.records import plain
from korch.report.compare import RunnerSpec, Settings, compare

JOINT = "joint"
JOINT_TIMES = 4
"""The joint search is repeated after the other searches, with this multiple of the budget."""

KEPT = (
    "predicted_ms",
    "lower_bound_ms",
    "gap",
    "kernels",
    "flop",
    "given_flop",
    "plan",
    "max_error",
    "seconds",
    "status",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(PAPER))
    parser.add_argument("--budget", type=float, help="seconds of each search (default: none)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--variants", help="variants that are compared with the joint choice (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("build/ablation"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for name in args.models.split(","):
        found[name] = ablate(name, args.folder / name, args.budget, args.rounds, args.variants)
        write_rows(args.output, found)


def searched(model: Path, artifact: Path, cache: Path, budget_s: float | None, ablation: Ablation) -> dict[str, Any]:
    """Write the artifact of one search; return what is kept of its report."""
    executable: Any = optimize(
        model, budget=budget_s, cache_folder=cache, ablation=replace(ablation, baselines=False), progress=False
    )
    executable.save(artifact)
    report = {key: plain(getattr(executable.report, key)) for key in KEPT}
    return report | {"fired": sorted(rule.name for rule in executable.report.rule_reports if rule.fired)}


def ablate(name: str, folder: Path, budget_s: float | None, rounds: int, variants: str | None = None) -> dict[str, Any]:
    """Return the results of each variant of a model, or of the named variants and the joint choice."""
    wanted = None if variants is None else {JOINT, *variants.split(",")}
    folder.mkdir(parents=True, exist_ok=True)
    model, kept = folder / f"{name}.onnx", folder / "rows.json"
    if not model.exists():
        model.write_bytes(build(name).SerializeToString())
    rows: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}

    def artifact(variant: str) -> Path:
        return folder / f"{variant.replace(' ', '-')}.korch"

    def add(variant: str, again: bool = False, times: int = 1, **options: Any) -> None:
        if (variant in rows and not again) or (wanted is not None and variant not in wanted):
            return
        budget = None if budget_s is None else times * budget_s
        rows[variant] = in_process(searched, model, artifact(variant), folder / "cache", budget, Ablation(**options))
        kept.write_text(json.dumps(rows, indent=1) + "\n")

    add(JOINT)
    add("rewrites first", rewrites="first")
    add("no rewrites", rules="none")
    for family, rules in FAMILIES.items():
        if any(rule.name in rows[JOINT]["fired"] for rule in rules):
            add(f"without {family}", rules=f"-{family}")
    add("no blocked layouts", layouts="last")
    add("one layout", layouts="plain")
    # The joint search has the most candidates, so it is repeated when the cache has the measurements of all others.
    add(JOINT, again="times_ns" not in rows[JOINT], times=JOINT_TIMES)
    runners = [RunnerSpec("korch", artifact(variant), variant) for variant in rows]
    comparison = compare(runners, random_inputs(model), Settings(default_threads(), rounds, subject=JOINT))
    print(f"{name}\n{comparison.to_text()}\n", flush=True)
    for row in comparison.rows:
        rows[row.name]["times_ns"] = list(row.times_ns)
    kept.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


if __name__ == "__main__":
    main()
