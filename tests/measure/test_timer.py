"""Kernels are timed in another process: a kernel that crashes it does not prevent the timing of other kernels."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from korch.errors import MeasureError
from korch.measure import session, timer, worker
from korch.measure.compiler import NATIVE_FOLDER
from korch.measure.record import Failed, Measured
from korch.measure.timer import SCRATCH, BufferSpec, Job, Setup, openmp_environment, time_kernels
from korch.primitive.types import DType

HEAD = "".join(f"#include <{n}.h>\n" for n in ("signal", "stdlib", "stdint", "stdio", "unistd"))
RUNS = {
    "good": "static_cast<float*>(buffers[1])[0] += static_cast<float*>(buffers[0])[0]; return 0;",
    "talks": 'printf("{\\"done\\": true}\\n"); fflush(stdout); return 0;',
    "faults": "return *static_cast<volatile int*>(nullptr);",
    "aborts": "abort();",
    "killed": "kill(getpid(), SIGKILL); return 0;",
    "exits": "_exit(3);",
    "loops": "for (volatile int i = 0;; ) (void)i;",
    "fails": "return 7;",
    "fails_late": "static int runs = 0; return ++runs > 12;",
}
CREATES = {
    "made": "return malloc(8);",
    "unmade": 'snprintf(error, size, "no such thing"); return nullptr;',
    "silent": "return nullptr;",
    "crashes": "abort();",
    "hangs": "for (volatile int i = 0;; ) (void)i; return nullptr;",
}


VOID = 'extern "C" void*'


def children() -> set[str]:
    """Return the processes that this one has started and not waited for."""
    found: set[str] = set()
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends
            found.update(task.read_text("utf-8").split())
    return found


def sources():
    text = HEAD
    for name, body in RUNS.items():
        text += f'extern "C" int {name}_run(void*, void* const* buffers) {{ {body} }}\n'
    for name, body in CREATES.items():
        text += f'extern "C" void* {name}_create(int threads, char* error, size_t size) {{ {body} }}\n'
        text += f'extern "C" int {name}_run(void* state, void* const*) {{ return state == nullptr; }}\n'
    return text


@pytest.fixture(scope="module")
def libraries(builder):
    own = (NATIVE_FOLDER / "korch_timer.cpp").read_text("utf-8")
    return builder.library([sources()]), builder.library([own])


@pytest.fixture
def measure(libraries, monkeypatch):
    monkeypatch.setattr(timer, "KERNEL_NS", 1_000_000)
    buffers = (BufferSpec(64, "f32"), BufferSpec(64, "f32"), BufferSpec(64, "u8"))

    def run(*names: str, hang_seconds: float = 20.0) -> list[Measured | Failed]:
        jobs = [Job(name, name in CREATES, buffers) for name in names]
        before = children()
        found = time_kernels(jobs, Setup(*libraries, threads=2, hang_seconds=hang_seconds))
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
    first, hung, last = measure("good", name, "made", hang_seconds=4.0)
    assert hung == Failed("hung", "it did not return within 4 s")
    assert isinstance(first, Measured)
    assert isinstance(last, Measured)


def test_several_kernels_may_break(measure):
    found = measure("faults", "good", "aborts", "fails", "made", "exits")
    assert [getattr(r, "kind", "") for r in found] == ["crashed", "", "crashed", "failed", "", "crashed"]


def test_a_library_that_does_not_load_is_an_error(libraries, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"nothing")
    job = Job("good", False, (BufferSpec(64, "f32"),))
    with pytest.raises(MeasureError) as caught:
        time_kernels([job], Setup(Path(broken), libraries[1]))
    assert str(caught.value) == (
        f"the measuring process ended before it ran a kernel: {broken}: file too short. Run `korch doctor`"
    )


def test_no_kernels_take_no_process(libraries, monkeypatch):
    monkeypatch.setattr(session.subprocess, "Popen", None)
    assert time_kernels([], Setup(*libraries)) == []


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


def test_threads_are_bound_to_cores_only_if_there_is_one_for_each() -> None:
    cores = len(os.sched_getaffinity(0))
    assert openmp_environment(cores)["OMP_PROC_BIND"] == "true"
    assert "OMP_PROC_BIND" not in openmp_environment(cores + 1)
    assert openmp_environment(cores + 1)["OMP_NUM_THREADS"] == str(cores + 1)


def test_a_workspace_holds_zeros() -> None:
    """Random bytes are floats that are no normal numbers, and slow in lanes that kernels pad."""
    memory = np.ones(100, np.uint8)
    worker.fill(memory, BufferSpec(100, SCRATCH).as_json(), np.random.default_rng(0))
    assert not memory.any()
    worker.fill(memory, BufferSpec(100, "u8").as_json(), np.random.default_rng(0))
    assert memory.any()
