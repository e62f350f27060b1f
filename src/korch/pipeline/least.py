"""The least budget of a search, estimated from the model's primitives before the search begins.

The shortest path to an artifact chooses a plan by estimates, and compiles, builds, checks and writes it. Its time
depends on the number of different kernels most. Durations are scaled by the share of the cores that this process gets.
"""

from __future__ import annotations

from dataclasses import dataclass

from korch.cores import slowness
from korch.measure.cpu import usual_pace
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.validation.validate import BUILD_KERNELS, WEIGHTS_BYTES

CALIBRATION_S = 3.0
"""Seconds to measure a machine that is not in the cache."""

SEARCH_S, PRIMITIVE_S = 0.4, 0.003
"""Seconds to find candidates and to solve the program: at least, and per primitive."""

KIND_KERNELS, PRIMITIVE_KERNELS = 0.3, 0.012
"""The work to compile a plan, as a number of long kernels: per kind of primitive, and per primitive."""

PRIMITIVE_BUILD = 0.1
"""The work to build a plan per primitive, as a number of kernels."""

FLOP_S, ELEMENT_S = 1e-10, 3e-8
"""Seconds of the interpreter, which computes the results with which a plan is compared."""

RANGE_S, CHECKED = 2.0, 4
"""Seconds to time a plan for a range at several sizes, and the number of sizes at which it is compared."""

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


def least_of(graph: PrimitiveGraph, options: Options, *, is_range: bool = False) -> Least:
    """Return the predicted seconds of the shortest path from a model's primitives to an artifact for the CPU.

    Args:
        graph: the primitives.
        options: the threads and the cache folder.
        is_range: whether the plan is for a range, and is compared with the model and timed at several sizes.
    """
    pace, is_calibrated = usual_pace(options)
    factor = MARGIN * slowness()
    primitives = graph.primitives
    kinds = len({(p.op, p.attributes, *(str(graph.types[v]) for v in p.inputs)) for p in primitives})
    compiled = KIND_KERNELS * kinds + PRIMITIVE_KERNELS * len(primitives)
    weights_bytes = sum(constant.array.nbytes for constant in graph.constants.values())
    run_s = FLOP_S * graph.total_flop
    run_s += ELEMENT_S * sum(graph.types[p.output].size for p in primitives)
    search_s = run_s + SEARCH_S + PRIMITIVE_S * len(primitives) + (0.0 if is_calibrated else CALIBRATION_S)
    build_s = pace.predict_s(
        "build", BUILD_KERNELS + PRIMITIVE_BUILD * len(primitives) + 2 * weights_bytes / WEIGHTS_BYTES
    )
    build_s += (RANGE_S + CHECKED * run_s) if is_range else 0.0
    return Least(factor * search_s, factor * pace.predict_s("compile", compiled), factor * build_s)
