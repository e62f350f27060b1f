"""Guesses of the CPU's meter: they order what was not measured."""

from __future__ import annotations

import pytest

from korch.candidate.candidate import Candidate, Offer, make_group
from korch.measure.calibrate import Calibration, Level
from korch.measure.cpu import GUESS, GUESS_START_NS, CpuMeter
from korch.primitive.graph import GraphBuilder
from korch.primitive.types import ValueType

LEVELS = (Level(1 << 20, 1e12, 1e12), Level(1 << 25, 3e10, 1e10), Level(0, 2e10, 1e10))


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
    return found


@pytest.mark.parametrize("size", [1, 16, 256])
def test_bytes_from_the_shared_cache_and_operations_add_up(meter: CpuMeter, size: int) -> None:
    seconds = 3 * 4 * size**2 / 4e10 + 2 * size**3 / 1e11
    assert meter.guess_ns(product(size)) == pytest.approx(
        GUESS_START_NS + 1e9 * GUESS * seconds, abs=1
    )
    assert meter.guess_ns(product(size)) > meter.bound_ns(product(size))
