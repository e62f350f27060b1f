"""Threads of a parallel region leave the core of the region's first thread."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.c_code import program_of

SOURCE = """
#include "korch_threads.c"

int korch_traces;
int64_t korch_trace_region(void) { return 0; }
void korch_trace_work(int64_t region, int64_t me, bool begins) { (void)region, (void)me, (void)begins; }
void korch_trace_wait(int64_t since_ns) { (void)since_ns; }
void korch_hold_handles(bool holds) { (void)holds; }
void *korch_allocate(int64_t size) { return calloc(1, (size_t)size + 64 - size % 64); }
void korch_release(void *memory) { free(memory); }

static int number; /* of the second thread */

static int note_number(void *given, korch_member *own) {
    (void)given;
    if (own->me == 1) number = (int)syscall(SYS_gettid);
    return 0;
}

/* Regions of some threads begin on one core after the other. Print for each whether the second thread may use it. */
int main(int count, char **words) {
    cpu_set_t all, only, found;
    sched_getaffinity(0, sizeof all, &all);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (!CPU_ISSET(core, &all)) continue;
        CPU_ZERO(&only);
        CPU_SET(core, &only);
        sched_setaffinity(0, sizeof only, &only);
        sched_setaffinity(0, sizeof all, &all);
        korch_parallel(atoi(words[count - 1]), note_number, NULL, NULL);
        sched_getaffinity(number, sizeof found, &found);
        printf("%d ", CPU_ISSET(core, &found) != 0);
    }
}
"""

CORES = os.sched_getaffinity(0)


def allowed(folder: Path, threads: int, cores: set[int]) -> list[str]:
    program = program_of(SOURCE, folder, "-lpthread")
    done = subprocess.run(
        [str(program), str(threads)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    return done.stdout.split()


@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
def test_a_thread_leaves_the_core_of_the_first_also_when_that_has_moved(tmp_path: Path) -> None:
    # In the first region, it leaves only if it is on this core.
    assert allowed(tmp_path, 2, CORES)[1:] == ["0"] * (len(CORES) - 1)


def test_threads_that_outnumber_the_cores_may_use_all(tmp_path: Path) -> None:
    assert allowed(tmp_path, len(CORES) + 1, CORES) == ["1"] * len(CORES)
