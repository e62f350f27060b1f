"""A model -> a file of the kernels that are worth measuring on a device, and an artifact from their records.

Neither needs the device. Candidates are ranked by what measuring them is expected to gain. If records are known, the
ranking uses them, so preparing a model again after an import adds the kernels that are worth measuring next.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from korch.candidate.candidate import Candidate, Refusal
from korch.cuda.compile import Cubin
from korch.cuda.kernel import Launch
from korch.cuda.measure.job import job_key
from korch.cuda.measure.job_file import JobFile, KernelJob
from korch.cuda.measure.meter import CudaMeter
from korch.cuda.module import require_triton
from korch.cuda.runtime.build import build_cuda
from korch.cuda.runtime.record import CudaProgram
from korch.errors import InfeasibleError, OptionError
from korch.frontend.onnx import ModelSource
from korch.measure.record import Measured
from korch.options import Options
from korch.pipeline.build import described_model, entry_of, search_report
from korch.pipeline.optimize import run_until
from korch.pipeline.results import Offered
from korch.pipeline.run import Run
from korch.report.progress import Progress, untold
from korch.runtime.build import Origin
from korch.search.result import PlanName
from korch.segments.block_search import BlockSearch, unheard
from korch.segments.join import with_constants_of
from korch.segments.trace import SearchTrace
from korch.system.deadline import Deadline
from korch.system.settings import few_collections
from korch.validation.validate import steps_of

BATCH = 64
"""Kernels that are compiled, and compressed, together."""

EXPLORE_SECONDS, EXPLORE_GAP = 4.0, 0.03
"""The limits of the solve of one interface by estimates."""

Pending = tuple[KernelJob, Sequence[Launch]]
"""A job whose launches are to be compiled."""

logger = logging.getLogger("korch.pipeline")


@dataclass(slots=True)
class Prepared:
    """How many kernels of a model were prepared."""

    candidates: int  # the different candidates of the model
    ranked: int  # those that are in a plan that is best by estimates, or may improve it, and have no record
    added: int = 0  # kernels that were added to the file
    known: int = 0  # kernels that are in the file or have a record already; equal kernels count once
    refused: int = 0  # kernels that were not built, or not compiled
    left: int = 0  # candidates that were not looked at, as the file, the limit or the time was used up
    guess_ns: int = 0  # the estimated time of one run of each added kernel, as a sum


@few_collections()
def build_apart(
    model: ModelSource, options: Options, shapes: Mapping[str, tuple[int, ...]], progress: Progress = untold
) -> CudaProgram:
    """Return the best plan of the kernels that were measured on a recorded device.

    Nothing runs: neither the results nor the time of the plan are checked.

    Raises:
        KorchError: the model or an option is unsuitable, or the kernels that were measured do not form a plan.
    """
    options = replace(options, ablation=replace(options.ablation, baselines=False))
    run = Run(options, shapes, progress, model)
    with run.resources:
        run_until(run, "candidates", skip=("reference",))
        meter = _cuda(run.results["candidates"])
        meter.only_known = True
        run_until(run, "orchestrate", first="orchestrate")
        with run.stage("build"):
            results, outcome = run.results, run.results["orchestrate"].outcome
            steps, graph = outcome.plans[PlanName.SEARCHED], results["saturate"].joined.graph
            entry = entry_of(PlanName.SEARCHED, steps, results["candidates"].ledger)
            graph = with_constants_of(graph, [steps])
            origin = Origin(described_model(run, results), outcome.found.certificate, options.recorded)
            program = build_cuda(graph, steps_of(entry, meter), meter.target, meter.compiler, origin)
        plan = program.plan
        report = replace(
            search_report(run, results),
            kernels=plan.kernel_count,
            flop=sum(step.work_flop for step in plan.steps),
            arena_bytes=plan.arena_bytes,
            stages_s=run.stage_seconds,
            seconds=sum(run.stage_seconds.values()),
        )
        return replace(program, report=report)


@few_collections()
def prepare_model(
    model: ModelSource,
    options: Options,
    shapes: Mapping[str, tuple[int, ...]],
    file: JobFile,
    most: int,
    progress: Progress = untold,
) -> Prepared:
    """Add a model's most promising kernels to a file of jobs.

    `most`: how many are added, unless the best plans by estimates have more.

    Raises:
        KorchError: the model, an option or the file is unsuitable; the message says what to do.
    """
    if not options.is_cuda or options.target == "cuda":
        raise OptionError(f"the target is {options.target}", "option target", "cuda:sm_90, cuda:sm_80 or cuda:NAME")
    options = replace(options, ablation=replace(options.ablation, baselines=False))
    run = Run(options, shapes, progress, model)
    with run.resources:
        run_until(run, "candidates", skip=("reference",))
        offered = run.results["candidates"]
        meter = _cuda(offered)
        run.tell("candidates", "ranked by estimates")
        ranked, planned = ranked_candidates(offered, options, run.deadline.less(0.5))
        most = max(most, planned)
        found = Prepared(len({c.key for task in offered.tasks for c in task.candidates}), len(ranked))
        add_kernels(ranked, meter, file, found, most, run.deadline)
        run.tell("build", f"{found.added} kernels are compiled, {file.size_bytes >> 20} MiB")
        found.left = found.ranked - found.added - found.known - found.refused
        return found


def _cuda(offered: Offered) -> CudaMeter:
    if not isinstance(offered.meter, CudaMeter):
        raise AssertionError("a meter of another target")
    return offered.meter


def ranked_candidates(offered: Offered, options: Options, deadline: Deadline) -> tuple[list[Candidate], int]:
    """Return candidates without a measured time: those of the best plans by estimates, then those that may be better.

    `deadline`: when to stop looking at further interfaces of blocks.

    Returns:
        The candidates, and how many of them are in these plans.
    """
    tasks, ledger = offered.tasks, offered.ledger
    counts = Counter({b: task.count for b, task in enumerate(tasks)})
    search = BlockSearch(tasks, ledger, options, Deadline(), unheard, SearchTrace(counts))
    first: dict[str, Candidate] = {}
    gains: dict[str, tuple[float, Candidate]] = {}
    for turn in range(max(len(block) for block in search.blocks)):
        for one in (block[turn] for block in search.blocks if turn < len(block)):
            if turn and deadline.is_over:
                break
            try:
                found = search.open(one).explore(EXPLORE_SECONDS, EXPLORE_GAP)
            except InfeasibleError as error:
                if turn == 0:
                    raise
                logger.info("block %d has no plan for its interface %d: %s", *one.key, error)
                continue
            first |= {c.key: c for c in (one.task.candidates[k] for k in found.unknown)}
            for gain_ns, k in found.improvements:
                candidate, whole_ns = one.task.candidates[k], one.task.count * gain_ns
                if whole_ns > gains.get(candidate.key, (0.0, candidate))[0]:
                    gains[candidate.key] = (whole_ns, candidate)
    others = sorted(gains.values(), key=lambda entry: -entry[0])
    return list((first | {c.key: first.get(c.key, c) for _, c in others}).values()), len(first)


def add_kernels(
    ranked: Sequence[Candidate], meter: CudaMeter, file: JobFile, found: Prepared, most: int, deadline: Deadline
) -> None:
    """Compile the kernels of candidates in order and add them to a file, until it is full; count them in `found`."""
    jobs = _new_jobs(ranked, meter, file, found)
    while found.added < most and not deadline.is_over:
        batch = list(islice(jobs, min(BATCH, most - found.added)))
        if not batch or not _add(batch, meter, file, found):
            return


def _new_jobs(ranked: Sequence[Candidate], meter: CudaMeter, file: JobFile, found: Prepared) -> Iterator[Pending]:
    """Yield the jobs of candidates, without those that have a record or are in the file."""
    seen = set(file.keys)
    for candidate, (guess_ns, _) in zip(ranked, meter.predict(ranked), strict=True):
        kernel = meter.kernel(candidate)
        if isinstance(kernel, Refusal):
            found.refused += 1
            continue
        spec = meter.job(candidate, kernel)
        key = job_key(spec)
        if key in seen or isinstance(meter.known(candidate), Measured):
            found.known += 1
            continue
        seen.add(key)
        yield KernelJob(key, spec, guess_ns), kernel.launches


def _add(batch: Sequence[Pending], meter: CudaMeter, file: JobFile, found: Prepared) -> bool:
    """Compile a batch and add it to the file; return whether there was room."""
    cubins = meter.compiler.compile([launch for _, launches in batch for launch in launches])
    images = {symbol: cubin for symbol, cubin in cubins.items() if isinstance(cubin, Cubin)}
    made = [job for job, launches in batch if all(launch.symbol in images for launch in launches)]
    if not file.add(made, images, meter.target.arch, require_triton().__version__):
        return False
    found.refused += len(batch) - len(made)
    found.added += len(made)
    found.guess_ns += sum(job.guess_ns for job in made)
    return True
