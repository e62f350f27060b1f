import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from korch.errors import InvalidGraphError
from korch.runtime import memory
from korch.runtime.memory import ArenaBuffer, ArenaPlan, check_arena, live_bytes, plan_arena

buffers = st.lists(
    st.builds(
        lambda size, first, length: ArenaBuffer(size, first, first + length),
        st.integers(0, 500),
        st.integers(0, 20),
        st.integers(0, 6),
    ),
    max_size=20,
)


def smallest(found):
    """The smallest arena, by trying every order with first fit (some order is optimal)."""
    best = None
    for order in itertools.permutations(range(len(found))):
        offsets = memory._place(found, memory._neighbours(found), order, False)
        size = memory._size_bytes(found, offsets)
        best = size if best is None else min(best, size)
    return best or 0


@settings(max_examples=150, deadline=None)
@given(buffers)
def test_plans_are_legal_and_not_below_their_bound(found):
    plan = plan_arena(found, seconds=0)
    check_arena(found, plan)
    assert live_bytes(found) == plan.lower_bound_bytes <= plan.size_bytes


@settings(max_examples=40, deadline=None)
@given(buffers.map(lambda found: found[:6]))
def test_small_plans_are_optimal_and_say_so(found):
    plan = plan_arena(found, seconds=5)
    assert plan.is_optimal
    assert plan.size_bytes == smallest(found)


def test_buffers_that_are_not_live_together_share_memory():
    plan = plan_arena([ArenaBuffer(100, 0, 1), ArenaBuffer(120, 1, 2), ArenaBuffer(128, 2, 3)])
    assert plan.size_bytes == 256
    assert plan.offsets[0] == plan.offsets[2]


def test_nothing_to_place_is_an_empty_arena():
    assert plan_arena([]) == ArenaPlan((), 0, 0)
    assert plan_arena([ArenaBuffer(0, 0, 3)]).size_bytes == 0


def test_the_solver_mends_what_greedy_orders_leave(monkeypatch):
    # One order only, which puts the fourth buffer where it splits the room for the last two.
    monkeypatch.setattr(memory, "_ORDERS", (lambda b: (b.first,),))
    found = [ArenaBuffer(128, 0, 1), ArenaBuffer(64, 0, 1), ArenaBuffer(128, 3, 5), ArenaBuffer(64, 1, 3)]
    found += [ArenaBuffer(128, 3, 3)]
    greedy = plan_arena(found, seconds=0)
    solved = plan_arena(found, seconds=5)
    assert greedy.size_bytes > greedy.lower_bound_bytes
    assert not greedy.is_optimal
    assert solved.size_bytes < greedy.size_bytes
    assert solved.is_optimal


def test_overlapping_buffers_are_refused():
    found = [ArenaBuffer(100, 0, 2), ArenaBuffer(100, 2, 3)]
    with pytest.raises(InvalidGraphError) as caught:
        check_arena(found, ArenaPlan((0, 64), 192, 192))
    assert str(caught.value) == ("arena: buffers 0 and 1 overlap in memory, and both are live at step 2")
    check_arena([found[0], ArenaBuffer(100, 3, 3)], ArenaPlan((0, 64), 192, 192))


@pytest.mark.parametrize("offset", [-64, 32, 128])
def test_buffers_that_are_unaligned_or_outside_are_refused(offset):
    with pytest.raises(InvalidGraphError) as caught:
        check_arena([ArenaBuffer(100, 0, 0)], ArenaPlan((offset,), 192, 192))
    assert str(caught.value) == (
        f"arena: buffer 0 of 100 bytes lies at offset {offset}; expected a multiple of 64 and an end within 192 bytes"
    )
