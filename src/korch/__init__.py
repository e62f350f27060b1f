"""Korch searches for the cheapest set of kernels to run a trained model on the machine at hand.

    import korch

    exe = korch.optimize("model.onnx")
    outputs = exe(*inputs)
    exe.save("model.korch")

The names in `__all__` are the public interface. They are imported on first use, so that
`import korch` itself is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from korch.ablation import Ablation
    from korch.api import optimize
    from korch.cuda.runtime.executable import CudaExecutable
    from korch.errors import KorchError
    from korch.host.executable import HostedExecutable
    from korch.limits import SearchLimits
    from korch.loading import load
    from korch.options import Options
    from korch.provider.provider import register_provider
    from korch.pytorch.module import ModuleExecutable
    from korch.runtime.executable import Executable
    from korch.runtime.ranged import RangedExecutable
    from korch.runtime.runnable import Runnable
    from korch.runtime.shaped import ShapedExecutable
    from korch.runtime.stateful import Session, StatefulExecutable

__version__ = "0.1.0.dev0"
__all__ = [
    "Ablation",
    "CudaExecutable",
    "Executable",
    "HostedExecutable",
    "KorchError",
    "ModuleExecutable",
    "Options",
    "RangedExecutable",
    "Runnable",
    "SearchLimits",
    "Session",
    "ShapedExecutable",
    "StatefulExecutable",
    "__version__",
    "load",
    "optimize",
    "register_provider",
]

_HOMES = {
    "optimize": "korch.api",
    "load": "korch.loading",
    "Options": "korch.options",
    "SearchLimits": "korch.limits",
    "Ablation": "korch.ablation",
    "KorchError": "korch.errors",
    "Executable": "korch.runtime.executable",
    "Runnable": "korch.runtime.runnable",
    "ShapedExecutable": "korch.runtime.shaped",
    "RangedExecutable": "korch.runtime.ranged",
    "StatefulExecutable": "korch.runtime.stateful",
    "Session": "korch.runtime.stateful",
    "ModuleExecutable": "korch.pytorch.module",
    "HostedExecutable": "korch.host.executable",
    "CudaExecutable": "korch.cuda.runtime.executable",
    "register_provider": "korch.provider.provider",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'korch' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
