"""Plans of small models with ranges: kernels are chosen at random, and omit work that a size does not need."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from korch.backend import open_meter
from korch.candidate.enumerate import enumerate_groups
from korch.inputs import random_arrays
from korch.measure.cpu import CpuMeter
from korch.options import Options
from korch.primitive.op import Array
from korch.provider.provider import Kernel
from korch.ranges.form import Sizes
from korch.ranges.masked import Masked
from korch.runtime.program import PlanStep
from korch.runtime.trim import trim_steps
from korch.search.instance import Answers, collect_candidates
from tests.ranges.range_models import Shapes, masked_model, model, padded, primitives, weight
from tests.runtime.test_trim import Planner
from tests.runtime.test_trim_two import ENCODER


@dataclass(frozen=True)
class RangedModel:
    """A small model, its ranges, and some of its sizes: odd ones, the least and the largest."""

    source: bytes
    shapes: Shapes
    whole: Masked
    sizes: tuple[Sizes, ...]

    def inputs(self, sizes: Sizes, seed: int) -> list[Array]:
        """Return random inputs of some sizes, as a plan reads them."""
        graph = primitives(self.source, self.shapes, sizes)
        types = {name: graph.types[value] for name, value in graph.inputs}
        feeds = random_arrays({name: (t.shape, t.dtype.numpy) for name, t in types.items()}, seed)
        given = padded(self.whole, feeds) | {hidden.name: hidden.array(sizes) for hidden in self.whole.plan.hidden}
        return [given[name] for name, _ in self.whole.graph.inputs]


def encoder(length: int = 65) -> RangedModel:
    """Return attention and a network behind it, of some rows."""
    sizes = tuple((n,) for n in (1, 2, 5, 15, 16, 17, 31, 33, 48, length - 1, length))
    return _model(ENCODER.replace("[b,", "[1,"), {"n": (range(1, length + 1),)}, sizes)


def batched_encoder(batches: int = 6, length: int = 21) -> RangedModel:
    """Return the same of the rows of a batch."""
    sizes = tuple(itertools.product((1, 2, batches - 1, batches), (1, 7, 16, 17, length)))
    return _model(ENCODER, {"b": (range(1, batches + 1),), "n": (range(1, length + 1),)}, sizes)


def _model(text: str, shapes: Shapes, sizes: tuple[Sizes, ...]) -> RangedModel:
    weights = {name: weight(32, 32) for name in ("wq", "wk", "wv")}
    source = model(text, **weights, wide=weight(32, 96), narrow=weight(96, 32))
    return RangedModel(source, shapes, masked_model(source, shapes), sizes)


@contextmanager
def planned(
    made: RangedModel, folder: Path, threads: int, seeds: Sequence[int]
) -> Iterator[tuple[CpuMeter, list[list[PlanStep[Kernel]]]]]:
    """Yield a meter whose target has some threads, more than there are cores, too, and a plan for each seed."""
    options = Options(cache_folder=folder, threads=1)
    with open_meter(options) as meter:
        assert isinstance(meter, CpuMeter)
        meter.target = replace(meter.target, threads=threads)
        groups, _ = enumerate_groups(made.whole.graph, options)
        candidates, _ = collect_candidates(made.whole.graph, groups, Answers(meter.providers, meter.target))
        planner = Planner(made.whole.graph, candidates, meter)
        plans = (trim_steps(made.whole.graph, planner.plan(s), made.whole.plan, meter.target) for s in seeds)
        yield meter, [[replace(step, cost_ns=10_000.0) for step in steps] for steps in plans]
