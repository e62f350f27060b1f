"""What is likely needed of the values of a graph with alternatives, and kernels that are timed as they will run."""

from __future__ import annotations

from korch.equivalence.saturate import saturate
from korch.ranges.form import Extent, extent
from korch.ranges.needed import needs
from korch.ranges.served import Served, likely_needs
from tests.ranges.range_models import bert, masked_model

N = frozenset((extent(0),))


def test_without_alternatives_it_is_what_is_needed_but_for_what_is_reduced() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph = whole.graph
    exact = needs(graph, range(len(graph.primitives)), whole.plan)
    likely = likely_needs(graph, whole.plan)
    assert any(exact.values())
    for value, need in exact.items():
        assert need.items() <= likely[value].items()


def test_alternatives_keep_what_is_likely_needed() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    before = likely_needs(whole.graph, whole.plan)
    graph, _ = saturate(whole.graph, strict=False)
    assert len(graph.primitives) > len(whole.graph.primitives)
    after = likely_needs(graph, whole.plan)
    assert any(before.values())
    for value, need in before.items():
        assert need.items() <= after[value].items()


def test_the_share_is_that_of_the_smallest_result() -> None:
    half = frozenset((Extent(0, 1, 0, 2),))
    served = Served(({1: N}, {0: half, 1: N}), (8,), ((0, "size"),))
    assert served.share([(2, 16), (16, 16)]) == 0.5 * 0.25
    assert served.size_of("size") == 8
    assert str(served) != str(Served(({1: N}, {0: half, 1: N}), (7,), ((0, "size"),)))
