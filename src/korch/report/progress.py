"""Progress on stderr: the current step, the time spent, and the rest of the budget.

On a terminal and in a notebook it is one line that is rewritten every second. Elsewhere, as in a log, a line is
written every ten seconds, so a short command writes none.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TextIO

from korch.errors import OptionError

Progress = Callable[[str, str], None]
"""Called with a stage's name and a line of text."""

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
        self._stream: TextIO | None = stream or sys.stderr
        self._clock = clock
        self._begun_s = clock() if begun_s is None else begun_s
        self._budget_s = budget_s
        self._stage, self._text = "", ""
        self._lined_s = self._clock()
        self._row = _row(self._stream) if is_rewritable(self._stream) else None  # a line of text that can be rewritten
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
        if self._row is not None:
            self._row.close()

    def tell(self, stage: str, text: str) -> None:
        """Show the start of a stage, or its newest line."""
        with self._lock:
            self._stage, self._text = stage, text
        self.show()

    def show(self) -> None:
        """Write the current line; in a log only if enough time has passed."""
        with self._lock:
            now_s = self._clock()
            if not self._stage or self._stream is None:
                return
            line = self.line(now_s)
            try:
                if self._row is not None:
                    self._row.set_description_str(line[: (shutil.get_terminal_size().columns or 80) - 1])
                elif now_s - self._lined_s >= LINE_SECONDS:
                    self._lined_s = now_s
                    self._stream.write(line + "\n")
                    self._stream.flush()
            except (OSError, ValueError):  # the reader has closed it
                self._done.set()

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


def shown(progress: Progress | bool | None, budget_s: float | None) -> AbstractContextManager[Progress]:
    """Return a context that gives the progress function of a pipeline.

    Args:
        progress: a function of a stage's name and a line of text; True for lines on stderr, False for none; None for
            a line on a terminal or in a notebook only.
        budget_s: the budget in seconds, which begins now.

    Raises:
        OptionError: `progress` is something else.
    """
    if callable(progress):
        return nullcontext(progress)
    if not (progress is None or isinstance(progress, bool)):
        expected = "True, False, or a function that is called with a stage's name and a line of text"
        raise OptionError(f"{progress!r} shows no progress", where="option progress", expected=expected)
    is_wanted = is_rewritable(sys.stderr) if progress is None else progress
    return _told(budget_s) if is_wanted else nullcontext(_ignore)


@contextmanager
def _told(budget_s: float | None) -> Iterator[Progress]:
    with Bar(budget_s) as bar:
        yield bar.tell


def _ignore(stage: str, text: str) -> None:
    """Show nothing."""


def is_rewritable(stream: TextIO | None) -> bool:
    """Return whether a line in a stream can be rewritten: it is a terminal, or the errors of a notebook."""
    try:
        return stream is not None and (stream.isatty() or ("ipykernel" in sys.modules and stream is sys.stderr))
    except ValueError:  # it is closed
        return False


def _row(stream: TextIO | None) -> Any:
    """Return a line of text that can be rewritten."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without widgets has a line of text
        from tqdm.auto import tqdm

    return tqdm(bar_format="{desc}", file=stream, leave=False, nrows=shutil.get_terminal_size().lines)
