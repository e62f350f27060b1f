"""A model with a few sizes -> an executable with one plan per size, all based on the kernels of one search.

If windows move along an axis of variable size, one plan for all sizes needs masks, and computes columns that only
the largest size needs. A plan for exactly one size needs neither. So only one size is searched, and its kernels are
generated again for the extents of the other sizes.
"""

import logging
import math
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from korch.backend import builder_of
from korch.errors import InaccurateError, InfeasibleError, InvalidGraphError
from korch.options import Options
from korch.pipeline.optimize import Watch, build_run, optimize_run, plan_run
from korch.pipeline.run import Run, Template
from korch.pipeline.source import Source
from korch.ranges.exact import all_sizes, count_sizes, exact_plans, has_free_windows, windowed_axes
from korch.ranges.form import Sizes, sizes_text
from korch.ranges.lockstep import Samples
from korch.ranges.samples import sample
from korch.report.progress import Progress, Update
from korch.runtime.combine import combine
from korch.runtime.executable import Executable
from korch.runtime.ranged import RangedExecutable, Ranges
from korch.system.alignment import ceil_div
from korch.system.cores import slowness
from korch.system.deadline import Deadline

logger = logging.getLogger("korch.pipeline")

PLAN_S, PRIMITIVE_S, CODE_S = 0.85, 0.009, 0.07
"""Seconds to make and check a plan with the kernels of another size's plan: at least, and per primitive; and per
primitive to compile the code that all plans share."""

TOGETHER = 8
"""The number of sizes whose kernels are determined before any of them is compiled, so that they share more code."""

SEARCH_SHARE = 0.2
"""The least fraction of the budget for the search at the first size; with less, there is no plan per size."""

LEAST_S = 1.0
"""The least budget of a plan, in seconds."""


def has_time_for_each(source: Source, options: Options, deadline: Deadline) -> bool:
    """Return whether each size gets a separate plan: if windows depend on the size, sizes are few, and time suffices.

    `deadline`: the time at which the artifact must be on disk.
    """
    dimensions, limits = source.dimensions, options.search
    count, ends = count_sizes(dimensions), (tuple(d.high for d in dimensions), tuple(d.low for d in dimensions))
    if count == 1:
        return False
    largest = source.primitives(ends[0])
    if not windowed_axes(largest):
        return False
    if not has_free_windows(Samples(dimensions, ends, (largest, source.primitives(ends[1])))):
        return False
    rest_s = rest_seconds(len(largest.primitives), count)
    left_s = deadline.left_s
    if count <= limits.exact_sizes and (left_s is None or rest_s <= (1 - SEARCH_SHARE) * left_s):
        return True
    remedy = f"at most {limits.exact_sizes} sizes"
    if count <= limits.exact_sizes and left_s is not None:
        spent_s = (options.budget_s or left_s) - left_s
        remedy = f"a budget of {math.ceil(spent_s + rest_s / (1 - SEARCH_SHARE))} s, or fewer sizes"
    logger.warning(
        f"one plan with masks serves all {count} sizes, and may take several times as long as a plan for one size; for "
        f"a plan for each, give {remedy}"
    )
    return False


def optimize_each(
    source: Source, options: Options, progress: Progress, deadline: Deadline, watch: Watch | None
) -> RangedExecutable:
    """Return an executable with a plan for each size.

    `deadline`: the time at which the artifact must be on disk.

    Raises:
        UnsupportedError: the size of an input's axis can't be computed from a dimension.
        KorchError: as `optimize_model`.
    """
    dimensions = source.dimensions
    sizes = all_sizes(dimensions)
    plans = exact_plans(sample(dimensions, tuple(d.high for d in dimensions), source.primitives), sizes)
    templates: list[Template] = []

    def run_of(own: Sizes, end: Deadline, template: Template | None = None) -> Run:
        text = sizes_text(dimensions, own)
        progress(Update("frontend", f"a plan for {text}" + (" with the kernels of the first" if template else "")))
        model, binding = source.bound(own)
        budget_s = None if end.left_s is None else max(LEAST_S, end.left_s)
        own_options = replace(options.for_search(sizes.index(own)), budget_s=budget_s)
        keep = None if templates else templates.append
        return Run(own_options, binding, progress, model, given=end, template=template, keep=keep)

    end = _first_end(deadline, rest_seconds(len(source.primitives(sizes[0]).primitives), len(sizes)))
    found = {sizes[0]: _executable(optimize_run(run_of(sizes[0], end), watch))}
    count = ceil_div(len(sizes) - 1, TOGETHER)
    for i in range(count):
        batch, end = sizes[1 + i :: count], deadline.shared(count - i)
        with ExitStack() as resources:
            runs = [_planned(run_of(own, end, templates[0]), resources, watch) for own in batch]
            for own, run in zip(batch, runs, strict=True):
                again = partial(run_of, own, end)
                found[own] = _executable(_built(run, watch) or optimize_run(again(), watch))
    if deadline.is_over:
        logger.warning("plans for %d sizes took longer than the budget: give more, or fewer sizes", len(sizes))
    return RangedExecutable(*combine([found[own] for own in sizes], builder_of(options)), Ranges(dimensions, plans))


def rest_seconds(primitives: int, sizes: int) -> float:
    """Return the seconds for the plans of all sizes except the first."""
    return slowness() * (PLAN_S * sizes + primitives * (CODE_S + PRIMITIVE_S * (sizes - 1)))


def _first_end(deadline: Deadline, rest_s: float) -> Deadline:
    """Return when the search at the first size ends."""
    left_s = deadline.left_s
    return deadline if left_s is None else deadline.less(min(1 - SEARCH_SHARE, rest_s / max(left_s, LEAST_S)))


def _planned(run: Run, resources: ExitStack, watch: Watch | None) -> Run | None:
    """Return a run with a plan of the template's kernels; None if there is no such plan."""
    try:
        resources.enter_context(run.resources)
        plan_run(run, watch)
        return run
    except (InfeasibleError, InvalidGraphError) as error:
        logger.info("the kernels of another size are no plan: %s", error)
        return None


def _built(run: Run | None, watch: Watch | None) -> Run | None:
    """Return a run with the executable of its plan; None if its results are not accurate."""
    if run is None:
        return None
    try:
        build_run(run, watch)
        return run
    except InaccurateError as error:
        logger.info("the kernels of another size are not accurate: %s", error)
        return None


def _executable(run: Run) -> Executable:
    executable = run.results["build"].executable
    if not isinstance(executable, Executable):
        raise AssertionError("an executable of another target")
    return executable
