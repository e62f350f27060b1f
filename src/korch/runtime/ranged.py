"""One executable for ranges of sizes: plans for a few upper sizes, each of which serves all sizes up to its own.

Inputs are padded with zeros to a plan's sizes, and the plan's outputs are cut to the model's sizes. The plan reads
masks as additional inputs, which keep the padding from changing the results (`korch.ranges`). The file has the format
of an executable for several shapes, plus `ranges.json`: the dimensions, and the sizes and masks of each plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from korch.errors import ArtifactError, InputError
from korch.primitive.op import Array
from korch.ranges.form import Dimension, Factor, Sizes, sizes_text
from korch.ranges.plan import RangePlan
from korch.runtime.artifact import Artifact
from korch.runtime.choice import PlanChoice
from korch.runtime.executable import Executable
from korch.runtime.padding import NO_STATES, Fitting, PaddedPlan, size_at
from korch.runtime.runnable import ArrayType, Runnable, TensorInfo, Timing
from korch.runtime.shaped import ShapedExecutable, Shared

if TYPE_CHECKING:
    from korch.runtime.report import KernelCost, Report, ShapedReport, SizeRecord

FORMAT = "korch-ranged"
RANGES = "ranges.json"

MOST_REMEMBERED = 64
"""The number of input shapes whose plan, masks, padding and cuts are cached."""


@dataclass(frozen=True)
class Ranges:
    """The ranges of an executable.

    Attributes:
        dimensions: the dimensions that have ranges of sizes.
        plans: how each plan serves sizes up to its own.
    """

    dimensions: tuple[Dimension, ...]
    plans: tuple[RangePlan, ...]


class RangedExecutable(ShapedExecutable):
    """Pads inputs of any size within the ranges to the sizes of the fastest plan for them, and cuts its outputs.

    Attributes:
        ranges: the dimensions with ranges of sizes, and how each plan serves them.
    """

    format = FORMAT
    more: ClassVar[Mapping[str, type[Any]]] = {RANGES: Ranges}

    def __init__(self, artifacts: Sequence[Artifact], shared: Shared, ranges: Ranges) -> None:
        """Load the plans of one library.

        Args:
            artifacts: the plans.
            shared: the library, sources and weights of all plans.
            ranges: the sizes that each plan serves.

        Raises:
            ArtifactError: the library can't be loaded here, or has other plans.
        """
        super().__init__(artifacts, shared)
        self._serve(ranges)

    @classmethod
    def of_loaded(cls, executables: Sequence[Executable], shared: Shared, ranges: Ranges) -> Self:
        """Return an executable of loaded plans, which is a part of another one."""
        found = cls.__new__(cls)
        found._shared, found.executables, found.plans = shared, list(executables), {}
        found._serve(ranges)
        return found

    def _serve(self, ranges: Ranges) -> None:
        if len(ranges.plans) != len(self.executables):
            raise ArtifactError("its ranges are not those of its plans")
        self.ranges = ranges
        found = [PaddedPlan(e, plan) for e, plan in zip(self.executables, ranges.plans, strict=True)]
        self._served = sorted(found, key=lambda served: math.prod(served.plan.sizes))
        self._choice = PlanChoice(ranges.dimensions, [served.plan for served in self._served])
        first, plan = self._largest
        self._described = [
            replace(info, shape=list(map(self._range_text, form)))
            for info, form in zip(first.get_inputs(), plan.inputs, strict=False)  # hidden inputs come last
        ]
        self._types = [ArrayType(i.name, (-1,) * len(i.shape), i.dtype) for i in self._described]
        self._offered = [info.name for info in self._described], [info.name for info in first.get_outputs()]
        self._fitting = lru_cache(MOST_REMEMBERED)(self._fit)

    @property
    def report(self) -> ShapedReport:
        """The report of all plans, with their costs by size."""
        plans = self.ranges.plans
        texts = [self._plan_text(plan).replace("up to", "at most", 1) for plan in plans]
        reports = [executable.report for executable in self.executables]
        costs = map(_kernel_costs, self.executables, plans)
        return replace(
            super().report,
            plans=dict(zip(texts, reports, strict=True)),
            costs=dict(zip(texts, costs, strict=True)),
            sizes=tuple(self._size_records(list(zip(plans, texts, reports, strict=True)))),
        )

    def _size_records(self, rows: Sequence[tuple[RangePlan, str, Report]]) -> Iterator[SizeRecord]:
        """Yield what is known of the plan that runs at each size at which kernels were measured."""
        from korch.runtime.report import SizeRecord  # not needed to load and run

        for sizes in sorted({at.sizes for plan in self.ranges.plans for at in plan.measured}):
            _, chosen = self.serving(sizes)
            text = next(text for plan, text, _ in rows if plan is chosen)
            for at in chosen.measured:
                if at.sizes == sizes:
                    gap = (at.sum_ns - at.bound_ns) / max(1, at.sum_ns)
                    known = at.sum_ns / 1e6, at.best_ns / 1e6, at.bound_ns / 1e6, gap
                    yield SizeRecord(self._sizes_text(sizes), text, *known)
        for plan, text, report in rows:
            if plan.is_exact and report.gap is not None:
                known = report.predicted_ms, report.predicted_ms, report.lower_bound_ms, report.gap
                yield SizeRecord(self._sizes_text(plan.sizes), text, *known)

    def facts(self) -> str:
        """Return a line about each plan."""
        ranges = ", ".join(f"{d}={d.range_text}" for d in self.ranges.dimensions)
        plans = (f"{self._plan_text(s.plan)}: {s.executable.facts()}" for s in self._served)
        return "\n  ".join([f"{len(self.executables)} plans for {ranges}", *plans])

    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the inputs; a dimension with a range of sizes is given like "1..512"."""
        return list(self._described)

    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the outputs; a dimension whose size depends on a range is given like "1..512"."""
        executable, plan = self._largest
        if plan.is_exact:
            ends = zip(self._served[0].executable.get_outputs(), executable.get_outputs(), strict=True)
            return [replace(high, shape=list(map(_between, low.shape, high.shape))) for low, high in ends]
        return [
            replace(info, shape=list(map(self._range_text, form)))
            for info, form in zip(executable.get_outputs(), plan.outputs, strict=True)
        ]

    def inputs_at(self, sizes: Sizes) -> list[TensorInfo]:
        """Return descriptions of the inputs for one size of each dimension."""
        _, plan = self._largest
        return [
            replace(info, shape=[size_at(axis, sizes) for axis in form])
            for info, form in zip(self._described, plan.inputs, strict=True)
        ]

    def example_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the inputs with the largest sizes."""
        return self.inputs_at(tuple(d.high for d in self.ranges.dimensions))

    def planned_bindings(self) -> list[dict[str, tuple[int, ...]]]:
        """Return the sizes at which plans were timed, and the largest sizes, as bindings.

        The key of a binding is the name of a dimension, or of an input, which then has its complete shape.
        """
        largest = tuple(d.high for d in self.ranges.dimensions)
        found = []
        for sizes in dict.fromkeys((largest, *(s.plan.timed or largest for s in reversed(self._served)))):
            shapes = {i.name: tuple(i.shape) for i in self.inputs_at(sizes)}
            free = zip(self.ranges.dimensions, sizes, strict=True)
            found.append({d.name: (n * d.step,) if d.axis is None else shapes[d.name] for d, n in free})
        return found

    def sizes_of(self, shapes: Sequence[tuple[int, ...]]) -> Sizes:
        """Return the size of each dimension, in steps, for input arrays of these shapes.

        Raises:
            InputError: an array has the wrong number of axes or a wrong size, or a size is out of its range.
        """
        _, plan = self._largest
        sizes: list[int | None] = [None] * len(self.ranges.dimensions)
        for info, form, shape in zip(self._described, plan.inputs, shapes, strict=True):
            where = f"input {info.name!r}"
            if len(shape) != len(form):
                raise InputError(f"it has {len(shape)} axes", where, f"{len(form)}")
            for axis, (factors, size) in enumerate(zip(form, shape, strict=True)):
                self._read_size(factors, size, f"{where}, axis {axis}", sizes)
        return tuple(0 if size is None else size for size in sizes)

    def _read_size(self, factors: tuple[Factor, ...], size: int, where: str, sizes: list[int | None]) -> None:
        extent = factors[0].extent if factors else None
        if extent is None:
            if size != (wanted := math.prod(factor.size for factor in factors)):
                raise InputError(f"its size is {size}", where, str(wanted))
            return
        dimension = self.ranges.dimensions[extent.dimension]
        steps = dimension.steps_of(size)
        if steps is None:
            raise InputError(
                f"the size {size} of {str(dimension)!r} is out of its range",
                where,
                dimension.range_text,
                "Optimize the model again for more sizes (--shape)",
            )
        known = sizes[extent.dimension]
        if known is not None and known != steps:
            other = f"{known * dimension.step}, as another axis"
            raise InputError(f"the size of {str(dimension)!r} is {size}", where, other)
        sizes[extent.dimension] = steps

    def serving(self, sizes: Sizes) -> tuple[Executable, RangePlan]:
        """Return the fastest plan for some sizes, and how it serves them."""
        served = self._served[self._choice.number(sizes)]
        return served.executable, served.plan

    def plan_for(self, arrays: Sequence[Any]) -> Executable:
        """Return the executable that runs arrays of these shapes after padding."""
        return self.serving(self.sizes_of(tuple(map(np.shape, self.complete(arrays)))))[0]

    def compute(self, arrays: Sequence[Any]) -> tuple[Array, ...]:
        """Run the fastest plan for these arrays, with padding and cutting."""
        if len(arrays) != len(self._types):  # checked first, because most calls give all
            arrays = self.complete(arrays)
        accepted = [type_.accept(array) for type_, array in zip(self._types, arrays, strict=True)]
        return self._fitting(tuple(array.shape for array in accepted)).run(accepted)

    def _names(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._offered

    def _fit(self, shapes: tuple[tuple[int, ...], ...]) -> Fitting:
        return self.fitting_at(self.sizes_of(shapes))

    def fitting_at(self, sizes: Sizes, kept: Mapping[int, int] = NO_STATES) -> Fitting:
        """Return how arrays of some sizes of the dimensions run; `kept` as in `Fitting`."""
        return Fitting(self._served[self._choice.number(sizes)], sizes, kept)

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the model once, with padding and cutting, and returns the nanoseconds."""
        return Runnable.stopwatch(self, arrays)

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Time runs with padding and cutting."""
        return Runnable.time(self, arrays, repeat)

    @property
    def further(self) -> tuple[object, ...]:
        """The ranges, which are in its file, too."""
        return (self.ranges,)

    @property
    def _largest(self) -> tuple[Executable, RangePlan]:
        return self._served[-1].executable, self._served[-1].plan

    def _range_text(self, axis: tuple[Factor, ...]) -> int | str:
        return _between(*(size_at(axis, [getattr(d, end) for d in self.ranges.dimensions]) for end in ("low", "high")))

    def _plan_text(self, plan: RangePlan) -> str:
        if plan.is_exact:
            return f"at {self._sizes_text(plan.sizes)}"
        timed = f", timed at {self._sizes_text(plan.timed)}" if plan.timed else ""
        return f"up to {self._sizes_text(plan.sizes)}{timed}"

    def _sizes_text(self, sizes: Sizes) -> str:
        return sizes_text(self.ranges.dimensions, sizes)


def _between(low: int | str, high: int | str) -> int | str:
    return low if low == high else f"{low}..{high}"


def _kernel_costs(executable: Executable, plan: RangePlan) -> tuple[KernelCost, ...]:
    from korch.runtime.report import KernelCost

    numbers = [(i, step.provider) for i, step in enumerate(executable.plan.steps) if step.runs]
    return tuple(KernelCost(i, name, cost) for (i, name), cost in zip(numbers, plan.costs, strict=False))
