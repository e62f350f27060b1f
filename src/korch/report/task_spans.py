"""A recorded run of a plan as tasks: what each thread ran, what it waited for, and the critical path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """The time in which a thread ran a task, or waited for one of another thread; in nanoseconds.

    Attributes:
        is_wait: whether it waited for the task.
        thread: 0 is the calling one.
        task: the task's number among those of all queues.
        kernel: the kernel's place in the plan. This, the stage and the grid points are 0 for a wait.
        stage: of the kernel; -1 for the whole kernel.
        first: the first grid point.
        last: the one after the last.
        begin_ns: its start, since the start of the run.
        end_ns: its end.
    """

    is_wait: bool
    thread: int
    task: int
    kernel: int
    stage: int
    first: int
    last: int
    begin_ns: int
    end_ns: int

    @property
    def time_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.begin_ns


@dataclass(frozen=True)
class TaskRun:
    """One run as tasks: its spans, in any order."""

    spans: tuple[TaskSpan, ...]

    @cached_property
    def tasks(self) -> Mapping[int, TaskSpan]:
        """The tasks by number."""
        return {span.task: span for span in self.spans if not span.is_wait}

    @property
    def end_ns(self) -> int:
        """The end of the last task."""
        return max((span.end_ns for span in self.tasks.values()), default=0)

    @property
    def waits(self) -> list[TaskSpan]:
        """The waits, the longest first."""
        return sorted((span for span in self.spans if span.is_wait), key=lambda span: -span.time_ns)

    def critical_path(self) -> list[TaskSpan]:
        """Return the tasks that determine when the last one ends, in order.

        Before a task there is the one that its thread has waited for just before it, or else the one that its thread
        ran before it.
        """
        before: dict[int, TaskSpan] = {}
        for thread in {span.thread for span in self.tasks.values()}:
            last: TaskSpan | None = None
            own = sorted((s for s in self.spans if s.thread == thread), key=lambda s: (s.end_ns, s.begin_ns))
            for span in own:
                if not span.is_wait:
                    if last is not None:
                        before[span.task] = last
                    last = span
                elif span.task in self.tasks:
                    waited = self.tasks[span.task]
                    last = waited if last is None or waited.end_ns > last.end_ns else last
        path = [max(self.tasks.values(), key=lambda span: span.end_ns)] if self.tasks else []
        while path and path[-1].task in before:
            path.append(before[path[-1].task])
        return path[::-1]
