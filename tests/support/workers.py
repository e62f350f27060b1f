"""Runs items in processes that may crash or hang without effect on the other items."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

HUNG = "it hung"
"""Why an item has no answer that took longer than its limit."""


def run_in_workers(
    items: Sequence[str], command: Sequence[str], jobs: int, limit_s: float, life: int = sys.maxsize
) -> Iterator[tuple[str, Any, str]]:
    """Run items in processes; yield for each item that ends the item, its answer, and the reason for a missing answer.

    Args:
        items: the items, each a line of text.
        command: a command whose process calls `answer_lines`.
        jobs: the number of processes.
        limit_s: the longest time for an item.
        life: the number of items after which a process is replaced.
    """
    waiting = list(reversed(items))
    workers = [_Worker(command, limit_s, life) for _ in range(min(jobs, len(items)))]
    try:
        with selectors.DefaultSelector() as selector:
            for worker in workers:
                selector.register(worker.give(waiting.pop()), selectors.EVENT_READ, worker)
            while selector.get_map():
                ready = {key.data for key, _ in selector.select(timeout=1.0)}
                for key in list(selector.get_map().values()):
                    worker = key.data
                    is_late = time.monotonic() > worker.until_s
                    if worker not in ready and not is_late:
                        continue
                    selector.unregister(key.fileobj)
                    line = "" if worker not in ready else worker.process.stdout.readline()
                    if line:
                        yield worker.item, json.loads(line), ""
                    else:
                        code = worker.process.poll() if is_late else worker.process.wait()
                        worker.end()
                        yield worker.item, None, HUNG if is_late else f"the process ended with code {code}"
                    if waiting:
                        selector.register(worker.give(waiting.pop()), selectors.EVENT_READ, worker)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process that runs items; it is replaced by a new process when it ends."""

    def __init__(self, command: Sequence[str], limit_s: float, life: int) -> None:
        self.command, self.limit_s, self.life = command, limit_s, life
        self.process: subprocess.Popen[str] | None = None
        self.count = 0
        self.item = ""
        self.until_s = 0.0

    def give(self, item: str) -> Any:
        """Send an item to the process; return the stream from which its answer is read."""
        if self.count == self.life:
            self.end()
        if self.process is None or self.process.poll() is not None:
            self.end()
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                bufsize=1,
            )
        self.count += 1
        self.item, self.until_s = item, time.monotonic() + self.limit_s
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, so there will be no answer
            self.process.stdin.write(f"{item}\n")
        return self.process.stdout

    def end(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(BrokenPipeError):
                self.process.communicate()
        self.process, self.count = None, 0


def answer_lines(run: Callable[[str], Any]) -> None:
    """Answer each line of the input with a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps the output of libraries apart from the answers
    for line in sys.stdin:
        answers.write(json.dumps(run(line.strip())) + "\n")
        answers.flush()
