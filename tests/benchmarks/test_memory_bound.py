"""The benchmark of memory-bound kernels: each case is a kernel."""

import pytest

from benchmarks.memory_bound import CASES, candidate_of, copy_of
from korch.candidate.candidate import Offer
from korch.candidate.layout import Layout
from korch.provider.generated import GeneratedProvider
from korch.provider.provider import Kernel


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_each_case_is_an_offer_of_the_generator(case, target):
    _, what, make = case
    group = make(1)
    inputs, outputs = group.plain_layouts
    if group.is_layout_change:
        before, after = map(Layout.parse, what.split())
        inputs, outputs = (before,), (after,)
    else:
        assert Offer(inputs, outputs, is_loop_nest=True) in GeneratedProvider().offer(group, target)
    kernel = GeneratedProvider().build(group, Offer(inputs, outputs), target)
    assert isinstance(kernel, Kernel)


def test_a_copy_moves_as_many_bytes():
    copy = copy_of(8000)
    assert copy.group.is_layout_change
    assert (copy.read_bytes, copy.write_bytes) == (4000, 4000)
    assert candidate_of(copy.group, copy.offer).key == copy.key
