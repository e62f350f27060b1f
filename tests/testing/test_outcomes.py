"""The plugin that keeps the outcomes of tests on a device: also of a run that ends before its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os
import pytest

def test_a():
    pass

@pytest.mark.skipif(True, reason="no")
def test_b():
    pass

def test_c():
    assert os.path.exists("mended")

def test_d():
    os.path.exists("mended") or os._exit(1)

def test_e():
    pass
"""


@pytest.mark.parametrize("workers", [(), ("-n", "1")])
def test_what_failed_or_was_not_reached_runs_first(workers, tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.outcomes", "-p", "no:randomly"]

    def run(folder: str) -> list[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "KORCH_OUTCOMES": f"{folder}/tests.log"}
        environment.pop("PYTEST_XDIST_WORKER", None)
        subprocess.run(
            [*command, *workers, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True, check=False
        )
        return (tmp_path / folder / "tests.log").read_text().replace("test_it.py::test_", "").splitlines()

    first = run("build/gpu")
    assert first[:3] == ["passed a", "skipped b", "failed c"]
    assert first[3:] == (["failed d", "passed e"] if workers else [])
    (tmp_path / "mended").touch()
    again = run("other")
    later = ["passed a", "skipped b", "passed e"] if workers else ["passed e", "passed a", "skipped b"]
    assert again == ["passed c", "passed d", *later]
