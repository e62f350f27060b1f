"""The compile cache: nothing is compiled twice, damage is repaired, and failures are attributed to their causes."""

import errno
import os
import shutil
import sys
import time
from pathlib import Path
from threading import Event

import pytest

from korch.errors import CompileError
from korch.measure import compiler, compiler_process
from korch.measure.compiler import Builder, CompileFailure, usable_folder
from korch.measure.toolchain import Compiler, find_compiler
from korch.system.deadline import Deadline
from korch.system.native import Code

GOOD = 'extern "C" int korch_test_number() { return 41; }'
OTHER = 'extern "C" int korch_test_other() { return 42; }'
BAD = 'extern "C" int korch_test_bad() { return nothing; }'


@pytest.fixture
def fresh(tmp_path) -> Builder:
    return Builder("generic", tmp_path)


def number(archive: bytes, name: str = "korch_test_number") -> int:
    return int(Code(archive).function(name)())


def forbid(monkeypatch):
    def refuse(command, *rest):
        raise AssertionError(f"the compiler was called: {command}")

    monkeypatch.setattr(compiler, "run_compiler", refuse)


def test_several_sources_become_one_archive(fresh):
    path = fresh.objects([GOOD, OTHER])
    assert (number(path), number(path, "korch_test_other")) == (41, 42)


def test_a_cache_folder_may_be_relative(fresh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Builder(fresh.isa, Path("here")).objects(["int one() { return 1; }"])
    assert (tmp_path / "here").is_dir()


def test_what_was_built_is_found_again(fresh, tmp_path, monkeypatch):
    path = fresh.objects([GOOD, OTHER])
    forbid(monkeypatch)
    assert fresh.objects([GOOD, OTHER]) == path
    assert Builder("generic", tmp_path).objects([GOOD, OTHER]) == path
    with pytest.raises(AssertionError, match="the compiler was called"):
        fresh.objects([GOOD, OTHER + "\n"])


@pytest.mark.parametrize(
    ("version", "is_apart"),
    [
        ("g++ (Debian 12.2.0-14) 12.2.0", False),
        ("Debian clang version 17.0.6 (9)", False),
        ("Ubuntu clang version 18.1.3 (1)", True),
        ("clang version 21.1.0", True),
        ("clang version 22.1.8", False),
    ],
)
def test_only_some_clangs_count_vectors_of_512_bits_apart(version, is_apart, tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "find_compiler", lambda: Compiler(("c++",), version))
    assert ("-mevex512" in Builder("avx512", tmp_path).flags) == is_apart
    assert ("-mevex512" in Builder("amx", tmp_path).flags) == is_apart
    assert "-mevex512" not in Builder("avx2", tmp_path).flags


def test_what_was_begun_is_there_and_the_rest_is_not_waited_for(fresh, monkeypatch):
    is_at_work, may_end, run, commands = Event(), Event(), compiler.run_compiler, []

    def wait(command, *rest):
        commands.append(command)
        is_at_work.set()
        assert may_end.wait(60)
        run(command, *rest)

    monkeypatch.setattr(compiler, "run_compiler", wait)
    fresh.begin([GOOD, OTHER, GOOD])
    assert is_at_work.wait(60)
    shutdown = compiler.ThreadPoolExecutor.shutdown

    def rest(pool, wait=True, *, cancel_futures=False):
        shutdown(pool, wait=False, cancel_futures=cancel_futures)
        may_end.set()  # not before what has not begun is left out
        shutdown(pool, wait=wait)

    monkeypatch.setattr(compiler.ThreadPoolExecutor, "shutdown", rest)
    fresh.rest()
    assert len(commands) == 1  # of the second, no compiler has begun
    (found,) = fresh.folder.glob("*.o")
    assert fresh.compile([GOOD, OTHER])[0] == found
    assert len(commands) == 2
    fresh.begin([GOOD, OTHER])
    fresh.rest()
    assert len(commands) == 2


def test_a_source_that_was_begun_in_vain_fails_when_it_is_asked_for(fresh):
    fresh.begin([BAD])
    good, bad = fresh.compile([GOOD, BAD])
    assert isinstance(good, Path)
    assert isinstance(bad, CompileFailure)


def test_another_instruction_set_is_another_object(fresh, tmp_path):
    (first,) = fresh.compile([GOOD])
    (second,) = Builder("avx2", tmp_path).compile([GOOD])
    assert first != second


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "unseal", "wrong seal", "remove"])
def test_damage_is_healed(fresh, damage):
    fresh.objects([GOOD])
    whole = {p.name: p.read_bytes() for p in fresh.folder.iterdir()}
    (victim,) = fresh.folder.glob("*.o")
    seal = victim.with_name(victim.name + ".sha256")
    data = victim.read_bytes()
    match damage:
        case "flip":
            victim.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
        case "cut":
            victim.write_bytes(data[: len(data) // 2])
        case "empty":
            victim.write_bytes(b"")
        case "unseal":
            seal.unlink()
        case "wrong seal":
            seal.write_text("0" * 64)
        case "remove":
            victim.unlink()
    assert number(fresh.objects([GOOD])) == 41
    assert {p.name for p in fresh.folder.iterdir()} == whole.keys()
    assert victim.read_bytes()[:4] == b"\x7fELF"


def test_only_a_wrong_source_is_refused(fresh):
    first, refused, last = fresh.compile([GOOD, BAD, OTHER])
    assert isinstance(first, Path)
    assert isinstance(last, Path)
    assert isinstance(refused, CompileFailure)
    assert "nothing" in refused.message
    with pytest.raises(CompileError, match=r"^the compiler refused a source: .*nothing"):
        fresh.objects([GOOD, BAD])
    leftover = [p for p in fresh.folder.iterdir() if p.suffix not in (".o", ".sha256")]
    assert leftover == []


def test_objects_that_do_not_fit_are_refused(fresh):
    with pytest.raises(ValueError, match="object 1 is refused: symbol korch_test_number is defined twice"):
        Code(fresh.objects([GOOD, GOOD + " // again"]))


class OverAfter(Deadline):
    """It is over when it was looked at so often."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    @property
    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def has_ended(process: int) -> bool:
    """Wait until a process that was killed has ended: a busy machine may take its time."""
    for _ in range(1200):  # a process that is left alone sleeps for 600 s
        try:
            stat = Path(f"/proc/{process}/stat").read_text("utf-8")
        except (FileNotFoundError, ProcessLookupError):
            return True
        if stat.rpartition(")")[2].split()[0] in "ZX":
            return True
        time.sleep(0.1)
    return False


def test_compilers_are_stopped_with_all_that_they_started(fresh, tmp_path):
    slow = Compiler(("sh", "-c", f"sleep 600 & echo $! >> {tmp_path}/started; wait"), "slow")
    whole = fresh.compile([GOOD])
    fresh.compiler = slow
    assert fresh.compile([GOOD, OTHER, BAD], OverAfter(8)) == [*whole, None, None]
    for line in (tmp_path / "started").read_text("utf-8").split():
        assert has_ended(int(line))
    assert not [path for path in fresh.folder.iterdir() if path.stem.startswith("tmp")]


def test_nothing_is_compiled_after_the_deadline(fresh):
    assert fresh.compile([GOOD, OTHER], Deadline(0.0)) == [None, None]
    assert number(fresh.objects([GOOD])) == 41


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def says_full(*_: object) -> None:
    raise CompileError("fatal error: error writing to x.s: No space left on device")


@pytest.mark.parametrize(
    ("place", "function"),
    [("_write_atomically", full), ("run_compiler", says_full), ("scratch_folder", full), ("Path.write_text", full)],
)
def test_a_full_disk_is_not_the_sources_fault(fresh, monkeypatch, place, function):
    with monkeypatch.context() as patch:
        patch.setattr(f"korch.measure.compiler.{place}", function)
        with pytest.raises(CompileError) as caught:
            fresh.compile([GOOD])
    text = str(caught.value)
    assert text.startswith(f"{fresh.folder}: the cache can't be written: ")
    assert "No space left on device" in text
    assert text.endswith("Free some space, or choose another folder with --cache-folder")
    assert list(fresh.folder.iterdir()) == []
    assert number(fresh.objects([GOOD])) == 41


def test_a_cache_folder_that_vanishes_is_an_error(fresh):
    shutil.rmtree(fresh.folder)
    with pytest.raises(CompileError, match="the cache can't be written"):
        fresh.compile([GOOD])


def scripted(code: str) -> Compiler:
    return Compiler((sys.executable, "-c", code), "scripted")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a process can't be limited so")
def test_a_compiler_that_computes_for_too_long_is_stopped(fresh, monkeypatch):
    monkeypatch.setattr(compiler_process, "COMPILE_SECONDS", 1)
    monkeypatch.setattr(compiler_process, "PATIENCE", 1000)
    fresh.compiler = scripted("while True: pass")
    assert fresh.compile([GOOD]) == [CompileFailure("the compiler took longer than 1 s")]


def test_a_compiler_that_waits_for_a_core_is_not(fresh, monkeypatch):
    monkeypatch.setattr(compiler_process, "COMPILE_SECONDS", 1)
    monkeypatch.setattr(compiler_process, "PATIENCE", 1000)
    fresh.compiler = scripted("import time; time.sleep(1.2)")
    (found,) = fresh.compile([GOOD])
    assert isinstance(found, Path)


def test_a_compiler_that_never_ends_is_stopped_and_may_be_asked_again(fresh, monkeypatch):
    monkeypatch.setattr(compiler_process, "PATIENCE", 0.3 / compiler_process.COMPILE_SECONDS)
    fresh.compiler = scripted("import time; time.sleep(60)")
    assert fresh.compile([GOOD]) == [CompileFailure("the compiler did not end within 0.3 s", True)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known what a process does")
def test_a_compiler_that_hangs_is_given_up_at_the_end(tmp_path):
    builder = Builder("generic", tmp_path, Deadline.after(1.5, time.monotonic()))
    builder.compiler = scripted("import time; time.sleep(60)")
    with pytest.raises(CompileError, match=r"^the compiler did not end in time. `korch doctor` checks it"):
        builder.objects([GOOD])
    with pytest.raises(CompileError, match="no time was left to start the compiler"):
        builder.objects([GOOD])


def test_a_compiler_that_computes_has_time_after_the_end(tmp_path):
    """A search may have found all its kernels in the cache, so that no compiler has run before the end."""
    builder = Builder("generic", tmp_path, Deadline.after(-1.0, time.monotonic()))
    works = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    compiles, builder.compiler = builder.compiler, scripted(works)
    (found,) = builder.compile([GOOD])
    assert isinstance(found, Path)
    builder.compiler = compiles
    assert number(builder.objects([OTHER]), "korch_test_other") == 42


def test_a_compiler_that_computes_endlessly_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "PATIENCE_SECONDS", 0.5)
    builder = Builder("generic", tmp_path, Deadline.after(-1.0, time.monotonic()))
    builder.compiler = scripted("while True: pass")
    assert builder.compile([GOOD]) == [CompileFailure("the compiler did not end in time", was_killed=True)]


def test_short_kernels_count_as_less_work_than_long_ones(fresh):
    short, long = "; LLVM IR for generic\n", GOOD + 9000 * " " + OTHER
    assert 0 < fresh.missing_work([short]) < 0.1 and fresh.missing_work([long, long]) == 1.0
    short = GOOD
    fresh.compile([short])
    assert fresh.missing_work([short]) == 0


def test_a_compiler_that_is_gone_is_said(fresh):
    fresh.compiler = Compiler(("/nowhere/c++",), "gone")
    (found,) = fresh.compile([GOOD])
    assert isinstance(found, CompileFailure)
    assert found.message.startswith("the compiler does not start: ")
    assert found.was_killed


@pytest.mark.skipif(shutil.which("g++") is None, reason="asks GCC's driver for another cc1plus")
@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("KILL", CompileFailure("the system killed the compiler, most likely because memory ran out", True)),
        ("XCPU", CompileFailure("the compiler took longer than 120 s")),
    ],
)
def test_what_ends_a_stage_of_the_compiler_is_told(fresh, tmp_path, name, failure):
    """What the system kills is not the source's fault."""
    stage = tmp_path / "cc1plus"
    stage.write_text(f"#!/bin/sh\nkill -{name} $$\n")
    stage.chmod(0o755)
    fresh.compiler = Compiler(("g++", f"-B{tmp_path}/"), "killed")
    assert fresh.compile([GOOD]) == [failure]
    stage.unlink()
    (found,) = fresh.compile([GOOD])
    assert isinstance(found, Path)


@pytest.fixture
def search(monkeypatch):
    """Call the search for a compiler as a new process would."""
    monkeypatch.delenv("CXX", raising=False)
    return find_compiler.__wrapped__


def test_a_named_compiler_is_used(search, monkeypatch):
    monkeypatch.setenv("CXX", f"{shutil.which('g++') or shutil.which('clang++')} -m64")
    found = search()
    assert found.command[1:] == ("-m64",)
    assert found.version


def test_arguments_of_a_named_compiler_make_other_objects_and_timings(search, tmp_path, monkeypatch):
    command = shutil.which("g++") or shutil.which("clang++")
    keys, identities = set(), set()
    for arguments in ("", " -O0", " -DNDEBUG"):
        monkeypatch.setenv("CXX", f"{command}{arguments}")
        monkeypatch.setattr(compiler, "find_compiler", search)
        (path,) = Builder("generic", tmp_path).compile([GOOD])
        keys.add(path)
        identities.add(search().identity)
    assert len(keys) == len(identities) == 3


@pytest.mark.parametrize("name", ["/nowhere/c++", "false"])
def test_a_named_compiler_that_does_not_run_is_said(search, monkeypatch, name):
    monkeypatch.setenv("CXX", name)
    with pytest.raises(CompileError) as caught:
        search()
    assert str(caught.value) == (f"environment variable CXX: {name!r} does not run; expected a C++ compiler")


def test_a_folder_that_can_not_be_written_is_replaced(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    other = usable_folder(blocked / "cache")
    assert other.is_dir()
    assert other == usable_folder(blocked / "cache")
    assert caplog.messages[0] == (
        f"the cache folder {blocked / 'cache'} can't be written (Not a directory); nothing is kept for the next run"
    )
    assert number(Builder("generic", blocked / "cache").objects([GOOD])) == 41


def test_no_folder_at_all_is_an_error(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setattr(compiler, "_temporary_folder", full)
    with pytest.raises(CompileError, match=r"no folder can be written: .*No space left on device"):
        usable_folder(blocked / "cache")
