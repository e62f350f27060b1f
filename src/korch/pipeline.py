"""The list of stages, from a model to an executable; each is timed and its result checked.

model -> operators -> primitives -> with alternatives -> groups -> candidates -> plan
      -> executables of the best plans -> the fastest one, checked
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import EnumerationReport, enumerate_groups
from korch.contest import Contest, Entry, hold_contest
from korch.equivalence.saturate import SaturationReport, saturate
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.measure.meter import CandidateMeter
from korch.options import Options
from korch.orchestrate.baselines import baseline_plans
from korch.orchestrate.instance import check_every_primitive_runs, collect_candidates
from korch.orchestrate.lazy import LazyLoop, Orchestration, Round
from korch.orchestrate.recall import Solved, keep_solved, recall_solved
from korch.primitive.check import check_graph
from korch.primitive.graph import PrimitiveGraph
from korch.provider.provider import load_providers
from korch.runtime.build import model_record
from korch.runtime.executable import Executable
from korch.runtime.record import ModelRecord

logger = logging.getLogger("korch.pipeline")

Progress = Callable[[str, str], None]
"""Called with a stage's name and a line of text."""


@dataclass
class Run:
    """What one optimization has found so far; each stage adds its part."""

    options: Options
    shapes: Mapping[str, tuple[int, ...]]
    progress: Progress
    started_s: float = field(default_factory=time.monotonic)
    stage_seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and say that it has begun."""
        begun = time.monotonic()
        self.progress(name, "")
        yield
        self.stage_seconds[name] = time.monotonic() - begun
        logger.debug("%s took %.2f s", name, self.stage_seconds[name])

    @property
    def deadline_s(self) -> float | None:
        """When the search must stop, on the monotonic clock."""
        budget = self.options.budget_s
        return None if budget is None else self.started_s + budget


def optimize_model(
    model: Any,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
) -> Executable:
    """Take a model through all stages; return the fastest checked executable.

    Args:
        model: a path, the bytes of an ONNX file, or an onnx.ModelProto.
        options: how to optimize.
        shapes: sizes for inputs with unknown dimensions, by input name.
        progress: told of each stage and of its steps.

    Raises:
        KorchError: the model, an option or the machine is not fit for it; the text says what to do.
    """
    run = Run(options, shapes or {}, progress or (lambda stage, text: None))
    with run.stage("frontend"):
        operators = load_model(model, run.shapes)
    with run.stage("fission"):
        split = _checked(fission(operators), options)
    with run.stage("equivalences"):
        graph, rules = saturate(split, strict=options.strict)
        _checked(graph, options)
    with run.stage("candidates"), CandidateMeter(options, load_providers()) as meter:
        groups, enumeration = enumerate_groups(graph, options)
        candidates, refusals = collect_candidates(graph, groups, meter.providers, meter.target)
        check_every_primitive_runs(graph, candidates, refusals)
        run.progress("candidates", f"{len(groups)} groups, {len(candidates)} candidates")
        with run.stage("orchestrate"):
            solved = recall_solved(meter.database, candidates, options)
            if solved is None:
                solved = _search(run, graph, candidates, meter)
        found = solved.found
        with run.stage("build"):
            report = _report(run, split, graph, rules, enumeration, candidates, found)
            contest = hold_contest(
                graph, [_entry(name, steps, meter) for name, steps in solved.plans.items()], meter,
                options, found.certificate, _model_record(model), report,
            )  # fmt: skip
    return _finish(run, contest, report)


def _checked(graph: PrimitiveGraph, options: Options) -> PrimitiveGraph:
    if options.check:
        check_graph(graph)
    return graph


def _search(
    run: Run, graph: PrimitiveGraph, candidates: Sequence[Candidate], meter: CandidateMeter
) -> Solved:
    """Find the optimum and the plans to hold it against; keep them for the next time."""

    def tell(entry: Round) -> None:
        run.progress("orchestrate", describe_round(entry))

    loop = LazyLoop(graph, candidates, meter, run.options, run.deadline_s, tell)
    found = loop.run()
    plans = {"optimal": found.steps}
    plans |= baseline_plans(graph, loop.usable, loop.cost_ns, run.options)
    solved = Solved(found, plans)
    keep_solved(meter.database, candidates, run.options, solved)
    return solved


def _entry(name: str, steps: Sequence[Candidate], meter: CandidateMeter) -> Entry:
    return Entry(name, tuple(steps), tuple(meter.cost_ns(c) for c in steps))


def describe_round(entry: Round) -> str:
    """Return a line on the search: bound, best plan and gap."""
    text = f"bound {entry.bound_ns / 1e6:.3f} ms, {entry.measured} measured"
    if entry.incumbent_ns is None:
        return text
    gap = 100 * (entry.incumbent_ns - entry.bound_ns) / (entry.incumbent_ns or 1)
    return f"{text}, best {entry.incumbent_ns / 1e6:.3f} ms, gap {gap:.2f} %"


def _model_record(model: Any) -> ModelRecord | None:
    return model_record(model) if isinstance(model, str | Path) else None


def _report(run: Run, split: PrimitiveGraph, graph: PrimitiveGraph, rules: SaturationReport,
            enumeration: EnumerationReport, candidates: Sequence[Candidate], found: Orchestration
            ) -> dict[str, Any]:  # fmt: skip
    certificate = found.certificate
    return {
        "status": certificate.status.value,
        "predicted_ms": (certificate.objective_ns or 0) / 1e6,
        "lower_bound_ms": certificate.bound_ns / 1e6,
        "gap": certificate.gap,
        "primitives": len(split.primitives),
        "alternatives": graph.alternatives,
        "sets": enumeration.sets,
        "groups": enumeration.groups,
        "limits_hit": list(enumeration.limits_hit),
        "candidates": len(candidates),
        "distinct_candidates": len({c.key for c in candidates}),
        "measured_candidates": found.distinct_measured,
        "failed_candidates": found.failed,
        "rules": asdict(rules),
        "rounds": [asdict(entry) for entry in found.rounds],
        "stopped_by_budget": found.stopped_by_budget,
        "stages_s": run.stage_seconds,
    }


def _finish(run: Run, contest: Contest, report: dict[str, Any]) -> Executable:
    executable = contest.winner
    report |= contest.report()
    report["kernels"] = len(executable.plan.steps)
    report["arena_bytes"] = executable.plan.arena_bytes
    report["seconds"] = time.monotonic() - run.started_s
    executable.report.clear()
    executable.report.update(report)
    return executable
