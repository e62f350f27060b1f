"""Plans end with correct results if threads lose their cores, are stopped, forked or interrupted."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from korch.measure.compiler import Builder
from korch.measure.llvm_process import llvm_identity
from korch.provider.provider import Kernel, Threading
from korch.runtime.bind import PlanStep
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.target import detect_target
from tests.runtime.test_tasks import network, steps_of
from tests.support.c_code import MEMBER, SYSTEM, llvm_of

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="threads are bound to cores as on Linux")

SCRIPT = """
import os, signal, sys, time
import numpy as np
from korch.runtime.executable import Executable
executable, way, seconds = Executable.load(sys.argv[1]), sys.argv[2], float(sys.argv[3])
x = np.random.default_rng(0).standard_normal((1, 32, 21, 18), np.float32)
expected = [y.copy() for y in executable(x)]
def check():
    assert all(np.array_equal(a, b) for a, b in zip(executable(x), expected, strict=True))
if way == "one core":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for task in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(task), {min(os.sched_getaffinity(0))})
if way == "fork":
    child = os.fork()
    for _ in range(20):
        check()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
end, interrupted, begun = time.monotonic() + seconds, 0, ""
while interrupted < 3 if way == "interrupt" else time.monotonic() < end:
    try:
        if not begun:
            begun = "begun"
            print(begun, flush=True)
        while way == "interrupt" or time.monotonic() < end:
            check()
    except KeyboardInterrupt:
        interrupted += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
check()
print("ended", interrupted, flush=True)
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory, cache_folder: Path) -> Path:
    """Return the artifact of a plan that runs as tasks of four threads."""
    graph = network()
    target = detect_target(4, llvm_identity())
    folder = tmp_path_factory.mktemp("plan")
    builder = Builder(target.isa, cache_folder)
    Executable(build(graph, steps_of(graph, target), target, builder, parts=2)).save(folder / "m.korch")
    return folder / "m.korch"


@contextmanager
def started(artifact: Path, way: str, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Yield a process that runs the plan for some seconds, when it has begun; kill it if the test fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(artifact), way, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "begun\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("way", ["one core", "fork"])
def test_threads_that_share_a_core_or_are_forked_end(artifact: Path, way: str) -> None:
    with started(artifact, way, 0.5) as process:
        assert process.communicate(timeout=120)[0] == "ended 0\n"
        assert process.returncode == 0


def test_a_stopped_process_goes_on(artifact: Path) -> None:
    """As with a quota of CPU time, all threads lose their cores again and again."""
    with started(artifact, "stop", 1.0) as process:
        for _ in range(40):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.015)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.005)
        assert process.communicate(timeout=120)[0] == "ended 0\n"


SLOW = """
import sys
import numpy as np
from korch.runtime.executable import Executable
executable = Executable.load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((1, 32, 21, 18), np.float32)
print("begun", flush=True)
try:
    executable(x)
    print("ended", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
sys.stdin.readline()
for y, expected in zip(executable(x), np.load(sys.argv[2]).values(), strict=True):
    assert np.array_equal(y, expected)
print("right", flush=True)
"""


SLOWED = """
int {own}_team(void *const *buffers, Member *own);
void {own}_task(int stage, void *const *buffers, long begin, long end, long me);
int {symbol}_team(void *const *buffers, Member *own) {{
    sleep_us({us});
    append_byte("{log}");
    return {own}_team(buffers, own);
}}
void {symbol}_task(int stage, void *const *buffers, long begin, long end, long me) {{
    sleep_us({us});
    append_byte("{log}");
    {own}_task(stage, buffers, begin, end, me);
}}
int {symbol}_run(void *state, void *const *buffers) {{
    return korch_region(korch_max_threads(), {symbol}_team, buffers);
}}
"""


def slowed(step: PlanStep[Kernel], log: Path, us: int = 60_000) -> PlanStep[Kernel]:
    """Return a kernel that sleeps before each task, or before its part of each thread, and appends to a file then."""
    if step.kernel.threading is not Threading.TEAM:
        return step
    own = step.kernel.symbol
    source = llvm_of(MEMBER + SYSTEM + SLOWED.format(own=own, symbol=f"slow_{own}", log=log, us=us))
    kernel = replace(step.kernel, symbol=f"slow_{own}", source=source, units=step.kernel.texts)
    return replace(step, kernel=kernel)


@pytest.mark.parametrize("parts", [0, 2])
def test_an_interrupt_ends_a_long_run_between_tasks(parts: int, tmp_path: Path, cache_folder: Path) -> None:
    graph, target, log = network(), detect_target(2, llvm_identity()), tmp_path / "log"
    builder, steps = Builder(target.isa, cache_folder), steps_of(graph, target)
    x = np.random.default_rng(0).standard_normal((1, 32, 21, 18), np.float32)
    np.savez(tmp_path / "expected.npz", *Executable(build(graph, steps, target, builder))(x))
    slow = [slowed(step, log) for step in steps]
    Executable(build(graph, slow, target, builder, parts=parts)).save(tmp_path / "m.korch")
    command = [sys.executable, "-c", SLOW, str(tmp_path / "m.korch"), str(tmp_path / "expected.npz")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        while not log.exists():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "interrupted\n"
        ended = log.stat().st_size
        process.stdin.write("\n")
        assert process.communicate(timeout=120)[0] == "right\n"
    assert ended < (log.stat().st_size - ended) / 2


BESIDE = """
import sys, threading
from pathlib import Path
import numpy as np
from korch.runtime.executable import Executable
slow, other = map(Executable.load, sys.argv[1:3])
log, x = Path(sys.argv[3]), np.zeros((1, 32, 21, 18), np.float32)
other(x)
once, runs, ended = log.stat().st_size, 1, threading.Event()
def repeat():
    global runs
    while not ended.is_set():
        other(x)
        runs += 1
thread = threading.Thread(target=repeat)
thread.start()
try:
    slow(x)
except KeyboardInterrupt:
    print("interrupted", flush=True)
ended.set()
thread.join()
print(log.stat().st_size - once * runs, flush=True)
"""


def test_an_interrupt_ends_no_run_of_another_thread(tmp_path: Path, cache_folder: Path) -> None:
    graph, target = network(), detect_target(2, llvm_identity())
    builder, steps = Builder(target.isa, cache_folder), steps_of(graph, target)
    for name, us in (("slow", 60_000), ("other", 4_000)):
        made = build(graph, [slowed(step, tmp_path / f"{name} log", us) for step in steps], target, builder, parts=2)
        Executable(made).save(tmp_path / name)
    command = [sys.executable, "-c", BESIDE, *(str(tmp_path / name) for name in ("slow", "other", "other log"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        while not (tmp_path / "slow log").exists() and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[0] == "interrupted\n0\n"  # no task was left out or repeated


DAEMON = """
import sys, threading, time
import numpy as np
from korch.runtime.executable import Executable
executable, x = Executable.load(sys.argv[1]), np.zeros((1, 32, 21, 18), np.float32)
def repeat():
    while True:
        executable(x)
threading.Thread(target=repeat, daemon=True).start()
time.sleep(0.1)
"""


def test_a_thread_may_run_a_plan_while_the_process_ends(tmp_path: Path, cache_folder: Path) -> None:
    graph, target = network(), detect_target(2, llvm_identity())
    slow = [slowed(step, tmp_path / "log", 4_000) for step in steps_of(graph, target)]
    Executable(build(graph, slow, target, Builder(target.isa, cache_folder), parts=2)).save(tmp_path / "m.korch")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for _ in range(5):
        subprocess.run([sys.executable, "-c", DAEMON, tmp_path / "m.korch"], env=environment, check=True)


def test_an_interrupt_ends_a_run_and_the_next_is_right(artifact: Path) -> None:
    end = time.monotonic() + 120
    with started(artifact, "interrupt", 1.0) as process:
        while process.poll() is None and time.monotonic() < end:
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        assert process.communicate(timeout=1)[0] == "ended 3\n"
