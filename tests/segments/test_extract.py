"""The choice of one alternative for each value with the least sum of costs over the graph."""

import itertools

import numpy as np
import pytest

from korch.equivalence.rules import FAMILIES, RULES, select_rules
from korch.equivalence.saturate import saturate
from korch.errors import OptionError
from korch.options import Options
from korch.primitive import reference
from korch.primitive.check import check_graph
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import parse_graph
from korch.segments.choose import BYTE_COST
from korch.segments.extract import extract
from tests.support.random_graph import random_inputs


def cost(graph: PrimitiveGraph, chosen: tuple[int, ...]) -> int:
    total = 0
    for p in chosen:
        primitive = graph.primitives[p]
        values = {*primitive.inputs, primitive.output}
        size = sum(graph.types[value].size_bytes for value in values)
        total += 1 + graph.work_flop(primitive) + BYTE_COST * size
    return total


def is_plan(graph: PrimitiveGraph, chosen: tuple[int, ...]) -> bool:
    known, left = set(graph.given), list(chosen)
    while ready := [p for p in left if known.issuperset(graph.primitives[p].inputs)]:
        known.update(graph.primitives[p].output for p in ready)
        left = [p for p in left if p not in ready]
    return all(value in known for _, value in graph.outputs)


CHAINS = (
    """graph(%0 "x": f64[6,4]) -> (%6 "y")
%1: f64[6,4] = constant {uniform=3.0}
%2: f64[6,4] = mul(%0, %1)
%3: f64[6,4] = add(%2, %1)
%4: f64[4,2] = constant {digest=1f}
%5: f64[6,2] = matmul(%3, %4)
%6: f64[6,2] = neg(%5)
""",
    """graph(%0 "x": f64[2,3,4]) -> (%4 "y", %2 "z")
%1: f64[3,2,4] = transpose(%0) {perm=(1,0,2)}
%2: f64[4,3,2] = transpose(%1) {perm=(2,0,1)}
%3: f64[2,3,4] = transpose(%2) {perm=(2,1,0)}
%4: f64[6,4] = reshape(%3) {shape=(6,4)}
""",
    """graph(%0 "a": f64[9,2], %1 "b": f64[2,9], %2 "c": f64[9,2]) -> (%5 "y")
%3: f64[9,9] = matmul(%0, %1)
%4: f64[9,2] = matmul(%3, %2)
%5: f64[9,2] = neg(%4)
""",
)


@pytest.mark.parametrize("text", CHAINS)
def test_it_is_the_cheapest_choice(text: str) -> None:
    given = parse_graph(text)
    graph, _ = saturate(given, strict=False)
    assert graph.alternatives
    found = extract(graph, Options())
    check_graph(found)
    assert not found.alternatives
    count = len(graph.primitives)
    best, own = cost(graph, tuple(range(count))), [cost(graph, (p,)) for p in range(count)]
    for chosen in (c for n in range(count + 1) for c in itertools.combinations(range(count), n)):
        total = sum(own[p] for p in chosen)
        if total < best and is_plan(graph, chosen):
            best = total
    assert cost(found, tuple(range(len(found.primitives)))) == best
    feeds = random_inputs(given, np.random.default_rng(3))
    expected = reference.run(given, feeds, exact=True)
    for name, array in reference.run(found, feeds, exact=True).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12, atol=1e-12)


def test_families_are_selected_by_name() -> None:
    assert select_rules("all") == RULES
    assert select_rules("none") == ()
    assert select_rules("layout,winograd") == (*FAMILIES["layout"], *FAMILIES["winograd"])
    left = select_rules("-layout,-winograd")
    assert set(left) == set(RULES) - set(select_rules("layout,winograd"))


@pytest.mark.parametrize("text", ["winnograd", "", "-all", "layout,-winograd"])
def test_unknown_families_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="there is no family of rewrites"):
        select_rules(text)
