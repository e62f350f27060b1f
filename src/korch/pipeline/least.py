"""The least budget of a search, estimated before the search begins, and announced once.

The shortest path to an artifact chooses a plan by estimates, and compiles, builds, checks and writes it. Its time
depends on the number of different kernels most. Durations are scaled by the share of the cores that this process gets.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.measure.cpu import usual_pace
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.primitive.ops.loop import LoopAttributes
from korch.primitive.reference import body_of
from korch.system.cores import slowness
from korch.system.deadline import Deadline
from korch.validation.validate import BUILD_KERNELS, WEIGHTS_BYTES

CALIBRATION_S = 1.0
"""Seconds to measure a machine that is not in the cache, with as few tries as a short budget leaves."""

SEARCH_S, PRIMITIVE_S = 0.4, 0.003
"""Seconds to find candidates and to solve the program: at least, and per primitive."""

KIND_KERNELS: Mapping[Category, float] = {
    Category.LINEAR: 1.0,
    Category.REDUCE: 0.3,
    Category.OPAQUE: 0.3,
    Category.ELEMENTWISE: 0.2,
    Category.LAYOUT: 0.14,
    Category.BROADCAST: 0.1,
}
"""The work to print and compile a plan, as a number of long kernels, per kind of primitive; primitives of one kind have
the same operation, attributes and types."""

PRIMITIVE_BUILD = 0.1
"""The work to build a plan per primitive, as a number of kernels."""

FLOP_S, ELEMENT_S, STEP_S = 7e-11, 6e-9, 1e-5
"""Seconds of the interpreter, which computes the results with which a plan is compared; STEP_S is per primitive of each
iteration of a loop."""

RANGE_S = 3.0
"""Seconds to time a plan for a range at several sizes, and to combine plans."""

MARGIN = 1.2

logger = logging.getLogger("korch.pipeline")


@dataclass(frozen=True)
class PlanWork:
    """What must be done for a plan of a model."""

    kernels: float  # the work to compile it, as a number of long kernels
    primitives: float  # the number of primitives
    weights_bytes: int  # the bytes of its constants
    flop: int  # the floating-point operations of a run
    elements: int  # the elements that the primitives of a run compute
    repeated: int = 0  # the number of primitives of all iterations of loops
    read_s: float = 0.0  # the predicted seconds until its primitives are known, on an idle machine

    @property
    def reference_s(self) -> float:
        """The predicted seconds in which the interpreter computes the results on an idle machine."""
        return FLOP_S * self.flop + ELEMENT_S * self.elements + STEP_S * self.repeated


@dataclass(frozen=True)
class Least:
    """The predicted seconds of the shortest path to an artifact."""

    search_s: float  # until there is a plan
    compile_s: float  # to compile its kernels
    end_s: float  # to build, check and write it

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.search_s + self.compile_s + self.end_s


def work_of(graph: PrimitiveGraph) -> PlanWork:
    """Return the work for a plan of a model, from its primitives."""
    primitives = graph.primitives
    kinds = {(p.op, p.attributes, *(graph.types[v] for v in p.inputs)): p.row.category for p in primitives}
    return PlanWork(
        sum(KIND_KERNELS[category] for category in kinds.values()),
        len(primitives),
        graph.weights_bytes,
        graph.total_flop,
        sum(graph.types[p.output].size for p in primitives),
        _repeated(graph),
    )


def _repeated(graph: PrimitiveGraph) -> int:
    """Return the number of primitives of all iterations of a graph's loops, which run once for all of their outputs."""
    loops = {p.operator: a for p in graph.primitives if isinstance(a := p.attributes, LoopAttributes)}
    bodies = ((a.trips, body_of(a.body)) for a in loops.values())
    return sum(trips * (len(body.primitives) + _repeated(body)) for trips, body in bodies)


def least_of(work: PlanWork, options: Options, compared: Sequence[float] = ()) -> Least:
    """Return the predicted seconds of the shortest path from a model to an artifact for the CPU.

    `work`: what must be done for a plan. `compared`: for a plan for a range, the work at each size at which it is
    compared with the model, as a fraction of the work at the largest size.
    """
    pace, is_calibrated = usual_pace(options)
    factor = MARGIN * slowness()
    first, *others = compared or (1.0,)
    run_s = work.reference_s
    search_s = work.read_s + first * run_s + SEARCH_S + PRIMITIVE_S * work.primitives
    search_s += 0.0 if is_calibrated else CALIBRATION_S
    build_s = pace.predict_s(
        "build", BUILD_KERNELS + PRIMITIVE_BUILD * work.primitives + 2 * work.weights_bytes / WEIGHTS_BYTES
    )
    build_s += (RANGE_S + sum(others) * run_s) if compared else 0.0
    compile_s = work.kernels * pace.predict_s("compile")
    return Least(factor * search_s, factor * compile_s, factor * build_s)


def announce(least: Least, budget_s: float | None, deadline: Deadline) -> None:
    """Warn if a budget is less than the least, unless a search has had an estimate already.

    `least`: the predicted seconds from now on. `deadline`: the end of the budget, or of the part of it that is for one
    of several plans; its `whole` keeps the least.
    """
    whole, needed_s = deadline.whole, least.total_s / deadline.share
    left_s = whole.left_s
    if whole.least_s is not None or budget_s is None or left_s is None:
        return
    spent_s = budget_s - left_s
    whole.least_s = math.ceil(spent_s + needed_s) if needed_s > left_s else 0.0
    if whole.least_s:
        parts = "" if deadline.share == 1 else " for one of several plans"
        logger.warning(
            f"the budget of {budget_s:g} s is too short: the least is about {whole.least_s:.0f} s ({spent_s:.0f} until "
            f"now;{parts} {least.search_s:.0f} to find a plan by estimates, {least.compile_s:.0f} to compile its "
            f"kernels, {least.end_s:.0f} to build and check it)"
        )
