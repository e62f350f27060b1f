"""TVM: ONNX -> Relax -> a shared library for this CPU, run by Relax's virtual machine.

Without tuning, TVM compiles the loops of each operator unchanged, for one thread. This is tens of times
slower than an engine with its own kernels, so the row's name says whether the model was tuned. With
trials, MetaSchedule first tunes by measuring schedules on this machine; TVM recommends 64 trials for each
different operator. The results are kept in Korch's cache folder.

`tvm_build.py` compiles in a separate process. Inputs are converted to TVM tensors before the first run, and
outputs are read in place; each run takes their memory from a pool.

Source: TVM documentation, "MetaSchedule" and `relax.pipeline.static_shape_tuning_pipeline`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.tool import run_tool
from korch.options import default_cache_folder
from korch.report.peers.peer import Array, Arrays, Run, contiguous, missing, require

_COMPILE_S = 900.0
_TRIAL_S = 20.0
"""A trial takes a few seconds on one core; this is a safe limit."""


@dataclass(frozen=True, slots=True)
class TvmPeer:
    """TVM.

    Attributes:
        trials: the number of MetaSchedule trials; 0 for no tuning.
    """

    trials: int = 0

    @property
    def name(self) -> str:
        """The name, with the number of trials."""
        return f"tvm ({self.trials} trials)" if self.trials else "tvm (untuned)"

    @property
    def prepare_timeout_s(self) -> float:
        """The limit of the time to prepare a model; it grows with the trials."""
        return _COMPILE_S + _TRIAL_S * self.trials

    def is_available(self) -> str | None:
        """Check whether TVM, and the packages that its tuner needs, are installed; nothing is imported."""
        tuner = ("xgboost", "psutil", "cloudpickle") if self.trials else ()
        return missing("tvm", "tvm", *tuner)

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Compile the model for the shapes of `inputs`, with tuning if `trials` is not 0."""
        require(self)
        inputs = contiguous(inputs)
        with tempfile.TemporaryDirectory(prefix="korch-tvm-") as folder:
            library = Path(folder) / "model.so"
            request = {
                "model": str(model_path),
                "inputs": {n: [list(a.shape), str(a.dtype)] for n, a in inputs.items()},
                "threads": threads,
                "trials": self.trials,
                "library": str(library),
                "kept": str(default_cache_folder() / "tvm"),
            }
            command = [sys.executable, "-P", "-m", "benchmarks.peers.tvm_build"]
            tuned = f" with {self.trials} trials" if self.trials else ""
            run_tool([*command, json.dumps(request)], f"compile the model{tuned}")
            return _load(library, inputs, threads)


def _load(library: Path, inputs: Arrays, threads: int) -> Run:
    os.environ["TVM_NUM_THREADS"] = str(threads)  # read when the pool starts
    tvm, relax = _import()
    machine = relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
    tensors = [tvm.runtime.tensor(array) for array in inputs.values()]
    call = machine["main"]

    def run() -> list[Array]:
        found: Any = call(*tensors)
        outputs = [found] if isinstance(found, tvm.runtime.Tensor) else list(found)
        return [np.from_dlpack(output) for output in outputs]

    return run


def _import() -> tuple[Any, Any]:
    """Import TVM without PyTorch, which TVM imports if it is installed, but does not need."""
    is_hidden = "torch" not in sys.modules
    if is_hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]  # says that it can't be imported
    try:
        import tvm
        from tvm import relax
    finally:
        if is_hidden:
            del sys.modules["torch"]
    return tvm, relax
