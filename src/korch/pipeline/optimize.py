"""Runs the stages: to an executable, to a plan for a device, or to one stage for its text."""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from korch.cuda.measure.meter import CudaMeter
from korch.cuda.runtime.executable import CudaExecutable
from korch.errors import InaccurateError, OptionError, ReplayError, excerpt
from korch.frontend.onnx import ModelSource
from korch.frontend.operator import OperatorGraph
from korch.frontend.tensors import data_files
from korch.options import Options
from korch.pipeline.build import search_report
from korch.pipeline.run import Run
from korch.pipeline.stages import STAGES, PipelineStage
from korch.primitive.graph import PrimitiveGraph
from korch.report.dry_run import DryRun, dry_run
from korch.report.progress import Progress, untold
from korch.runtime.executable import Executable
from korch.search.result import PlanName
from korch.segments.block import Partition
from korch.system.deadline import Deadline
from korch.system.files import check_output
from korch.system.settings import few_collections

logger = logging.getLogger("korch.pipeline")

Watch = Callable[[PipelineStage, Run], None]
"""Called after a stage, once its result is checked."""


def run_until(
    run: Run, last: str, *, first: str = "frontend", skip: Collection[str] = (), watch: Watch | None = None
) -> None:
    """Run the stages from `first` to `last`, and check the result of each.

    `run`: the state; it must have the results of the stages before `first`. `skip`: names of stages that are not run.
    """
    options = run.options
    if options.ledger is not None:
        check_output(options.ledger, "--ledger", [*_files_of(run.model), *options.files])
    names = [stage.name for stage in STAGES]
    todo = [stage for stage in STAGES[names.index(first) : names.index(last) + 1] if stage.name not in skip]
    run.todo = [stage.name for stage in todo]
    if "build" in run.todo:
        _ = run.record  # begins to read the file
    for stage in todo:
        with run.stage(stage.name), _damaged_ledgers(options.replay):
            run.results.update(stage.run(run, run.results))
            stage.check(run.results)
        if watch is not None:
            watch(stage, run)


@contextmanager
def _damaged_ledgers(replay: Path | None) -> Iterator[None]:
    """Report errors that unusable answers of a ledger cause as errors of the ledger."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        if replay is None:
            raise
        hint = "Write the ledger again: korch optimize --ledger FILE"
        what = f"an answer of the ledger can't be used ({type(error).__name__}: {excerpt(error)})"
        raise ReplayError(what, where=str(replay), hint=hint) from error


def _files_of(model: ModelSource | OperatorGraph | None) -> list[Path]:
    """Return the files from which a model is read; none if it is in memory."""
    if not isinstance(model, str | Path):
        return []
    return [Path(model), *data_files(Path(model))]


def front(run: Run) -> tuple[Partition, PrimitiveGraph]:
    """Return a model's primitives in segments with alternatives, and as a graph without them."""
    run_until(run, "saturate")
    return run.results["saturate"].partition, run.results["fission"].graph


def plan_model(
    model: ModelSource | OperatorGraph,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
) -> DryRun:
    """Search a plan for a CUDA device with bounds as costs, and compile its kernels.

    No device is needed, and nothing is run.

    `shapes`: sizes for inputs with unknown dimensions, by input name.

    Raises:
        KorchError: the model, an option or the machine is unsuitable; the message says what to do.
    """
    options = replace(options, measure=False, ablation=replace(options.ablation, baselines=False))
    if not options.is_cuda:
        raise OptionError("a dry run is for CUDA devices", where="option --dry-run", expected="--target cuda:sm_90")
    run = Run(options, shapes or {}, progress or untold, model)
    with run.resources:
        run_until(run, "orchestrate", skip=("reference",))
        meter, found = run.results["candidates"].meter, run.results["orchestrate"]
        if not isinstance(meter, CudaMeter):
            raise AssertionError("a meter of another target")
        with run.stage("build"):
            return dry_run(found.outcome.plans[PlanName.SEARCHED], meter, search_report(run, run.results))


def optimize_model(
    model: ModelSource | OperatorGraph,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
    watch: Watch | None = None,
) -> Executable | CudaExecutable:
    """Run a model through all stages; return the fastest executable whose results are right.

    Args:
        model: a path, the bytes of an ONNX file, an onnx.ModelProto, or an operator graph.
        options: how to optimize.
        shapes: sizes for inputs with unknown dimensions, by input name.
        progress: called for each stage and for its steps.
        deadline: the time at which the artifact must be on disk; by default the budget from now on.
        watch: called after each stage.

    Raises:
        KorchError: the model, an option or the machine is unsuitable; the message says what to do.
    """
    run = Run(options, shapes or {}, progress or untold, model, given=deadline)
    return optimize_run(run, watch).results["build"].executable


def optimize_run(run: Run, watch: Watch | None) -> Run:
    """Run all stages, and repeat them with `--strict` if no plan is accurate; return the run that has the executables.

    Raises:
        KorchError: as `optimize_model`.
    """
    try:
        _run_all(run, watch)
        return run
    except InaccurateError as error:
        if run.options.strict:
            raise
        logger.warning("no plan is within the tolerance, so the search is repeated; with --strict it is done once")
        logger.info("%s", error)
        run.deadline.whole.least_s = None  # the rest of the budget may be too short for another search
        precision = "float32" if run.options.precision == "int8" else run.options.precision
        again = Run(
            replace(run.options, strict=True, error=0.0, calibrate=None, precision=precision),
            run.shapes,
            run.progress,
            run.model,
            started_s=run.started_s,
            given=run.deadline,
            masked=run.masked,
            keep=run.keep,
        )
        _run_all(again, watch)
        executable = again.results["build"].executable
        executable.report = replace(executable.report, rejected=error.what)
        return again


@few_collections()
def plan_run(run: Run, watch: Watch | None) -> None:
    """Run the stages up to the plan; `build_run` runs the rest. The caller must close the run's resources."""
    run_until(run, "orchestrate", watch=watch)


@few_collections()
def build_run(run: Run, watch: Watch | None) -> None:
    """Build, check and time the plan of a run."""
    run_until(run, "build", first="lower", watch=watch)


@few_collections()
def _run_all(run: Run, watch: Watch | None) -> None:
    with run.resources:
        run_until(run, "build", watch=watch)
