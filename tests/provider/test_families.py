"""Kernels of several sizes that share code: they compute the same as kernels with all sizes in their texts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from korch.candidate.candidate import Group, Offer
from korch.candidate.layout import Layout, channels_blocked, channels_last
from korch.measure.compiler import Builder
from korch.measure.toolchain import find_compiler
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.ops.reduce import ReduceAttributes
from korch.provider.families import Families
from korch.provider.provider import Kernel, Threading, named_kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.depthwise import Depthwise, DepthwiseBlocking, weights_layout
from korch.schedule.windows import ConvBlocking, Windows
from korch.target import Target, detect_target
from korch.testing.kernels import compare, run_kernel
from korch.testing.samples import random_arrays
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import Machine
from tests.provider.onednn_groups import Graph

Made = tuple[Group, Offer, Kernel]


@pytest.fixture(scope="module")
def builder(cache_folder: Path) -> Builder:
    return Builder(detect_target(1, find_compiler().identity).isa, cache_folder)


@pytest.fixture(scope="module")
def one_core() -> Target:
    return detect_target(1, find_compiler().identity)


def window(size: int, target: Target, taps: int = 3, stride: int = 1) -> Made:
    """Return a depthwise convolution with `size` results in a row."""
    g, lanes = Graph(), target.lanes
    attributes = ConvAttributes((1, stride), (taps // 2,) * 2, (taps // 2,) * 2, (1, 1), lanes)
    x = g.tensor(1, lanes, 3, size * stride)
    group = g.group(g.add("conv", [x, g.weights(lanes, 1, taps, taps)], attributes))
    layouts = ((channels_blocked(4, lanes), Layout.plain(4)), (channels_blocked(4, lanes),))
    schedule = Depthwise(group, group.body.linear[0], layouts, lanes)
    program = schedule.program(DepthwiseBlocking(3, lanes, 4, is_by_rows=True))
    offer = Offer((layouts[0][0], weights_layout(lanes, 4, is_of_bytes=False)), layouts[1])
    return group, offer, kernel_of(program, group, offer, target)


def convolution(size: int, target: Target) -> Made:
    """Return a dense convolution with `size` rows and columns of results, which reads its image where it lies."""
    g, lanes = Graph(), target.lanes
    attributes = ConvAttributes((1, 1), (0, 0), (0, 0), (1, 1), 1)
    x = g.tensor(1, 2, size + 2, size + 2)
    group = g.group(g.add("conv", [x, g.weights(lanes, 2, 3, 3)], attributes))
    layouts = ((channels_last(4), Layout.plain(4)), (channels_last(4),))
    schedule = Windows(group, group.body.linear[0], layouts, Machine.of(target))
    program = schedule.program(ConvBlocking((size, size), lanes, None, lanes, in_place=True))
    offer = Offer((layouts[0][0], Layout((0, 2, 3, 1), ((0, lanes),))), layouts[1])
    return group, offer, kernel_of(program, group, offer, target)


def reduction(size: int, target: Target) -> Made:
    """Return the sums of rows of `size` numbers, which threads share."""
    g = Graph()
    group = g.group(g.add("reduce_sum", [g.add("exp", [g.tensor(200, size)])], ReduceAttributes((1,))))
    offer = Offer(*group.plain_layouts)
    return group, offer, kernel_of(lower(group.body, *group.plain_layouts, Machine.of(target)), group, offer, target)


def compiles(builder: Builder, texts: Sequence[str]) -> list[bool]:
    return [isinstance(found, Path) for found in builder.compile(texts)]


def shared(builder: Builder, kernels: Sequence[Kernel]) -> list[Kernel]:
    families, found = Families(), []
    for number, one in enumerate(kernels):
        families.learn(0, str(number), one)
    for number, one in enumerate(kernels):
        found += families.share([(str(number), one)], lambda texts: compiles(builder, texts))
    return found


def check(made: Sequence[Made], builder: Builder, rng: np.random.Generator) -> list[Kernel]:
    """Return kernels that share code; they compute what the group does, and the very numbers that those alone do."""
    found = shared(builder, [kernel for *_, kernel in made])
    for (group, offer, alone), kernel in zip(made, found, strict=True):
        inputs = random_arrays(rng, group.input_types)
        outputs = run_kernel(kernel, group, offer, inputs, builder)
        compare(group, inputs, outputs)
        for own, other in zip(outputs, run_kernel(alone, group, offer, inputs, builder), strict=True):
            np.testing.assert_array_equal(own, other)
    return found


@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (3, 2), (5, 1), (1, 1)])
def test_windows_of_each_number_of_places(taps, stride, one_core, builder, rng):
    sizes = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 17)
    found = check([window(size, one_core, taps, stride) for size in sizes], builder, rng)
    assert len({one.units for one in found} - {()}) == 1
    assert sum(bool(one.units) for one in found) == 8  # of 1, 2 and 3 places each has its own


def test_products_of_each_number_of_rows(one_core, builder, rng):
    found = check([convolution(size, one_core) for size in (4, 5, 6, 7, 9, 12, 13)], builder, rng)
    ((text,),) = {one.units for one in found}
    assert re.search(r"korch::Rows<\d+, korch::At<\d+>{}", text)


def test_kernels_that_threads_share(one_core, builder, rng):
    two_cores = dataclasses.replace(one_core, threads=2)
    found = check([reduction(size, two_cores) for size in (100, 101, 117, 200)], builder, rng)
    assert {one.threading for one in found} == {Threading.TEAM}
    assert len({one.units for one in found}) == 1 and found[0].units


def test_numbers_that_do_not_differ_stay_in_the_text(one_core, builder):
    one, other = shared(builder, [convolution(size, one_core)[2] for size in (6, 12)])
    assert one.units == other.units and one.symbol != other.symbol
    assert "korch::Once<3>" in one.units[0]
    assert "numbers[0]" in one.units[0] and "\x01" not in one.units[0] + one.source


def test_kernels_that_do_not_compile_together_stay_as_they_are(one_core):
    alone = [convolution(size, one_core)[2] for size in (6, 12)]
    families = Families()
    for number, one in enumerate(alone):
        families.learn(0, str(number), one)
    assert families.share([("0", alone[0])], lambda texts: [False] * len(texts)) == [alone[0]]
    assert families.share([("unknown", alone[0])], lambda texts: []) == [alone[0]]


def test_kernels_that_are_not_printed_from_programs_are_not_shared():
    kernels = [named_kernel(f'extern "C" int NAME_run(void*, void* const*) {{ return {n}; }}') for n in (0, 1)]
    families = Families()
    for number, one in enumerate(kernels):
        families.learn(0, str(number), one)
    assert families.share([("0", kernels[0])], lambda texts: [True] * len(texts)) == [kernels[0]]
