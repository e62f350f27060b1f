"""The process that runs an artifact and records its threads, for `korch.report.threads`.

It reads a task as JSON from stdin and writes one JSON object to stdout. It is a separate process,
so that no other threads of this one disturb the runs.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from korch.runtime.executable import Executable
from korch.runtime.library import Handle, pointers_of
from korch.runtime.runnable import random_feeds
from korch.system.native import runtime

REGIONS_OF_A_KERNEL = 64
"""The most regions that are recorded for each kernel; further ones are only counted."""


class RegionRecord(ctypes.Structure):
    """The activity of one thread in one parallel region; the same structure as `span` in korch_trace.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("region", "thread", "begin_ns", "end_ns", "wait_ns"))


TASKS_OF_A_KERNEL = 256
"""The most tasks and waits that are recorded for each kernel and thread."""


TASK_FIELDS = ("is_wait", "thread", "task", "step", "stage", "begin", "end")


class TaskRecord(ctypes.Structure):
    """A task that a thread ran or waited for; the same structure as `task_span` in korch_trace.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in (*TASK_FIELDS, "begin_ns", "end_ns"))


def _task_recorder(most: int) -> Callable[[Handle, Sequence[int], Sequence[int]], list[list[int]]]:
    """Return a function that runs a plan once and returns the tasks and waits of all threads, at most `most`."""

    def once(handle: Handle, given: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
        spans, found, begun_ns = (TaskRecord * most)(), ctypes.c_int64(), ctypes.c_int64()
        code = runtime().korch_watch_tasks(
            handle.pointer,
            pointers_of(given),
            pointers_of(wanted),
            spans,
            ctypes.c_int64(most),
            ctypes.byref(found),
            ctypes.byref(begun_ns),
        )
        if code:
            raise SystemExit(f"the run failed with code {code}")
        return [
            [*(getattr(s, name) for name in TASK_FIELDS), s.begin_ns - begun_ns.value, s.end_ns - begun_ns.value]
            for s in spans[: min(found.value, most)]
        ]

    return once


def serve() -> None:
    """Run the task from stdin and write the answer to stdout."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of kernels goes to stderr, not into the answer
    task = json.loads(sys.stdin.read())
    executable = Executable.load(task["artifact"])
    arrays = list(random_feeds(executable.get_inputs(), task["seed"]).values())
    for _ in range(3):
        executable(*arrays)
    threads, count = executable.plan.threads, len(executable.plan.steps)
    room = max(1, count) * threads * REGIONS_OF_A_KERNEL

    def once(handle: Handle, given: Sequence[int], wanted: Sequence[int]) -> dict[str, Any]:
        kernel_ns, spans = (ctypes.c_int64 * count)(), (RegionRecord * room)()
        found, begun_ns = ctypes.c_int64(), ctypes.c_int64()
        code = runtime().korch_watch_run(
            handle.pointer,
            pointers_of(given),
            pointers_of(wanted),
            kernel_ns,
            spans,
            ctypes.c_int64(room),
            ctypes.byref(found),
            ctypes.byref(begun_ns),
        )
        if code:
            raise SystemExit(f"the run failed with code {code}")
        kept = spans[: min(found.value, room)]
        return {
            "begun_ns": begun_ns.value,
            "kernel_ns": list(kernel_ns),
            "left_out": found.value - len(kept),
            "spans": [[s.region, s.thread, s.begin_ns, s.end_ns, s.wait_ns] for s in kept],
        }

    runs = [executable.hooked(arrays, once) for _ in range(task["rounds"])]
    once_as_tasks = _task_recorder(max(1, count) * threads * TASKS_OF_A_KERNEL)
    tasks = [executable.hooked(arrays, once_as_tasks) for _ in range(task["rounds"])]
    json.dump({"runs": runs, "tasks": tasks}, answer)
    answer.close()
