"""Kernels are timed in another process: a kernel that crashes it does not prevent the timing of other kernels."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from korch.errors import MeasureError
from korch.measure import session, timer, worker
from korch.measure.record import Failed, Measured
from korch.measure.timer import SCRATCH, BufferSpec, Job, Setup, time_kernels
from korch.primitive.types import DType
from tests.support.c_code import SYSTEM, llvm_of

RUNS = {
    "good": "((float *)buffers[1])[0] += ((const float *)buffers[0])[0]; return 0;",
    "talks": 'ask_system(SYS_write, 1, (long)"{\\"done\\": true}\\n", 15, 0); return 0;',
    "faults": "return *(volatile int *)0;",
    "aborts": "end(6);",
    "killed": "end(9); return 0;",
    "exits": "ask_system(SYS_exit_group, 3, 0, 0, 0);",
    "loops": "for (volatile int i = 0;;) (void)i;",
    "fails": "return 7;",
    "writes_in_place": "return buffers[0] != buffers[1] || buffers[1] == buffers[2];",
    "fails_late": "static int runs = 0; return ++runs > 12;",
}
CREATES = {
    "made": "static int state; return &state;",
    "unmade": '__builtin_memcpy(error, "no such thing", 14); return 0;',
    "silent": "return 0;",
    "crashes": "end(6);",
    "hangs": "for (volatile int i = 0;;) (void)i; return 0;",
    "counts": """
    static int state;
    unsigned long cores[128] = {0};
    ask_system(SYS_sched_getaffinity, 0, sizeof cores, (long)cores, 0);
    for (int i = 0; i < 128 * 64; ++i) state += cores[i / 64] >> i % 64 & 1;
    return state == CORES ? &state : 0;
    """,
}
CORES = len(os.sched_getaffinity(0))
END = "static void end(int signal) { ask_system(SYS_kill, ask_system(SYS_getpid, 0, 0, 0, 0), signal, 0, 0); }\n"


def children() -> set[str]:
    """Return the processes that this one has started and not waited for."""
    found: set[str] = set()
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends
            found.update(task.read_text("utf-8").split())
    return found


def sources():
    text = f"#define CORES {CORES}\n{SYSTEM}{END}"
    for name, body in RUNS.items():
        text += f"int {name}_run(void *state, void *const *buffers) {{ {body} }}\n"
    for name, body in CREATES.items():
        text += f"void *{name}_create(int threads, char *error, unsigned long size) {{ {body} }}\n"
        text += f"int {name}_run(void *state, void *const *buffers) {{ return state == 0; }}\n"
    return text


@pytest.fixture(scope="module")
def objects(builder):
    return builder.compile([llvm_of(sources())])


@pytest.fixture
def measure(objects, monkeypatch):
    monkeypatch.setattr(timer, "KERNEL_NS", 1_000_000)
    buffers = (BufferSpec(64, "f32"), BufferSpec(64, "f32"), BufferSpec(64, "u8"))

    def run(*names: str, hang_seconds: float = 20.0) -> list[Measured | Failed]:
        jobs = [Job(name, name in CREATES, buffers) for name in names]
        before = children()
        found = time_kernels(jobs, Setup(objects, threads=2, hang_seconds=hang_seconds))
        assert children() <= before  # no process is left behind, not even a dead one
        return found

    return run


def test_good_kernels_have_times(measure):
    for found in measure("good", "made", "talks"):
        assert isinstance(found, Measured)
        assert len(found.samples_ns) >= timer.LEAST_ROUNDS
        assert 0 < found.time_ns <= max(found.samples_ns)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("faults", Failed("crashed", "the process ended by SIGSEGV")),
        ("aborts", Failed("crashed", "the process ended by SIGABRT")),
        ("killed", Failed("killed", "the system killed it, most likely because memory ran out")),
        ("exits", Failed("crashed", "the process ended by exit code 3")),
        ("fails", Failed("failed", "run returned an error")),
        ("fails_late", Failed("failed", "run returned an error")),
        ("unmade", Failed("not created", "no such thing")),
        ("silent", Failed("not created", "create gave nothing")),
        ("crashes", Failed("crashed", "the process ended by SIGABRT")),
    ],
)
def test_a_kernel_that_breaks_is_recorded_and_the_others_are_timed(measure, name, expected):
    first, broken, last = measure("good", name, "made")
    assert broken == expected
    assert isinstance(first, Measured)
    assert isinstance(last, Measured)


@pytest.mark.parametrize("name", ["loops", "hangs"])
def test_a_kernel_that_hangs_is_recorded_and_the_others_are_timed(measure, name):
    first, hung, last = measure("good", name, "made", hang_seconds=2.0)
    assert hung == Failed("hung", "it did not return within 2 s")
    assert isinstance(first, Measured)
    assert isinstance(last, Measured)


def test_several_kernels_may_break(measure):
    found = measure("faults", "good", "aborts", "fails", "made", "exits")
    assert [getattr(r, "kind", "") for r in found] == ["crashed", "", "crashed", "failed", "", "crashed"]


def test_a_kernel_s_own_threads_may_use_all_cores(objects):
    """The threads of the measuring process are bound to a core each, if there are as many."""
    (found,) = time_kernels([Job("counts", True, (BufferSpec(64, "f32"),))], Setup(objects, threads=CORES))
    assert isinstance(found, Measured)


def test_a_kernel_that_writes_into_an_operand_gets_one_memory(objects):
    buffers = (BufferSpec(1 << 20, "f32"), BufferSpec(1 << 20, "f32", same_as=0), BufferSpec(64, "u8"))
    (found,) = time_kernels([Job("writes_in_place", False, buffers)], Setup(objects))
    assert isinstance(found, Measured)


def test_an_object_that_does_not_load_is_an_error(tmp_path):
    broken = tmp_path / "broken.o"
    broken.write_bytes(b"nothing")
    job = Job("good", False, (BufferSpec(64, "f32"),))
    with pytest.raises(MeasureError) as caught:
        time_kernels([job], Setup([broken]))
    reason = "object 0 is refused: it is truncated"
    assert str(caught.value) == f"the measuring process ended before it ran a kernel: {reason}. Run `korch doctor`"


def test_no_kernels_take_no_process(objects, monkeypatch):
    monkeypatch.setattr(session.subprocess, "Popen", None)
    assert time_kernels([], Setup(objects)) == []


def test_a_buffer_is_filled_with_numbers_around_one():
    for size in (1, 7, worker.PATTERN, 2 * worker.PATTERN + 5):
        memory = np.full(4 * size + 8, 255, np.uint8)
        worker.fill(memory, {"bytes": 4 * size, "dtype": "f32"}, np.random.default_rng(0))
        numbers = memory[: 4 * size].view(np.float32)
        assert numbers.min() >= 0.5
        assert numbers.max() <= 1
        assert size < 9 or len(np.unique(numbers)) > min(size, worker.PATTERN) // 2
        assert not memory[4 * size :].any()


def test_components_are_filled_with_numbers_around_one():
    memory = np.full(24, 255, np.uint8)
    worker.fill(memory, {"bytes": 20, "dtype": "bf16"}, np.random.default_rng(0))
    numbers = memory[:20].view(DType.BF16.numpy).astype(np.float32)
    assert (numbers >= 0.5).all() and (numbers <= 1).all()


BOUND = """
import ctypes, os
from korch.system.native import runtime
cores = os.sched_getaffinity(0)
runtime().korch_bind(ctypes.c_int(len(cores) + {more}))
print(len(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize("more", [0, 1])
def test_threads_are_bound_to_cores_only_if_there_is_one_for_each(more) -> None:
    done = subprocess.run([sys.executable, "-c", BOUND.format(more=more)], check=True, capture_output=True, text=True)
    assert int(done.stdout) == (len(os.sched_getaffinity(0)) if more else 1)


def test_a_workspace_holds_zeros() -> None:
    """Random bytes are floats that are no normal numbers, and slow in lanes that kernels pad."""
    memory = np.ones(100, np.uint8)
    worker.fill(memory, BufferSpec(100, SCRATCH).as_json(), np.random.default_rng(0))
    assert not memory.any()
    worker.fill(memory, BufferSpec(100, "u8").as_json(), np.random.default_rng(0))
    assert memory.any()
