"""The savings of rules, compared with searches without these rules."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import pytest

from korch.binary_program.solve import solve
from korch.candidate.candidate import Candidate
from korch.candidate.enumerate import enumerate_groups
from korch.equivalence.rule import rule_of
from korch.equivalence.rules import RULES
from korch.equivalence.saturate import saturate
from korch.limits import SearchLimits
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.text import parse_graph
from korch.provider.provider import load_providers
from korch.report.alternatives.savings import add_savings, rule_savings
from korch.search.instance import Answers, Instance, collect_candidates
from korch.target import Target
from tests.support.facts import Facts

OPTIONS = Options(search=SearchLimits(max_primitives=2))


class Costs(Facts):
    """A cost for every kernel: its operations, a call, and a bit; some are as if not measured.

    A call costs more than any bit, so two kernels are never cheaper than one that does the same.
    """

    def __init__(self, unmeasured: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.unmeasured = unmeasured

    @property
    def database(self) -> Costs:
        return self

    def record(self, candidate: str) -> Measured | Failed | None:
        return None

    def known(self, candidate: Candidate) -> Measured | Failed | None:
        if candidate.key in self.unmeasured:
            return None
        # Not of the key, which has the provider's version.
        offer = candidate.offer
        text = f"{candidate.provider} {offer.variant} {candidate.group.text}"
        bit = zlib.crc32(" ".join(map(str, (text, *offer.inputs, *offer.outputs))).encode()) % 10
        return Measured(candidate.linear_flop + bit + 11, ())

    def cost_ns(self, candidate: Candidate) -> tuple[int, bool]:
        record = self.known(candidate)
        return (record.time_ns, True) if isinstance(record, Measured) else (1, False)


PRODUCTS = """graph(%0 "a": f32[9,2], %1 "b": f32[2,9], %2 "c": f32[9,2]) -> (%5 "y")
%3: f32[9,9] = matmul(%0, %1)
%4: f32[9,2] = matmul(%3, %2)
%5: f32[9,2] = tanh(%4)
"""


def candidates_of(graph: PrimitiveGraph) -> tuple[Candidate, ...]:
    groups, _ = enumerate_groups(graph, OPTIONS)
    return collect_candidates(graph, groups, Answers(load_providers(), Target()))[0]


def best(graph: PrimitiveGraph, candidates: Sequence[Candidate], costs: Costs) -> tuple[int, list[Candidate]]:
    plan = solve(Instance(graph, candidates).problem(costs.cost_ns))
    return plan.certificate.objective_ns or 0, [candidates[k] for k in plan.kernels]


@pytest.fixture(name="graph")
def rewritten() -> PrimitiveGraph:
    return saturate(parse_graph(PRODUCTS), strict=False, rules=RULES)[0]


def test_a_saving_is_what_the_plan_of_a_search_without_the_rule_costs_more(graph: PrimitiveGraph) -> None:
    costs = Costs()
    candidates = candidates_of(graph)
    cost_ns, steps = best(graph, candidates, costs)
    wrote = [rule_of(origin) for origin in graph.origins]
    (used,) = {wrote[p] for step in steps for p in step.group.primitives} - {""}
    others = [rule for rule in RULES if rule.name != used]
    without, _ = saturate(parse_graph(PRODUCTS), strict=False, rules=others)
    expected_ns, _ = best(without, candidates_of(without), costs)
    assert expected_ns > cost_ns
    found = rule_savings(Instance(graph, candidates), steps, costs, OPTIONS)
    assert found == {used: expected_ns - cost_ns}
    assert len(costs.facts) == 1
    assert rule_savings(Instance(graph, candidates), steps, costs, OPTIONS) == found


def test_where_nothing_else_is_measured_no_saving_is_made_up(graph: PrimitiveGraph) -> None:
    candidates = candidates_of(graph)
    _, steps = best(graph, candidates, Costs())
    used = {candidate.key for candidate in steps}
    costs = Costs(frozenset(c.key for c in candidates if c.key not in used))
    found = rule_savings(Instance(graph, candidates), steps, costs, OPTIONS)
    assert list(found.values()) == [None]


def test_savings_of_blocks_count_as_often_as_the_blocks_are_there() -> None:
    total = add_savings([({"a": 3, "b": 1}, 2), ({"a": 4, "c": None}, 1), ({"c": 2}, 1)])
    assert total == {"a": 10, "b": 2, "c": None}
