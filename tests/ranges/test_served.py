"""The elements that are likely needed in a graph with alternatives, and kernels that are timed as they will run."""

from __future__ import annotations

from korch.equivalence.saturate import saturate
from korch.ranges.endings import Ending, endings_of, read
from korch.ranges.filled import ends
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
    served = Served(({1: N}, {0: half, 1: N}), (8,))
    assert served.share([(2, 16), (16, 16)]) == 0.5 * 0.25
    assert str(served) != str(Served(({1: N}, {0: half, 1: N}), (7,)))


def test_reductions_that_end_need_less_of_their_operands() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph, _ = saturate(whole.graph, strict=False)
    found = ends(graph, range(len(graph.primitives)), whole.plan)
    before = ends(whole.graph, range(len(whole.graph.primitives)), whole.plan)
    assert len(found) >= len(before)
    likely = likely_needs(graph, whole.plan, read(found, [(p, axis) for p, own in found.items() for axis in own], 8))
    whole_vectors = frozenset((extent(0).rounded(8),))
    for p, own in found.items():
        primitive = graph.primitives[p]
        for axis in own:
            assert likely[primitive.inputs[0]][axis] >= whole_vectors
            assert primitive.op != "matmul" or likely[primitive.inputs[1]][axis - 1] >= whole_vectors


def test_a_kernel_that_reads_half_has_half_the_share() -> None:
    ending = Ending(extent(0), 16, ((1, 2),), frozenset(((5, 2),)))
    served = Served(({1: N},), (8,), (ending,))
    assert served.share([(2, 16)]) == 0.5 * 0.5
    assert str(served) != str(Served(({1: N},), (8,)))


def test_all_reductions_along_an_axis_end_or_none() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph = whole.graph
    found = ends(graph, range(len(graph.primitives)), whole.plan)
    (most,) = (p for p in found if graph.primitives[p].op == "reduce_max")
    first = graph.primitives[most].inputs[0]
    (own,) = endings_of(graph, (most,), (first,), found)
    assert (own.length, own.axes, own.reductions) == (32, ((0, 3),), frozenset(((most, 3),)))
    assert str(own) == "(1n0+0)/1 of i0:3"
    total = next(p for p in found if graph.primitives[p].op == "reduce_sum")
    chain = tuple(range(most, total + 1))  # the maximum, the powers and their sum
    rest = {p: axes for p, axes in found.items() if p != total}
    assert endings_of(graph, chain, (first,), found) and not endings_of(graph, chain, (first,), rest)
