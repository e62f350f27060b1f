"""The compile cache: nothing is compiled twice, damage is repaired, and failures are attributed to their causes."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from korch.errors import CompileError
from korch.measure import compiler
from korch.measure.compiler import Builder, CompileFailure, usable_folder
from korch.system.deadline import Deadline
from korch.system.native import Code
from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import MARK

HEAD = f'{MARK}generic\ntarget triple = "{ISAS["generic"].triple}"\n'
GOOD = f"{HEAD}define i32 @korch_test_number() {{ ret i32 41 }}\n"
OTHER = f"{HEAD}define i32 @korch_test_other() {{ ret i32 42 }}\n"
BAD = f"{HEAD}define i32 @korch_test_bad() {{ ret i32 %nothing }}\n"


@pytest.fixture
def fresh(tmp_path) -> Builder:
    return Builder("generic", tmp_path)


def number(archive: bytes, name: str = "korch_test_number") -> int:
    return int(Code(archive).function(name)())


def forbid(monkeypatch):
    def refuse(command, *rest):
        raise AssertionError(f"the compiler was called: {command}")

    monkeypatch.setattr(compiler, "compile_llvm", refuse)


def test_several_sources_become_one_archive(fresh):
    path = fresh.objects([GOOD, OTHER])
    assert (number(path), number(path, "korch_test_other")) == (41, 42)


def test_a_cache_folder_may_be_relative(fresh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Builder(fresh.isa, Path("here")).objects([GOOD])
    assert (tmp_path / "here").is_dir()


def test_what_was_built_is_found_again(fresh, tmp_path, monkeypatch):
    path = fresh.objects([GOOD, OTHER])
    forbid(monkeypatch)
    assert fresh.objects([GOOD, OTHER]) == path
    assert Builder("generic", tmp_path).objects([GOOD, OTHER]) == path
    with pytest.raises(AssertionError, match="the compiler was called"):
        fresh.objects([GOOD, OTHER + "\n"])


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
        Code(fresh.objects([GOOD, GOOD + "; again\n"]))


def test_nothing_is_compiled_after_the_deadline(fresh):
    assert fresh.compile([GOOD, OTHER], Deadline(0.0)) == [None, None]
    assert number(fresh.objects([GOOD])) == 41


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def says_full(*_: object) -> None:
    raise CompileError("[Errno 28] No space left on device")


@pytest.mark.parametrize(
    ("place", "function"),
    [("write_atomically", full), ("compile_llvm", says_full), ("scratch_folder", full), ("Path.write_text", full)],
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


def test_a_compiler_whose_result_is_needed_has_time_after_the_end(tmp_path, monkeypatch):
    builder, limits = Builder("generic", tmp_path, Deadline(0.0)), []
    monkeypatch.setattr(compiler, "compile_llvm", lambda source, target, stop: limits.append(stop.left_s))
    builder.compile([GOOD])
    assert 0.9 * compiler.PATIENCE_SECONDS < limits[0] <= compiler.PATIENCE_SECONDS


def test_only_what_is_not_compiled_is_work(fresh):
    before = fresh.missing_work([GOOD, OTHER, GOOD])
    fresh.compile([GOOD])
    assert before == 2 * fresh.missing_work([GOOD, OTHER]) > 0


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
