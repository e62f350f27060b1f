"""Kernels that the compiler refuses: each is a bug of Korch, and is recorded so that it can be reported.

The search continues without such a kernel, so its plan may be worse than possible. The failure is logged as
a warning, included in the report, and written to a file with everything that a bug report needs.
"""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path

from korch.candidate.candidate import Candidate
from korch.measure.compiler import CompileFailure

logger = logging.getLogger("korch.measure")


@dataclass(frozen=True, slots=True)
class Uncompiled:
    """A kernel that does not compile: its candidate, the error, and the file with the compiler's output."""

    candidate: str
    message: str
    file: str = ""


def recorded(folder: Path, candidate: Candidate, message: str) -> Uncompiled:
    """Return the record of a kernel that did not compile, now or in an earlier session."""
    path = folder / f"{candidate.key}.txt"
    return Uncompiled(str(candidate), message, str(path) if path.exists() else "")


def record(folder: Path, candidate: Candidate, source: str, failure: CompileFailure) -> Uncompiled:
    """Write a kernel that does not compile to a file, and return its record."""
    text = (
        f"{candidate}\n\n{candidate.group.text}\n"
        f"=== the compiler\n{failure.output or failure.message}\n=== the source\n{source}"
    )
    with contextlib.suppress(OSError):  # a full disk must not end a search
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{candidate.key}.txt").write_text(text)
    row = recorded(folder, candidate, failure.message)
    text = "a kernel does not compile: %s: %s"
    logger.warning(text, row.candidate, row.message, extra={"uncompiled": True})
    return row
