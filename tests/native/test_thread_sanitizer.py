"""ThreadSanitizer finds no race in task queues and barriers; if a wait is removed, it finds one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from korch.measure.compiler import NATIVE_FOLDER
from korch.measure.toolchain import find_compiler

SOURCE = r"""
#include <pthread.h>
#include <stdio.h>
#include "korch_wait.h"

constexpr int THREADS = 3, TURNS = 400;
static long first[6], second[6], sums[THREADS];

static void write(int stage, void* const*, long begin, long end, long) {
  for (long i = begin; i < end; ++i) (stage == 0 ? first : second)[i] += stage == 0 ? i : first[5 - i];
}

#include "korch_tasks.h"
static const plan::step STEP = {nullptr, nullptr, write, nullptr, nullptr, 0, false};
static const int64_t FIRST_TASKS[] = {0, 2, 4, 6};
#define PART(me) 2 * me, 2 * me + 2
static const plan::task TASKS[] = {{0, 0, PART(0), 0}, {0, 1, PART(0), 0}, {0, 0, PART(1), 1},
                                   {0, 1, PART(1), 1}, {0, 0, PART(2), 1}, {0, 1, PART(2), 1},
                                   {0, 0, 0, 0, 2}};
static const plan::wait WAITS[] = {{2, ENDED}, {0, ENDED}};
static korch_plan made() {
  korch_plan plan = {};
  plan.steps = {1, &STEP}, plan.first_tasks = {4, FIRST_TASKS}, plan.tasks = {7, TASKS}, plan.waits = {2, WAITS};
  plan.queues = THREADS;
  return plan;
}
static const korch_plan queues = made();

static korch::Count met[THREADS], ended[THREADS];
static korch::Team team{met, THREADS, 1000};

// A kernel of two stages.
static int sum(void* const* buffers, korch::Member& own) {
  long* const at = static_cast<long*>(buffers[0]);
  at[own.me] += 1;
  own.meet();
  const long other = at[(own.me + 1) % own.threads] & 1;
  own.meet();
  at[own.me] += other;
  return 0;
}

static void* work(void* number) {
  const long me = reinterpret_cast<long>(number);
  korch::Member own = korch::member(team, me, THREADS, 0);
  for (uint32_t turn = 0; turn < TURNS; ++turn) {
    const uint32_t before[] = {2 * turn, 2 * turn, 2 * turn};
    korch_tasks::run_queue(queues, 0, int(me), nullptr, nullptr, ended, before, team);
    own.meet();
    void* const buffers[] = {sums};
    sum(buffers, own);
    own.meet();
  }
  return nullptr;
}

int main() {
  pthread_t threads[THREADS];
  for (long i = 0; i < THREADS; ++i) pthread_create(threads + i, nullptr, work, reinterpret_cast<void*>(i));
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  long expected = 0;
  for (long turn = 1; turn <= TURNS; ++turn) expected += 5 * turn;
  printf("%s\n", second[0] == expected ? "right" : "wrong");
}
"""


def sanitized(folder: Path, ended: int) -> subprocess.CompletedProcess[str]:
    """Return the run of the program, in which tasks wait until others have ended some number of theirs.

    Args:
        folder: for the program.
        ended: the number.
    """
    found = find_compiler()
    (folder / "main.cpp").write_text(SOURCE)
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", f"-DENDED={ended}", f"-I{NATIVE_FOLDER}"]
    command = [*found.command, *found.openmp, *flags, "main.cpp", "-o", "main", "-pthread"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode and "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []  # it can't run with too random addresses
    return subprocess.run([*fixed, "./main"], cwd=folder, capture_output=True, text=True, check=False, timeout=300)


def test_no_race_is_found(tmp_path: Path) -> None:
    done = sanitized(tmp_path, 1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "right\n", "")


def test_a_missing_wait_is_found(tmp_path: Path) -> None:
    done = sanitized(tmp_path, 0)
    assert done.returncode != 0 and "data race" in done.stderr
