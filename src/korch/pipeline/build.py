"""Plans -> the fastest executable with correct results, and its report."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from korch.backend import maker
from korch.binary_program.problem import Status
from korch.candidate.candidate import Candidate
from korch.cuda.runtime.executable import CudaExecutable
from korch.frontend.indices import index_limits
from korch.frontend.onnx import HeldModel
from korch.frontend.operator import OperatorGraph
from korch.limits import SearchLimits
from korch.measure.expect import expect
from korch.measure.meter import AnyMeter
from korch.measure.record import Measured
from korch.numerics import Standard
from korch.pipeline.precision import Precision
from korch.pipeline.results import Built, Offered, SplitModel, StageResults
from korch.pipeline.run import END_SAFETY, Run
from korch.pipeline.tied import with_tied_tables
from korch.primitive.dispute import Dispute
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.opaque import OpaqueAttributes
from korch.ranges.masked import Masked
from korch.report.rivals import grouping_rows, rivals_of
from korch.runtime.executable import Executable
from korch.runtime.padding import OutputCut, padded_inputs
from korch.runtime.record import ModelRecord
from korch.runtime.report import Disturbance, GroupingRecord, OperatorRecord, PrecisionRecord, Report, ScheduleTimes
from korch.search.ledger import Ledger
from korch.search.result import PlanName
from korch.segments.block_task import BlockTask
from korch.segments.join import with_constants_of
from korch.segments.trace import changed_rounds
from korch.system.deadline import Deadline
from korch.validation.discrepancy import examine
from korch.validation.fresh import time_fresh
from korch.validation.plan import Make, PlanEntry, Validation
from korch.validation.schedule import with_fastest_schedule
from korch.validation.standard import random_inputs
from korch.validation.validate import WEIGHTS_BYTES, Trial, validate_plans

Groupings = Mapping[str, tuple[tuple[GroupingRecord, ...], ...]]
"""By the name of a plan, the alternative groupings of each of its kernels."""


def build_plans(run: Run, results: StageResults) -> Built:
    """Build, check and time the plans; return the fastest executable with correct results.

    `results`: the results of all earlier stages. Those that only the search needs are dropped.
    """
    options, offered, found = run.options, results["candidates"], results["orchestrate"]
    meter, ledger, outcome = offered.meter, offered.ledger, found.outcome
    meter.tell = partial(run.tell, "build")
    report = _measured_report(run, results) if options.measure else search_report(run, results)
    groupings = {name: grouping_rows(rows) for name, rows in outcome.groupings.items()}
    plans = list(outcome.plans.items())[: None if options.ablation.baselines else 1]
    graph = results["saturate"].joined.graph
    stored = partial(with_tied_tables, graph, ledger=ledger, deadline=run.deadline)
    variants = [(plan, entry_of(PlanName.SEARCHED, stored(plan.steps), ledger)) for plan in found.sized]
    entries = _replayed([entry_of(name, stored(steps), ledger) for name, steps in plans], ledger)
    if not results["saturate"].partition.is_whole:
        graph = with_constants_of(graph, [*outcome.plans.values(), *(plan.steps for plan in found.sized)])
    certificate = outcome.found.certificate
    del outcome, plans, found, offered
    del results["saturate"], results["candidates"], results["orchestrate"]  # unused candidates may need much memory
    model = described_model(run, results)
    ranges = run.masked.plan if run.masked is not None else None
    make_any = partial(maker, graph, meter, options, model=model, certificate=certificate)
    schedule = ledger.recorded_choice("schedule") or run.schedule
    make = make_any(runs_tasks=schedule == "tasks")
    write_s = meter.pace.predict_s("build", results["fission"].weights_bytes / WEIGHTS_BYTES)
    end = run.deadline.before(END_SAFETY * write_s)
    standard = results["reference"]
    trial = Trial(graph, standard) if run.masked is None else masked_trial(run.masked, standard, graph, options.search)
    begun_s = time.monotonic()
    validation = validate_plans(trial, entries, meter, make, end)
    first_s = time.monotonic() - begun_s
    ledger.record_choice("plan", validation.won.entry.name)
    validation, times = _with_schedule(schedule, ledger, validation, make_any(runs_tasks=True), end)
    discrepancy = None if ledger.is_replayed else examine(validation, meter, end)
    executable = validation.winner
    if not isinstance(executable, Executable | CudaExecutable):
        raise AssertionError("an executable of another target")
    fresh = None  # there is none of plans of GPUs
    if options.measure and not ledger.is_replayed and isinstance(executable, Executable):
        fresh = time_fresh(executable, validation.timed, validation.won.median_ns, end.left_s)
    report = replace(report, discrepancy=discrepancy, schedule=times, fresh=fresh)
    executable.report = _complete(report, run, results["fission"], meter, validation, groupings)
    sized = []
    if ranges is not None and isinstance(executable, Executable):
        is_searched = validation.won.entry.name == PlanName.SEARCHED
        first = variants[0][0]
        sized = [(first if is_searched else replace(first, measured=()), executable)]
        for plan, entry in variants[1:]:
            if end.left_s is not None and end.left_s < first_s:
                break  # it takes about as long as the first plan
            trial = replace(trial, timed={**trial.timed, **ranges.hidden_at(plan.timed)})
            other = validate_plans(trial, [entry], meter, make, end)
            if isinstance(other.winner, Executable):
                own = replace(report, predicted_ms=entry.predicted_ns / 1e6)
                other.winner.report = _complete(own, run, results["fission"], meter, other, {})
                sized.append((plan, other.winner))
    return Built(executable, sized)


def described_model(run: Run, results: StageResults) -> ModelRecord:
    """Return the record of the model that a plan is for."""
    model = run.record().with_defaults(results["frontend"].defaults)
    return replace(model, limits=_limits(run, results["frontend"]))


def _limits(run: Run, model: OperatorGraph) -> dict[str, tuple[int, int]]:
    """Return the limits of indices; of a plan for a range, those into constants that are the same for all sizes."""
    unsure = {name for name in model.types if name not in model.constants} | model.sized if run.masked else ()
    return index_limits(model, unsure, is_module=isinstance(run.model, HeldModel))


def _with_schedule(
    schedule: str, ledger: Ledger, validation: Validation, make_tasks: Make, end: Deadline
) -> tuple[Validation, ScheduleTimes | None]:
    """Return the validation with the chosen schedule, and the times of both schedules if they were compared."""
    times = None
    if schedule == "fastest":
        validation, times = with_fastest_schedule(validation, ledger.meter, make_tasks, end)
        schedule = "tasks" if times is not None and times.runs_tasks else "joins"
    ledger.record_choice("schedule", schedule)
    return validation, times


def masked_trial(masked: Masked, standard: Standard, graph: PrimitiveGraph, limits: SearchLimits) -> Trial:
    """Return the trial that compares plans for a range with the model at one size, and times them for another size.

    `standard`: the exact results of the model at the first of `masked.checked`.
    """
    plan, sizes = masked.plan, masked.checked[0]
    given = padded_inputs(plan, sizes, list(standard.inputs.values()))
    timed = {**random_inputs(graph, limits.seed), **plan.hidden_at(plan.timed)}
    cuts = [OutputCut.of(form, sizes) for form in plan.outputs]
    return Trial(
        graph,
        standard,
        dict(zip((name for name, _ in graph.inputs), given, strict=True)),
        timed,
        lambda arrays: [cut.apply(array) for cut, array in zip(cuts, arrays, strict=True)],
    )


def _complete(
    report: Report, run: Run, split: SplitModel, meter: AnyMeter, validation: Validation, groupings: Groupings
) -> Report:
    """Return the report of a search, completed with the results of the chosen plan."""
    won, plan = validation.won.entry, validation.winner.plan
    seconds = time.monotonic() - run.started_s
    return replace(
        validation.described(report),
        disturbed=_disturbance(validation, meter),
        disputes=_disputes(run, split.graph),
        doubt=_doubt(validation, meter),
        not_compiled=(*meter.uncompiled.values(), *validation.uncompiled()),
        provider_faults=meter.faults.counts(),
        rivals={step.candidate: report.rivals.get(step.candidate, ()) for step in plan.steps},
        described={c.key: lines for c in won.steps if (lines := meter.described(c))},
        groupings=groupings.get(won.name, ()),
        kernels=plan.kernel_count,
        in_place=len(plan.steps) - plan.kernel_count,
        precision=_precision(split.precision, validation),
        flop=sum(step.work_flop for step in plan.steps),
        arena_bytes=plan.arena_bytes,
        stages_s={**run.stage_seconds, "build": seconds - sum(run.stage_seconds.values())},
        seconds=seconds,
    )


def _doubt(validation: Validation, meter: AnyMeter) -> str:
    """Return why bounds, which follow from the measured rates of the machine, may be too high."""
    if validation.won.median_ns < sum(step.bound_ns for step in validation.winner.plan.steps):
        return "a run takes less time than the bounds of its kernels together"
    return "the budget left little time to measure this machine" if meter.has_brief_rates else ""


def _disputes(run: Run, graph: PrimitiveGraph) -> tuple[Dispute, ...]:
    """Return the nodes on which references differed; those of opaque primitives name only an operator until here."""
    nodes: dict[str, list[str]] = {}
    for primitive, origin in zip(graph.primitives, graph.origins, strict=True):
        if isinstance(primitive.attributes, OpaqueAttributes):
            nodes.setdefault(primitive.attributes.op_type, []).append(origin)
    return tuple(
        replace(found, node=" or ".join(dict.fromkeys(nodes.get(found.node, [found.node]))))
        for found in run.disputes.values()
    )


def _precision(precision: Precision | None, validation: Validation) -> PrecisionRecord | None:
    """Return how the kept plan uses the error budget: another plan than the searched one may have been kept."""
    if precision is None:
        return None
    record = precision.record(origin for step in validation.winner.plan.steps for origin in step.origins)
    return replace(record, error=max(record.error, validation.won.max_error or 0.0))


def search_report(run: Run, results: StageResults) -> Report:
    """Return the report of the model and the search."""
    outcome, split, offered = results["orchestrate"].outcome, results["fission"].graph, results["candidates"]
    operators = results["frontend"].operators
    partition, meter, tasks, found = results["saturate"].partition, offered.meter, offered.tasks, outcome.found
    certificate, enumerations = found.certificate, [task.enumeration for task in tasks]
    keys = [{c.key for c in task.candidates} for task in tasks]
    is_optimal = certificate.status is Status.OPTIMAL and not partition.is_whole
    savings = outcome.savings.items()
    return Report(
        status="optimal per segment" if is_optimal else certificate.status.value,
        predicted_ms=(certificate.objective_ns or 0) / 1e6,
        lower_bound_ms=certificate.bound_ns / 1e6,
        gap=certificate.gap,
        calibrated_gap=certificate.calibrated_gap,
        calibrated_ms=None if certificate.calibrated_ns is None else certificate.calibrated_ns / 1e6,
        primitives=len(split.primitives),
        given_flop=split.total_flop,
        alternatives=partition.rules.alternatives,
        sets=sum(enumeration.sets for enumeration in enumerations),
        groups=sum(enumeration.groups for enumeration in enumerations),
        limits_hit=tuple(sorted({hit for enumeration in enumerations for hit in enumeration.limits_hit})),
        candidates=sum(len(task.candidates) for task in tasks),
        distinct_candidates=len(set().union(*keys)),
        measured_candidates=_count_measured(tasks, offered.ledger),
        timed_kernels=offered.ledger.timed_kernels,
        failed_candidates=found.failed,
        rules=partition.rules,
        rule_savings_ms={rule: None if saved_ns is None else saved_ns / 1e6 for rule, saved_ns in savings},
        rounds=changed_rounds(found.rounds),
        recalled=outcome.is_recalled,
        stopped_by_budget=found.stopped_by_budget,
        budget_s=run.options.budget_s,
        least_s=run.least_s,
        stages_s=run.stage_seconds,
        idle=run.idle_shares,
        search_s=_spent_s(offered, run.stage_seconds.get("orchestrate", 0.0)),
        operators=tuple(OperatorRecord(o.label, tuple(o.inputs), tuple(o.outputs)) for o in operators),
        partition=outcome.partition,
        machine=meter.rates(),
        provider_reports=meter.provider_reports(),
    )


def _spent_s(offered: Offered, whole_s: float) -> dict[str, float]:
    """Return where the seconds of a search went, by kind of work; "other" is the rest, such as making programs."""
    asked_s, work_s = offered.ledger.spent_s, offered.meter.pace.spent_s
    found = {
        "compiling": work_s.get("compile", 0.0),
        "timing": work_s.get("time", 0.0),
        "solving": asked_s.get("solve", 0.0) + asked_s.get("relax", 0.0),
        "estimating": asked_s.get("bounds", 0.0) + asked_s.get("guesses", 0.0),
    }
    return {**found, "other": max(0.0, whole_s - sum(found.values()))}


def _measured_report(run: Run, results: StageResults) -> Report:
    """Return the report of the model and the search with what was measured, and the rivals of the plans' kernels."""
    plans, tasks, ledger = (
        results["orchestrate"].outcome.plans,
        results["candidates"].tasks,
        results["candidates"].ledger,
    )
    report, untimed = search_report(run, results), _count_untimed(plans[PlanName.SEARCHED], ledger)
    chosen = {c.key: c for steps in plans.values() for c in steps}.values()
    return replace(
        report,
        gap=None if untimed else report.gap,
        calibrated_gap=None if untimed else report.calibrated_gap,
        untimed=untimed,
        rivals=rivals_of(chosen, (c for task in tasks for c in task.candidates), ledger),
    )


def _count_measured(tasks: Sequence[BlockTask], ledger: Ledger) -> int:
    """Return the number of distinct candidates with a measured time; blocks share some."""
    candidates = {c.key: c for task in tasks for c in task.candidates}
    return sum(map(ledger.is_measured, candidates.values()))


def _count_untimed(steps: Sequence[Candidate], ledger: Ledger) -> int:
    """Return the number of a plan's kernels that were not measured, without in-place candidates."""
    return sum(not (ledger.cost_ns(step)[1] or step.offer.is_in_place) for step in steps)


def _replayed(entries: list[PlanEntry], ledger: Ledger) -> list[PlanEntry]:
    """Return all plans; in a replay only the one that won when the ledger was written."""
    won = ledger.recorded_choice("plan")
    return entries if won is None else [entry for entry in entries if entry.name == won]


def entry_of(name: str, steps: Sequence[Candidate], ledger: Ledger) -> PlanEntry:
    """Return a plan with the costs of its kernels."""
    costs = tuple(ledger.cost_ns(c) for c in steps)
    expected = expect((ns, ledger.known(c)) for (ns, _), c in zip(costs, steps, strict=True) if not c.offer.is_in_place)
    return PlanEntry(name, tuple(steps), costs, expected)


def _disturbance(validation: Validation, meter: AnyMeter) -> Disturbance:
    known = [meter.known(c) for c in validation.won.entry.steps]
    return Disturbance(
        kernel_runs=meter.disturbed,
        plan_runs=sum(result.disturbed for result in validation.results),
        kernels=sum(isinstance(r, Measured) and r.is_disturbed for r in known),
        is_plan_disturbed=validation.won.is_disturbed,
    )
