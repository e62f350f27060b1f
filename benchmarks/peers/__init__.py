"""Engines that only the benchmarks compare with, for `--against benchmarks.peers:IREE` and the like.

EAGER, INDUCTOR    PyTorch runs the ONNX file, translated to a module
TRANSFORMER        Inductor compiles the module from which the file of a transformer was exported
IREE               IREE
"""

from __future__ import annotations

from benchmarks.peers.iree import IreePeer
from benchmarks.peers.onnx_in_torch import OnnxInTorch
from benchmarks.peers.transformers import TransformerPeer

EAGER = OnnxInTorch("eager", is_compiled=False)
INDUCTOR = OnnxInTorch("inductor", is_compiled=True)
TRANSFORMER = TransformerPeer()
IREE = IreePeer()

NAMES = ("eager", "inductor", "iree")
"""The engines that the benchmarks' command lines know by a short name."""


def full_name(engine: str) -> str:
    """Return the name of an engine for `korch.report.compare`."""
    return f"{__name__}:{engine.upper()}" if engine in NAMES else engine
