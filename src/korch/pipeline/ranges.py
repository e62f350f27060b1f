"""A model with ranges of sizes -> executables for a few upper sizes, each compared with the model at smaller sizes."""

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from korch.backend import builder_of
from korch.errors import InaccurateError, OptionError, UnprovidedError, UnsupportedError
from korch.inputs import Arrays, converted, named_arrays, where_of
from korch.limits import SearchLimits
from korch.numerics import Standard
from korch.options import Options
from korch.pipeline.each_size import has_time_for_each, optimize_each
from korch.pipeline.fit_costs import fit_costs
from korch.pipeline.least import PlanWork, announce, least_of, work_of
from korch.pipeline.optimize import Watch, optimize_run
from korch.pipeline.run import Run
from korch.pipeline.source import Source
from korch.primitive.op import Array
from korch.ranges.exact import count_sizes
from korch.ranges.form import Dimension, Sizes, sizes_text
from korch.ranges.lockstep import HINT
from korch.ranges.masked import share_of
from korch.ranges.samples import upper_sizes
from korch.report.progress import Progress, Update
from korch.runtime.combine import combine
from korch.runtime.executable import Executable
from korch.runtime.padding import padded_run
from korch.runtime.ranged import RangedExecutable, Ranges
from korch.system.cores import slowness
from korch.system.deadline import Deadline
from korch.validation.standard import GIVE_INPUTS, standard_of

FIT_SHARE = 0.08  # share of the time of a search reserved to time its plans at several sizes
CHECKED_FLOP = 4e10  # limits the sizes, except the largest, at which a plan is checked: most work of the model there
CHECKED_SIZES = 3  # number of sizes at which a plan for a range is compared with the model even without time
RANDOM_SIZES = 2  # how many of the sizes at which it is compared are random

LARGER_SHARE = 1.2
"""A larger plan gets this many times an equal share of the time: its kernels take longer, and serve more sizes."""

CHECK_SHARE = 0.03
"""The largest fraction of the remaining time for a comparison with the model at one size."""

COMBINE_S, BYTE_S = 1.0, 5e-9
"""Seconds to combine and to write the plans on an idle machine: at least, and per byte of weights."""

TIMED_SHARES = (0.5, 0.0, 0.125, 0.03)
"""The positions between the smallest and the largest size of a plan at which kernels are timed, the main one first."""

NEAR_SIZES = 2
"""Any two sizes at which kernels are timed differ by more than this factor in some dimension."""


def optimize_ranges(
    source: Source, options: Options, progress: Progress, deadline: Deadline, watch: Watch | None = None
) -> RangedExecutable:
    """Return an executable for all sizes of the ranges.

    `deadline`: the time at which the artifact must be on disk.

    Raises:
        UnsupportedError: a node can't be run for a range of sizes, or runs on the host.
        InaccurateError: a plan's results differ from the model's at one of the sizes.
        KorchError: as `optimize_model`.
    """
    given, options = _given(source, options), replace(options, inputs=None)
    try:
        is_for_each = has_time_for_each(source, options, deadline)
        executable = None if is_for_each else _for_all(source, options, progress, deadline, watch)
        if executable is None:
            executable = optimize_each(source, options, progress, deadline, watch)
    except UnprovidedError as error:
        raise no_ranges(error) from error
    if given is not None:
        sizes = executable.sizes_of([array.shape for array in given.values()])
        model = source.primitives(sizes)
        _compare(
            standard_of(model, model, replace(options, inputs=given)),
            executable(*given.values()),
            sizes_text(source.dimensions, sizes),
        )
    return executable


def no_ranges(reason: object) -> UnsupportedError:
    """Return the error for a model of which the host runs a part, for this reason."""
    what = f"a part of the model runs on the host, which takes no ranges of sizes ({reason})"
    return UnsupportedError(what, where="option --shape", hint=HINT)


def _for_all(
    source: Source, options: Options, progress: Progress, deadline: Deadline, watch: Watch | None
) -> RangedExecutable | None:
    """Return an executable of plans that serve all sizes up to their own; None if each size needs its own plan."""
    try:
        found, ranges = plans_for_all(source, options, progress, deadline, watch)
        return RangedExecutable(*combine(found, builder_of(options)), ranges)
    except UnsupportedError as error:
        if not 1 < count_sizes(source.dimensions) <= options.search.exact_sizes:
            raise
        progress(Update("frontend", f"a plan for each size, because no plan serves all sizes: {error.what}"))
        return None


def _given(source: Source, options: Options) -> Arrays | None:
    """Return the inputs that the user gives, which may have any sizes of the ranges; None if there are none."""
    if options.inputs is None:
        return None
    where, model = where_of(options.inputs), source.primitives(tuple(d.high for d in source.dimensions))
    types = {name: model.types[value] for name, value in model.inputs}
    arrays = named_arrays(options.inputs, types, where)
    for name, type_ in types.items():
        shape = arrays[name].shape
        if len(shape) != type_.rank or any(n > most for n, most in zip(shape, type_.shape, strict=True)):
            raise OptionError(f"array {name!r} has shape {list(shape)}", where, f"at most {list(type_.shape)}")
    return {name: converted(name, arrays[name], type_.dtype.numpy, where) for name, type_ in types.items()}


def plans_for_all(
    source: Source, options: Options, progress: Progress, deadline: Deadline, watch: Watch | None
) -> tuple[list[Executable], Ranges]:
    """Return executables for a few upper sizes, and how they serve all sizes of the ranges."""
    dimensions, limits = source.dimensions, options.search
    columns = _columns(dimensions, limits)
    uppers = list(itertools.product(*columns))
    found, plans, fixed_s = [], [], 0.0
    for i, sizes in enumerate(uppers):
        begun_s, left_s = time.monotonic(), deadline.left_s
        if i and left_s is not None and left_s < fixed_s:
            break  # the first plan serves these sizes, too
        progress(Update("frontend", f"a plan for sizes up to {sizes_text(dimensions, sizes)}"))
        work, pace = work_of(source.primitives(sizes)), slowness()
        checks = _checked_sizes(dimensions, columns, sizes, _checked_share(work, left_s, pace), limits)
        needed = checks[: 1 + CHECKED_SIZES]
        shares = [share_of(checked, sizes) for checked in needed]
        left = len(uppers) - i
        share = left if left == 1 else left / LARGER_SHARE
        least = least_of(work, options, shares)
        if left_s is not None and least.total_s > left_s / share:
            share = 1  # there is time for one plan at most
        announce(least, options.budget_s, deadline)
        whole = source.masked(sizes)
        timed, *others = _timed(dimensions, columns, sizes)
        whole = replace(
            whole,
            plan=replace(whole.plan, timed=timed),
            others=tuple(others),
            checked=tuple(needed),
            model=source.primitives(checks[0]),
        )
        rest_s = COMBINE_S + BYTE_S * work.weights_bytes + work.reference_s * sum(shares[1:])
        end = deadline.shared(share).before(pace * rest_s)
        model, binding = source.bound(sizes)
        given = end.before(FIT_SHARE * (end.left_s or 0.0))
        run = Run(options.for_search(i), binding, progress, model, given=given, masked=whole)
        run = optimize_run(run, watch)
        executables = run.results["build"].sized
        found += [executable for _, executable in executables]
        served = [replace(whole.plan, timed=plan.timed, measured=plan.measured) for plan, _ in executables]
        progress(Update("build", f"timing {len(served)} plans at several sizes"))
        costs = fit_costs(dimensions, list(zip((e for _, e in executables), served, strict=True)), end, limits)
        for checked in (*checks[1:], *({_highs(dimensions, sizes)} - {*checks})):
            if checked not in needed and not _has_time(end, pace * work.reference_s * share_of(checked, sizes)):
                break
            progress(Update("build", f"comparing with the model at {sizes_text(dimensions, checked)}"))
            model = source.primitives(checked)
            standard = standard_of(model, model, options)
            for _, executable in executables:
                outputs = padded_run(executable, whole.plan, checked, list(standard.inputs.values()))
                _compare(standard, outputs, sizes_text(dimensions, checked))
        plans += [replace(plan, costs=own) for plan, own in zip(served, costs, strict=True)]
        fixed_s = time.monotonic() - begun_s - run.stage_seconds["orchestrate"]
    return found, Ranges(dimensions, tuple(plans))


def compared_shares(
    dimensions: Sequence[Dimension], work: PlanWork, options: Options, deadline: Deadline
) -> list[float]:
    """Return the work at each size at which the first plan is compared, as a fraction of the work at the largest."""
    columns = _columns(dimensions, options.search)
    upper = tuple(column[0] for column in columns)
    share = _checked_share(work, deadline.left_s, slowness())
    checks = _checked_sizes(dimensions, columns, upper, share, options.search)
    return [share_of(checked, upper) for checked in checks[: 1 + CHECKED_SIZES]]


def _columns(dimensions: Sequence[Dimension], limits: SearchLimits) -> list[list[int]]:
    """Return the upper sizes of plans, by dimension."""
    columns = [upper_sizes(d, limits.range_factor, limits.range_least) for d in dimensions]
    # Kernels compute the needed rows of several dimensions, and time is for one search.
    return [column[:1] for column in columns] if len(columns) > 1 else columns


def _checked_share(work: PlanWork, left_s: float | None, pace: float) -> float:
    """Return the largest work at a size at which plans are compared, as a fraction of the work at the largest size."""
    share = min(1.0, CHECKED_FLOP / max(1, work.flop))
    return (
        share if left_s is None else min(share, CHECK_SHARE * max(1.0, left_s) / (pace * max(1e-6, work.reference_s)))
    )


def _has_time(deadline: Deadline, seconds: float) -> bool:
    left_s = deadline.left_s
    return left_s is None or left_s > seconds


def _checked_sizes(
    dimensions: Sequence[Dimension], columns: Sequence[Sequence[int]], upper: Sizes, share: float, limits: SearchLimits
) -> list[Sizes]:
    """Return sizes at which a plan is compared with the model: corners of the sizes that it serves, and random ones.

    `columns`: the upper sizes of plans, by dimension. `share`: the largest work of the model at one of the sizes, as a
    fraction of the work at the largest size; only the lowest sizes may exceed it.
    """
    lows = _lows(dimensions, columns, upper)
    lowest = tuple(d.low for d in dimensions)
    upper = _highs(dimensions, upper)
    rng = np.random.default_rng(limits.seed)
    corners = [lowest, tuple(max(low, n - 1) for low, n in zip(lows, upper, strict=True)), lows]
    corners.append(tuple(max(low, n // 2 + 1) for low, n in zip(lowest, upper, strict=True)))
    for _ in range(RANDOM_SIZES):
        corners.append(tuple(int(rng.integers(low, n + 1)) for low, n in zip(lowest, upper, strict=True)))
    smaller = [_smaller(upper, lowest, upper, share, kept) for kept in range(len(upper))]
    smaller += [_smaller(n, lowest, upper, share, k % len(upper)) for k, n in enumerate(corners)]
    return list(dict.fromkeys(smaller))


def _highs(dimensions: Sequence[Dimension], upper: Sizes) -> Sizes:
    """Return the largest sizes that a plan serves; the upper size of a very short range is larger."""
    return tuple(min(n, d.high) for n, d in zip(upper, dimensions, strict=True))


def _smaller(sizes: Sizes, lowest: Sizes, upper: Sizes, share: float, kept: int) -> Sizes:
    """Return reduced sizes at which the model does at most a fraction of the work at the upper sizes, if possible.

    `kept`: the dimension that is reduced last, so that it remains as large as possible.
    """
    found = list(sizes)
    for d in (*(d for d in range(len(sizes)) if d != kept), kept):
        others = math.prod(n / most for i, (n, most) in enumerate(zip(found, upper, strict=True)) if i != d)
        if others * found[d] > share * upper[d]:
            found[d] = max(lowest[d], int(share / others * upper[d]))
    return tuple(found)


def _lows(dimensions: Sequence[Dimension], columns: Sequence[Sequence[int]], upper: Sizes) -> Sizes:
    """Return the smallest sizes that no smaller plan serves."""
    return tuple(
        next((n + 1 for n in column if n < size), d.low)
        for d, column, size in zip(dimensions, columns, upper, strict=True)
    )


def _timed(dimensions: Sequence[Dimension], columns: Sequence[Sequence[int]], upper: Sizes) -> list[Sizes]:
    """Return the sizes for which a plan's kernels are timed: in the middle of those that it serves, and smaller ones.

    With several dimensions, the geometric middle is used, since the work is a product of the sizes. Sizes that are
    close to an earlier one are left out.
    """
    lows = _lows(dimensions, columns, upper)
    highs = _highs(dimensions, upper)

    def between(low: int, high: int, share: float) -> int:
        place = low + share * (high - low) if len(lows) == 1 or not low else low * (high / low) ** share
        return max(low, min(high, int(place) | 1))

    found: list[Sizes] = []
    for share in TIMED_SHARES:
        sizes = tuple(between(*ends, share) for ends in zip(lows, highs, strict=True))
        if not any(_is_near(sizes, other) for other in found):
            found.append(sizes)
    return found


def _is_near(sizes: Sizes, others: Sizes) -> bool:
    return all(max(n, m) <= NEAR_SIZES * min(n, m) for n, m in zip(sizes, others, strict=True))


def _compare(standard: Standard, outputs: Sequence[Array], at: str) -> None:
    """Raise an error if a plan's outputs differ from the model's."""
    errors, wrong = standard.judge(dict(zip(standard.expected, outputs, strict=True)))
    if wrong:
        raise InaccurateError(
            f"at {at} the error of output {wrong[0]!r} is {errors[wrong[0]].of_largest:.2e} of its largest element",
            where="option --shape",
            hint=GIVE_INPUTS
            if standard.overflows
            else "Give the sizes that you need, separated by commas, or report this with the model",
        )
