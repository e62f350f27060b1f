"""Tests of PyTorch modules with Korch: `make test-torch` installs the packages that they need and runs them."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from korch.limits import SearchLimits

collect_ignore_glob = [] if find_spec("torch") and find_spec("onnxscript") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    """The same numbers whatever ran before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def quick(cache_folder: Path) -> dict[str, object]:
    """Options under which a small module is optimized in a second: the plan is right, not good."""
    return {
        "threads": 1,
        "measure": False,
        "search": SearchLimits(gap=0.9, max_primitives=6, solver_seconds=5.0),
        "cache_folder": cache_folder,
    }
