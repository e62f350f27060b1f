"""The cores of a container: quotas of control groups, read from fake folders; and the time slices of threads."""

import os
import threading
import time
from pathlib import Path

import pytest

from korch.system import cores
from korch.system.cores import SHORT_SLICE_NS, idle_seconds, machine_cores, short_slices, slowness, usable_cores
from korch.system.native import runtime

V1 = "3:cpuset:/\n2:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n"


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


QUOTAS: list[tuple[dict[str, str], int]] = [
    ({}, 64),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 64),
    ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/cpu.max": "350000 100000\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
        },
        3,
    ),
    ({"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "400000 100000"}, 4),
    (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
        },
        2,
    ),
    (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        3,
    ),
    (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        64,
    ),
    ({"proc/self/cgroup": "0::/\nnonsense\n", "sys/fs/cgroup/cpu.max": "a b c"}, 64),
]
"""Files, and the cores that a process with 64 of them may use."""


@pytest.mark.parametrize(("files", "cores"), QUOTAS)
def test_the_quota_of_a_container_is_seen(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("korch.system.cores.os.sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores(written(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("text", "cores", "expected"),
    [
        ("cpu 1 2 3\nprocs_running 1\nprocs_blocked 7\n", 2, 1.0),
        ("procs_running 2\n", 2, 1.5),
        ("procs_running 3\n", 2, 2.0),
        ("procs_running 11\n", 64, 74 / 64),
        ("procs_running 0\n", 2, 1.0),
        ("", 2, 1.0),
    ],
)
def test_work_takes_longer_beside_threads_that_need_the_same_cores(
    text: str, cores: int, expected: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("korch.system.cores.os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("korch.system.cores.os.cpu_count", lambda: cores)
    monkeypatch.setattr("korch.system.cores.SAMPLE_S", 0.0)
    root = written(tmp_path, {"proc/stat": text})
    assert slowness(root) == expected
    monkeypatch.setattr("korch.system.cores.os.cpu_count", lambda: 4 * cores)  # and this process may use a quarter
    assert slowness(root) == 1.0


def test_cores_are_idle_while_they_wait_for_work_or_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("korch.system.cores.os.sched_getaffinity", lambda _: {0, 2})
    monkeypatch.setattr("korch.system.cores.os.sysconf", lambda _: 100)
    rows = "cpu 9 9 9 9 9 9\ncpu0 1 2 3 400 50 6\ncpu1 1 2 3 999 9 6\ncpu2 1 2 3 100 0 6\nintr 1 2 3 4 5 6\n"
    assert idle_seconds(written(tmp_path, {"proc/stat": rows})) == 5.5
    assert idle_seconds(tmp_path / "other") is None


def test_the_runtime_is_told_the_quota() -> None:
    """Threads of a plan spin if each has a core within the quota."""
    assert runtime().korch_max_threads() == usable_cores()


def test_a_machine_has_no_fewer_cores_than_a_process_may_use() -> None:
    assert machine_cores() >= usable_cores() >= 1


def test_all_threads_have_short_slices_within_the_context_only() -> None:
    own = threading.get_native_id()
    before_ns = cores._set_slice(own, 0)
    if not before_ns:
        pytest.skip("this system has no time slices of single threads")
    niceness, done = os.nice(0), threading.Event()
    earlier, later = (threading.Thread(target=done.wait) for _ in range(2))
    earlier.start()
    try:
        with short_slices():
            later.start()
            inside = {thread: cores._set_slice(thread, SHORT_SLICE_NS) for thread in cores._threads()}
        outside = {thread: cores._set_slice(thread, 0) for thread in cores._threads()}
    finally:
        done.set()
    assert {own, earlier.native_id, later.native_id} <= inside.keys()
    assert set(inside.values()) == {SHORT_SLICE_NS}
    assert set(outside.values()) == {before_ns}
    assert os.nice(0) == niceness


def test_the_slice_of_a_thread_that_has_ended_is_ignored() -> None:
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert ended.native_id is not None
    # `join` returns when Python's part has ended; the system removes the thread a little later.
    deadline = time.monotonic() + 10
    while Path(f"/proc/self/task/{ended.native_id}").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert cores._set_slice(ended.native_id, SHORT_SLICE_NS) == 0
