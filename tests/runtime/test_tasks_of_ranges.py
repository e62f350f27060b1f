"""Kernels that omit work that a size does not need: equal results as tasks and with joins, at all sizes and threads."""

from __future__ import annotations

import numpy as np
import pytest

import korch
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.runtime.padding import OutputCut
from tests.runtime.ranged_plans import RangedModel, batched_encoder, encoder, planned


def differing(made: RangedModel, joins: Executable, tasks: Executable) -> list[tuple[int, ...]]:
    """Return the sizes at which any bit of the model's results differs."""
    found = []
    for sizes in made.sizes:
        cuts = [OutputCut.of(form, sizes) for form in made.whole.plan.outputs]
        for seed in range(3):
            arrays = made.inputs(sizes, seed)
            sides = (joins(*arrays), tasks(*arrays))
            expected, results = ([cut.apply(a).tobytes() for cut, a in zip(cuts, s, strict=True)] for s in sides)
            if expected != results:
                found.append(sizes)
    return found


@pytest.mark.parametrize(
    ("make", "threads"), [(encoder, 1), (encoder, 3), (encoder, 8), (batched_encoder, 2), (batched_encoder, 8)]
)
def test_tasks_have_the_bits_of_joins_at_each_size(cache_folder, make, threads) -> None:
    made = make()
    with planned(made, cache_folder, threads, (1,)) as (meter, (steps,)):
        joins, tasks = (
            Executable(build(made.whole.graph, steps, meter.target, meter.builder, parts=parts)) for parts in (0, 2)
        )
        text = tasks.sources["main.cpp"]
        assert ("SEGMENT_COUNT = 1;" in text) == (threads > 1)
        assert (" share 16 of " in text or " share 6 of " in text) == (threads > 1)
        assert not differing(made, joins, tasks)


def test_sizes_follow_each_other_in_one_executable(cache_folder) -> None:
    """Results at a size do not depend on those before: the shares of each run are those of its own size."""
    made = encoder()
    with planned(made, cache_folder, 2, (0,)) as (meter, (steps,)):
        joins, tasks = (
            Executable(build(made.whole.graph, steps, meter.target, meter.builder, parts=parts)) for parts in (0, 2)
        )
    cuts = {sizes: [OutputCut.of(form, sizes) for form in made.whole.plan.outputs] for sizes in made.sizes}
    for turn, n in enumerate(np.random.default_rng(0).integers(0, len(made.sizes), 40)):
        sizes = made.sizes[n]
        arrays = made.inputs(sizes, turn)
        sides = zip(cuts[sizes], joins(*arrays), tasks(*arrays), strict=True)
        assert all(np.array_equal(cut.apply(a), cut.apply(b)) for cut, a, b in sides)


def test_a_range_is_optimized_with_tasks(cache_folder) -> None:
    made = encoder(33)
    options = {
        "measure": False,
        "threads": 2,
        "ablation": korch.Ablation(baselines=False),
        "cache_folder": cache_folder,
    }
    joins, tasks = (
        korch.optimize(made.source, shapes=made.shapes, schedule=schedule, **options) for schedule in ("joins", "tasks")
    )
    assert not any(one.plan.waiting.runs_tasks for one in joins.executables)
    assert all(one.plan.waiting.runs_tasks for one in tasks.executables)
    for n in (1, 16, 17, 32, 33):
        rng = np.random.default_rng(n)
        feeds = {"x": rng.standard_normal((1, n, 32), np.float32), "bias": rng.standard_normal((1, n), np.float32)}
        assert joins.run(None, feeds)[0].tobytes() == tasks.run(None, feeds)[0].tobytes()
