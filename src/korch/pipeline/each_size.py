"""A model with a few sizes -> an executable with a plan for each, all of them with the kernels of one search.

Windows along an axis of many sizes cost masks and columns that only the largest size needs. A plan for exactly one
size has neither. So one size is searched, and its kernels are made for the extents of the others, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from korch.backend import builder_of
from korch.deadline import Deadline
from korch.errors import InfeasibleError, InvalidGraphError
from korch.options import Options
from korch.pipeline.optimize import Watch, optimize_run
from korch.pipeline.run import Progress, Run, Template
from korch.pipeline.source import Source
from korch.ranges.exact import all_sizes, count_sizes, exact_plans, has_free_windows
from korch.ranges.form import Dimension, Sizes
from korch.ranges.lockstep import Samples
from korch.ranges.samples import sample
from korch.runtime.executable import Executable
from korch.runtime.ranged import RangedExecutable, Ranges
from korch.runtime.shaped import combine

logger = logging.getLogger("korch.pipeline")

PRIMITIVE_S = 0.0155
"""The time per primitive to compile and check a plan with the kernels of another size's plan."""

SEARCH_SHARE = 0.2
"""The least share of a budget for the search at the first size; with less, there are no plans for each size."""

LEAST_S = 1.0
"""The least budget of a plan."""


def has_time_for_each(source: Source, options: Options, deadline: Deadline) -> bool:
    """Return whether each size gets a plan of its own: windows depend on the size, and there are few sizes, and time.

    Args:
        source: the model.
        options: with the limit of sizes.
        deadline: the time at which the artifact must be on disk.
    """
    dimensions = source.dimensions
    if not 1 < count_sizes(dimensions) <= options.search.exact_sizes:
        return False
    ends = _highest(dimensions), _lowest(dimensions)
    graphs = tuple(map(source.primitives, ends))
    is_windowed = has_free_windows(Samples(dimensions, ends, graphs))
    rest_s = PRIMITIVE_S * len(graphs[0].primitives) * (count_sizes(dimensions) - 1)
    has_time = deadline.left_s is None or rest_s <= (1 - SEARCH_SHARE) * deadline.left_s
    if is_windowed and not has_time:
        logger.info("plans for each of %d sizes would take %.0f s", count_sizes(dimensions), rest_s)
    return is_windowed and has_time


def optimize_each(
    source: Source, options: Options, progress: Progress, deadline: Deadline, watch: Watch | None
) -> RangedExecutable:
    """Return an executable with a plan for each size.

    Args:
        source: the model.
        options: how to optimize.
        progress: called with a stage's name and a line of text.
        deadline: the time at which the artifact must be on disk.
        watch: called after each stage.

    Raises:
        UnsupportedError: an axis of an input follows from no dimension.
        KorchError: as `optimize_model`.
    """
    dimensions = source.dimensions
    sizes = all_sizes(dimensions)
    plans = exact_plans(sample(dimensions, _highest(dimensions), source.primitives), sizes)
    found: list[Executable] = []
    templates: list[Template] = []
    rest_s = PRIMITIVE_S * len(source.primitives(sizes[0]).primitives) * (len(sizes) - 1)
    for i, own in enumerate(sizes):
        text = ", ".join(f"{d}={n * d.step}" for d, n in zip(dimensions, own, strict=True))
        progress("frontend", f"a plan for {text}" + (" with the kernels of the first" if templates else ""))
        end = deadline.shared(len(sizes) - i) if i else _first_end(deadline, rest_s)
        model, binding = source.bound(own)
        budget_s = None if end.left_s is None else max(LEAST_S, end.left_s)
        own_options = replace(options.for_search(i), budget_s=budget_s)
        make = partial(Run, own_options, binding, progress, model, given=end)
        found.append(_executable(make, templates, watch))
    if deadline.is_over:
        logger.warning("plans for %d sizes took longer than the budget: give more, or fewer sizes", len(sizes))
    return RangedExecutable(*combine(found, builder_of(options)), Ranges(dimensions, plans))


def _first_end(deadline: Deadline, rest_s: float) -> Deadline:
    """Return when the search at the first size ends."""
    left_s = deadline.left_s
    return deadline if left_s is None else deadline.less(min(1 - SEARCH_SHARE, rest_s / max(left_s, LEAST_S)))


def _executable(make: Callable[..., Run], templates: list[Template], watch: Watch | None) -> Executable:
    """Return the executable of one size; the first one adds its plan to the templates."""
    executable: object = None
    if templates:
        try:
            executable = optimize_run(make(template=templates[0]), watch).executable
        except (InfeasibleError, InvalidGraphError) as error:
            logger.info("the kernels of another size are no plan: %s", error)
    if executable is None:
        keep = None if templates else templates.append
        executable = optimize_run(make(keep=keep), watch).executable
    if not isinstance(executable, Executable):
        raise AssertionError("an executable of another target")
    return executable


def _lowest(dimensions: tuple[Dimension, ...]) -> Sizes:
    return tuple(d.low for d in dimensions)


def _highest(dimensions: tuple[Dimension, ...]) -> Sizes:
    return tuple(d.high for d in dimensions)
