"""Engines that only the benchmarks compare with, for `--against benchmarks.peers:IREE` and the like.

EAGER, INDUCTOR    PyTorch runs the ONNX file, translated to a module
TRANSFORMER        Inductor compiles the module from which the file of a transformer was exported
EAGER_LOOP, ...    PyTorch runs a block of experts, in each form of the library transformers
IREE               IREE
"""

from benchmarks.peers.iree import IreePeer
from benchmarks.peers.modules import of_experts, of_onnx, of_transformer

EAGER = of_onnx("eager", is_compiled=False)
INDUCTOR = of_onnx("inductor", is_compiled=True)
TRANSFORMER = of_transformer()
EAGER_LOOP = of_experts("eager loop", "eager")
EAGER_GROUPED = of_experts("eager grouped", "grouped_mm")
EAGER_GATHER = of_experts("eager gather", "batched_mm")
INDUCTOR_GROUPED = of_experts("inductor grouped", "grouped_mm", is_compiled=True)
INDUCTOR_GATHER = of_experts("inductor gather", "batched_mm", is_compiled=True)
IREE = IreePeer()

NAMES = ("eager", "inductor", "iree")
"""The engines that the benchmarks' command lines know by a short name."""


def full_name(engine: str) -> str:
    """Return the name of an engine for `korch.report.compare`."""
    return f"{__name__}:{engine.upper()}" if engine in NAMES else engine
