"""Plans whose kernels omit work that a size does not need give the model's results; all other memory has NaN."""

import ctypes
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from korch.backend import open_meter
from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.layout import Layout
from korch.events.kernels import has_tasks
from korch.measure.cpu import CpuMeter
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.provider import tile_kernel
from korch.provider.provider import Kernel
from korch.ranges.masked import Masked
from korch.ranges.needed import Ends
from korch.runtime.bind import PlanStep
from korch.runtime.padding import OutputCut
from korch.search.instance import Answers, collect_candidates
from korch.system.alignment import aligned_bytes
from korch.testing.kernels import load_kernels
from tests.provider.test_verified import shorter
from tests.ranges import range_models
from tests.ranges.range_models import as_served, at_sizes, masked_model, model, weight
from tests.support.emulated import Emulated

LENGTH = 21
SHAPES = {"n": (range(1, LENGTH + 1),)}
LENGTHS = (1, 7, 8, 9, LENGTH - 1, LENGTH)
"""Sizes at which a plan is compared: around vectors, and the largest ones."""

IMAGE_COUNT = 9
BATCH = {"n": (range(1, IMAGE_COUNT + 1),)}

PROJECTED = """
g (float[n, 8] x) => (float[n, 8] y, float[8] mean)
{
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    t = Transpose <perm = [1, 0]> (k)
    s = MatMul(q, t)
    p = Softmax <axis = -1> (s)
    v = MatMul(x, wv)
    b = Add(v, bias)
    y = MatMul(p, b)
    mean = ReduceMean <axes = [0], keepdims = 0> (y)
}
"""

OF_ITSELF = """
g (float[n, 8] x, float[n] bias) => (float[n, 8] y)
{
    t = Transpose <perm = [1, 0]> (x)
    s = MatMul(x, t)
    b = Add(s, bias)
    p = Softmax <axis = -1> (b)
    y = MatMul(p, x)
}
"""


IMAGES = """
g (float[n, 50, 8] x) => (float[n, 2, 50, 8] y)
{
    q = MatMul(x, wide)
    r = Relu(q)
    z = MatMul(r, narrow)
    s = Reshape(z, shape)
    y = Transpose <perm = [0, 2, 1, 3]> (s)
}
"""


class Planner:
    """Makes plans of kernels that are chosen at random, all in plain layouts."""

    def __init__(self, graph: PrimitiveGraph, candidates: Sequence[Candidate], meter) -> None:
        self.graph, self.meter = graph, meter
        self.by_value: dict[int, list[Candidate]] = {}
        for candidate in candidates:
            if candidate.group.primitives and not candidate.offer.is_in_place and self._is_plain(candidate):
                for value in candidate.group.outputs:
                    self.by_value.setdefault(value, []).append(candidate)

    def _is_plain(self, candidate: Candidate) -> bool:
        ports = (*candidate.input_ports, *candidate.output_ports)
        return all(layout == Layout.plain(len(self.graph.types[value].shape)) for value, layout in ports)

    def plan(self, seed: int) -> list[PlanStep[Kernel]]:
        """Return the steps of a plan in the order in which they run."""
        rng, steps = random.Random(seed), []
        there = {value for _, value in self.graph.inputs} | self.graph.constants.keys()

        def make(value: int) -> None:
            if value in there:
                return
            options = list(self.by_value[value])
            rng.shuffle(options)
            kernels = ((candidate, self.meter.kernel(candidate)) for candidate in options)
            candidate, kernel = next((c, k) for c, k in kernels if isinstance(k, Kernel) and k.program is not None)
            for given in candidate.group.inputs:
                make(given)
            steps.append(PlanStep(candidate, kernel))
            there.update(candidate.group.outputs)

        for _, value in self.graph.outputs:
            make(value)
        return steps


def execute(
    graph: PrimitiveGraph, steps: Sequence[PlanStep[Kernel]], library: ctypes.CDLL, feeds: Mapping[str, Array]
) -> dict[str, Array]:
    """Return the outputs of a plan; each value is in memory that was full of NaN before."""
    inputs = dict(graph.inputs)
    memory = {inputs[name]: memory_of(array) for name, array in feeds.items()}
    for step in steps:
        group, offer, kernel = step.candidate.group, step.candidate.offer, step.kernel
        buffers = []
        for value, layout in zip(group.inputs, offer.inputs, strict=True):
            constant = graph.constants.get(value)
            buffers.append(memory[value] if constant is None else memory_of(layout.pack(constant.array)))
        for value, layout, type_ in zip(group.outputs, offer.outputs, group.output_types, strict=True):
            memory[value] = aligned_bytes(layout.size_bytes(type_))
            memory[value][:] = 0xFF
            buffers.append(memory[value])
        if kernel.workspace_bytes:
            buffers.append(aligned_bytes(kernel.workspace_bytes))
            buffers[-1][:] = 0xFF
        if kernel.size_input:
            buffers.append(memory[inputs[kernel.size_input]])
        pointers = (ctypes.c_void_p * len(buffers))(*(buffer.ctypes.data for buffer in buffers))
        assert library.function(f"{kernel.symbol}_run")(None, pointers) == 0
    types = graph.types
    return {name: memory[v].view(types[v].dtype.numpy).reshape(types[v].shape) for name, v in graph.outputs}


def memory_of(array: Array) -> Array:
    dense = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    memory = aligned_bytes(dense.nbytes)
    memory[:] = dense
    return memory


def wrong_sizes(
    source: bytes,
    whole: Masked,
    steps: Sequence[PlanStep[Kernel]],
    library: ctypes.CDLL,
    shapes: Mapping[str, tuple[range]] = SHAPES,
) -> list[int]:
    """Return the sizes at which a plan does not give the model's results."""
    (sizes_of_n,) = shapes["n"]
    return [n for n in LENGTHS if n in sizes_of_n and is_wrong(source, whole, steps, library, shapes, (n,))]


def is_wrong(
    source: bytes,
    whole: Masked,
    steps: Sequence[PlanStep[Kernel]],
    library: ctypes.CDLL,
    shapes: Mapping[str, tuple[range]],
    sizes: tuple[int, ...],
) -> bool:
    """Return whether a plan does not give the model's results at a size."""
    wanted, given, masks = at_sizes(source, shapes, whole, sizes)
    found = execute(whole.graph, steps, library, given | masks)
    return not all(
        np.allclose(OutputCut.of(form, sizes).apply(found[name]), wanted[name], rtol=1e-3, atol=1e-4)
        for name, form in zip(wanted, whole.plan.outputs, strict=True)
    )


def planner_of(whole: Masked, meter: CpuMeter, options: Options) -> Planner:
    """Return a planner with the candidates of a model's groups."""
    groups, _ = enumerate_groups(whole.graph, options)
    candidates, _ = collect_candidates(whole.graph, groups, Answers(meter.providers, meter.target))
    return Planner(whole.graph, as_served(whole, whole.graph, candidates, meter.target.lanes), meter)


def plans_of(
    whole: Masked, folder: Path, count: int
) -> tuple[list[list[PlanStep[Kernel]]], list[Kernel], ctypes.CDLL | Emulated]:
    """Return random plans whose kernels leave out what a size does not need, the kernels, and their library."""
    options = Options(cache_folder=folder, threads=2)
    with open_meter(options) as meter:
        planner = planner_of(whole, meter, options)
        plans = [planner.plan(seed) for seed in range(count)]
        kernels = list({step.kernel.symbol: step.kernel for steps in plans for step in steps}.values())
        return plans, kernels, load_kernels(kernels, meter.builder)


def test_tasks_end_within_an_image(cache_folder) -> None:
    """An image of a batch is 50 rows: tasks end with the last row that is needed, whatever their rows."""
    values = {"wide": weight(8, 96), "narrow": weight(96, 16), "shape": np.array([0, 50, 2, 8])}
    source = model(IMAGES, **values)
    whole = masked_model(source, BATCH)
    plans, kernels, library = plans_of(whole, cache_folder, 3)
    products = [kernel.source for kernel in kernels if "matmul" in kernel.source]
    assert products and all(re.search(rf"smin.i64\(i64 {50 * IMAGE_COUNT}, i64 %", source) for source in products)
    for steps in plans:
        assert not wrong_sizes(source, whole, steps, library, BATCH)


def test_results_of_which_different_numbers_are_needed_are_computed_together(cache_folder) -> None:
    """A product whose result is read in whole vectors behind a mask, and as it is elsewhere."""
    options = Options(cache_folder=cache_folder, threads=2)
    weights = {name: weight(8, 8) for name in ("wq", "wk", "wv")} | {"bias": weight(8)}
    whole = masked_model(model(PROJECTED, **weights), SHAPES)
    with open_meter(options) as meter:
        by_value = planner_of(whole, meter, options).by_value
        found = []
        for candidate in {c.key: c for own in by_value.values() for c in own}.values():
            needs = candidate.served.needs if candidate.served is not None else ()
            kernel = meter.kernel(candidate)
            is_mixed = len({need.get(0) for need in needs} - {None}) > 1
            if is_mixed and isinstance(kernel, Kernel) and kernel.program is not None:
                found.append(kernel)
    assert found and all(kernel.size_input and not has_tasks(kernel) for kernel in found)


@pytest.mark.fault
def test_programs_for_sizes_are_checked(cache_folder, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """A plan has kernels that compute all sizes if those that end write behind the ends of their outputs."""
    check = tile_kernel.check_program
    monkeypatch.setattr(tile_kernel, "check_program", lambda p: check(shorter(p) if p.parameters else p))
    whole = masked_model(model(IMAGES, wide=weight(8, 96), narrow=weight(96, 16), shape=np.array([0, 50, 2, 8])), BATCH)
    with caplog.at_level("WARNING"):
        (steps,), kernels, _ = plans_of(whole, cache_folder, 1)
    refused = [record.getMessage() for record in caplog.records if "computes all sizes" in record.getMessage()]
    assert refused and all("reaches" in text for text in refused)
    assert steps and not any(kernel.size_input for kernel in kernels)


def test_plans_give_the_results_of_the_model(cache_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a mutation: that reductions of some kernels read one vector less than these do is found."""
    options = Options(cache_folder=cache_folder, threads=2)
    weights = {name: weight(8, 8) for name in ("wq", "wk", "wv")} | {"bias": weight(8)}
    with open_meter(options) as meter:
        cases = []
        for source, seeds in ((model(PROJECTED, **weights), (0, 1)), (model(OF_ITSELF), (0,))):
            whole = masked_model(source, SHAPES)
            planner = planner_of(whole, meter, options)
            cases += [(source, whole, planner.plan(seed)) for seed in seeds]
        source, whole, _ = cases[0]

        def too_few(found: Mapping[int, Ends], step: int) -> dict[int, Ends]:
            return {p: {axis: e.then(-step) for axis, e in own.items()} for p, own in found.items()}

        monkeypatch.setattr(range_models, "in_whole_vectors", too_few)
        mutated = planner_of(whole, meter, options).plan(0)
        kernels = {step.kernel.symbol: step.kernel for *_, steps in [*cases, (mutated,)] for step in steps}
        library = load_kernels(list(kernels.values()), meter.builder)
    counts = [[count for _, count in step.kernel.counts] for *_, steps in cases for step in steps]
    assert sum(any(e.step > 1 for count in own for e in count.extents) for own in counts) >= 6
    for case in cases:
        assert not wrong_sizes(*case, library)
    assert wrong_sizes(source, whole, mutated, library)
