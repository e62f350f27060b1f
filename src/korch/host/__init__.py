"""Models of which some parts are not a graph of static tensors: the host runs those parts.

ONNX Runtime runs shapes that depend on data, sequences, strings and control flow. If it refuses a
part, the reference evaluator of ONNX runs it.
"""

from korch.host.executable import HostedExecutable
from korch.host.optimize import optimize_with_host

__all__ = ["HostedExecutable", "optimize_with_host"]
