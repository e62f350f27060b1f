"""What needs a CUDA device; without one nothing is collected."""

import os
from importlib.util import find_spec

import numpy as np
import pytest

from korch.cuda.driver import has_driver

os.environ.pop("TRITON_INTERPRET", None)
if not has_driver() or find_spec("torch") is None or find_spec("triton") is None:
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def target():
    from korch.measure.cuda.device import detect_cuda_target

    return detect_cuda_target()


@pytest.fixture(scope="session")
def compiler(target, tmp_path_factory):
    from korch.cuda.compile import CubinCompiler

    made = CubinCompiler(target.arch, tmp_path_factory.mktemp("cubins"))
    yield made
    made.close()


@pytest.fixture
def rng():
    return np.random.default_rng(0)
