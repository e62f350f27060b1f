"""Tests of kernels for CUDA devices without a device: interpreted by Triton, and cross-compiled."""

import os
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest

from korch.cuda.target import NOMINAL, CudaTarget

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
if find_spec("triton") is None:  # `make test-cuda` installs it
    collect_ignore_glob = ["test_*"]


@pytest.fixture
def small() -> CudaTarget:
    """Return a device so small that small tensors fill it."""
    return replace(NOMINAL[90], processors=2)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def whole() -> CudaTarget:
    """Return a device on which tests' tensors need few programs: their sums are cut into parts."""
    return NOMINAL[90]
