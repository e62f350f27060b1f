"""Concatenations in place: the addresses and lifetimes of operands, and that no other buffer overlaps them."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from korch.binary_program.solve import solve
from korch.candidate.candidate import Candidate, Offer, make_group
from korch.candidate.enumerate import enumerate_groups
from korch.candidate.layout import channels_blocked
from korch.errors import InvalidGraphError
from korch.limits import SearchLimits
from korch.options import Options
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.layout import ConcatAttributes
from korch.primitive.text import parse_graph
from korch.primitive.types import DType, ValueType
from korch.provider.generated import GeneratedProvider
from korch.provider.in_place import InPlaceProvider
from korch.provider.provider import Kernel
from korch.report.kernel import kernel_text
from korch.report.profile import profile
from korch.runtime.bind import PlanStep, Program, Slot, SlotPlace, bind_steps
from korch.runtime.report import Report
from korch.search.instance import Answers, Instance, collect_candidates
from korch.target import Target
from tests.runtime import runtime_plans as plans
from tests.support.arena import simulate

TARGET = Target(lanes=16)


def plan(
    text: str, in_place: Sequence[int], order: Sequence[int] = (), layout: Any = None, workspace_bytes: int = 0
) -> tuple[PrimitiveGraph, list[PlanStep[Kernel]]]:
    """Each primitive as a kernel, those of some values in place."""
    graph = parse_graph(text.lstrip())
    steps = []
    for p in order or range(len(graph.primitives)):
        value = graph.primitives[p].output
        group = make_group(graph, [p], [value])
        offer = Offer(*group.plain_layouts)
        if layout is not None:
            ends = {v for _, v in graph.inputs}
            own = (plain if v in ends else layout for v, plain in zip(group.inputs, offer.inputs, strict=True))
            offer = Offer(tuple(own), (layout,))
        kernel = Kernel(f"k{p}", "", workspace_bytes=workspace_bytes)
        if value in in_place:
            offer, kernel = replace(offer, is_in_place=True), Kernel("", "")
        steps.append(PlanStep(Candidate(group, "toy", offer), kernel))
    return graph, steps


def bind(text: str, in_place: Sequence[int], **fields: Any) -> Program[Kernel]:
    """Bind a plan whose every kernel is run by its reference, and check what it computes."""
    graph, steps = plan(text, in_place, **fields)
    program = bind_steps(graph, steps)
    check(graph, steps, program)
    return program


def check(graph: PrimitiveGraph, steps: Sequence[PlanStep[Any]], program: Program[Any]) -> None:
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(graph.types[v].shape).astype(graph.types[v].dtype.numpy) for _, v in graph.inputs]
    feeds = {name: array for (name, _), array in zip(graph.inputs, arrays, strict=True)}
    expected = reference.run(graph, feeds, exact=False)
    found = simulate(graph, steps, program, arrays)
    for (name, _), array in zip(graph.outputs, found, strict=True):
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


PAIR = """
graph(%0 "x": f32[1,16,2,2]) -> (%4 "y")
%1: f32[1,16,2,2] = exp(%0)
%2: f32[1,16,2,2] = neg(%0)
%3: f32[1,32,2,2] = concat(%1, %2) {axis=1}
%4: f32[1,32,2,2] = abs(%3)
"""


def test_operands_lie_in_the_result_one_after_another() -> None:
    program = bind(PAIR, [3])
    assert [slots[-1] for slots in program.slots[:3]] == [
        Slot(SlotPlace.ARENA, 0),
        Slot(SlotPlace.ARENA, 256),
        Slot(SlotPlace.ARENA, 0),
    ]
    assert program.slots[2][:2] == (program.slots[0][-1], program.slots[1][-1])
    assert program.arena.size_bytes == 512
    assert bind(PAIR, []).arena.size_bytes == 1024


def test_so_they_do_in_blocks_of_channels() -> None:
    text = PAIR.replace("[1,16,2,2]", "[1,48,2,2]").replace("[1,32,2,2]", "[1,96,2,2]")
    blocked = channels_blocked(4, 16)
    graph, steps = plan(text, [3], layout=blocked)
    last = steps[3].candidate
    plain = replace(last, offer=Offer((blocked,), last.group.plain_layouts[1]))
    steps[3] = replace(steps[3], candidate=plain)
    program = bind_steps(graph, steps)
    check(graph, steps, program)
    assert program.slots[1][-1].at - program.slots[0][-1].at == 48 * 4 * 4


def test_a_result_that_is_a_model_output_is_written_in_parts() -> None:
    text = PAIR.replace('%4 "y"', '%3 "y"').rsplit("%4", 1)[0]
    program = bind(text, [3])
    assert [slots[-1] for slots in program.slots] == [
        Slot(SlotPlace.OUTPUT, 0),
        Slot(SlotPlace.OUTPUT, 0, 256),
        Slot(SlotPlace.OUTPUT, 0),
    ]
    assert program.arena.size_bytes == 0


NESTED = """
graph(%0 "x": f32[1,4,4]) -> (%7 "y")
%1: f32[1,4,4] = exp(%0)
%2: f32[1,4,4] = neg(%0)
%3: f32[1,8,4] = concat(%1, %2) {axis=1}
%4: f32[1,8,4] = abs(%3)
%5: f32[1,16,4] = concat(%4, %3) {axis=1}
%6: f32[1,16,4] = tanh(%5)
%7: f32[1,16,4] = neg(%6)
"""


def test_parts_have_parts() -> None:
    program = bind(NESTED, [3, 5])
    where = [slots[-1] for slots in program.slots[:5]]
    start = where[4].at
    assert where[:4] == [Slot(SlotPlace.ARENA, start + n) for n in (128, 192, 128, 0)]


def test_a_reader_after_the_concatenation_finds_the_operand_whole() -> None:
    text = """
graph(%0 "x": f32[1,16]) -> (%6 "y")
%1: f32[1,16] = exp(%0)
%2: f32[1,16] = neg(%0)
%3: f32[1,32] = concat(%1, %2) {axis=1}
%4: f32[1,32] = abs(%3)
%5: f32[1,16] = tanh(%1)
%7: f32[1,32] = concat(%5, %2) {axis=1}
%6: f32[1,32] = add(%4, %7)
"""
    for workspace_bytes in (0, 64):
        program = bind(text, [3], workspace_bytes=workspace_bytes)
        assert program.slots[4][0] == program.slots[0][1]


def test_an_operand_that_is_a_model_output_is_copied_out() -> None:
    text = PAIR.replace('(%4 "y")', '(%4 "y", %2 "z")')
    program = bind(text, [3], workspace_bytes=64)
    assert program.copies == ((1, program.slots[1][1]),)


def test_an_operand_of_an_output_that_is_another_output_is_copied_from_there() -> None:
    text = PAIR.replace('(%4 "y")', '(%3 "y", %2 "z")').rsplit("%4", 1)[0]
    program = bind(text, [3])
    assert program.copies == ((1, Slot(SlotPlace.OUTPUT, 0, 256)),)


def test_parts_without_elements_are_there_too() -> None:
    bind(
        """
graph(%0 "x": f32[1,16], %1 "e": f32[1,0]) -> (%5 "y")
%2: f32[1,16] = exp(%0)
%3: f32[1,0] = neg(%1)
%4: f32[1,32] = concat(%2, %3, %6) {axis=1}
%6: f32[1,16] = neg(%0)
%5: f32[1,32] = abs(%4)
""",
        [4],
        order=[0, 1, 3, 2, 4],
    )


@pytest.mark.parametrize(
    ("text", "in_place"),
    [
        (PAIR.replace("concat(%1, %2)", "concat(%1, %0)"), [3]),
        (PAIR.replace("concat(%1, %2)", "concat(%1, %1)"), [3]),
        (NESTED.replace("concat(%4, %3)", "concat(%4, %2, %1)"), [3, 5]),
    ],
)
def test_what_lies_elsewhere_is_refused(text: str, in_place: list[int]) -> None:
    graph, steps = plan(text, in_place)
    with pytest.raises(InvalidGraphError, match="it is a concatenation in place of"):
        bind_steps(graph, steps)


def test_parts_that_do_not_fill_the_whole_are_refused() -> None:
    text = PAIR.replace("f32[1,16,2,2]", "f32[1,8,2,2]").replace("f32[1,32", "f32[1,16")
    with pytest.raises(InvalidGraphError, match="of 512 bytes to 256"):
        graph, steps = plan(text, [3], layout=channels_blocked(4, 16))
        bind_steps(graph, steps)


def test_the_library_skips_them(make_executable: Any) -> None:
    executable = make_executable(plans.concatenated())
    assert [step.runs for step in executable.plan.steps] == [True, True, False, True, False, True]
    assert executable.plan.kernel_count == 4
    assert sorted(executable.sources)[:2] == ["k_exp16.ll", "k_late.ll"]
    assert plans.tables_of(executable.sources).count("{ ptr null, ptr null, ptr null, ") == 2
    arrays = plans.random_arrays(plans.concatenated().graph)
    timing = executable.time(arrays, 5)
    assert len(timing.kernel_ns[0]) == 6
    whole = executable.plan.steps[4]
    assert [(p.place, p.at, p.offset) for p in (*whole.inputs, *whole.outputs)] == [
        ("OUTPUT", 1, 0),
        ("OUTPUT", 1, 128),
        ("OUTPUT", 1, 0),
    ]
    profiled = profile(executable, arrays, 3)
    assert len(profiled.kernels) == 6
    assert "concat" not in profiled.to_text() and "all kernels     4" in profiled.to_text()
    assert "none: the kernels of the operands write into the memory of the result" in kernel_text(
        executable.plan, Report(), 2
    )


def random_graph(rng: Random) -> PrimitiveGraph:
    """A graph of concatenations along the first axis that has elements to skip."""
    builder = GraphBuilder()
    rest = rng.choice([(1,), (4,), (2, 2), (1, 1)])
    type_ = ValueType((1, 16, *rest), DType.F32)
    values = [builder.input(f"x{i}", type_) for i in range(2)]
    read: set[int] = set()
    for _ in range(rng.randint(6, 14)):
        if rng.random() < 0.4:
            parts = rng.sample(values, min(len(values), rng.randint(2, 3)))
            if sum(builder.type(v).shape[1] for v in parts) <= 256:
                values.append(builder.add("concat", parts, ConcatAttributes(1)))
                read.update(parts)
                continue
        value = rng.choice(values)
        values.append(builder.add(rng.choice(("neg", "abs", "tanh")), [value]))
        read.add(value)
    for i, value in enumerate(dict.fromkeys(values[2:])):
        if value not in read or rng.random() < 0.1:
            builder.output(f"y{i}", value)
    return builder.freeze()


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_compute_what_they_should(seed: int) -> None:
    rng = Random(seed)
    graph = random_graph(rng)
    groups, _ = enumerate_groups(graph, Options(search=SearchLimits(max_primitives=2)))
    candidates, _ = collect_candidates(graph, groups, Answers((GeneratedProvider(), InPlaceProvider()), TARGET))
    costs = {c.key: rng.randint(1, 9) for c in candidates}
    problem = Instance(graph, candidates).problem(lambda c: (0 if c.offer.is_in_place else costs[c.key], True))
    chosen = [candidates[k] for k in solve(problem, seconds=5, limits=SearchLimits(solver_workers=1)).kernels]
    steps = [
        PlanStep(
            c, Kernel("", "") if c.offer.is_in_place else Kernel(f"k{i}", "", workspace_bytes=64 * rng.randint(0, 2))
        )
        for i, c in enumerate(chosen)
    ]
    check(graph, steps, bind_steps(graph, steps))


def test_random_plans_have_concatenations_in_place() -> None:
    count = 0
    for seed in range(40):
        graph = random_graph(Random(seed))
        groups, _ = enumerate_groups(graph, Options(search=SearchLimits(max_primitives=2)))
        found, _ = collect_candidates(graph, groups, Answers((InPlaceProvider(),), TARGET))
        count += len({c.group.outputs for c in found})
    assert count > 30
