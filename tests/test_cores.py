"""The cores of a container: quotas of control groups, in made-up folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from korch.cores import machine_cores, usable_cores

V1 = "3:cpuset:/\n2:cpu,cpuacct:/box\n1:name=systemd:/\n0::/\n"


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
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
    ],
)
def test_the_quota_of_a_container_is_seen(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("korch.cores.os.sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores(written(tmp_path, files)) == cores


def test_a_machine_has_no_fewer_cores_than_a_process_may_use() -> None:
    assert machine_cores() >= usable_cores() >= 1
