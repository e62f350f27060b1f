"""The least budget of a search, estimated from the model's primitives before the search begins.

The shortest path to an artifact chooses a plan by estimates, and compiles, builds, checks and writes it. Its time
depends on the number of different kernels most. Durations are scaled by the share of the cores that this process gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from korch.measure.cpu import usual_pace
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category
from korch.system.cores import slowness
from korch.validation.validate import BUILD_KERNELS, WEIGHTS_BYTES

CALIBRATION_S = 3.0
"""Seconds to measure a machine that is not in the cache."""

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
"""The work to compile a plan, as a number of long kernels, per kind of primitive; primitives of one kind have the same
operation, attributes and types."""

PRIMITIVE_BUILD = 0.1
"""The work to build a plan per primitive, as a number of kernels."""

FLOP_S, ELEMENT_S = 1e-10, 3e-8
"""Seconds of the interpreter, which computes the results with which a plan is compared."""

RANGE_S = 3.0
"""Seconds to time a plan for a range at several sizes, and to combine plans."""

MARGIN = 1.2


@dataclass(frozen=True)
class Least:
    """The predicted seconds of the shortest path to an artifact.

    Attributes:
        search_s: until there is a plan.
        compile_s: to compile its kernels.
        end_s: to build, check and write it.
    """

    search_s: float
    compile_s: float
    end_s: float

    @property
    def total_s(self) -> float:
        """The sum."""
        return self.search_s + self.compile_s + self.end_s


def reference_s(graph: PrimitiveGraph) -> float:
    """Return the predicted seconds in which the interpreter computes the results of a model on an idle machine."""
    elements = sum(graph.types[p.output].size for p in graph.primitives)
    return FLOP_S * graph.total_flop + ELEMENT_S * elements


def least_of(graph: PrimitiveGraph, options: Options, compared: Sequence[float] = ()) -> Least:
    """Return the predicted seconds of the shortest path from a model's primitives to an artifact for the CPU.

    Args:
        graph: the primitives.
        options: the threads and the cache folder.
        compared: for a plan for a range, the work at each size at which it is compared with the model, as a fraction
            of the work at the largest size.
    """
    pace, is_calibrated = usual_pace(options)
    factor = MARGIN * slowness()
    primitives = graph.primitives
    kinds = {(p.op, p.attributes, *(graph.types[v] for v in p.inputs)): p.row.category for p in primitives}
    compiled = sum(KIND_KERNELS[category] for category in kinds.values())
    weights_bytes = sum(constant.array.nbytes for constant in graph.constants.values())
    first, *others = compared or (1.0,)
    run_s = reference_s(graph)
    search_s = first * run_s + SEARCH_S + PRIMITIVE_S * len(primitives) + (0.0 if is_calibrated else CALIBRATION_S)
    build_s = pace.predict_s(
        "build", BUILD_KERNELS + PRIMITIVE_BUILD * len(primitives) + 2 * weights_bytes / WEIGHTS_BYTES
    )
    build_s += (RANGE_S + sum(others) * run_s) if compared else 0.0
    return Least(factor * search_s, factor * pace.predict_s("compile", compiled), factor * build_s)
