"""A run as a trace for Perfetto or Chrome's tracing page.

One row shows the kernels. If the activity of threads was recorded, each thread has a row with a
span for each kernel or parallel region in which it worked. For a plan that runs as tasks, the rows of a second run
follow: the tasks of each thread, the waits between them, and the critical path.
Source: the Trace Event Format, "complete events".
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from korch.report.kernel import operations
from korch.report.profile import Profile
from korch.report.task_spans import TaskRun, TaskSpan
from korch.report.threads import Threads
from korch.runtime.record import PlanRecord

CALLING_ONLY = (
    "Kernels without spans in the rows of threads ran on the calling thread alone, or on threads "
    "that are not recorded: ONNX Runtime's."
)


def trace(plan: PlanRecord, profile: Profile, threads: Threads | None = None, reason: str = "") -> dict[str, Any]:
    """Return the trace of a run.

    Args:
        plan: the kernels in order.
        profile: the times of the kernels, which are shown if threads were not recorded.
        threads: recorded runs, of which the typical one is shown.
        reason: why threads were not recorded.
    """
    if threads is None:
        kernel_ns = [kernel.median_ns for kernel in profile.kernels]
        names = {0: f"kernels, each on {plan.threads} threads"}
        note = f"Threads are not shown: {reason or 'they were not recorded'}."
    else:
        kernel_ns = [float(time_ns) for time_ns in threads.typical.kernel_ns]
        names = {0: "kernels"} | {n + 1: f"thread {n}" for n in range(threads.threads)}
        note = CALLING_ONLY
    events = _titles(1, plan.model.path or "model", names)
    events += _kernels(plan, profile, kernel_ns)
    if threads is not None:
        events += _threads(plan, threads)
        if (run := threads.typical_tasks) is not None:
            events += _tasks(plan, run, threads.threads)
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"threads": note}}


def _titles(process: int, title: str, rows: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the events that name a process and its rows."""
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": title}}]
    for row, name in rows.items():
        events.append({"name": "thread_name", "ph": "M", "pid": process, "tid": row, "args": {"name": name}})
        events.append({"name": "thread_sort_index", "ph": "M", "pid": process, "tid": row, "args": {"sort_index": row}})
    return events


def _kernels(plan: PlanRecord, profile: Profile, kernel_ns: list[float]) -> list[dict[str, Any]]:
    events = []
    begins = accumulate(kernel_ns, initial=0.0)
    for number, (step, begin_ns, time_ns) in enumerate(
        zip(plan.steps, begins, kernel_ns, strict=False)  # the last begin is the end
    ):
        load = profile.loads[number] if profile.loads else None
        about = {} if load is None else {"longest over mean": load.longest, "idle": load.idle}
        events.append(
            {
                "name": operations(step),
                "cat": step.provider,
                "ph": "X",
                "ts": begin_ns / 1e3,
                "dur": time_ns / 1e3,
                "pid": 1,
                "tid": 0,
                "args": {
                    "kernel": number,
                    "provider": step.provider,
                    "variant": step.variant,
                    "alone us": step.cost_ns / 1e3,
                    "bound us": step.bound_ns / 1e3,
                    "bytes": step.size_bytes,
                    "FLOP": step.work_flop,
                    "origins": [origin for origin in step.origins if origin],
                    **about,
                },
            }
        )
    return events


def _threads(plan: PlanRecord, threads: Threads) -> list[dict[str, Any]]:
    return [
        {
            "name": operations(plan.steps[span.kernel]),
            "cat": plan.steps[span.kernel].provider,
            "ph": "X",
            "ts": span.begin_ns / 1e3,
            "dur": (span.end_ns - span.begin_ns) / 1e3,
            "pid": 1,
            "tid": span.thread + 1,
            "args": {"kernel": span.kernel, "waited for other threads us": span.wait_ns / 1e3},
        }
        for span in threads.typical.spans
    ]


def _tasks(plan: PlanRecord, run: TaskRun, threads: int) -> list[dict[str, Any]]:
    """Return the rows of a run as tasks; in the trace they are a separate process."""
    rows = {0: "critical path"} | {n + 1: f"thread {n}" for n in range(threads)}
    events = _titles(2, "a run as tasks", rows)
    events += (_task(plan, run, span, span.thread + 1) for span in run.spans if not span.is_wait or span.time_ns)
    events += (_task(plan, run, span, 0) for span in run.critical_path())
    return events


def _task(plan: PlanRecord, run: TaskRun, span: TaskSpan, row: int) -> dict[str, Any]:
    task = run.tasks.get(span.task, span)
    step = plan.steps[task.kernel]
    about = {"task": task.task, "kernel": task.kernel, "stage": task.stage, "grid points": f"{task.first}:{task.last}"}
    return {
        "name": f"wait for task {task.task} of {operations(step)}" if span.is_wait else operations(step),
        "cat": "wait" if span.is_wait else step.provider,
        "ph": "X",
        "ts": span.begin_ns / 1e3,
        "dur": span.time_ns / 1e3,
        "pid": 2,
        "tid": row,
        "args": {**about, "thread": task.thread},
    }
