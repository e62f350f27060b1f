"""The measuring process itself: its imports, crashes without a dump, and its end after the parent is killed."""

import os
import resource
import select
import subprocess
import sys

import pytest

from korch.measure.record import Measured
from korch.measure.timer import BufferSpec, Job, Setup, time_kernels
from tests.support.c_code import SYSTEM, llvm_of

BUFFERS = (BufferSpec(64, "f32"), BufferSpec(64, "u8"))
SOURCE = (
    SYSTEM
    + """
int fine_run(void *state, void *const *buffers) { return 0; }
int undumped_run(void *state, void *const *buffers) {
    unsigned long limits[2]; /* of dumps: RLIMIT_CORE */
    return ask_system(SYS_prlimit64, 0, 4, 0, (long)limits) != 0 || limits[0] != 0;
}
int stays_run(void *state, void *const *buffers) {
    int pid = ask_system(SYS_getpid, 0, 0, 0, 0);
    const long fifo = ask_system(SYS_openat, -100, (long)"FIFO", 1, 0);
    if (ask_system(SYS_write, fifo, (long)&pid, sizeof pid, 0) < 0) return 1;
    for (volatile int i = 0;; ++i);
}
"""
)
PARENT = """
import sys
from pathlib import Path
from korch.measure.timer import BufferSpec, Job, Setup, time_kernels
setup = Setup([Path(sys.argv[1])], hang_seconds=600.0)
time_kernels([Job("stays", False, (BufferSpec(64, "u8"),))], setup)
"""


@pytest.fixture(scope="module")
def objects(builder):
    return builder.compile([llvm_of(SOURCE)])


def time_one(objects, name):
    (found,) = time_kernels([Job(name, False, BUFFERS)], Setup(objects))
    return found


def test_the_current_folder_is_not_imported_from(objects, tmp_path, monkeypatch):
    """Whoever optimizes a model in a folder did not ask to run that folder's Python files."""
    for name in ("base64", "json", "numpy", "korch"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(time_one(objects, "fine"), Measured)
    assert not (tmp_path / "ran").exists()


def test_a_crash_leaves_no_dump(objects):
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("dumps are forbidden here, whatever the process does")
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        assert isinstance(time_one(objects, "undumped"), Measured)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_a_hanging_kernel_dies_with_a_killed_parent(builder, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (path,) = builder.compile([llvm_of(SOURCE.replace("FIFO", str(fifo)))])
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(path)])
    try:
        assert select.select([end], [], [], 600)[0], "the kernel was not started"
        worker = os.pidfd_open(int.from_bytes(os.read(end, 4), sys.byteorder))
        try:
            parent.kill()
            assert select.select([worker], [], [], 300)[0], "the measuring process lives on"
        finally:
            os.close(worker)
    finally:
        os.close(end)
        parent.kill()
        parent.wait()
