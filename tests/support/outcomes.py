"""A plugin of pytest that writes each outcome to a file as it happens, and runs what failed before first.

A run that is ended from outside loses nothing that it has found. The file is $KORCH_OUTCOMES, or build/gpu/tests.log;
a line has an outcome and a test. Outcomes of earlier runs are read from build/gpu/tests.log: tests that failed run
first, then those that have not run yet.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

EARLIER = Path("build/gpu/tests.log")
KNOWN = "KORCH_EARLIER_OUTCOMES"
"""The environment variable that passes the earlier outcomes to workers, which must agree on the order of tests."""

_ORDER = {"failed": 0, "": 1, "skipped": 2, "passed": 2}


def pytest_configure() -> None:
    """Read the outcomes of earlier runs."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        lines = EARLIER.read_text("utf-8").splitlines() if EARLIER.exists() else []
        os.environ[KNOWN] = json.dumps({test: outcome for outcome, test in (line.split(" ", 1) for line in lines)})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests in order."""
    known: dict[str, str] = json.loads(os.environ[KNOWN])
    items.sort(key=lambda item: _ORDER[known.get(item.nodeid, "")])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append an outcome: that of the call, or of what failed around it."""
    if "PYTEST_XDIST_WORKER" in os.environ or not (report.when == "call" or report.outcome != "passed"):
        return
    path = Path(os.environ.get("KORCH_OUTCOMES", EARLIER))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{report.outcome} {report.nodeid}\n")
