"""The measuring process: loads libraries and times kernels, and may crash or hang without harm.

It reads one job list as a JSON line from stdin and writes JSON lines: `{"unready": text}` if a
library does not load, `{"at": i}` before it touches kernel i, `{"sample": [i, ns]}` after each
timing, `{"failed": [i, kind, text]}`, `{"done": true}`. What kernels print goes to stderr.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from korch.alignment import align_up, aligned_bytes

Bytes = npt.NDArray[np.uint8]

SAMPLE_NS = 200_000
"""A turn of a kernel is as many runs as last this long, each of them a sample."""

MOST_REPEATS = 4

OTHER_BYTES = 128 << 20
"""Most memory whose reading drives all else from the cores' own caches, unless these are larger. It
need not exceed the cache that the cores share, which may be of hundreds of megabytes on a server:
for each process a system takes a second to hand out so much."""

KINDS = {"f32": np.float32, "f64": np.float64, "bf16": np.uint16}
"""How the elements of a buffer are written, by the names of their types."""

PATTERN = 1 << 16
"""Random numbers that a buffer is filled with, again and again."""

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) that asks for a signal at the parent's death."""


def fill(memory: Bytes, buffer: dict[str, Any], rng: np.random.Generator) -> None:
    """Fill a buffer with what is given, or random floats around 1, or zeros."""
    memory[:] = 0
    if "data" in buffer:
        data = np.frombuffer(base64.b64decode(buffer["data"]), np.uint8)
        memory[: data.size] = data
    elif buffer.get("dtype") in KINDS:
        view = memory[: buffer["bytes"]].view(KINDS[buffer["dtype"]])
        some: np.ndarray = rng.random(min(view.size, PATTERN), np.float32)
        some = some * np.float32(0.5) + np.float32(0.5)
        if buffer["dtype"] == "bf16":
            some = some.view(np.uint32) >> 16  # a bfloat16 is the upper half of a float32
        for start in range(0, view.size, PATTERN):
            view[start : start + PATTERN] = some[: view.size - start]


class Span(ctypes.Structure):
    """A buffer of which something is done before each run."""

    _fields_ = (("at", ctypes.c_void_p), ("size", ctypes.c_int64))


class Job:
    """One kernel, ready to run."""

    def __init__(self, library: ctypes.CDLL, spec: dict[str, Any], threads: int) -> None:
        self.function = getattr(library, spec["symbol"] + "_run")
        rng = np.random.default_rng(0)
        # In one block of huge pages, as an executable's arena is: with small pages chance decides
        # which parts of a buffer share a set of a cache.
        sizes = [align_up(max(1, buffer["bytes"])) for buffer in spec["buffers"]]
        self.memory = aligned_bytes(sum(sizes))
        pointers = []
        for buffer, size, end in zip(spec["buffers"], sizes, np.cumsum(sizes), strict=True):
            own = self.memory[end - size : end][: max(1, buffer["bytes"])]
            fill(own, buffer, rng)
            pointers.append(own.ctypes.data)
        self.pointers = (ctypes.c_void_p * len(pointers))(*pointers)
        self.state: int | None = None
        self.error = ""
        if spec["has_state"]:
            create = getattr(library, spec["symbol"] + "_create")
            create.restype = ctypes.c_void_p
            text = ctypes.create_string_buffer(512)
            self.state = create(ctypes.c_int(threads), text, ctypes.c_size_t(512))
            if not self.state:
                self.error = text.value.decode(errors="replace") or "create gave nothing"

        def spans(positions: list[int]) -> tuple[ctypes.Array[Span], ctypes.c_int64]:
            found = [Span(pointers[i], spec["buffers"][i]["bytes"]) for i in positions]
            return (Span * max(1, len(found)))(*found), ctypes.c_int64(len(found))

        self.inputs, self.cold = spans(spec["inputs"]), spans(spec["cold"])
        self.repeats = 1


def end_with(parent: int) -> None:
    """Let the system kill this process with its parent: a kernel that hangs would stay for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def load(task: dict[str, Any]) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Load the libraries of a task and return the timer and the kernels.

    Raises:
        OSError: one can't be loaded.
    """
    for path in task["preload"]:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    timer = ctypes.CDLL(task["timer"])
    timer.korch_time_fresh.restype = ctypes.c_int64
    timer.korch_threads(ctypes.c_int(task["threads"]))
    return timer, ctypes.CDLL(task["library"])


def serve() -> None:
    """Run the jobs of one line of input."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    end_with(task["parent"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # crashes are expected; nobody reads dumps

    def say(**line: Any) -> None:
        out.write(json.dumps(line) + "\n")

    try:
        timer, library = load(task)
    except OSError as error:
        say(unready=str(error))
        os._exit(1)

    own_bytes = ctypes.c_int64(task["own_cache_bytes"])
    own_all = task["threads"] * task["own_cache_bytes"]
    memory = aligned_bytes(max(2 * own_all, min(2 * task["l3_bytes"], OTHER_BYTES), 128))
    memory[:] = 0
    other = Span(memory.ctypes.data, memory.size)

    def time_ns(job: Job) -> int:
        return int(timer.korch_time_fresh(
            job.function, ctypes.c_void_p(job.state), job.pointers, *job.inputs, *job.cold,
            ctypes.byref(other), own_bytes, ctypes.c_int(task["threads"]),
        ))  # fmt: skip

    jobs: dict[int, Job] = {}
    spent: dict[int, int] = {}
    for i, spec in enumerate(task["jobs"]):
        say(at=i)
        job = Job(library, spec, task["threads"])
        if job.error:
            say(failed=[i, "not created", job.error])
            continue
        taken = [time_ns(job) for _ in range(2)]
        if min(taken) < 0:
            say(failed=[i, "failed", "run returned an error"])
            continue
        job.repeats = max(1, min(MOST_REPEATS, SAMPLE_NS // max(1, taken[-1])))
        jobs[i], spent[i] = job, 0
    for turn in range(task["rounds"]):
        for i, job in jobs.items():
            if turn >= task["least_rounds"] and spent[i] > task["kernel_ns"]:
                continue
            say(at=i)
            # The kernels of this batch share the caches; in a plan a kernel's outputs lie where
            # others have just worked. So its own memory comes back before it is timed.
            spent[i] += time_ns(job)
            for _ in range(job.repeats):
                taken_ns = time_ns(job)
                spent[i] += taken_ns
                say(sample=[i, taken_ns])
    say(done=True)
    out.flush()
    os._exit(0)  # states are not destroyed: a crash in a destructor is nobody's business here
