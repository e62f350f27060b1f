"""ThreadSanitizer finds no race in task queues and barriers; if a wait is removed, it finds one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from korch.system.native_build import FOLDER

SOURCE = r"""
#include "korch_threads.c"
#include "korch_plan.c"
#include "korch_trace.c"

enum { THREADS = 3, TURNS = 400 };
typedef struct { long first[6], second[6], sums[THREADS], total; } memory;

/* Two stages, which run as tasks. */
static void write_stage(int stage, void *const *buffers, int64_t begin, int64_t end, int64_t me) {
    memory *own = buffers[0];
    (void)me;
    for (int64_t i = begin; i < end; ++i)
        if (stage == 0) own->first[i] += i;
        else own->second[i] += own->first[5 - i];
}

static int write_all(void *state, void *const *buffers) {
    (void)state;
    write_stage(0, buffers, 0, 6, 0);
    write_stage(1, buffers, 0, 6, 0);
    return 0;
}

/* A kernel of two stages, which all threads run. */
static int sum(void *given, korch_member *own) {
    long *const at = (*(memory **)given)->sums;
    at[own->me] += 1;
    if (own->threads > 1) own->meet(own);
    const long other = at[(own->me + 1) % own->threads] & 1;
    if (own->threads > 1) own->meet(own);
    at[own->me] += other;
    return 0;
}
static int sum_alone(void *state, void *const *buffers) { (void)state; return korch_region(THREADS, sum, buffers); }

/* One thread. */
static int count_alone(void *state, void *const *buffers) { (void)state; ++((memory *)buffers[0])->total; return 0; }

static const korch_step STEPS[] = {{write_all, NULL, write_stage, NULL, NULL, 0, 0},
                             {sum_alone, sum, NULL, NULL, NULL, 1, 0},
                             {count_alone, NULL, NULL, NULL, NULL, 2, 0}, {sum_alone, sum, NULL, NULL, NULL, 3, 0},
                             {sum_alone, NULL, NULL, NULL, NULL, 4, 1}};
static const slot SLOTS[] = {{OUTPUT, 0, 0}, {OUTPUT, 0, 0}, {OUTPUT, 0, 0}, {OUTPUT, 0, 0}, {OUTPUT, 0, 0}};
static const int64_t BINDINGS[] = {0, 1, 2, 3, 4}, FIRST_TASKS[] = {0, 2, 4, 6};
static const segment SEGMENTS[] = {{0, 1}};
#define PART(me) 2 * me, 2 * me + 2
static const task TASKS[] = {{0, 0, PART(0), 0}, {0, 1, PART(0), 0}, {0, 0, PART(1), 1}, {0, 1, PART(1), 1},
                             {0, 0, PART(2), 1}, {0, 1, PART(2), 1}, {0, 0, 0, 0, 2}};
static const condition WAITS[] = {{2, ENDED}, {0, ENDED}};
static const char *const SYMBOLS[] = {"a", "b", "c", "d", "e"};
static const tables PLAN = {.steps = {5, STEPS}, .symbols = {5, SYMBOLS}, .slots = {5, SLOTS},
                                .bindings = {5, BINDINGS},
                                .segments = {1, SEGMENTS}, .first_tasks = {4, FIRST_TASKS}, .tasks = {7, TASKS},
                                .waits = {2, WAITS}, .queues = THREADS};

/* A thread that runs a handle of its own. */
static void *work(void *given) {
    static memory memories[2];
    memory *const own = &memories[given != NULL];
    char error[200];
    korch_handle *const handle = korch_create(&PLAN.tensors, NULL, THREADS, error, sizeof error);
    void *const outputs[] = {own};
    for (int turn = 0; turn < TURNS; ++turn) korch_run(handle, NULL, outputs);
    korch_destroy(handle);
    long expected = 0;
    for (long turn = 1; turn <= TURNS; ++turn) expected += 5 * turn;
    return own->second[0] == expected && own->total == TURNS ? own : NULL;
}

int main(void) {
    pthread_t other;
    void *found;
    pthread_create(&other, NULL, work, &other);
    const bool is_right = work(NULL) != NULL;
    pthread_join(other, &found);
    puts(is_right && found ? "right" : "wrong");
    fflush(stdout);
    _exit(0); /* idle threads wait for ever */
}
"""


def sanitized(folder: Path, ended: int) -> subprocess.CompletedProcess[str]:
    """Return the run of the program, in which tasks wait until others have ended some number of theirs.

    Args:
        folder: for the program.
        ended: the number.
    """
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is neither gcc nor clang, whose ThreadSanitizer this needs")
    (folder / "main.c").write_text(SOURCE)
    flags = ["-std=gnu11", "-O1", "-g", "-fsanitize=thread", f"-DENDED={ended}", f"-I{FOLDER}"]
    command = [compiler, *flags, "main.c", "-o", "main", "-pthread"]
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
    done = sanitized(tmp_path, -6)  # no task
    assert done.returncode != 0 and "data race" in done.stderr
