"""Estimates of the CPU's meter: they order candidates that were not measured."""

import pytest

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.candidate.layout import Layout, channels_last
from korch.costs.analysis import GUESS, START_NS
from korch.costs.operations import TRANSCENDENTAL, operations
from korch.costs.rates import Calibration, MemoryLevel
from korch.measure.cpu import CpuMeter
from korch.primitive.graph import GraphBuilder
from korch.primitive.ops.reduce import BroadcastAttributes, PoolAttributes, ReduceAttributes
from korch.primitive.types import ValueType

LEVELS = (MemoryLevel(1 << 20, 1e12, 1e12), MemoryLevel(1 << 25, 3e10, 1e10), MemoryLevel(0, 2e10, 1e10))


def product(size: int) -> Candidate:
    builder = GraphBuilder()
    x, y = (builder.input(name, ValueType.parse(f"f32[{size},{size}]")) for name in "xy")
    builder.output("z", builder.add("matmul", [x, y]))
    group = make_group(builder.freeze(), [0], [2])
    return Candidate(group, "someone", Offer(*group.plain_layouts), "1")


@pytest.fixture
def meter() -> CpuMeter:
    found = object.__new__(CpuMeter)  # without compiler and database
    found.calibration = Calibration(LEVELS, 1e11, 1.0, 500.0)
    found.reads_weights_from_memory = False
    found.model = None
    return found


def guess_ns(meter: CpuMeter, candidate: Candidate) -> int:
    """The analytic guess: the meter has no learned model."""
    return meter.predict([candidate])[0][0]


@pytest.mark.parametrize("size", [1, 16, 256])
def test_bytes_from_the_shared_cache_and_operations_add_up(meter: CpuMeter, size: int) -> None:
    seconds = 3 * 4 * size**2 / 4e10 + 2 * size**3 / 1e11
    assert guess_ns(meter, product(size)) == pytest.approx(START_NS + 1e9 * GUESS * seconds, abs=1)
    assert guess_ns(meter, product(size)) > meter.bound_ns(product(size))


def pooled(layout: Layout, before: str = "", is_loop_nest: bool = True) -> Candidate:
    """A pool of 5x5 windows, of an image or of a function of it."""
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[1,64,20,20]"))
    y = builder.add(before, [x]) if before else x
    attributes = PoolAttributes((5, 5), (1, 1), (2, 2), (2, 2), (1, 1))
    builder.output("z", builder.add("pool_max", [y], attributes))
    graph = builder.freeze()
    group = make_group(graph, range(len(graph.primitives)), [graph.outputs[0][1]])
    return Candidate(group, "someone", Offer((layout,), (layout,), is_loop_nest=is_loop_nest), "1")


def test_what_is_computed_in_each_window_counts(meter: CpuMeter) -> None:
    plain, last = Layout.plain(4), channels_last(4)
    alone, function = pooled(last), pooled(last, "sigmoid")
    points = 64 * 20 * 20
    assert operations(alone.group.body) == 25 * points
    assert operations(function.group.body) == (1 + TRANSCENDENTAL) * 25 * points
    assert guess_ns(meter, alone) < guess_ns(meter, function) < guess_ns(meter, pooled(plain, "exp"))
    assert guess_ns(meter, alone) < guess_ns(meter, pooled(plain))
    assert meter.bound_ns(alone) == meter.bound_ns(pooled(plain)) == meter.bound_ns(function)
    assert guess_ns(meter, pooled(plain, is_loop_nest=False)) < guess_ns(meter, alone)


def test_what_is_read_twice_is_computed_twice_but_for_outputs_and_reductions() -> None:
    builder = GraphBuilder()
    x = builder.input("x", ValueType.parse("f32[8,16]"))
    y = builder.add("neg", [x])
    total = builder.add("reduce_sum", [y], ReduceAttributes((1,)))
    wide = builder.add("broadcast", [total], BroadcastAttributes((8, 16)))
    builder.output("z", builder.add("mul", [y, wide]))
    graph = builder.freeze()
    group = make_group(graph, range(len(graph.primitives)), [graph.outputs[0][1]])
    # Per element: neg for the sum, the sum, neg again and the product.
    assert operations(group.body) == 4 * 8 * 16
