"""Plans that Clang or zig compiles: results are correct, and equal as tasks and with joins."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ZIG = f"{sys.executable} -m ziglang c++"

SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from korch.errors import CompileError
from korch.measure.compiler import Builder
from korch.measure.toolchain import find_compiler
from korch.primitive import reference
from korch.runtime.build import build
from korch.runtime.executable import Executable
from korch.target import detect_target
from tests.runtime.runtime_plans import tables_of
from tests.runtime.test_tasks import arrays, network, steps_of
graph, target = network(), detect_target(2, find_compiler().identity)
builder = Builder(target.isa, Path(sys.argv[1]))
assert "clang" in builder.compiler.version.lower()
try:
    builder.library(['extern "C" int omp_get_max_threads(void); int threads() { return omp_get_max_threads(); }'])
except CompileError:
    sys.exit("it has no OpenMP library")
steps = steps_of(graph, target)
joins, tasks = (Executable(build(graph, steps, target, builder, parts=parts)) for parts in (0, 3))
assert "@segments = private constant [1 x" in tables_of(tasks.sources)
for seed in range(20):
    for expected, found in zip(joins(*arrays(seed)), tasks(*arrays(seed)), strict=True):
        assert np.array_equal(expected, found)
exact = reference.run(graph, {"x": arrays()[0]}, exact=True)
for name, found in zip(("y", "z"), tasks(*arrays()), strict=True):
    assert np.allclose(found, exact[name], rtol=1e-4, atol=1e-5)
print("equal")
"""


@pytest.mark.parametrize("command", ["clang++", ZIG], ids=["clang", "zig"])
def test_tasks_have_the_results_of_joins(command: str, tmp_path: Path) -> None:
    if command == ZIG and importlib.util.find_spec("ziglang") is None:
        pytest.skip("the package ziglang is not installed")
    if command != ZIG and shutil.which(command) is None:
        pytest.skip("there is no clang++")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, "CXX": command},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "it has no OpenMP library" in done.stderr:
        pytest.skip(f"{command} has no OpenMP library (the package intel-openmp has one)")
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr
