"""Progress on stderr: the stage, and its newest line; silent when stderr is no terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

STAGES = ("frontend", "fission", "equivalences", "candidates", "orchestrate", "baselines", "build")


class Bar:
    """A context whose `tell` is a pipeline's progress function."""

    def __init__(self) -> None:
        is_hidden = not sys.stderr.isatty()
        shape = "{n_fmt}/{total_fmt} {desc} {elapsed}"
        self._bar = tqdm(total=len(STAGES), disable=is_hidden, file=sys.stderr, bar_format=shape,
                         leave=False)  # fmt: skip

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self._bar.close()

    def tell(self, stage: str, text: str) -> None:
        """Show that a stage has begun, or its newest line."""
        self._bar.set_description_str(f"{stage}: {text}" if text else stage, refresh=False)
        if not text and stage in STAGES:
            self._bar.n = STAGES.index(stage) + 1
        self._bar.refresh()
