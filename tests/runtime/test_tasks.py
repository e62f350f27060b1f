"""Kernels that run as tasks of queues have the same results as kernels with a join after each."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from korch.candidate.candidate import Candidate, Refusal, make_group, make_layout_change
from korch.candidate.layout import Layout, channels_last
from korch.errors import InvalidGraphError
from korch.events.check import check_queues
from korch.events.kernels import Splitter, Use, segments_of
from korch.events.queues import QueuedTask
from korch.events.schedule import schedule_segment
from korch.measure.compiler import Builder
from korch.measure.llvm_process import llvm_identity
from korch.primitive import reference
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import BroadcastAttributes, ReduceAttributes
from korch.provider.conv import ConvProvider
from korch.provider.gemm import GemmProvider
from korch.provider.generated import GeneratedProvider
from korch.runtime import build as building
from korch.runtime.bind import PlanStep, bind_steps
from korch.runtime.build import build
from korch.runtime.combine import combine
from korch.runtime.executable import Executable
from korch.runtime.shaped import ShapedExecutable
from korch.target import detect_target
from tests.runtime import runtime_plans as plans

PROVIDERS = (GeneratedProvider(), ConvProvider(), GemmProvider())


def network(rows=21):
    """Return convolutions of several kinds, a branch, a scale of channels, and a softmax."""
    rng = np.random.default_rng(0)
    builder, x = plans.new_graph(x=f"f32[1,32,{rows},18]")

    def conv(value, channels, out, window, stride=1, groups=1):
        weights = rng.standard_normal((out, channels // groups, window, window), np.float32) / 8
        pads = (window // 2,) * 2
        return builder.add(
            "conv", [value, builder.constant(weights)], ConvAttributes((stride,) * 2, pads, pads, (1, 1), groups)
        )

    a = builder.add("neg", [conv(x, 32, 32, 3, groups=32)])
    b = builder.add("tanh", [conv(a, 32, 48, 1)])
    c = conv(b, 48, 48, 3, stride=2)
    d = conv(builder.add("abs", [b]), 48, 48, 1)
    mean = builder.add("reduce_sum", [d], ReduceAttributes((2, 3)))
    scaled = builder.add("mul", [d, builder.add("broadcast", [mean], BroadcastAttributes((1, 48, rows, 18)))])
    builder.output("y", builder.add("exp", [builder.add("neg", [builder.add("abs", [scaled])])]))
    builder.output("z", builder.add("tanh", [c]))
    return builder.freeze()


def steps_of(graph, target):
    """Return a kernel for each primitive, with images channels last, and changes of layout."""
    ends = [(value, True) for _, value in graph.inputs], [(value, False) for _, value in graph.outputs]
    changes = [[(make_layout_change(graph, value), is_input) for value, is_input in side] for side in ends]
    groups = [make_group(graph, [i], [primitive.output]) for i, primitive in enumerate(graph.primitives)]
    rows = [*changes[0], *((group, None) for group in groups), *changes[1]]
    return [step_of(group, target, is_input) for group, is_input in rows]


def step_of(group, target, is_input):
    """Return the kernel of a group; of a change of layout, one to channels last for an input, else one from it."""

    def wanted(type_, is_output):
        is_plain = type_.rank < 4 or (is_input is not None and is_input != is_output)
        return Layout.plain(type_.rank) if is_plain else channels_last(4).normalized(type_.shape)

    for provider in PROVIDERS:
        offers = provider.offer(group, target)
        for offer in () if isinstance(offers, Refusal) else offers:
            read = [(x, t) for i, (x, t) in enumerate(zip(offer.inputs, group.input_types, strict=True))]
            varying = [pair for i, pair in enumerate(read) if i not in group.constant_inputs]
            written = zip(offer.outputs, group.output_types, strict=True)
            if all(x == wanted(t, False) for x, t in varying) and all(x == wanted(t, True) for x, t in written):
                kernel = provider.build(group, offer, target)
                return PlanStep(Candidate(group, provider.name, offer, ""), kernel, cost_ns=10_000.0)
    raise AssertionError(group.text)


@pytest.fixture(scope="module")
def graph():
    return network()


@pytest.fixture(scope="module")
def built(graph, cache_folder):
    """Return a function from threads and tasks of each thread to an executable; without tasks, to one with joins."""
    found = {}

    def make(threads, parts):
        if (threads, parts) not in found:
            target = detect_target(threads, llvm_identity())
            builder = Builder(target.isa, cache_folder)
            found[threads, parts] = Executable(build(graph, steps_of(graph, target), target, builder, parts=parts))
        return found[threads, parts]

    return make


def arrays(seed=0, rows=21):
    return [np.random.default_rng(seed).standard_normal((1, 32, rows, 18), np.float32)]


@pytest.mark.parametrize(("threads", "parts"), [(2, 3), (5, 1)])
def test_tasks_have_the_results_of_joins(built, graph, threads, parts):
    joins, tasks = built(threads, 0), built(threads, parts)
    assert "@segments = private constant [0 x" in plans.tables_of(joins.sources)
    assert "@segments = private constant [1 x" in plans.tables_of(tasks.sources)
    for seed in range(20):
        expected, found = joins(*arrays(seed)), tasks(*arrays(seed))
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    exact = reference.run(graph, dict(zip(("x",), arrays(), strict=True)), exact=True)
    for name, found in zip(("y", "z"), tasks(*arrays()), strict=True):
        assert np.allclose(found, exact[name], rtol=1e-4, atol=1e-5)


def test_a_plan_for_other_threads_runs_without_queues(built):
    artifact = built(2, 3).artifact
    expected = built(2, 0)(*arrays())
    found = Executable(replace(artifact, plan=replace(artifact.plan, threads=1)))(*arrays())
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_each_plan_of_a_library_runs_its_own_queues(cache_folder):
    """Of the second plan, the images are larger."""
    target = detect_target(2, llvm_identity())
    builder, graphs = Builder(target.isa, cache_folder), [network(), network(rows=64)]
    plans_of = [
        [Executable(build(own, steps_of(own, target), target, builder, parts=parts)) for own in graphs]
        for parts in (0, 3)
    ]
    together = ShapedExecutable(*combine(plans_of[1], builder))
    for rows, joins in zip((21, 64), plans_of[0], strict=True):
        given = arrays(rows=rows)
        assert all(np.array_equal(a, b) for a, b in zip(joins(*given), together(*given), strict=True))


def test_calls_from_several_threads_and_timed_runs(built):
    tasks, expected = built(2, 3), built(2, 0)(*arrays())
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: tasks(*arrays()), range(24)):
            assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))
    timing = tasks.time(arrays(), 2)
    assert all(ns > 0 for kernels in timing.kernel_ns for ns in kernels)


def test_a_segment_ends_at_a_kernel_without_tasks(graph):
    target = detect_target(2, llvm_identity())
    steps = steps_of(graph, target)
    library = replace(steps[4].kernel, program=None)
    uses = [
        Use(i, step.kernel if i != 4 else library, tuple(map(building._place, slots)), 1000.0)
        for i, (step, slots) in enumerate(zip(steps, bind_steps(graph, steps).slots, strict=True))
    ]
    assert [len(segment) for segment in segments_of(uses)] == [4, len(steps) - 5]
    found = schedule_segment(segments_of(uses)[0], target, 2)
    assert found.steps == (0, 4)
    assert 0 < max(found.simulated.waiting_ns) < found.simulated.total_ns


def test_tasks_with_less_to_write_take_less_time():
    builder, x = plans.new_graph(x="f32[40000]")
    builder.output("y", builder.add("neg", [x]))
    graph, target = builder.freeze(), detect_target(2, llvm_identity())
    group = make_group(graph, [0], [graph.primitives[0].output])
    step = step_of(group, target, None)
    use = Use(0, step.kernel, (None, ("output 0", 0)), 1000.0)
    (stage,) = Splitter(target, 1).stages(use, 0)
    sizes = [sum(spans.size for spans in own.writes.values()) for own in stage.footprints]
    assert sum(sizes) == 4 * 40000 and len(set(sizes)) == 2
    assert max(stage.times_ns) == pytest.approx(1000.0)
    assert stage.times_ns[0] * sizes[1] == pytest.approx(stage.times_ns[1] * sizes[0])
    (alone,) = Splitter(target, 1).stages(replace(use, alone_ns=1500.0), 0)
    assert sum(alone.times_ns) == pytest.approx(1500.0)


def test_queues_of_real_kernels_without_a_wait_are_refused(graph):
    """A queue with one wait less is found to be unsafe: what tasks touch is exact enough that each wait is needed."""
    target = detect_target(2, llvm_identity())
    steps = steps_of(graph, target)
    (segment,) = building._segments(building.uses_of(bind_steps(graph, steps), steps), target, 2)
    footprints = [stage.footprints for stage in segment.stages]
    check_queues(segment.queues, footprints)
    mutants = 0
    for q, queue in enumerate(segment.queues):
        for i, entry in enumerate(queue):
            for wait in entry.waits:
                waits = tuple(other for other in entry.waits if other != wait)
                changed = (*queue[:i], QueuedTask(entry.task, waits), *queue[i + 1 :])
                with pytest.raises(InvalidGraphError, match="nothing orders task"):
                    check_queues((*segment.queues[:q], changed, *segment.queues[q + 1 :]), footprints)
                mutants += 1
    assert mutants > 10
