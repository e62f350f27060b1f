"""Consecutive kernels in one parallel region, and when one thread runs all of them instead."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from korch.provider.provider import Kernel, Threading
from korch.report.threads import watch_threads
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.system.native import Code
from tests.runtime import runtime_plans as plans
from tests.support.c_code import MEMBER, SYSTEM, llvm_of

MS = 1_000_000

SEES = """
int {symbol}_team(void *const *buffers, Member *own) {{
    float *y = buffers[1];
    const long me = own->me, all = own->threads;
    if (me == 0) {{
        for (int i = 0; i < 16; ++i) y[i] = -1;
        y[12] = ((const float *)buffers[0])[12] + 1;
    }}
    if (all > 1) own->meet(own);
    y[me] = me;
    if (all > 1) own->meet(own);
    y[4 + me] = y[(me + 1) % all]; /* what another wrote before they met */
    y[8 + me] = own->team != 0;
    return 0;
}}
int {symbol}_run(void *state, void *const *buffers) {{
    return korch_region(korch_max_threads(), {symbol}_team, buffers);
}}
"""
STATE = """
static int state;
void *{symbol}_create(int threads, char *error, unsigned long size) {{ return &state; }}
void {symbol}_destroy(void *state) {{}}
"""


def sees(i: int, has_state: bool = False) -> Kernel:
    text = MEMBER + (SEES + STATE * has_state).format(symbol=f"k_sees{i}")
    return Kernel(f"k_sees{i}", llvm_of(text), has_state=has_state, threading=Threading.TEAM)


@pytest.fixture
def make_seeing(builder):
    """Return a function from whether each kernel has a state to an executable of such kernels."""

    def make(has_state, threads):
        graph_builder, x = plans.new_graph(x="f32[16]")
        for i in range(len(has_state)):
            x = graph_builder.add("neg", [x])
            graph_builder.output(f"y{i}", x)
        graph = graph_builder.freeze()
        steps = [
            plans.step(graph, [value], sees(i, has))
            for i, ((_, value), has) in enumerate(zip(graph.outputs, has_state, strict=True))
        ]
        return Executable(build(graph, steps, replace(plans.TARGET, threads=threads), builder))

    return make


X = np.zeros(16, np.float32)


def told(has_team: int, i: int) -> list[float]:
    return [0, 1, 2, 3, 1, 2, 3, 0, *[has_team] * 4, i + 1, -1, -1, -1]


def told_alone(i: int, has_team: bool = False) -> list[float]:
    """One thread runs the kernel; it still has its team if the other threads stopped within the region."""
    return [0, -1, -1, -1, 0, -1, -1, -1, has_team, -1, -1, -1, i + 1, -1, -1, -1]


def test_kernels_that_follow_each_other_are_a_teams_and_one_with_a_state_is_not(make_seeing):
    executable = make_seeing([False, False, True, False, False, False], 4)
    has_team = [True] * 6
    first, second = executable(X), executable(X)
    assert first[0].tolist() == told(True, 0)
    for found in (first, second):
        for i, y in enumerate(found):  # alone where other processes use the cores
            assert y.tolist() in (told(has_team[i], i), told_alone(i), told_alone(i, has_team[i]))


def test_callers_in_several_threads_get_what_they_get_alone(make_seeing):
    """Two executables at once, with kernels that share a region and kernels that do not."""
    has_state = [False, False, True, False, True, True, False, False]
    executables = [make_seeing(has_state, 3) for _ in range(2)]

    def call(i):
        for y in [y for _ in range(40) for y in executables[i % 2](X)]:
            assert y[:3].tolist() in ([0, 1, 2], [0, -1, -1])
            assert y[4:7].tolist() in ([1, 2, 0], [0, -1, -1])
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(4)))


def test_a_kernel_by_itself_opens_its_region_itself(make_seeing):
    executable = make_seeing([False, True, False], 4)
    runs = [[y.tolist() for y in executable(X)] for _ in range(50)]
    assert [told(True, i) for i in range(3)] in runs  # on a busy machine, one thread runs some of them
    assert all(y[12] == i + 1 for run in runs for i, y in enumerate(run))


def test_one_thread_needs_no_team(make_seeing):
    for i, y in enumerate(make_seeing([False, False], 1)(X)):
        assert y.tolist() == told_alone(i)


def test_the_threads_of_a_team_are_seen_in_each_kernel(make_seeing, tmp_path):
    make_seeing([False, False, True, False], 4).save(tmp_path / "m.korch")
    for run in watch_threads(tmp_path / "m.korch", 4, rounds=3).runs:
        seen = sorted((span.kernel, span.thread) for span in run.spans)
        assert seen == [(kernel, thread) for kernel in range(4) for thread in range(4)]
        for span in run.spans:
            assert 0 <= span.wait_ns <= span.end_ns - span.begin_ns


OVERSUBSCRIPTION = """
#include "korch_oversubscription.h"
static oversubscription own;
static int64_t clock_ns;
static int64_t clock_now(void) { return clock_ns; }
void begin(int64_t now_ns) { begin_oversubscription(&own, now_ns); }
void note_wait(int64_t since_ns, int64_t now_ns, int threads) { add_wait(&own, now_ns - since_ns, now_ns, threads); }
int64_t step(int64_t since_ns, int64_t now_ns, int64_t usual_ns, int threads) {
    note_step(&own, now_ns - since_ns, now_ns, &usual_ns, threads);
    return usual_ns;
}
void end(int64_t now_ns) { end_oversubscription(&own, now_ns); }
int is_here(int64_t now_ns) {
    clock_ns = now_ns;
    return is_oversubscribed(&own, clock_now);
}
"""


class Oversubscription:
    """A oversubscription of its own; times are in milliseconds."""

    def __init__(self, code):
        self.code = code

    def is_here(self, now):
        return bool(self.code.function("is_here")(ctypes.c_int64(int(now * MS))))

    def tell(self, name, *times, threads=()):
        self.code.function(name, None)(*(ctypes.c_int64(int(t * MS)) for t in times), *threads)

    def wait(self, since, now, threads=2):
        self.tell("note_wait", since, now, threads=[threads])
        return self.is_here(now)

    def step(self, since, now, usual, threads=2):
        """A step whose threads can't be looked into; return what is usual then."""
        times = (ctypes.c_int64(int(t * MS)) for t in (since, now, usual))
        return self.code.function("step", ctypes.c_int64)(*times, threads) / MS

    def works(self, since, now):
        """A run of all threads without a wait."""
        self.tell("begin", since)
        self.tell("end", now)


@pytest.fixture
def oversubscription(builder):
    return Oversubscription(Code(builder.objects([llvm_of(OVERSUBSCRIPTION)])))


def test_who_waits_longer_than_the_work_takes_alone_is_alone_for_twice_as_long(oversubscription):
    oversubscription.works(0, 5)
    oversubscription.tell("begin", 100)
    assert not oversubscription.wait(101, 106)  # all threads have 5 ms of work each, so one has 5 more
    assert oversubscription.wait(106, 107)
    assert oversubscription.is_here(118)
    assert not oversubscription.is_here(120)  # in the same run
    assert oversubscription.wait(120, 140)
    oversubscription.tell("begin", 150)
    assert oversubscription.is_here(150)
    oversubscription.tell("begin", 230)
    assert not oversubscription.is_here(230)


def test_a_long_run_counts_as_what_it_was(oversubscription):
    """What is done by now may be the least of it: a wait at the begin is not all."""
    oversubscription.works(0, 50)
    oversubscription.tell("begin", 100)
    assert not oversubscription.wait(100.1, 104)
    oversubscription.tell("begin", 200)
    assert not oversubscription.wait(300, 390)  # this one has worked for 100 ms


def test_of_the_first_run_nothing_is_known(oversubscription):
    oversubscription.tell("begin", 0)
    assert not oversubscription.wait(1, 100)


def test_a_short_wait_is_no_oversubscription(oversubscription):
    oversubscription.works(0, 0.1)
    oversubscription.tell("begin", 1)
    assert not oversubscription.wait(1, 1.9)


def test_more_threads_wait_for_longer(oversubscription):
    """Alone, eight threads' work takes eight times as long."""
    oversubscription.works(0, 1)
    oversubscription.tell("begin", 10)
    assert not oversubscription.wait(10, 16.9, 8)
    assert oversubscription.wait(16.9, 17.1, 8)


def test_what_a_step_takes_beyond_its_usual_time_counts_as_a_wait(oversubscription):
    oversubscription.works(0, 4)
    oversubscription.tell("begin", 10)
    assert oversubscription.step(10, 13, usual=3) == 3  # its usual time is work
    assert not oversubscription.is_here(13)
    oversubscription.step(13, 17.9, usual=1)  # 3.9 ms late
    assert not oversubscription.is_here(17.9)
    oversubscription.step(17.9, 20.2, usual=1)  # 5.2 ms in all, of which 5 ms were work
    assert oversubscription.is_here(20.2)


def test_the_usual_time_of_a_step_is_its_least_and_grows_slowly(oversubscription):
    assert oversubscription.step(0, 5, usual=0) == 5
    assert oversubscription.step(0, 3, usual=5) == 3
    assert oversubscription.step(0, 100, usual=3) == pytest.approx(3 * 65 / 64)
    assert oversubscription.step(0, 3.01, usual=3) == pytest.approx(3.01)
    usual = 1.0
    for _ in range(46):
        usual = oversubscription.step(0, 2, usual)
    assert usual == pytest.approx(2)


def test_oversubscriptions_that_come_back_last_longer_and_runs_without_shorten_them(oversubscription):
    oversubscription.works(0, 1)
    now, lengths = 10, []
    for _ in range(10):
        oversubscription.tell("begin", now)
        assert oversubscription.wait(now, now + 2)
        now += 2
        lengths.append(next(n for n in range(1, 400) if not oversubscription.is_here(now + n)))
        now += lengths[-1]
        oversubscription.tell("end", now)
    assert lengths == [4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    for i in range(8):
        oversubscription.works(now + i, now + i + 1)
    oversubscription.tell("begin", now + 20)
    assert oversubscription.wait(now + 20, now + 22)
    assert oversubscription.is_here(now + 25)
    assert not oversubscription.is_here(now + 27)


LATE = """
int {symbol}_team(void *const *buffers, Member *own) {{
    if (own->me != 0) sleep_us(1000 * ((const float *)buffers[0])[0]);
    else ((float *)buffers[1])[0] = own->threads;
    return 0;
}}
int {symbol}_run(void *state, void *const *buffers) {{
    ((float *)buffers[1])[0] = 1000 + korch_max_threads(); /* what a library finds */
    return 0;
}}
"""


def test_where_threads_come_late_one_runs_all(builder):
    """The calling thread waits for longer than all work takes, so it runs the next kernels and runs alone."""
    graph_builder, x = plans.new_graph(x="f32[16]")
    for i in range(4):
        graph_builder.output(f"y{i}", graph_builder.add(("neg", "abs", "tanh", "exp")[i], [x]))
    graph = graph_builder.freeze()
    steps = []
    for i, (_, value) in enumerate(graph.outputs):
        source = llvm_of(MEMBER + SYSTEM + LATE.format(symbol=f"k_late{i}"))
        kernel = Kernel(f"k_late{i}", source, threading=Threading.OWN if i == 3 else Threading.TEAM)
        steps.append(plans.step(graph, [value], kernel))
    executable = Executable(build(graph, steps, replace(plans.TARGET, threads=3), builder))

    def threads(late_ms):
        return [float(y[0]) for y in executable(np.full(16, late_ms, np.float32))]

    for _ in range(200):
        if threads(0) == [3, 3, 3, 1003]:
            break
    assert threads(40) == [3, 1, 1, 1001]  # the others have stopped after the first kernel
    assert threads(0) == [1, 1, 1, 1001]
