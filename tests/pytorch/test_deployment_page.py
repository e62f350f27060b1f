"""The steps of the page on deployment: PyTorch, `korch unpack`, a C compiler, the C program."""

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from korch.cli import main
from tests.support.c_code import COMPILER

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def test_the_page_from_its_first_step_to_its_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache_folder: Path
) -> None:
    text = PAGE.read_text("utf-8")
    (python,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (program,) = re.findall(r"^```c\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KORCH_CACHE", str(cache_folder))
    names: dict[str, Any] = {}
    # A shorter search than the page's: what is tested is not the plan.
    exec(compile(python.replace("threads=1", "threads=1, budget=5"), "deploy.md", "exec"), names)
    assert main(["unpack", "digits.korch", "digits"]) == 0
    Path("run.c").write_text(program)
    link = ["-Ldigits", "-lkorch_runtime", "-Wl,-rpath,$ORIGIN/digits"]
    subprocess.run([*COMPILER, "-O2", "-Idigits", "run.c", "-o", "run", *link], check=True)
    (command,) = re.findall(r"^    \$ (\./run .*)$", text, re.MULTILINE)
    done = subprocess.run(command.split(), env={}, capture_output=True, text=True, check=True)
    found = np.array(done.stdout.split(), np.float32)
    expected = names["module"](names["image"]).detach().numpy().ravel()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(found, names["exe"](names["image"]).numpy().ravel())
