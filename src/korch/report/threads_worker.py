"""The process that runs an artifact and records its threads, for `korch.report.threads`.

It reads a task as JSON from stdin and writes one JSON object to stdout. It is a separate process,
so that no other threads of this one disturb the runs.
"""

import ctypes
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from korch.runtime.executable import Executable
from korch.runtime.library import Handle, pointers_of
from korch.runtime.runnable import random_feeds
from korch.system.native import runtime

REGIONS_OF_A_KERNEL = 64
"""The most regions that are recorded for each kernel."""


TASKS_OF_A_KERNEL = 256
"""The most tasks and waits that are recorded for each kernel and thread."""

REGIONS, TASKS = 1, 2
"""What is recorded."""

TASK_FIELDS = ("is_wait", "thread", "number", "step", "stage", "begin", "end")


class Record(ctypes.Structure):
    """What a thread did: a part of a region, a task or a wait; the same structure as in korch_trace.c."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            *("number", "thread", "is_wait", "step", "stage", "begin", "end"),
            *("begin_ns", "end_ns", "wait_ns"),
        )
    )


def _watched(traces: int, most: int, handle: Handle, *buffers: Any) -> tuple[list[Record], int]:
    """Run a plan once; return what was recorded, at most some records, and when the run began."""
    records, found, begun_ns = (Record * most)(), ctypes.c_int64(), ctypes.c_int64()
    counts = ctypes.c_int64(most), ctypes.byref(found), ctypes.byref(begun_ns)
    code = runtime().korch_watch(traces, handle.pointer, *buffers, records, *counts)
    if code:
        raise SystemExit(f"the run failed with code {code}")
    return records[: min(found.value, most)], begun_ns.value


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
        kernel_ns = (ctypes.c_int64 * count)()
        own = pointers_of(given), pointers_of(wanted), kernel_ns
        records, begun_ns = _watched(REGIONS, room, handle, *own)
        return {
            "begun_ns": begun_ns,
            "kernel_ns": list(kernel_ns),
            "spans": [[r.number, r.thread, r.begin_ns, r.end_ns, r.wait_ns] for r in records],
        }

    def once_as_tasks(handle: Handle, given: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
        most = max(1, count) * threads * TASKS_OF_A_KERNEL
        records, begun_ns = _watched(TASKS, most, handle, pointers_of(given), pointers_of(wanted), None)
        return [
            [*(getattr(r, name) for name in TASK_FIELDS), r.begin_ns - begun_ns, r.end_ns - begun_ns] for r in records
        ]

    runs = [executable.hooked(arrays, once) for _ in range(task["rounds"])]
    tasks = [executable.hooked(arrays, once_as_tasks) for _ in range(task["rounds"])]
    json.dump({"runs": runs, "tasks": tasks}, answer)
    answer.close()
