"""The list of stages, from a model to an executable; each is timed and its result checked.

model -> operators -> primitives -> segments with alternatives -> groups -> candidates -> plan
      -> executables of the best plans -> the fastest one, checked

A small model is one segment. Of a large one, segments that differ only in weights are one block,
which is searched once.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from korch.assembly.segments import Outcome, search_segments
from korch.assembly.task import Task, prepare_all
from korch.assembly.trace import changed_rounds
from korch.assembly.whole import search_whole
from korch.backend import maker, open_meter
from korch.candidate.candidate import Candidate
from korch.concurrent.side_by_side import SIDE_BY_SIDE, described, side_by_side
from korch.contest import BUILD_KERNELS, WEIGHTS_BYTES, Contest, Entry, hold_contest, standard_of
from korch.deadline import Deadline, stopped_by_interrupt
from korch.doubt import Doubt, examine
from korch.equivalence.rule import AnyRule
from korch.equivalence.rules import select_rules
from korch.equivalence.saturate import Limits, SaturationReport, joined_reports, saturate
from korch.errors import InaccurateError, OptionError
from korch.explanation.counterfactual import counterfactual_groupings
from korch.explanation.extract import extract
from korch.explanation.savings import rule_savings
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.frontend.operator import OperatorGraph
from korch.measure.cpu import CpuMeter
from korch.measure.cuda.meter import CudaMeter
from korch.measure.expect import expect
from korch.measure.meter import AnyMeter
from korch.measure.record import Measured
from korch.options import Options
from korch.partition.block import Partition, find_blocks
from korch.partition.join import Joined, join, with_constants_of
from korch.partition.segment import Segment, whole_segment
from korch.partition.spill import Spill
from korch.partition.split import split_segments
from korch.primitive.check import check_graph
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.lowering import lower_products
from korch.primitive.precision import with_half
from korch.primitive.types import DType
from korch.program.problem import Status
from korch.report.dry_run import DryRun, dry_run
from korch.report.rivals import grouping_rows, rivals_of
from korch.runtime.build import model_record
from korch.runtime.record import ModelRecord, plain
from korch.search.ledger import Ledger
from korch.search.result import Round

logger = logging.getLogger("korch.pipeline")

BESIDE_SECONDS = 60.0
"""Longest search for kernels to run side by side."""

REWRITE_SHARE = 0.25
"""The share of a budget after which no more alternatives are looked for."""

ENUMERATE_SHARE = 0.5
"""The share of what is left then after which no more candidates are looked for."""

BESIDE_SHARE = 0.1
"""The share of a budget that is left for it, for rival plans and for what explains the plan."""

SAFETY = 1.3
"""So many times what the end of an optimization is predicted to take is left for it."""

END_RUNS = 8
"""Runs of the plan at the end, to check and to time it, at a third of the machine's best rate."""

HALF = {"float16": DType.F16, "bfloat16": DType.BF16}
"""The element types of products of 16 bits, by the value of the option `precision`."""

PRIMITIVES_PER_KERNEL = 3
"""At least: so many primitives of a model are usually in one kernel of its plan."""

LEAST_BESIDE_SECONDS = 2.0
"""In less time nothing is built and measured."""

NOT_REPLAYED = ("cache_folder", "ledger", "replay", "on_interrupt", "budget_s", "host")
"""Options that may differ between a search and its replay."""

Progress = Callable[[str, str], None]
"""Called with a stage's name and a line of text."""


@dataclass
class Run:
    """What one optimization has found so far; each stage adds its part.

    Attributes:
        given: when the artifact must lie on disk, if others have begun to spend the budget.
        end_s: what building, checking and writing the plan are predicted to take.
        least_s: what the optimization takes at least, if that is more than its budget.
    """

    options: Options
    shapes: Mapping[str, tuple[int, ...]]
    progress: Progress
    started_s: float = field(default_factory=time.monotonic)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    operators: list[Any] = field(default_factory=list)
    end_s: float = 0.0
    least_s: float | None = None
    given: Deadline | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage and say that it has begun."""
        begun = time.monotonic()
        self.progress(name, "")
        yield
        self.stage_seconds[name] = time.monotonic() - begun
        logger.debug("%s took %.2f s", name, self.stage_seconds[name])

    @cached_property
    def deadline(self) -> Deadline:
        """When the artifact must lie on disk."""
        return self.given or Deadline.after(self.options.budget_s, self.started_s)

    @property
    def looks_side_by_side(self) -> bool:
        """Whether kernels that could run side by side are looked for."""
        options = self.options
        able = options.measure and not options.is_cuda and options.threads > 1
        return options.ablation.side_by_side and able

    @property
    def build_deadline(self) -> Deadline:
        """When nothing is left to be done but to build, check and write the plan."""
        return self.deadline.before(self.end_s)

    @property
    def first_deadline(self) -> Deadline:
        """When the plan of kernels one after the other must be found."""
        budget_s = self.options.budget_s
        if budget_s is None:
            return self.deadline
        return self.build_deadline.before(BESIDE_SHARE * budget_s)

    def check_budget(self, compile_s: float) -> None:
        """Warn if the budget is too short for a first plan, and give the least that it takes.

        Args:
            compile_s: predicted seconds to compile kernels of a first plan.
        """
        budget_s, left_s = self.options.budget_s, self.deadline.left_s
        if self.least_s is not None or budget_s is None or left_s is None or compile_s + self.end_s <= left_s:
            return
        spent_s = budget_s - left_s
        self.least_s = spent_s + compile_s + self.end_s
        logger.warning(
            f"the budget of {budget_s:g} s is too short: the least is about {self.least_s:.0f} s ({spent_s:.0f} until "
            f"now, {compile_s:.0f} to compile a first plan's kernels, {self.end_s:.0f} to build and check it); the "
            "plan is chosen by estimates, and no kernel is timed"
        )


def plan_model(
    model: Any, options: Options, shapes: Mapping[str, tuple[int, ...]] | None = None, progress: Progress | None = None
) -> DryRun:
    """Take a model for a CUDA device up to its plan, with bounds for costs, and compile that.

    No device is needed, and nothing is run.

    Args:
        model: as for `optimize_model`.
        options: how to optimize; the target is a CUDA device.
        shapes: sizes for inputs with unknown dimensions, by input name.
        progress: told of each stage and of its steps.

    Raises:
        KorchError: the model, an option or the machine is not fit for it; the text says what to do.
    """
    options = replace(options, measure=False, ablation=replace(options.ablation, baselines=False))
    run = Run(options, shapes or {}, progress or (lambda stage, text: None))
    partition, split = front(model, run)
    with run.stage("candidates"), open_meter(options) as meter:
        if not isinstance(meter, CudaMeter):
            raise OptionError("a dry run is for CUDA devices", where="option --dry-run", expected="--target cuda:sm_90")
        joined = join(partition)
        tasks = prepare_all(partition, joined, meter, options, run.deadline.less(1 - ENUMERATE_SHARE))
        run.progress("candidates", _describe_tasks(tasks))
        with run.stage("orchestrate"):
            outcome = _search(run, partition, joined, tasks, Ledger(meter, options.search))
        with run.stage("build"):
            report = _report(run, split, partition, tasks, outcome)
            return dry_run(outcome.plans["optimal"], meter, report)


def optimize_model(
    model: Any,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> Any:
    """Take a model through all stages; return the fastest checked executable.

    Args:
        model: a path, the bytes of an ONNX file, an onnx.ModelProto, or an operator graph.
        options: how to optimize.
        shapes: sizes for inputs with unknown dimensions, by input name.
        progress: told of each stage and of its steps.
        deadline: when the artifact must lie on disk; the budget from now on if it is left out.

    Raises:
        KorchError: the model, an option or the machine is not fit for it; the text says what to do.
    """
    run = Run(options, shapes or {}, progress or (lambda stage, text: None), given=deadline)
    try:
        return _optimize(model, run)
    except InaccurateError as error:
        if options.strict:
            raise
        run.progress("candidates", "no plan is within the tolerance; again with --strict")
        logger.info("%s", error)
        run.options = replace(options, strict=True)
        executable = _optimize(model, run)
        executable.report["rejected"] = error.what
        return executable


def front(model: Any, run: Run) -> tuple[Partition, PrimitiveGraph]:
    """Return a model's primitives with their alternatives, in segments, and without them."""
    with run.stage("frontend"):
        is_loaded = isinstance(model, OperatorGraph)
        operators = model if is_loaded else load_model(model, run.shapes)
    run.operators = [[o.label, list(o.inputs), list(o.outputs)] for o in operators.operators]
    with run.stage("fission"):
        split = _checked(lower_products(fission(operators)))
    with run.stage("equivalences"):
        return _partition(split, run), split


@contextmanager
def few_collections() -> Iterator[None]:
    """Let Python seldom look for garbage in circles: a search makes none worth mentioning.

    It makes millions of objects that stay, and would look through them again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@few_collections()
def _optimize(model: Any, run: Run) -> Any:
    """Take a model through all stages."""
    options = run.options
    partition, split = front(model, run)
    weights_bytes = sum(constant.array.nbytes for constant in split.constants.values())
    joined = join(partition)
    with run.stage("reference"):  # what is refused for its results is refused before the search
        inputs, standard = standard_of(split, joined.graph, options)
    with run.stage("candidates"), open_meter(options, weights_bytes) as meter:
        tasks = prepare_all(partition, joined, meter, options, run.deadline.less(1 - ENUMERATE_SHARE))
        run.progress("candidates", _describe_tasks(tasks))
        meter.tell = partial(run.progress, "orchestrate")
        run.end_s = _end_s(split, meter)
        meter.expect_compiling = run.check_budget
        with run.stage("orchestrate"), _interruptible(run):
            ledger = _ledger(meter, options)
            outcome = _search(run, partition, joined, tasks, ledger)
            outcome = _side_by_side(run, joined.graph, outcome, ledger)
        found = outcome.found
        with run.stage("build"):
            meter.tell = partial(run.progress, "build")
            report = _report(run, split, partition, tasks, outcome)
            report["measured_candidates"] = _count_measured(tasks, ledger)
            report["untimed"] = _count_untimed(outcome.plans["optimal"], ledger, options)
            if report["untimed"]:
                report["gap"] = None
            report["machine"] = meter.rates()
            rivals = _rivals(outcome, tasks, ledger, options)
            groupings = {name: grouping_rows(rows) for name, rows in outcome.groupings.items()}
            plans = list(outcome.plans.items())[: None if options.ablation.baselines else 1]
            entries = [_entry(name, steps, ledger) for name, steps in plans]
            entries = _replayed(entries, ledger)
            graph = joined.graph
            if not partition.is_whole:
                graph = with_constants_of(graph, outcome.plans.values())
            del partition, tasks, joined, outcome  # what no plan uses may be large
            make = maker(
                graph, meter, options, model=_model_record(model), certificate=found.certificate, report=report
            )
            write_s = meter.pace.predict_s("build", weights_bytes / WEIGHTS_BYTES)
            end = run.deadline.before(SAFETY * write_s)
            contest = hold_contest(graph, entries, meter, make, inputs, standard, end)
            ledger.record_choice("plan", contest.won.entry.name)
            doubt = None if ledger.is_replayed else examine(contest, meter, end)
            report |= _disturbances(contest, doubt, meter)
            report["not_compiled"] = [*meter.uncompiled.values(), *contest.uncompiled()]
    if contest.won.entry.name == SIDE_BY_SIDE:
        report["side_by_side"] = described(contest.won.entry.steps)
        report["side_by_side"]["predicted_ms"] = contest.won.entry.predicted_ns / 1e6
    report["rivals"] = {step.candidate: rivals.get(step.candidate, ()) for step in contest.winner.plan.steps}
    report["groupings"] = groupings.get(contest.won.entry.name, [])
    return _finish(run, contest, report)


def _end_s(split: PrimitiveGraph, meter: AnyMeter) -> float:
    """Return what building, checking and writing a plan are predicted to take, and a margin."""
    weights_bytes = sum(constant.array.nbytes for constant in split.constants.values())
    kernels = BUILD_KERNELS + len(split.primitives) / PRIMITIVES_PER_KERNEL
    build_s = meter.pace.predict_s("build", kernels + 2 * weights_bytes / WEIGHTS_BYTES)
    work_flop = sum(map(split.work_flop, split.primitives))
    run_s = 3 * work_flop / float(meter.rates()["rate_flop_per_s"]) * meter.pace.slowness
    return SAFETY * (build_s + END_RUNS * run_s)


def _disturbances(contest: Contest, doubt: Doubt | None, meter: AnyMeter) -> dict[str, Any]:
    """Return what the report says of other processes that were in the way."""
    known = [meter.known(c) for c in contest.won.entry.steps]
    return {
        "disturbed": {
            "kernel_runs": meter.disturbed,
            "kernels": sum(isinstance(r, Measured) and r.is_disturbed for r in known),
            "plan_runs": sum(result.disturbed for result in contest.results),
            "is_plan_disturbed": contest.won.is_disturbed,
        },
        "doubt": None if doubt is None else doubt.as_record(),
    }


def _rivals(outcome: Outcome, tasks: Sequence[Task], ledger: Ledger, options: Options) -> dict[str, Any]:
    """Return what lost against each kernel of all plans; nothing if nothing was measured."""
    if not options.measure:
        return {}
    chosen = {c.key: c for steps in outcome.plans.values() for c in steps}.values()
    return rivals_of(chosen, (c for task in tasks for c in task.candidates), ledger)


def _checked(graph: PrimitiveGraph) -> PrimitiveGraph:
    check_graph(graph)
    return graph


def _rewrite(
    graph: PrimitiveGraph, options: Options, rules: Sequence[AnyRule], deadline: Deadline
) -> tuple[PrimitiveGraph, SaturationReport]:
    found, report = saturate(graph, strict=options.strict, rules=rules, deadline=deadline)
    if options.ablation.rewrites == "first":
        found = extract(found, options)
    if options.precision in HALF:
        found = with_half(found, HALF[options.precision])
    return found, report


def _partition(split: PrimitiveGraph, run: Run) -> Partition:
    """Add alternatives, and cut the model into segments where that loses least.

    Rules that look at more than one primitive are applied to the whole model: what they combine
    could else lie on both sides of a cut.
    """
    options, deadline = run.options, run.deadline.less(1 - REWRITE_SHARE)
    limit = options.segment_limit(len(split.primitives))
    rules = select_rules(options.ablation.rules)
    spill = Spill(options.cache_folder if options.cache_folder.is_dir() else None)
    whole, report = split, None
    segments: tuple[Segment, ...] = (whole_segment(split),)
    if limit is not None:
        wide = [rule for rule in rules if not rule.is_local]
        rules = tuple(rule for rule in rules if rule.is_local)
        whole, report = saturate(
            split,
            strict=options.strict,
            rules=wide,
            keep=spill.keep,
            limits=Limits.of(len(split.primitives)),
            deadline=deadline,
        )
        segments = split_segments(whole, limit)
    rewrite = partial(_rewrite, options=options, rules=rules, deadline=deadline)
    partition = find_blocks(whole, segments, rewrite, spill)
    if report is not None:
        partition = replace(partition, rules=joined_reports(report, partition.rules))
    for block in partition.blocks:
        _checked(block.graph)
    return partition


@contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """If asked for, let an interrupt end the search with the best plan so far."""
    if run.options.on_interrupt == "stop":
        yield
        return

    def tell() -> None:
        run.progress("orchestrate", "interrupted: the best plan so far is built; again to give up")

    with stopped_by_interrupt(run.deadline, tell):
        yield


def _search(run: Run, partition: Partition, joined: Joined, tasks: Sequence[Task], ledger: Ledger) -> Outcome:
    """Find the best plan and those to compare it with."""

    def tell(b: int, entry: Round) -> None:
        _tell(run, tasks, b, entry)

    if not partition.is_whole:
        return search_segments(partition, joined, tasks, ledger, run.options, run.first_deadline, tell)
    solved = search_whole(tasks[0], ledger, run.options, run.first_deadline, partial(tell, 0))
    savings = rule_savings(
        tasks[0].block.graph, tasks[0].candidates, solved.found.steps, ledger, run.options, deadline=run.first_deadline
    )
    end = run.build_deadline.until(time.monotonic() + ledger.limits.groupings_seconds)
    groupings = {
        name: counterfactual_groupings(
            tasks[0].block.graph, tasks[0].candidates, steps, ledger.cost_ns, run.options, deadline=end
        )
        for name, steps in solved.plans.items()
        if run.options.measure and not end.is_over
    }
    return Outcome(
        dict(solved.plans), solved.found, savings=savings, groupings=groupings, is_recalled=solved.is_recalled
    )


def _ledger(meter: AnyMeter, options: Options) -> Ledger:
    """Return the ledger of a search: a new one, or the one that is replayed."""
    steers = {k: v for k, v in plain(options).items() if k not in NOT_REPLAYED}
    about = {"target": meter.database.target, "options": steers}
    return Ledger(meter, options.search, write_to=options.ledger, replay=options.replay, about=about)


def _replayed(entries: list[Entry], ledger: Ledger) -> list[Entry]:
    """Return the plan that won when the ledger was written, in a replay; otherwise all plans."""
    won = ledger.recorded_choice("plan")
    return entries if won is None else [entry for entry in entries if entry.name == won]


def _side_by_side(run: Run, graph: PrimitiveGraph, outcome: Outcome, ledger: Ledger) -> Outcome:
    """Add the best plan with kernels side by side, if there is one that is faster."""
    if not (run.looks_side_by_side and isinstance(ledger.meter, CpuMeter)):
        return outcome
    end = run.build_deadline.until(time.monotonic() + BESIDE_SECONDS)
    if (ledger.left_s(end) or 0.0) < LEAST_BESIDE_SECONDS:
        return outcome
    steps = next(iter(outcome.plans.values()))
    found = side_by_side(graph, steps, ledger, run.options, end)
    if found is None:
        return outcome
    before_ns, after_ns = (sum(ledger.cost_ns(c)[0] for c in plan) for plan in (steps, found))
    run.progress(
        "orchestrate",
        f"side by side: {len(found)} kernels instead of {len(steps)}, "
        f"{after_ns / 1e6:.3f} ms instead of {before_ns / 1e6:.3f} ms",
    )
    return replace(outcome, plans={SIDE_BY_SIDE: found, **outcome.plans})


def _tell(run: Run, tasks: Sequence[Task], b: int, entry: Round) -> None:
    text = describe_round(entry)
    if len(tasks) > 1:
        count = f" (x {tasks[b].count})" if tasks[b].count > 1 else ""
        text = f"block {b + 1} of {len(tasks)}{count}: {text}"
    run.progress("orchestrate", text)


def _describe_tasks(tasks: Sequence[Task]) -> str:
    groups = sum(task.enumeration.groups for task in tasks)
    text = f"{groups} groups, {sum(len(task.candidates) for task in tasks)} candidates"
    if len(tasks) > 1 or tasks[0].count > 1:
        segments = sum(task.count for task in tasks)
        text = f"{segments} segments, {len(tasks)} of them different: {text}"
    return text


def _entry(name: str, steps: Sequence[Candidate], ledger: Ledger) -> Entry:
    costs = tuple(ledger.cost_ns(c) for c in steps)
    expected = expect((ns, ledger.known(c)) for (ns, _), c in zip(costs, steps, strict=True) if not c.offer.is_in_place)
    return Entry(name, tuple(steps), costs, expected)


def describe_round(entry: Round) -> str:
    """Return a line on the search: bound, best plan and gap."""
    text = f"bound {entry.bound_ns / 1e6:.3f} ms, {entry.measured} measured"
    if entry.incumbent_ns is None:
        return text
    gap = 100 * (entry.incumbent_ns - entry.bound_ns) / (entry.incumbent_ns or 1)
    return f"{text}, best {entry.incumbent_ns / 1e6:.3f} ms, gap {gap:.2f} %"


def _model_record(model: Any) -> ModelRecord | None:
    return model_record(model) if isinstance(model, str | Path) else None


def _report(
    run: Run, split: PrimitiveGraph, partition: Partition, tasks: Sequence[Task], outcome: Outcome
) -> dict[str, Any]:
    found = outcome.found
    certificate = found.certificate
    keys = [{c.key for c in task.candidates} for task in tasks]
    is_optimal = certificate.status is Status.OPTIMAL and not partition.is_whole
    return {
        "status": "optimal per segment" if is_optimal else certificate.status.value,
        "predicted_ms": (certificate.objective_ns or 0) / 1e6,
        "lower_bound_ms": certificate.bound_ns / 1e6,
        "gap": certificate.gap,
        "primitives": len(split.primitives),
        "given_flop": sum(map(split.work_flop, split.primitives)),
        "alternatives": partition.rules.alternatives,
        "sets": sum(task.enumeration.sets for task in tasks),
        "groups": sum(task.enumeration.groups for task in tasks),
        "limits_hit": sorted({hit for task in tasks for hit in task.enumeration.limits_hit}),
        "candidates": sum(len(task.candidates) for task in tasks),
        "distinct_candidates": len(set().union(*keys)),
        "failed_candidates": found.failed,
        "rules": asdict(partition.rules),
        "rule_savings_ms": {
            rule: None if saved_ns is None else saved_ns / 1e6 for rule, saved_ns in outcome.savings.items()
        },
        "rounds": [asdict(entry) for entry in changed_rounds(found.rounds)],
        "recalled": outcome.is_recalled,
        "stopped_by_budget": found.stopped_by_budget,
        "budget_s": run.options.budget_s,
        "least_s": run.least_s,
        "stages_s": run.stage_seconds,
        "operators": run.operators,
        "partition": outcome.partition,
    }


def _count_measured(tasks: Sequence[Task], ledger: Ledger) -> int:
    """Return how many different candidates have a measured time; blocks share some."""
    candidates = {c.key: c for task in tasks for c in task.candidates}
    return sum(map(ledger.is_measured, candidates.values()))


def _count_untimed(steps: Sequence[Candidate], ledger: Ledger, options: Options) -> int:
    """Return how many kernels of a plan no time was left to measure; 0 if none is to be."""
    if not options.measure:
        return 0
    return sum(not (ledger.cost_ns(step)[1] or step.offer.is_in_place) for step in steps)


def _finish(run: Run, contest: Contest, report: dict[str, Any]) -> Any:
    executable = contest.winner
    report |= contest.report()
    report["kernels"] = executable.plan.kernel_count
    report["in_place"] = len(executable.plan.steps) - executable.plan.kernel_count
    report["flop"] = sum(step.work_flop for step in executable.plan.steps)
    report["arena_bytes"] = executable.plan.arena_bytes
    report["seconds"] = time.monotonic() - run.started_s
    executable.report.clear()
    executable.report.update(report)
    return executable
