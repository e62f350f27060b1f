"""Progress on stderr: the current step, the time spent, and the rest of the budget.

On a terminal it is one line that is rewritten every second. Elsewhere, as in a log, a line is
written every ten seconds, so a short command writes none.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

STAGES = ("frontend", "fission", "saturate", "reference", "candidates", "orchestrate", "lower", "build", "save")
"""The stages of the pipeline in order, and the writing of the artifact; other stages are shown without a number."""

TICK_SECONDS = 1.0
LINE_SECONDS = 10.0
"""The time between two lines if the output is not a terminal."""


class Bar:
    """A context manager whose `tell` is used as the progress function of a pipeline."""

    def __init__(
        self,
        budget_s: float | None = None,
        begun_s: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the clock.

        Args:
            budget_s: the budget in seconds.
            begun_s: the start of the budget on the clock.
            stream: where lines are written; by default stderr.
            clock: returns the time in seconds.
        """
        self._stream = stream or sys.stderr
        self._clock = clock
        self._begun_s = clock() if begun_s is None else begun_s
        self._budget_s = budget_s
        self._stage, self._text = "", ""
        self._lined_s = self._clock()
        self._is_terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Bar:
        self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._is_terminal:
            self._write("\r\x1b[K")

    def tell(self, stage: str, text: str) -> None:
        """Show the start of a stage, or its newest line."""
        with self._lock:
            self._stage, self._text = stage, text
        self.show()

    def show(self) -> None:
        """Write the current line; in a log only if enough time has passed."""
        with self._lock:
            now_s = self._clock()
            if not self._stage:
                return
            line = self.line(now_s)
            if self._is_terminal:
                self._write("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1])
            elif now_s - self._lined_s >= LINE_SECONDS:
                self._lined_s = now_s
                self._write(line + "\n")

    def line(self, now_s: float) -> str:
        """Return the line for a time on the clock."""
        number = STAGES.index(self._stage) + 1 if self._stage in STAGES else 0
        place = f"{number}/{len(STAGES)} " if number else ""
        spent_s = now_s - self._begun_s
        clock = f"{spent_s:.0f} s"
        if self._budget_s is not None:
            left_s = self._budget_s - spent_s
            clock += f", {left_s:.0f} s left" if left_s >= 0 else f", {-left_s:.0f} s over budget"
        text = f": {self._text}" if self._text else ""
        return f"{place}{self._stage} [{clock}]{text}"

    def _tick(self) -> None:
        while not self._done.wait(TICK_SECONDS):
            self.show()

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # the reader has closed it
            self._done.set()
