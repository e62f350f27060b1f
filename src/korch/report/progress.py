"""Progress on stderr: the current step, the best plan so far, the time spent, and the rest of the budget.

On a terminal and in a notebook it is one line that is rewritten every second; elsewhere nothing is written. On
request, a line is written every ten seconds, as for a log, or JSON lines for other programs.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any, Literal, TextIO, get_args

from korch.errors import OptionError
from korch.report.units import milliseconds


@dataclass(frozen=True, slots=True)
class Update:
    """What an optimization does now. Its text is "stage: text"."""

    stage: str  # the name of the stage
    text: str = ""  # a line about its current step; "" at its start
    best_ms: float | None = None  # the sum of the kernels' times of the best plan so far; None if it is not known here
    expected_ms: float | None = None  # an estimate of that sum after a longer search

    def __str__(self) -> str:
        return f"{self.stage}: {self.text}" if self.text else self.stage


Progress = Callable[[Update], None]
"""Called with each step of an optimization."""

Show = Literal["auto", "lines", "json", "off"]
"""Where progress is shown: "auto" on terminals and in notebooks only."""

SHOWS: tuple[Show, ...] = get_args(Show)

STAGES = ("frontend", "fission", "saturate", "reference", "candidates", "orchestrate", "lower", "build", "save")
"""The stages of the pipeline in order, and the writing of the artifact; other stages are shown without a number."""

TICK_SECONDS = 1.0
LINE_SECONDS = 10.0
"""The time between two lines of a log. JSON lines come with ticks, stages and better plans."""


class Bar:
    """A context manager whose `tell` is used as the progress function of a pipeline."""

    def __init__(
        self,
        budget_s: float | None = None,
        begun_s: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        show: Show = "auto",
    ) -> None:
        """Start the clock.

        Args:
            budget_s: the budget in seconds.
            begun_s: the start of the budget on the clock.
            stream: where lines are written; by default stderr.
            clock: returns the time in seconds.
            show: what is written.
        """
        self._stream: TextIO | None = stream or sys.stderr
        self._clock = clock
        self._begun_s = clock() if begun_s is None else begun_s
        self._budget_s = budget_s
        self._now = Update("")
        self._lined_s = self._clock()
        self._show = show
        is_row = show == "auto" and is_rewritable(self._stream)
        self._row = _row(self._stream) if is_row else None  # a line of text that can be rewritten
        if show == "off" or (show == "auto" and not is_row):
            self._stream = None
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

    def tell(self, update: Update) -> None:
        """Show the start of a stage, or its newest step."""
        with self._lock:
            before = self._now
            if update.best_ms is None:
                update = replace(update, best_ms=before.best_ms, expected_ms=before.expected_ms)
            self._now = update
        self.show(is_news=(update.stage, update.best_ms) != (before.stage, before.best_ms))

    def show(self, *, is_news: bool = False) -> None:
        """Write the current line; lines of a log and of JSON only if enough time has passed.

        `is_news`: whether a stage has begun, or a better plan was found.
        """
        with self._lock:
            now_s = self._clock()
            if not self._now.stage or self._stream is None:
                return
            is_json = self._show == "json"
            try:
                if self._row is not None:
                    self._row.set_description_str(self.line(now_s)[: (shutil.get_terminal_size().columns or 80) - 1])
                elif now_s - self._lined_s >= (TICK_SECONDS if is_json else LINE_SECONDS) or (is_json and is_news):
                    self._lined_s = now_s
                    self._stream.write((self.json(now_s) if is_json else self.line(now_s)) + "\n")
                    self._stream.flush()
            except (OSError, ValueError):  # the reader has closed it
                self._done.set()

    def json(self, now_s: float) -> str:
        """Return the JSON line for a time on the clock."""
        spent_s = now_s - self._begun_s
        left_s = None if self._budget_s is None else round(self._budget_s - spent_s, 1)
        return json.dumps({**asdict(self._now), "seconds": round(spent_s, 1), "left_s": left_s})

    def line(self, now_s: float) -> str:
        """Return the line for a time on the clock."""
        now = self._now
        number = STAGES.index(now.stage) + 1 if now.stage in STAGES else 0
        place = f"{number}/{len(STAGES)} " if number else ""
        spent_s = now_s - self._begun_s
        clock = f"{spent_s:.0f} s"
        if self._budget_s is not None:
            left_s = self._budget_s - spent_s
            clock += f", {left_s:.0f} s left" if left_s >= 0 else f", {-left_s:.0f} s over budget"
        best = "" if now.best_ms is None else f" best {milliseconds(now.best_ms)}"
        if best and now.expected_ms is not None:
            best += f", {milliseconds(now.expected_ms)} expected"
        return f"{place}{now.stage} [{clock}]{best}{f': {now.text}' * bool(now.text)}"

    def _tick(self) -> None:
        while not self._done.wait(TICK_SECONDS):
            self.show()


def shown(progress: Progress | bool | None, budget_s: float | None) -> AbstractContextManager[Progress]:
    """Return a context that gives the progress function of a pipeline.

    Args:
        progress: a function that is called with each step; True for a line on a terminal or in a notebook and lines
            on stderr elsewhere, False for none; None for a line on a terminal or in a notebook only.
        budget_s: the budget in seconds, which begins now.

    Raises:
        OptionError: `progress` is something else.
    """
    if callable(progress):
        return nullcontext(progress)
    if not (progress is None or isinstance(progress, bool)):
        expected = "True, False, or a function that is called with each step"
        raise OptionError(f"{progress!r} shows no progress", where="option progress", expected=expected)
    is_wanted = is_rewritable(sys.stderr) if progress is None else progress
    return _told(budget_s) if is_wanted else nullcontext(untold)


@contextmanager
def _told(budget_s: float | None) -> Iterator[Progress]:
    with Bar(budget_s, show="auto" if is_rewritable(sys.stderr) else "lines") as bar:
        yield bar.tell


def untold(update: Update) -> None:
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
