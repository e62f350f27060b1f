"""Engines that only the benchmarks compare with, for `--against benchmarks.peers:IREE` and the like.

EAGER, INDUCTOR    PyTorch runs the ONNX file, translated to a module
TRANSFORMER        Inductor compiles the module from which the file of a transformer was exported
IREE               IREE
TVM, TVM_2000      TVM, untuned and tuned with 2000 trials
"""

from __future__ import annotations

from benchmarks.peers.iree import IreePeer
from benchmarks.peers.onnx_in_torch import OnnxInTorch
from benchmarks.peers.transformers import TransformerPeer
from benchmarks.peers.tvm import TvmPeer

EAGER = OnnxInTorch("eager", is_compiled=False)
INDUCTOR = OnnxInTorch("inductor", is_compiled=True)
TRANSFORMER = TransformerPeer()
IREE = IreePeer()
TVM = TvmPeer()
TVM_2000 = TvmPeer(2000)

NAMES = ("eager", "inductor", "iree", "tvm")
"""The engines that the benchmarks' command lines know by a short name."""


def full_name(engine: str) -> str:
    """Return the name of an engine for `korch.report.compare`."""
    return f"{__name__}:{engine.upper()}" if engine in NAMES else engine
