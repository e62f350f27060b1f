"""What the commands of benchmarks share: options, files of results, and the facts about the machine in them.

Each row is written when it is complete, so that an interrupted command can be continued.
"""

import argparse
import json
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from korch.api import optimize
from korch.target import detect_target

T = TypeVar("T")

PACKAGES = (
    "onnxruntime",
    "openvino",
    "ortools",
    "numpy",
    "onnx",
    "torch",
    "transformers",
    "iree-base-compiler",
    "iree-base-runtime",
)


def options_of(doc: str, models: Iterable[str], *, budget_s: float | None = None, rounds: int = 15) -> Any:
    """Return a parser with the options of commands that search models and compare their plans.

    Args:
        doc: the documentation of the module; its first line describes the command.
        models: the names of all models.
        budget_s: the default seconds of a search.
        rounds: the default number of rounds in which engines are timed.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--budget", type=float, default=budget_s, help="seconds of each search")
    parser.add_argument("--artifacts", type=Path, help="folder of artifacts; those that are searched are written to it")
    parser.add_argument("--output", type=Path, help="the file of results")
    return parser


@contextmanager
def artifacts_of(args: Any) -> Iterator[Path]:
    """Give the folder for a command's artifacts: that of its options, or a temporary one."""
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.artifacts or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def artifact_of(model: Path, artifact: Path, **options: Any) -> Path:
    """Return an artifact; if it does not exist, it is searched first, with an empty cache unless the options name one.

    `options`: those of `korch.optimize`.
    """
    if not artifact.exists():
        with tempfile.TemporaryDirectory() as cache:
            optimize(model, **{"cache_folder": Path(cache), **options}).save(artifact)
    return artifact


def in_process(function: Callable[..., T], *args: Any) -> T:
    """Return the result of a function that runs in a process of its own.

    Raises:
        BrokenProcessPool: the process ended.
        Exception: what the function raises.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def known_rows(path: Path | None, key: str = "models") -> Any:
    """Return the rows of a file of results; no rows if there is no such file."""
    if path is None or not path.exists():
        return [] if key == "rows" else {}
    return json.loads(path.read_text("utf-8"))[key]


def write_rows(path: Path | None, rows: Any, key: str = "models") -> None:
    """Write rows with the facts about the machine to a file of results, if there is one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), key: rows}, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Return the CPU's model, its cores and instruction set, Korch's commit, and the versions of what is installed."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(names),
        "isa": detect_target(1, "").isa,
        "commit": commit,
        "python": platform.python_version(),
        "versions": versions,
    }
