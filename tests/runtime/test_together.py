"""Kernels that follow each other in one parallel region, and when they are one thread's instead."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import runtime_plans as plans

from korch.measure.compiler import find_compiler
from korch.provider.provider import Kernel
from korch.report.threads import watch_threads
from korch.runtime.build import build
from korch.runtime.executable import Executable

pytestmark = pytest.mark.skipif(
    "clang" in find_compiler().version.lower(), reason="only GCC's regions can be given to a team"
)

MS = 1_000_000

SEES = """
#include "korch_teams.h"
extern "C" int {symbol}_run(void*, void* const* buffers) {{
  float* y = static_cast<float*>(buffers[1]);
  for (int i = 0; i < 16; ++i) y[i] = -1;
#pragma omp parallel
  {{
    const int me = omp_get_thread_num(), all = omp_get_num_threads();
    y[me] = me;
#pragma omp barrier
    y[4 + me] = y[(me + 1) % all];  // what another wrote before they met
    y[8 + me] = korch_teams::seat.team != nullptr;
  }}
  y[12] = static_cast<const float*>(buffers[0])[12] + 1;
  return 0;
}}
"""
STATE = """
extern "C" void* {symbol}_create(int, char*, size_t) {{ return new int; }}
extern "C" void {symbol}_destroy(void* state) {{ delete static_cast<int*>(state); }}
"""


def sees(i: int, has_state: bool = False) -> Kernel:
    text = SEES + STATE * has_state
    return Kernel(f"k_sees{i}", text.format(symbol=f"k_sees{i}"), has_state=has_state)


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


def told_alone(has_team: int, i: int) -> list[float]:
    return [0, -1, -1, -1, 0, -1, -1, -1, has_team, -1, -1, -1, i + 1, -1, -1, -1]


def test_kernels_that_follow_each_other_are_a_teams_and_one_with_a_state_is_not(make_seeing):
    executable = make_seeing([False, False, True, False, False, False], 4)
    has_team = [True, True, False, True, True, True]
    first, second = executable(X), executable(X)
    assert first[0].tolist() == told(True, 0)
    for found in (first, second):
        for i, y in enumerate(found):  # alone where other processes want the cores
            assert y.tolist() in (told(has_team[i], i), told_alone(has_team[i], i))
        assert found[2].tolist() == told(False, 2)


def test_a_kernel_by_itself_opens_its_region_itself(make_seeing):
    executable = make_seeing([False, True, False], 4)
    for _ in range(3):
        assert [y.tolist() for y in executable(X)] == [told(False, i) for i in range(3)]


def test_one_thread_needs_no_team(make_seeing):
    for i, y in enumerate(make_seeing([False, False], 1)(X)):
        assert y.tolist() == told_alone(False, i)


def test_the_threads_of_a_team_are_seen_in_each_kernel(make_seeing, tmp_path):
    make_seeing([False, False, True, False], 4).save(tmp_path / "m.korch")
    for run in watch_threads(tmp_path / "m.korch", 4, rounds=3).runs:
        seen = sorted((span.kernel, span.thread) for span in run.spans)
        assert seen == [(kernel, thread) for kernel in range(4) for thread in range(4)]
        for span in run.spans:
            assert 0 <= span.wait_ns <= span.end_ns - span.begin_ns


CROWD = """
#include "korch_teams.h"
static korch_teams::Crowd crowd;
static int calls, threads_seen;
extern "C" {
int begin(int64_t now_ns) { crowd.begin(now_ns); return crowd.is_here(); }
int note_wait(int64_t since_ns, int64_t now_ns, int threads) {
  crowd.note_wait(since_ns, now_ns, threads);
  return crowd.is_here();
}
void end() { crowd.end(); }
int run(int threads) {
  korch_teams::run_together(threads, &crowd, [] {
    threads_seen = 0;
#pragma omp parallel
    __atomic_fetch_add(&threads_seen, 1, __ATOMIC_RELAXED);
  });
  return threads_seen;
}
}
"""


@pytest.fixture
def crowd(builder, tmp_path):
    # A copy: its state is this test's own.
    copy = tmp_path / "crowd.so"
    copy.write_bytes(builder.library([CROWD]).read_bytes())
    found = ctypes.CDLL(str(copy))
    found.begin.argtypes = [ctypes.c_int64]
    found.note_wait.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    return found


def test_who_waits_longer_than_alone_it_would_work_is_alone_for_twice_as_long(crowd):
    assert not crowd.begin(0)
    assert not crowd.note_wait(5 * MS, 9 * MS, 2)  # it worked for 5 of 9 ms
    assert not crowd.begin(20 * MS)
    assert crowd.note_wait(21 * MS, 24 * MS, 2)
    assert crowd.begin(29 * MS)
    assert not crowd.begin(31 * MS)


def test_a_short_wait_is_no_crowd(crowd):
    assert not crowd.begin(0)
    assert not crowd.note_wait(0, MS - 1, 2)


def test_more_threads_wait_for_longer(crowd):
    """Alone, eight threads' work takes eight times as long."""
    assert not crowd.begin(0)
    assert not crowd.note_wait(2 * MS, 15 * MS, 8)
    assert crowd.note_wait(15 * MS, 17 * MS, 8)


def test_crowds_that_come_back_last_longer_and_runs_without_shorten_them(crowd):
    now, lengths = 0, []
    for _ in range(12):
        crowd.begin(now)
        assert crowd.note_wait(now, now + 2 * MS, 2)
        now += 2 * MS
        length = next(n for n in range(1, 400) if not crowd.begin(now + n * MS))
        lengths.append(length)
        now += length * MS
    assert lengths == [4, 8, 16, 32, 64, 128, 256, 300, 300, 300, 300, 300]
    for _ in range(8):
        crowd.begin(now)
        crowd.end()
    crowd.begin(now)
    assert crowd.note_wait(now, now + 2 * MS, 2)
    assert crowd.begin(now + 5 * MS)
    assert not crowd.begin(now + 6 * MS)


def test_in_a_crowd_regions_have_one_thread(crowd):
    crowd.begin(0)
    assert crowd.run(3) == 3
    crowd.begin(2**62)
    assert crowd.note_wait(2**62, 2**62 + MS, 3)  # until long from now
    assert crowd.run(3) == 1
