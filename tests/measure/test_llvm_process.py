"""LLVM IR is compiled in processes that may end or hang: that affects one kernel only."""

import os
import subprocess
import sys
import time

import pytest

from korch.errors import CompileError
from korch.measure import llvm_process
from korch.measure.compiler import Builder, CompileFailure
from korch.measure.llvm_process import KilledError, StoppedError
from korch.system.deadline import Deadline
from korch.system.native import Code
from korch.tile.llvm.print import MARK

GOOD = f'{MARK}generic\ntarget triple = "x86_64-unknown-linux-gnu"\n\ndefine i32 @answer() {{\n  ret i32 41\n}}\n'


@pytest.fixture
def worker(monkeypatch):
    """Replace the worker by a program."""

    def replace(program):
        llvm_process.end_processes()
        command = [sys.executable, "-c", program]
        made = subprocess.Popen

        def start(_, **options):
            return made(command, **options)

        monkeypatch.setattr(llvm_process.subprocess, "Popen", start)

    return replace


def test_modules_become_one_archive(tmp_path):
    builder = Builder("generic", tmp_path)
    code = Code(builder.objects([GOOD, GOOD.replace("answer", "other").replace("41", "42")]))
    assert (code.function("answer")(), code.function("other")()) == (41, 42)


def test_a_wrong_module_is_refused_and_the_process_goes_on(tmp_path):
    builder = Builder("generic", tmp_path)
    bad, good = builder.compile([GOOD.replace("41", "x"), GOOD])
    assert isinstance(bad, CompileFailure) and "LLVM refused it" in bad.message and not bad.was_killed
    assert good is not None and not isinstance(good, CompileFailure)


def test_a_process_that_aborts_costs_one_kernel(tmp_path, worker):
    worker("input(); import os; os.abort()")
    (failed,) = Builder("generic", tmp_path).compile([GOOD])
    assert isinstance(failed, CompileFailure) and failed.message == "LLVM ended with status -6"


@pytest.mark.parametrize("number", [9, 15])
def test_a_process_that_was_killed_says_nothing_about_the_kernel(tmp_path, worker, number):
    worker(f"input(); import os; os.kill(os.getpid(), {number})")
    with pytest.raises(KilledError, match="memory"):
        llvm_process.compile_llvm(tmp_path / "a.ll", tmp_path / "a.o", Deadline())


@pytest.mark.parametrize("answer", ["[Errno 5] Input/output error", "no message", ""])
def test_a_failure_of_the_system_or_no_object_says_nothing_about_the_kernel(tmp_path, worker, answer):
    worker(f"input(); print({answer!r}, flush=True)")
    (failed,) = Builder("generic", tmp_path).compile([GOOD])
    assert isinstance(failed, CompileFailure) and failed.was_killed
    assert not list(tmp_path.rglob("*.o"))


def test_an_idle_process_that_was_ended_is_replaced(tmp_path):
    llvm_process.start_processes(1)
    for process in llvm_process._idle:
        process.terminate()
        process.wait()
    (found,) = Builder("generic", tmp_path).compile([GOOD])
    assert found is not None and not isinstance(found, CompileFailure)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_use_the_processes_of_its_parent():
    llvm_process.start_processes(1)
    if not (child := os.fork()):
        os._exit(len(llvm_process._idle))
    assert os.waitpid(child, 0)[1] == 0 and llvm_process._idle


def test_a_process_that_hangs_is_stopped(tmp_path, worker, monkeypatch):
    worker("input(); import time; time.sleep(60)")
    with pytest.raises(StoppedError, match="did not end in time"):
        llvm_process.compile_llvm(tmp_path / "a.ll", tmp_path / "a.o", Deadline.after(0.3, time.monotonic()))
    monkeypatch.setattr(llvm_process, "LIMIT_SECONDS", 0.2)
    with pytest.raises(CompileError, match="took longer"):
        llvm_process.compile_llvm(tmp_path / "a.ll", tmp_path / "a.o", Deadline())
    assert not llvm_process._idle
