"""Kernels that the compiler refuses: each is a bug of Korch, and is recorded to be reported.

Without such a kernel the search goes on, so its plan may be worse than it could be. What is found
is logged as a warning, kept in the report, and written to a file with all that a bug report needs.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from korch.candidate.candidate import Candidate
from korch.measure.compiler import CompileFailure

logger = logging.getLogger("korch.measure")

Row = dict[str, str]
"""For the report: candidate, message, and the file with the compiler's output."""


def recorded(folder: Path, candidate: Candidate, message: str) -> Row:
    """Return the row of a kernel that did not compile, now or in an earlier session."""
    path = folder / f"{candidate.key}.txt"
    file = str(path) if path.exists() else ""
    return {"candidate": str(candidate), "message": message, "file": file}


def record(folder: Path, candidate: Candidate, source: str, failure: CompileFailure) -> Row:
    """Write down a kernel that does not compile, and return its row.

    Args:
        folder: gets the file.
        candidate: what the kernel is for.
        source: its text.
        failure: what the compiler said.
    """
    text = (
        f"{candidate}\n\n{candidate.group.text}\n"
        f"=== the compiler\n{failure.output or failure.message}\n=== the source\n{source}"
    )
    with contextlib.suppress(OSError):  # a full disk must not end a search
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{candidate.key}.txt").write_text(text)
    row = recorded(folder, candidate, failure.message)
    text = "a kernel does not compile: %s: %s"
    logger.warning(text, row["candidate"], row["message"], extra={"uncompiled": True})
    return row
