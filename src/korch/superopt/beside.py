"""Groups -> findings, in a separate process that runs in parallel to other work.

The process reads one task as a pickle, and writes a line of JSON for each group as soon as its search has ended.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import Self

from korch.candidate.candidate import Group
from korch.limits import SearchLimits
from korch.superopt.find import finding_text, timed_search
from korch.superopt.sizes import CacheMachine
from korch.system.child import child_command
from korch.system.deadline import Deadline

MARGIN_SECONDS = 5.0
"""How long after the deadline the process may end, so that it can finish the step that it has begun."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class SearchBeside:
    """A search for programs of groups in another process; a context manager that ends the process."""

    def __init__(
        self, groups: Sequence[Group], machine: CacheMachine, limits: SearchLimits, deadline: Deadline
    ) -> None:
        """Start the process if there is a group to search, and time is left."""
        self.keys = frozenset(group.key for group in groups)
        self._order, self._deadline = [group.key for group in groups], deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._pool = ThreadPoolExecutor(1)
        if groups and not deadline.is_over:
            self._process = subprocess.Popen(
                child_command("korch.superopt.beside"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD},
            )
            task = pickle.dumps((list(groups), machine, limits, deadline.left_s))
            self._printed = self._pool.submit(self._process.communicate, task)

    def findings(self) -> dict[str, tuple[str, bool]]:
        """Wait for the end; return, by group key, the finding as text and whether more time would not change it.

        Groups that the process did not reach, or during which it died, are left out.
        """
        if self._process is None:
            return {}
        left_s = self._deadline.left_s
        wait([self._printed], None if left_s is None else max(0.0, left_s) + MARGIN_SECONDS)
        self._stop()
        # A line without a newline is incomplete: the process was stopped while it wrote the line.
        lines = self._printed.result()[0].decode().split("\n")[:-1]
        found = {}
        for key, line in zip(self._order, lines, strict=False):
            text, is_lasting = json.loads(line)
            found[key] = str(text), bool(is_lasting)
        return found

    def _stop(self) -> None:
        if self._process is not None and not self._printed.done():
            self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._pool.shutdown()


def serve() -> None:
    """Search for programs of the groups of a task, one group after another."""
    groups, machine, limits, seconds = pickle.load(sys.stdin.buffer)
    deadline = Deadline.after(seconds, time.monotonic())
    for group in groups:
        finding, is_lasting = timed_search(group, machine, deadline, limits)
        print(json.dumps([finding_text(finding), is_lasting]), flush=True)
