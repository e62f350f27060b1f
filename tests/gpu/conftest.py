"""Tests that need a CUDA device; without a device no test is collected."""

import os
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from korch.cuda.driver import has_driver

os.environ.pop("TRITON_INTERPRET", None)
if not has_driver() or find_spec("torch") is None or find_spec("triton") is None:
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def target():
    from korch.cuda.measure.device import detect_cuda_target

    return detect_cuda_target()


@pytest.fixture(scope="session")
def compiler(target, tmp_path_factory):
    from korch.cuda.compile import CubinCompiler

    made = CubinCompiler(target.arch, tmp_path_factory.mktemp("cubins"), workers=2)  # several processes run tests
    yield made
    made.close()


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _sound_device():
    """End this process after an invalid address: all later work of a process fails, so no other test may run in it."""
    yield
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            pytest.exit(f"the device does not compute any more: {error}", 3)
        sys.stderr.write(f"the device does not compute any more: {error}\n")
        os._exit(3)  # pytest-xdist starts another process for the other tests
