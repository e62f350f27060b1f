"""The elements that kernels for a range compute do not depend on the kernels of a plan."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from korch.candidate.candidate import make_group
from korch.equivalence.saturate import saturate
from korch.options import Options
from korch.pipeline import served as of_tasks
from korch.primitive.graph import PrimitiveGraph
from korch.ranges.filled import ends
from korch.ranges.form import Extent, extent
from korch.ranges.needed import Need, in_whole_vectors, needs_of_plan
from korch.ranges.served import Served
from korch.system.deadline import Deadline
from tests.provider.linear_groups import Graph
from tests.ranges.range_models import bert, masked_model

N = frozenset((extent(0),))


def test_alternatives_need_no_more_than_the_model() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph, _ = saturate(whole.graph, strict=False)
    assert len(graph.primitives) > len(whole.graph.primitives)

    def needed(graph: PrimitiveGraph) -> Mapping[int, Need]:
        return needs_of_plan(graph, whole.plan, in_whole_vectors(ends(graph, whole.plan), 8))

    before, after = needed(whole.graph), needed(graph)
    assert any(before.values())
    assert before.items() <= after.items()


def test_reductions_that_end_need_less_of_their_operands() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph, _ = saturate(whole.graph, strict=False)
    found = in_whole_vectors(ends(graph, whole.plan), 8)
    needed, whole_vectors = needs_of_plan(graph, whole.plan, found), extent(0).rounded(8)
    assert found
    for p, own in found.items():
        primitive = graph.primitives[p]
        for axis in own:
            assert whole_vectors in needed[primitive.inputs[0]][axis]
            assert primitive.op != "matmul" or whole_vectors in needed[primitive.inputs[1]][axis - 1]


def test_the_share_is_that_of_the_smallest_result() -> None:
    g = Graph()
    x = g.tensor(2, 16)
    group = g.group(g.add("exp", [x]), g.add("neg", [x]))
    half = frozenset((Extent(0, 1, 0, 2),))
    served = Served(({1: N}, {0: half, 1: N}), {}, (8,))
    assert served.share(group.body) == 0.5
    ended = Served(({1: N}, {}), {0: {1: extent(0)}}, (8,))
    assert ended.share(group.body) == 0.5 * 0.5
    assert len({str(served), str(ended), str(Served(served.needs, {}, (7,)))}) == 3
    assert served.form == Served(served.needs, {}, (7,)).form != ended.form


def test_a_group_knows_where_its_primitives_are_in_the_graph() -> None:
    whole = masked_model(bert(), {"batch": (1,), "length": (range(1, 33),)})
    graph = whole.graph
    numbers = range(len(graph.primitives))
    group = make_group(graph, numbers, [value for _, value in graph.outputs])
    found = group.numbers_in(graph)
    assert sorted(found) == list(numbers)
    assert [graph.primitives[p].op for p in found] == [p.op for p in group.body.primitives]


def test_in_segments_that_share_a_kernel_a_reduction_ends_in_all_of_them_or_in_none() -> None:
    block: Any = SimpleNamespace(instances=(0, 1), graph=SimpleNamespace(primitives=(None,) * 3))
    found = {0: {1: extent(0)}, 1: {1: extent(0)}, 3: {1: extent(0)}, 4: {1: extent(0).then(1)}, 5: {0: extent(0)}}
    joined: Any = SimpleNamespace(first_primitives=(0, 3))
    task: Any = SimpleNamespace(block=block)
    assert of_tasks._in_all_segments([task], joined, found) == {0: {1: extent(0)}, 3: {1: extent(0)}}


def test_a_search_that_has_nothing_to_choose_has_no_rounds() -> None:
    certificate = SimpleNamespace(bound_ns=0, seconds=0.0)
    outcome: Any = SimpleNamespace(plans={"searched": ()}, found=SimpleNamespace(rounds=(), certificate=certificate))
    masked: Any = SimpleNamespace(plan=SimpleNamespace(timed=(64,)), others=())
    run: Any = SimpleNamespace(options=Options(), build_deadline=Deadline())
    ledger: Any = SimpleNamespace(batch=24, bounds_ns=lambda candidates: [], measure=lambda candidates, deadline: None)
    model: Any = SimpleNamespace(tasks=())
    (plan,) = of_tasks.search_sizes(run, model, ledger, outcome, masked)
    assert (plan.timed, plan.steps) == ((64,), ())
