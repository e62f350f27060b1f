"""The stages from a model to its executable, as one literal table.

A small model is one segment. In a large model, segments that differ only in weights form one block,
which is searched once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from korch.backend import has_kernels, open_meter
from korch.candidate.candidate import Candidate, Refusal, make_group
from korch.cuda.kernel import CudaKernel
from korch.equivalence.rounded import with_rounded_data
from korch.equivalence.rule import AnyRule
from korch.equivalence.rules import integers, select_rules
from korch.equivalence.saturate import SaturationLimits, SaturationReport, joined_reports, saturate
from korch.errors import InvalidGraphError, OptionError
from korch.fission import FissionReport, fission_with_report
from korch.frontend.onnx import load_model
from korch.frontend.operator import OperatorGraph
from korch.measure.meter import AnyMeter
from korch.numerics import Standard
from korch.options import Options
from korch.pipeline import texts
from korch.pipeline.build import build_plans
from korch.pipeline.calibration import calibration_of
from korch.pipeline.least import least_of, work_of
from korch.pipeline.loops import plan_loops
from korch.pipeline.precision import Form, Kernels, Precision, find_forms, with_forms
from korch.pipeline.quantized import in_bytes, is_quantized
from korch.pipeline.results import Offered, Planned, Programs, Rewritten, SplitModel, StageResults
from korch.pipeline.run import ENUMERATE_SHARE, Run, Template
from korch.pipeline.served import search_sizes, time_as_served
from korch.pipeline.transfer import transferred
from korch.primitive import reference
from korch.primitive.check import check_graph
from korch.primitive.gathers import gather_matrices
from korch.primitive.graph import Primitive, PrimitiveGraph
from korch.primitive.lowering import MULTIPLIED, MULTIPLIED_BY_CUDA, lower_products
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.precision import with_half, with_tf32
from korch.primitive.text import format_graph
from korch.primitive.types import DType
from korch.primitive.writes import write_rows
from korch.records import plain
from korch.search.instance import check_steps
from korch.search.ledger import Ledger
from korch.search.result import PlanName, Round
from korch.segments.block import Partition, find_blocks
from korch.segments.block_task import BlockTask, prepare_all
from korch.segments.extract import extract
from korch.segments.join import Joined, join
from korch.segments.search import Outcome, Segmented, search_segments
from korch.segments.segment import Segment, whole_segment
from korch.segments.spill import Spill
from korch.segments.text import format_partition
from korch.segments.with_alternatives import split_segments
from korch.superopt.provider import add_superopt
from korch.system.deadline import Deadline, stopped_by_interrupt
from korch.validation.standard import standard_of

REWRITE_SHARE = 0.25  # share of the budget after which no more alternatives are added
CHECK_SHARE = 0.25  # share of the remaining time reserved to check the error of a plan and to search again
VARIANTS_SHARE = 0.3  # share of the time of a search reserved for plans for other sizes

NOT_REPLAYED = ("cache_folder", "farm", "ledger", "replay", "on_interrupt", "budget_s", "host", "calibrate", "inputs")
"""Options that may differ between a search and its replay."""

HALF = {"float16": DType.F16, "bfloat16": DType.BF16}
"""The element types of 16 bits, by the value of the options `precision` and `state`."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One step from a model to its executable."""

    name: str  # the name on the command line
    run: Callable[[Run, StageResults], StageResults]  # returns its result, from those of earlier stages
    text: Callable[[StageResults], str]  # returns the printed form of the result
    check: Callable[[StageResults], None] = lambda found: None  # raises an error if the result is not valid


def load(run: Run) -> OperatorGraph:
    """Return the model's operators."""
    return run.model if isinstance(run.model, OperatorGraph) else load_model(run.model, run.shapes)


def split_operators(run: Run, operators: OperatorGraph) -> SplitModel:
    """Return the model's primitives; a quantized model is computed with bytes if the target has kernels for that."""
    options, report = run.options, FissionReport(0, ())
    if run.masked is None:
        given, report = fission_with_report(operators, with_loops=not options.is_cuda)
    else:
        given = run.masked.graph
    is_narrow = is_quantized(given)
    multiplies = is_narrow and not (options.is_cuda or options.strict)
    multiplies = multiplies and integers.RULES[0] in select_rules(options.ablation.rules)
    multiplied = MULTIPLIED_BY_CUDA if options.is_cuda else MULTIPLIED
    given = _with_gathers(given, multiplied, options)
    if run.masked is None and not options.is_cuda:
        given = write_rows(given)
    graph = in_bytes(given, has_kernels(options) if multiplies else None, run.deadline, multiplied)
    if options.budget_s is not None and not options.is_cuda:
        run.expect(least_of(work_of(graph), options, run.masked.compared if run.masked is not None else ()))
    precision = _precision(run, graph) if options.error else None
    return SplitModel(graph, lower_products(given) if is_narrow else None, precision, report.kept)


def _with_gathers(graph: PrimitiveGraph, multiplied: Sequence[DType], options: Options) -> PrimitiveGraph:
    """Return a graph in which products with gathered matrices are rewritten unless a kernel computes them."""
    if all(p.op != GATHERED for p in graph.primitives):
        return graph
    lowered = lower_products(graph, multiplied)
    has_kernel = has_kernels(options)

    def keeps(primitive: Primitive) -> bool:
        group = make_group(lowered, (lowered.primitives.index(primitive),), (primitive.output,))
        return not options.is_cuda and has_kernel(group)

    return gather_matrices(lowered, keeps)


def _precision(run: Run, graph: PrimitiveGraph) -> Precision:
    """Return the less precise forms of a model's products."""
    options = run.options
    if run.masked is not None:
        raise OptionError("less precise types are for models of fixed sizes", "option error", hint="Remove --error")
    found = calibration_of(graph, options.calibrate, options.search)
    kernels = Kernels(has_kernels(options), has_kernels(options, with_few_pairs=True))
    end = run.build_deadline.less(1 - REWRITE_SHARE)
    forms = find_forms(graph, found.samples, options.error, kernels, end, options.search)
    expected = [reference.run(graph, feeds) for feeds in found.checks]
    run.tell("fission", f"{len(forms)} less precise products, calibrated on {found.source}")
    return Precision(options.error, forms, found.checks, expected, found.source, options.search)


def add_alternatives(run: Run, found: SplitModel) -> Rewritten:
    """Return the segments of the model with their alternatives.

    Rules that match more than one primitive are applied to the whole model before it is cut,
    because a cut could separate what they match.
    """
    options, split = run.options, found.graph
    deadline = run.build_deadline.less(1 - REWRITE_SHARE)
    limit = options.search.segment_limit(len(split.primitives))
    rules = _rules(options)
    spill = Spill(options.cache_folder if options.cache_folder.is_dir() else None, options.search)
    whole, report = split, None
    segments: tuple[Segment, ...] = (whole_segment(split),)
    if limit is not None:
        wide = [rule for rule in rules if not rule.is_local]
        rules = tuple(rule for rule in rules if rule.is_local)
        limits = SaturationLimits.of(len(split.primitives))
        whole, report = saturate(
            split, strict=options.strict, rules=wide, keep=spill.keep, limits=limits, deadline=deadline
        )
        segments = split_segments(whole, limit)
    forms = found.precision.forms if found.precision else ()
    rewrite = partial(_rewrite, options=options, rules=rules, forms=forms, deadline=deadline)
    partition = find_blocks(whole, segments, rewrite, spill)
    if report is not None:
        partition = replace(partition, rules=joined_reports(report, partition.rules))
    return Rewritten(partition, join(partition))


def _rules(options: Options) -> Sequence[AnyRule]:
    found = select_rules(options.ablation.rules)
    return found if options.precision not in HALF else [rule for rule in found if not rule.needs_float32]


def _rewrite(
    graph: PrimitiveGraph, options: Options, rules: Sequence[AnyRule], forms: Sequence[Form], deadline: Deadline
) -> tuple[PrimitiveGraph, SaturationReport]:
    found, report = saturate(graph, strict=options.strict, rules=rules, deadline=deadline)
    if options.ablation.rewrites == "first":
        found = extract(found, options)
    if options.precision in HALF:
        found = with_half(found, HALF[options.precision])
    if options.allows_tf32:
        found = with_tf32(found)
    if not options.strict and not options.is_cuda:
        found = with_rounded_data(found, options.precision == "int8")
    return with_forms(found, forms), report


def check_blocks(partition: Partition) -> None:
    """Check the graph of each block."""
    for block in partition.blocks:
        check_graph(block.graph)


def compute_reference(run: Run, split: SplitModel, joined: Joined) -> Standard:
    """Return random inputs and exact results; a model for which this fails is refused before the search."""
    if run.masked is not None and run.masked.model is not None:
        return standard_of(run.masked.model, joined.graph, run.options)
    given = split.precision.samples[0] if split.precision else {}
    return standard_of(split.quantized or split.graph, joined.graph, run.options, given)


def collect_candidates(run: Run, split: SplitModel, alternatives: Rewritten) -> Offered:
    """Return the candidates of each block, and the meter that builds and times them."""
    options, partition, joined = run.options, alternatives.partition, alternatives.joined
    meter = run.resources.enter_context(open_meter(options, split.weights_bytes, run.last_deadline))
    if "orchestrate" in run.todo:
        meter.expect_work()  # while candidates are enumerated
    deadline = run.build_deadline.less(1 - ENUMERATE_SHARE)
    ledger = _ledger(options, meter)
    plan_loops(run, partition, ledger)
    tasks: list[BlockTask] = []
    if run.template is None:
        found = add_superopt(meter, partition, split.graph.total_flop, ledger, options, deadline)
        if found:
            run.tell("candidates", found)
            deadline = run.build_deadline.less(1 - ENUMERATE_SHARE)
        tasks = prepare_all(partition, joined, meter, options, deadline)
    if run.masked is not None:
        tasks = time_as_served(tasks, joined, meter, run.masked.plan)
    run.tell("candidates", texts.tasks_line(tasks))
    meter.tell = partial(run.tell, "orchestrate")
    run.end_s = run.predict_end_s(split, meter)
    meter.expect_compiling = partial(run.check_budget, ledger)
    return Offered(meter, ledger, tasks)


def orchestrate(run: Run, precision: Precision | None, alternatives: Rewritten, offered: Offered) -> Planned:
    """Return the plans: the best one first, then the plans that it is compared with."""
    ledger, joined = offered.ledger, alternatives.joined
    with _interruptible(run):
        if run.template is not None:
            return Planned(transferred(run, joined.graph, ledger, run.template))
        model = Segmented(alternatives.partition, joined, offered.tasks)
        outcome = search_plans(run, model, ledger, precision)
        steps = outcome.plans[PlanName.SEARCHED]
        if run.keep is not None:
            run.keep(Template(joined.graph, steps))
        sized = [] if run.masked is None else search_sizes(run, model, ledger, outcome, run.masked)
        return Planned(outcome, sized)


def search_plans(run: Run, model: Segmented, ledger: Ledger, precision: Precision | None) -> Outcome:
    """Return the best sequential plan and the plans that it is compared with."""

    def tell(b: int, entry: Round, whole: Round) -> None:
        run.tell("orchestrate", texts.round_line(model.tasks, b, entry), whole)

    deadline = run.build_deadline
    if precision is not None:
        deadline = deadline.less(CHECK_SHARE)
    if run.masked is not None and run.masked.others:
        deadline = deadline.less(VARIANTS_SHARE)
    while True:
        tasks = model.tasks if precision is None else precision.tasks(model.tasks, model.partition)
        outcome = search_segments(replace(model, tasks=tasks), ledger, run.options, deadline, tell)
        if precision is None or not precision.check(
            model.joined.graph, outcome.plans[PlanName.SEARCHED], not run.build_deadline.is_over
        ):
            return outcome
        deadline = run.build_deadline
        run.tell("orchestrate", f"the error is {precision.error:.1e}; searched again with another sum of errors")


def _ledger(options: Options, meter: AnyMeter) -> Ledger:
    """Return the ledger of the search: a new one, or the one that is replayed."""
    values = plain(options.recorded)
    values |= values.pop("search") | values.pop("ablation")
    about = {f"option {name}": value for name, value in values.items() if name not in NOT_REPLAYED}
    about["target"] = meter.database.target
    return Ledger(meter, options.search, write_to=options.ledger, replay=options.replay, about=about)


def check_plans(graph: PrimitiveGraph, outcome: Outcome) -> None:
    """Check each plan without a solver.

    Raises:
        InvalidGraphError: a kernel reads a value that no earlier kernel writes, or an output is not written.
    """
    for name, steps in outcome.plans.items():
        try:
            check_steps(graph, steps)
        except InvalidGraphError as error:
            raise replace(error, where=f"plan {name!r}, {error.where}".removesuffix(", ")) from error


def lower_plan(steps: Sequence[Candidate], meter: AnyMeter) -> Programs:
    """Return the tile programs of a plan's kernels; None for a kernel that is not generated from one."""
    meter.prepare(steps)
    kernels = [(candidate, meter.kernel(candidate)) for candidate in steps]
    return tuple((c, None if isinstance(kernel, Refusal | CudaKernel) else kernel.program) for c, kernel in kernels)


STAGES = (
    PipelineStage(
        "frontend", lambda run, found: {"frontend": load(run)}, lambda found: texts.operators_text(found["frontend"])
    ),
    PipelineStage(
        "fission",
        lambda run, found: {"fission": split_operators(run, found["frontend"])},
        lambda found: format_graph(found["fission"].graph),
        lambda found: check_graph(found["fission"].graph),
    ),
    PipelineStage(
        "saturate",
        lambda run, found: {"saturate": add_alternatives(run, found["fission"])},
        lambda found: format_partition(found["saturate"].partition),
        lambda found: check_blocks(found["saturate"].partition),
    ),
    PipelineStage(
        "reference",
        lambda run, found: {"reference": compute_reference(run, found["fission"], found["saturate"].joined)},
        lambda found: texts.reference_text(found["reference"]),
    ),
    PipelineStage(
        "candidates",
        lambda run, found: {"candidates": collect_candidates(run, found["fission"], found["saturate"])},
        lambda found: texts.candidates_text(found["candidates"].tasks),
    ),
    PipelineStage(
        "orchestrate",
        lambda run, found: {
            "orchestrate": orchestrate(run, found["fission"].precision, found["saturate"], found["candidates"])
        },
        lambda found: texts.plan_text(found["candidates"], found["orchestrate"]),
        lambda found: check_plans(found["saturate"].joined.graph, found["orchestrate"].outcome),
    ),
    PipelineStage(
        "lower",
        lambda run, found: {"lower": lower_plan(found["orchestrate"].best, found["candidates"].meter)},
        lambda found: texts.programs_text(found["lower"]),
    ),
    PipelineStage(
        "build", lambda run, found: {"build": build_plans(run, found)}, lambda found: texts.kernels_text(found["build"])
    ),
)
"""The stages from a model to its executable. The stage "build" checks each executable by its results."""


@contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """With `on_interrupt="keep"`, let an interrupt end the search with the best plan."""
    if run.options.search.on_interrupt == "stop":
        yield
        return

    def tell() -> None:
        run.tell("orchestrate", "interrupted: the best plan so far is built; interrupt again to end the command")

    with stopped_by_interrupt(run.deadline, tell):
        yield
