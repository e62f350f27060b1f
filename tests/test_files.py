"""Files that users name, temporary folders, and folders for code that is executed."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from korch.errors import OptionError
from korch.options import Options
from korch.pipeline import Run, run_until, untold
from korch.search.ledger import Ledger
from korch.system.files import check_output, make_private, open_file
from korch.system.scratch import PREFIX, scratch_folder, sweep
from tests.partition_oracle import FakeMeter

KILLED = """
import os, signal, sys
from pathlib import Path
from korch.system.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("a")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_pipe_and_a_device_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="a pipe or a device"):
            open_file(path)
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_an_error_of_the_system(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the name of a file can't be like this"):
        open_file(tmp_path / name)
    with pytest.raises(OptionError, match="can't be written"):
        check_output(tmp_path / name, "-o")


def test_what_can_be_written_passes(tmp_path: Path) -> None:
    check_output(tmp_path / ("n" * 250), "-o")
    (tmp_path / "link").symlink_to(tmp_path / "to nothing")
    check_output(tmp_path / "link", "-o", [tmp_path / "missing"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link"]


def test_what_can_not_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to("/nowhere/x")
    (tmp_path / "read").touch()
    (tmp_path / "alias").symlink_to(tmp_path / "read")
    for name in ("loop", "dangling", "n" * 256, "alias", "none/x", "."):
        with pytest.raises(OptionError):
            check_output(tmp_path / name, "-o", [tmp_path / "read"])
    for path in ("/dev/full", "/dev/null", "/proc/x"):
        with pytest.raises(OptionError):
            check_output(Path(path), "-o")


@pytest.mark.parametrize("umask", [0, 0o077, 0o277])
def test_a_folder_of_what_is_run_is_private(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        make_private(tmp_path / "new")
    finally:
        os.umask(before)
    (tmp_path / "old").mkdir()
    (tmp_path / "old").chmod(0o777)
    make_private(tmp_path / "old")
    for name in ("new", "old"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("korch.system.files.os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="it belongs to another user"):
        make_private(tmp_path)


def test_what_a_killed_process_leaves_is_swept_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    (left,) = tmp_path.glob(f"{PREFIX}*")
    assert (left / "half").exists()
    with scratch_folder(tmp_path) as own:
        assert sorted(tmp_path.iterdir()) == sorted([own, tmp_path / "other"])
        sweep(tmp_path)
        assert own.exists()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "other"]


def test_a_folder_that_a_sweep_is_removing_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep finds a new folder before it is locked, and removes it only after it was tried to lock."""
    taken: list[tuple[Path, int]] = []

    def open_late(path: Path, flags: int) -> int:
        descriptor = open_now(path, flags)
        if not taken:
            taken.append((path, open_now(path, flags)))
            fcntl.flock(taken[0][1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor

    open_now = os.open
    monkeypatch.setattr("korch.system.scratch.os.open", open_late)
    with scratch_folder(tmp_path) as folder:
        ((removed, descriptor),) = taken
        assert folder != removed
    monkeypatch.undo()
    os.close(descriptor)


@pytest.mark.parametrize("option", ["model", "pipe", "inputs"])
def test_a_ledger_is_checked_before_anything_is_written(option: str, tmp_path: Path) -> None:
    model, pipe = tmp_path / "model", tmp_path / "pipe"
    model.write_bytes(b"kept")
    os.mkfifo(pipe)
    (tmp_path / "inputs").write_bytes(b"read")
    run = Run(Options(ledger=tmp_path / option, inputs=tmp_path / "inputs"), {}, untold, model)
    with pytest.raises(OptionError, match=r"option --ledger: .* (would be overwritten|is a pipe or a device)"):
        run_until(run, "frontend")
    assert model.read_bytes() == b"kept"


def test_a_replay_of_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="pipe or a device"):
        Ledger(FakeMeter(), replay=tmp_path / "pipe")
