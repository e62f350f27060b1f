"""Programs of blocks are found from the group alone, and verified."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.superopt_unpruned import Unpruned
from korch.candidate.candidate import Group, make_group
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.ops.layout import ReshapeAttributes
from korch.superopt.axes import NotNamedError, named
from korch.superopt.choose import gain_of, ranked
from korch.superopt.expressions import expressions
from korch.superopt.find import LATE, Finding, search
from korch.superopt.generate import Rules, block_graphs
from korch.superopt.provider import SuperoptProvider
from korch.superopt.sizes import CacheMachine
from korch.superopt.verify import verify
from korch.system.deadline import Deadline
from korch.tile.ir.program import Contract, Loop, TileProgram
from tests.support.blocks import BLOCKS, GROUPS, Block, attention, rms_norm_product
from tests.support.facts import Facts

MACHINE = CacheMachine(4, 2, 1 << 16)


def group_of(graph: PrimitiveGraph) -> Group:
    return make_group(graph, range(len(graph.primitives)), [v for _, v in graph.outputs])


def loops(program: TileProgram) -> list[Loop]:
    return [step for stage in program.stages for step in stage.steps if isinstance(step, Loop)]


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_programs_of_blocks_are_found(name):
    group = group_of(GROUPS[name]())
    finding = search(group, MACHINE)
    assert finding.programs, finding.reason
    assert not finding.refused or name == "linear-attention"  # in one order its large exponentials overflow
    for found in finding.programs[:2]:
        verdict = verify(found.program, group.body)
        assert verdict.is_equal, verdict.reason
        assert len(found.program.stages) == 1


def test_attention_with_rescaled_sums_is_found():
    computation = named(attention())
    found = block_graphs(computation, expressions(computation))
    rescaled = [graph for graph in found.found if any(step.follows >= 0 for step in graph.steps)]
    assert rescaled
    assert {step.op for graph in rescaled for step in graph.steps if step.is_carried} == {"reduce_max", "reduce_sum"}


def test_a_normalization_moves_behind_its_product():
    """The sums of squares and the product are collected in one loop, so that x is read once."""
    computation = named(rms_norm_product())
    found = block_graphs(computation, expressions(computation))
    assert any(sum(step.is_carried for step in graph.steps) == 2 for graph in found.found)


def test_one_matrix_in_two_roles():
    b = Block()
    x = b.tensor("x", 4, 6)
    group = group_of(b.result(b.softmax(b.add("matmul", (x, b.turned(x))))))
    finding = search(group, MACHINE)
    assert finding.programs
    assert any(isinstance(step, Contract) for _, step in finding.programs[0].program.stages[0].leaves)


def test_what_is_not_over_named_axes_is_refused():
    b = Block()
    x = b.tensor("x", 4, 6)
    group = group_of(b.result(b.add("exp", (b.add("reshape", (x,), ReshapeAttributes((8, 3))),))))
    assert search(group, MACHINE).reason == "a reshape joins or splits axes"
    with pytest.raises(NotNamedError, match="a reshape"):
        named(group.body)


def test_pruning_counts_and_limits():
    computation = named(rms_norm_product())
    ways = expressions(computation)
    found = block_graphs(computation, ways)
    assert found.is_complete
    assert found.pruned["another order"] > 0
    short = block_graphs(computation, ways, Rules(most_steps=4))
    assert not short.found
    assert short.pruned["steps"] + short.pruned["unread values"] > 0
    small = block_graphs(computation, ways, Rules(tile_elements=7))
    assert small.pruned["memory"] > 0
    free = block_graphs(computation, ways, Rules(by_bound=False, by_readers=False))
    assert free.visited > found.visited
    assert {graph.steps for graph in found.found} <= {graph.steps for graph in free.found}


def test_pruning_by_expressions_leaves_all_programs():
    b = Block()
    graph = b.result(b.add("exp", (b.add("matmul", (b.tensor("x", 4, 6), b.tensor("w", 6, 5))),)))
    computation = named(graph)
    ways = expressions(computation)
    pruned, free = (
        block_graphs(computation, ways, Rules(most_steps=2, others=others, by_bound=False))
        for others in (None, Unpruned)
    )
    assert pruned.is_complete
    assert free.is_complete
    assert {graph.steps for graph in pruned.found} == {graph.steps for graph in free.found} != set()
    assert free.visited > 2 * pruned.visited


def searched(
    kept: Facts, groups: Sequence[Group], seconds: float, machine: CacheMachine = MACHINE, version: str = "1"
) -> SuperoptProvider:
    provider = SuperoptProvider(kept, machine)
    provider.version = version
    provider.search(groups, lambda kind, question, ask: ask(), Deadline.after(seconds, time.monotonic()))
    return provider


def found_by(kept: Facts, group: Group, seconds: float, machine: CacheMachine = MACHINE, version: str = "1") -> Finding:
    return searched(kept, [group], seconds, machine, version).find(group)


def test_results_are_kept_by_group():
    kept, group = Facts(), group_of(BLOCKS["lora"]())
    assert SuperoptProvider(kept, MACHINE).find(group).reason == "it was not searched"
    first = found_by(kept, group, 30.0)
    again = found_by(kept, replace(group, inputs=group.inputs), 0.0)
    assert again == first
    assert first.programs
    assert found_by(kept, group, 0.0, version="2").reason == LATE
    assert found_by(kept, group, 0.0, replace(MACHINE, lanes=8)).reason == LATE


def test_it_is_known_whether_there_are_results():
    kept, group = Facts(), group_of(BLOCKS["lora"]())
    assert not searched(kept, [group], 0.0).has_results(kept.fact)
    assert searched(kept, [group], 30.0).has_results(kept.fact)
    assert searched(kept, [group], 0.0).report() == searched(kept, [group], 0.0).report() != ()
    assert SuperoptProvider(kept, MACHINE).report() == ()


def test_only_groups_with_programs_are_asked_for():
    graph, kept = BLOCKS["lora"](), Facts()
    (shape,) = searched(kept, [group_of(graph)], 0.0).group_shapes
    assert [*shape(graph, [])] == []
    (shape,) = searched(kept, [group_of(graph)], 30.0).group_shapes
    assert {len(group.primitives) for group in shape(graph, [])} == {len(graph.primitives)}


PROGRAM = '{"programs": [{"stored": "%s", "packed": [], "turns": 1, "steps": [], "estimate_ns": 1.0}]}'


@pytest.mark.parametrize("damage", ["", '{"programs": 3}', PROGRAM % "x", PROGRAM % "[]", PROGRAM % '[\\"Pass\\"]'])
def test_a_damaged_result_is_searched_again(damage):
    kept, group = Facts(), group_of(BLOCKS["lora"]())
    found_by(kept, group, 30.0)
    (name,) = (name for name in kept.facts if name.endswith(group.key))
    kept.facts[name] = damage
    assert found_by(kept, group, 30.0).programs
    assert kept.facts[name] != damage


def test_a_search_that_was_cut_short_is_not_kept():
    kept, group = Facts(), group_of(BLOCKS["lora"]())
    assert not found_by(kept, group, 1e-9).programs
    assert not kept.facts


def test_recorded_answers_count():
    kept, group, asked = Facts(), group_of(BLOCKS["lora"]()), []
    recorded = '{"reason": "as recorded"}'

    def answer(kind: str, question: object, ask: Callable[[], str]) -> str:
        asked.append((kind, question))
        return recorded

    provider = SuperoptProvider(kept, MACHINE)
    provider.search([group], answer, Deadline(0.0))
    assert asked == [("superopt", group.key)]
    assert provider.find(group).reason == "as recorded"
    assert provider.report() == ("superoptimizer: 0 programs for 0 of 1 groups, 0 prefixes visited in 0.0 s",)


def test_groups_are_ranked_by_what_can_be_won():
    """More scores in memory, or more instances, come first; what gains little of its or the model time is left out."""
    small, large = (group_of(attention(2, n, n, 8, 8)) for n in (16, 64))
    assert [*ranked([(small, 1), (large, 1)], MACHINE)] == [large, small]
    assert [*ranked([(small, 1), (large, 1), (small, 99)], MACHINE)] == [small, large]
    assert [*ranked([(small, 1), (large, 1)], MACHINE, 1e15)] == []
    assert gain_of(large, MACHINE).is_worth_it()
    assert not gain_of(group_of(rms_norm_product(8, 4096, 4096)), MACHINE).is_worth_it()
