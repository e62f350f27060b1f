"""A recorded run of a plan as tasks: the tasks that each thread ran and waited for, and the critical path."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """The time in which a thread ran a task, or waited for one of another thread; in nanoseconds."""

    is_wait: bool  # whether it waited for the task
    thread: int  # the number of the thread; 0 is the calling thread
    task: int  # the task's number among the tasks of all queues
    kernel: int  # the kernel's index in the plan. This, the stage and the grid points are 0 for a wait.
    stage: int  # the stage of the kernel; -1 for the whole kernel
    first: int  # the first grid point
    last: int  # the end of the grid points (exclusive)
    begin_ns: int  # its start, since the start of the run
    end_ns: int  # its end

    @property
    def time_ns(self) -> int:
        """Its duration."""
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
        """The waits in descending order of their duration."""
        return sorted((span for span in self.spans if span.is_wait), key=lambda span: -span.time_ns)

    def critical_path(self) -> list[TaskSpan]:
        """Return, in order, the tasks that determine the end of the last task.

        The predecessor of a task on this path is, of the task that its thread ran before it and the tasks that its
        thread waited for in between, the one that ended last.
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
