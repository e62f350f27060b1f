"""Models with parts that are no graph of static tensors: the host runs those parts.

Shapes that depend on data, sequences, strings and control flow stay with ONNX Runtime; where that
refuses too, ONNX's reference evaluator runs them.
"""

from korch.host.executable import HostedExecutable, load
from korch.host.optimize import optimize_with_host

__all__ = ["HostedExecutable", "load", "optimize_with_host"]
