"""The measuring process: loads objects and times kernels; its caller survives if it crashes or hangs.

It reads one job list as a JSON line from stdin and writes JSON lines: `{"unready": text}` if a
library does not load, `{"at": i}` before it runs kernel i, `{"sample": [i, ns, away_ns]}` after
each timing, `{"failed": [i, kind, text]}`, `{"done": true}`. Output of kernels goes to stderr.

If a thread had no core for some time of a run (`away_ns`), the run is repeated, within limits.
"""

import base64
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from korch.measure.record import CLEAN_SAMPLES, is_disturbed
from korch.system.alignment import align_up, aligned_bytes
from korch.system.archive import pack_objects
from korch.system.cores import short_slices
from korch.system.native import Code, runtime

Bytes = npt.NDArray[np.uint8]

SAMPLE_NS = 200_000
"""In each round a kernel is run as often as fits into this time, at most MOST_REPEATS times; each run is a sample."""

MOST_REPEATS = 4

PATIENCE = 4
"""The factor by which a short kernel whose runs are disturbed may exceed its time and rounds."""

SLICE_NS = 1_000_000
"""A run that is longer than this hardly ever fits between two interruptions on a busy machine."""

OTHER_BYTES = 128 << 20
"""The most memory that is read to evict other data from the cores' private caches, unless these are larger.
It need not exceed the shared cache, which may have hundreds of megabytes on a server: the system takes a
second per process to allocate that much."""

KINDS = {"f32": np.float32, "f64": np.float64, "bf16": np.uint16}
"""The NumPy types with which the elements of a buffer are written, by type name."""

BYTES = ("i8", "u8")
"""The types of quantized values; booleans are not included."""

PATTERN = 1 << 16
"""The number of random numbers with which a buffer is filled repeatedly."""

CORES = os.sched_getaffinity(0)
"""The cores that this process may use; its threads are later bound to one each."""

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that asks for a signal at the parent's death."""


def fill(memory: Bytes, buffer: dict[str, Any], rng: np.random.Generator) -> None:
    """Fill a buffer with the given data, or with random floats in [0.5, 1), random bytes, or zeros by its type."""
    memory[:] = 0
    if "data" in buffer:
        data = np.frombuffer(base64.b64decode(buffer["data"]), np.uint8)
        memory[: data.size] = data
    elif buffer.get("dtype") in BYTES:
        some = rng.integers(0, 256, min(memory.size, PATTERN), np.uint8)
        for start in range(0, memory.size, PATTERN):
            memory[start : start + PATTERN] = some[: memory.size - start]
    elif buffer.get("dtype") in KINDS:
        view = memory[: buffer["bytes"]].view(KINDS[buffer["dtype"]])
        some = rng.random(min(view.size, PATTERN), np.float32)
        some = some * np.float32(0.5) + np.float32(0.5)
        if buffer["dtype"] == "bf16":
            some = some.view(np.uint32) >> 16  # a bfloat16 is the upper half of a float32
        for start in range(0, view.size, PATTERN):
            view[start : start + PATTERN] = some[: view.size - start]


class BufferSpan(ctypes.Structure):
    """A buffer that the timer reads or evicts before each run."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_int64))


class Freshness(ctypes.Structure):
    """What is in caches before a run: the same structure as in korch_timer.c."""

    _fields_ = (
        ("input_count", ctypes.c_int64),
        ("inputs", ctypes.POINTER(BufferSpan)),
        ("cold_count", ctypes.c_int64),
        ("cold", ctypes.POINTER(BufferSpan)),
        ("other", BufferSpan),
        ("own_cache_bytes", ctypes.c_int64),
        ("threads", ctypes.c_int64),
    )


class LoadedJob:
    """One kernel, ready to run."""

    def __init__(self, code: Code, spec: dict[str, Any], other: Bytes, task: dict[str, Any]) -> None:
        """Load a kernel of a task; before each run, `other` memory is read."""
        threads = task["threads"]
        self.function = code.function(spec["symbol"] + "_run")
        rng = np.random.default_rng(0)
        # One block of huge pages, like an executable's arena: with small pages it is random which parts of a
        # buffer map to the same set of a cache.
        sizes = [align_up(max(1, b["bytes"])) if b["same_as"] is None else 0 for b in spec["buffers"]]
        self.memory = aligned_bytes(sum(sizes))
        pointers: list[int] = []
        for buffer, size, end in zip(spec["buffers"], sizes, np.cumsum(sizes), strict=True):
            if not size:
                pointers.append(pointers[buffer["same_as"]])
                continue
            own = self.memory[end - size : end][: max(1, buffer["bytes"])]
            fill(own, buffer, rng)
            pointers.append(own.ctypes.data)
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.state: int | None = None
        self.error = ""
        if spec["has_state"]:
            create = code.function(spec["symbol"] + "_create", ctypes.c_void_p)
            text, own_cores = ctypes.create_string_buffer(512), os.sched_getaffinity(0)
            os.sched_setaffinity(0, CORES)  # a library's threads inherit these
            self.state = create(ctypes.c_int(threads), text, ctypes.c_size_t(512))
            os.sched_setaffinity(0, own_cores)
            if not self.state:
                self.error = text.value.decode(errors="replace") or "create gave nothing"

        def spans(positions: list[int]) -> tuple[int, ctypes.Array[BufferSpan]]:
            found = [BufferSpan(pointers[i], spec["buffers"][i]["bytes"]) for i in positions]
            return len(found), (BufferSpan * len(found))(*found)

        rest = BufferSpan(other.ctypes.data, other.size), task["own_cache_bytes"], threads
        self.fresh = Freshness(*spans(spec["inputs"]), *spans(spec["cold"]), *rest)
        self.repeats = 1


def end_with(parent: int) -> None:
    """Let the system kill this process when its parent dies, so that a hung kernel does not run forever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def load(task: dict[str, Any]) -> Code:
    """Load the objects of a task, and prepare the threads.

    Raises:
        OSError: an object can't be read.
        ValueError: an object can't be loaded.
    """
    native, threads = runtime(), ctypes.c_int(task["threads"])
    native.korch_bind(threads)
    native.korch_set_threads(threads)
    return Code(pack_objects(Path(path).read_bytes() for path in task["objects"]))


def serve() -> None:
    """Run the jobs of one line of input."""
    with short_slices():
        _serve()


def _serve() -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    end_with(task["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected; core dumps are not needed

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    try:
        code = load(task)
    except (OSError, ValueError) as error:
        say(unready=str(error))
        os._exit(1)

    timer, own_all = runtime(), task["threads"] * task["own_cache_bytes"]
    other = aligned_bytes(max(2 * own_all, min(2 * task["l3_bytes"], OTHER_BYTES), 128))
    other[:] = 0

    def time_ns(job: LoadedJob) -> tuple[int, int]:
        state, away_ns = ctypes.c_void_p(job.state), ctypes.c_int64()
        taken_ns = timer.korch_time_fresh(
            job.function, state, job.pointers, ctypes.byref(job.fresh), ctypes.byref(away_ns)
        )
        return int(taken_ns), away_ns.value

    jobs: dict[int, LoadedJob] = {}
    end_s = time.monotonic() + task["seconds"]
    for i, spec in enumerate(task["jobs"]):
        say(at=i)
        job = LoadedJob(code, spec, other, task)
        if job.error:
            say(failed=[i, "not created", job.error])
            continue
        taken = [time_ns(job)[0] for _ in range(1 if time.monotonic() > end_s else 2)]
        if min(taken) < 0:
            say(failed=[i, "failed", "run returned an error"])
            continue
        job.repeats = max(1, min(MOST_REPEATS, SAMPLE_NS // max(1, taken[-1])))
        jobs[i] = job
    limits = TimingLimits(task["rounds"], task["least_rounds"], task["kernel_ns"], end_s)
    take_turns(jobs, time_ns, limits, say)
    say(done=True)
    out.flush()
    os._exit(0)  # states are not destroyed: a crash in a destructor would not matter here


@dataclass(frozen=True)
class TimingLimits:
    """How long kernels are timed."""

    rounds: int  # the number of rounds of a kernel that is not disturbed
    least_rounds: int  # the least number of rounds, even if they take long
    kernel_ns: int  # the time of one kernel after which it gets no more than `least_rounds`
    end_s: float  # when to end; each kernel gets one round in any case
    clock: Callable[[], float] = time.monotonic  # returns the time in seconds


@dataclass
class _Spent:
    """The time and runs that were spent on a kernel so far."""

    time_ns: int = 0
    least_ns: int = 0
    clean: int = 0
    rounds: int = 0

    def add(self, taken_ns: int, away_ns: int) -> None:
        """Count a run."""
        own_ns = taken_ns - away_ns
        self.time_ns += own_ns
        self.least_ns = min(own_ns, self.least_ns or own_ns)
        self.clean += not is_disturbed(taken_ns, away_ns)

    def is_done(self, limits: TimingLimits) -> bool:
        """Return whether a kernel has enough runs, or has taken too long."""
        is_short = self.least_ns < SLICE_NS
        times = 1 if self.clean >= CLEAN_SAMPLES or not is_short else PATIENCE
        is_long = self.rounds >= limits.least_rounds and self.time_ns > times * limits.kernel_ns
        return is_long or self.rounds >= times * limits.rounds


def take_turns(
    jobs: dict[int, Any], time_ns: Callable[[Any], tuple[int, int]], limits: TimingLimits, say: Callable[..., None]
) -> None:
    """Time kernels in rounds, so that a slow period affects all of them.

    `jobs`: the kernels, by number. `time_ns`: runs a kernel; returns nanoseconds, and for how many of them a thread had
    no core.
    """
    spent = {i: _Spent() for i in jobs}
    for turn in range(PATIENCE * limits.rounds):
        for i, job in jobs.items():
            own = spent[i]
            if own.is_done(limits) or (turn and limits.clock() > limits.end_s):
                continue
            say(at=i)
            own.rounds += 1
            # The other kernels of the batch have evicted this kernel's memory from the caches, whereas in a plan
            # its outputs are in memory that other kernels have just used. So one run is made before it is timed.
            first_ns, first_away_ns = time_ns(job)
            own.time_ns += first_ns - first_away_ns
            for _ in range(job.repeats):
                taken_ns, away_ns = time_ns(job)
                own.add(taken_ns, away_ns)
                say(sample=[i, taken_ns, away_ns])
