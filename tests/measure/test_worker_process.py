"""The measuring process itself: its imports, crashes without a dump, and its end after the parent is killed."""

import os
import resource
import select
import subprocess
import sys

import pytest

from korch.measure.compiler import NATIVE_FOLDER
from korch.measure.record import Measured
from korch.measure.timer import BufferSpec, Job, Setup, time_kernels

BUFFERS = (BufferSpec(64, "f32"), BufferSpec(64, "u8"))
SOURCE = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>
extern "C" int fine_run(void*, void* const*) { return 0; }
extern "C" int undumped_run(void*, void* const*) {
  rlimit limit;
  return getrlimit(RLIMIT_CORE, &limit) != 0 || limit.rlim_cur != 0;
}
extern "C" int stays_run(void*, void* const*) {
  int pid = getpid(), fifo = open(getenv("KORCH_TEST_FIFO"), O_WRONLY);
  if (write(fifo, &pid, sizeof pid) < 0) return 1;
  for (volatile int i = 0;; ++i);
}
"""
PARENT = """
import sys
from pathlib import Path
from korch.measure.timer import BufferSpec, Job, Setup, time_kernels
library, timer, fifo = sys.argv[1:]
setup = Setup(Path(library), Path(timer), hang_seconds=600.0, environment={"KORCH_TEST_FIFO": fifo})
time_kernels([Job("stays", False, (BufferSpec(64, "u8"),))], setup)
"""


@pytest.fixture(scope="module")
def libraries(builder):
    own = (NATIVE_FOLDER / "korch_timer.cpp").read_text("utf-8")
    return builder.library([SOURCE]), builder.library([own])


def time_one(libraries, name):
    (found,) = time_kernels([Job(name, False, BUFFERS)], Setup(*libraries))
    return found


def test_the_current_folder_is_not_imported_from(libraries, tmp_path, monkeypatch):
    """Whoever optimizes a model in a folder did not ask to run that folder's Python files."""
    for name in ("base64", "json", "numpy", "korch"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(time_one(libraries, "fine"), Measured)
    assert not (tmp_path / "ran").exists()


def test_a_crash_leaves_no_dump(libraries):
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("dumps are forbidden here, whatever the process does")
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        assert isinstance(time_one(libraries, "undumped"), Measured)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


def test_a_hanging_kernel_dies_with_a_killed_parent(libraries, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    end = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *map(str, libraries), str(fifo)])
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
