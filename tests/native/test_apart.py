"""Threads of a parallel region leave the core of the region's first thread."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from korch.measure.compiler import NATIVE_FOLDER
from korch.measure.toolchain import find_compiler

SOURCE = """
#include "korch_apart.h"
#include <stdio.h>
#include <stdlib.h>
#include <thread>

static void go_to(int core, const cpu_set_t& all) {
  cpu_set_t only;
  CPU_ZERO(&only);
  CPU_SET(core, &only);
  pthread_setaffinity_np(pthread_self(), sizeof only, &only);
  pthread_setaffinity_np(pthread_self(), sizeof all, &all);
}

// Regions of some threads begin on one core after the other. Print for each whether another thread, which was on the
// first core when the first region began, may use that core.
int main(int, char** arguments) {
  const int threads = atoi(arguments[1]);
  cpu_set_t all, found;
  pthread_getaffinity_np(pthread_self(), sizeof all, &all);
  volatile bool has_left = false, ends = false;
  std::thread other;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &all)) continue;
    go_to(core, all);
    const korch::Leader leader(threads);
    if (!other.joinable())
      other = std::thread([&, leader] {
        go_to(core, all);
        leader.leave_core(1);
        has_left = true;
        while (!ends) sched_yield();
      });
    while (!has_left) sched_yield();
    pthread_getaffinity_np(other.native_handle(), sizeof found, &found);
    printf("%d ", CPU_ISSET(core, &found) != 0);
  }
  ends = true;
  other.join();
}
"""

CORES = os.sched_getaffinity(0)


def allowed(folder: Path, threads: int, cores: set[int]) -> list[str]:
    source, program, compiler = folder / "apart.cpp", folder / "apart", find_compiler()
    source.write_text(SOURCE)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{NATIVE_FOLDER}", str(source)]
    subprocess.run([*compiler.command, *compiler.openmp, *flags, "-o", str(program)], check=True)
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
    assert allowed(tmp_path, 2, CORES) == ["0"] * len(CORES)


def test_threads_that_outnumber_the_cores_may_use_all(tmp_path: Path) -> None:
    assert allowed(tmp_path, len(CORES) + 1, CORES) == ["1"] * len(CORES)


def test_a_thread_stays_where_there_is_no_other_core(tmp_path: Path) -> None:
    assert allowed(tmp_path, 1, {min(CORES)}) == ["1"]
