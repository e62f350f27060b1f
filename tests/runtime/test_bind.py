from dataclasses import replace

import pytest

from korch.candidate.layout import Layout
from korch.errors import InvalidGraphError
from korch.runtime.bind import Slot, SlotPlace, bind_steps
from korch.runtime.build import check_symbols
from tests.runtime import runtime_plans as plans


def bind(plan):
    return bind_steps(plan.graph, plan.steps)


def test_intermediates_lie_in_the_arena_and_outputs_in_the_callers_memory():
    program = bind(plans.chain())
    places = [[slot.place for slot in slots] for slots in program.slots]
    arena, given, output = SlotPlace.ARENA, SlotPlace.INPUT, SlotPlace.OUTPUT
    assert places == [[given, arena], [arena, arena], [arena, output]]
    assert program.arena.size_bytes == program.arena.lower_bound_bytes == 128
    assert program.copies == ()


def test_a_workspace_is_live_in_its_step_only():
    program = bind(plans.workspace())
    scratch = program.slots[1][-1]
    assert scratch.place is SlotPlace.ARENA
    assert scratch not in program.slots[1][:-1]
    assert program.arena.size_bytes == 3 * 256


def test_floats_of_a_plan_for_ranges_share_no_memory_with_workspaces():
    """Kernels read rows of floats that no kernel has written; bits of other types there are denormal numbers."""
    plan = plans.chain()
    first, second, third = plan.steps
    scratch = replace(first, kernel=replace(first.kernel, workspace_bytes=4096))
    shared = bind_steps(plan.graph, (scratch, second, third)).arena.size_bytes
    trimmed = replace(third, kernel=replace(third.kernel, size_input="x"))
    program = bind_steps(plan.graph, (scratch, second, trimmed))
    floats = {slots[k].at for slots, k in zip(program.slots, (1, 1, 0), strict=True)}
    (_, _, workspace), *_ = program.slots
    assert shared == 4096 + 64 and program.arena.size_bytes == 4096 + 128
    assert workspace.at >= max(floats) + 64


def test_a_constant_is_packed_once_for_each_layout():
    plan = plans.blocked_constant()
    twice = replace(plan, steps=(plan.steps[0], *plan.steps))
    assert [str(layout) for _, layout in bind(plan).constants] == ["aBcd4b", "abcd"]
    assert bind(twice).constants == bind(plan).constants


def test_outputs_that_no_kernel_writes_in_place_are_copied():
    program = bind(plans.passed_through())
    assert program.copies == (
        (0, Slot(SlotPlace.INPUT, 0)),
        (1, Slot(SlotPlace.CONSTANT, 0)),
        (2, Slot(SlotPlace.CONSTANT, 1)),
        (4, Slot(SlotPlace.OUTPUT, 3)),
    )


def test_a_step_that_reads_too_early_is_refused():
    plan = plans.chain()
    with pytest.raises(InvalidGraphError) as caught:
        bind_steps(plan.graph, plan.steps[1:])
    value = plan.steps[1].candidate.group.inputs[0]
    assert str(caught.value) == (f"step 0 (k_neg): it reads %{value} in layout ab, which no step before it writes")


def test_a_model_input_in_a_layout_that_no_step_makes_is_refused():
    plan = plans.layouts()
    with pytest.raises(InvalidGraphError) as caught:
        bind_steps(plan.graph, plan.steps[1:])
    assert "(k_work): it reads %0 in layout acdb, which no step before it writes" in str(caught.value)


def test_a_plan_without_an_output_is_refused():
    plan = plans.layouts()
    value = plan.graph.outputs[0][1]
    with pytest.raises(InvalidGraphError) as caught:
        bind_steps(plan.graph, plan.steps[:2])
    assert str(caught.value) == f"output 'y': no step writes it (%{value} in layout abcd)"


def test_symbols_that_clash_or_are_none_are_refused():
    plan = plans.chain()
    clash = replace(plan.steps[1].kernel, source="// other\n", symbol="k_exp")
    program = bind_steps(plan.graph, (plan.steps[0], replace(plan.steps[1], kernel=clash), plan.steps[2]))
    with pytest.raises(InvalidGraphError) as caught:
        check_symbols(program)
    assert str(caught.value) == ("kernel k_exp: two kernels with different sources have this symbol")
    odd = replace(plan.steps[1].kernel, symbol="k-1")
    program = bind_steps(plan.graph, (plan.steps[0], replace(plan.steps[1], kernel=odd), plan.steps[2]))
    with pytest.raises(InvalidGraphError) as caught:
        check_symbols(program)
    assert str(caught.value) == "kernel 'k-1': its symbol is no C identifier"


def test_a_layout_change_of_a_constant_reads_the_packed_constant():
    plan = plans.blocked_constant()
    value = next(v for v, c in plan.graph.constants.items() if not c.is_uniform)
    kernel = plans.loop("k_move", 20, "o0[i] = i0[i];")
    move = plans.layout_step(plan.graph, value, kernel, Layout.plain(4), Layout((0, 2, 3, 1)))
    program = bind_steps(plan.graph, (move, *plan.steps))
    assert program.slots[0][0] == Slot(SlotPlace.CONSTANT, 0)


def test_threads_have_their_workspaces_of_all_kernels_in_one_place():
    plan = plans.chain()
    sizes = (100, 0, 300)
    kernels = [replace(s.kernel, thread_bytes=r, workspace_bytes=2 * r) for s, r in zip(plan.steps, sizes, strict=True)]
    steps = [replace(step, kernel=kernel) for step, kernel in zip(plan.steps, kernels, strict=True)]
    program = bind_steps(plan.graph, steps, 2)
    values_end = bind_steps(plan.graph, plan.steps).arena.size_bytes
    begins = {
        t: {s[-1].at + t * (s[-1].offset + r) for s, r in zip(program.slots, sizes, strict=True) if r} for t in (0, 1)
    }
    (first,), (second,) = begins.values()
    assert values_end <= first <= second - 300
    assert second + 300 <= program.arena.size_bytes
    assert program.arena.is_optimal
