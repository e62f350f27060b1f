"""The file of an artifact -> its executable, without the modules that only a search needs."""

from __future__ import annotations

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING

from korch.errors import InputError
from korch.runtime.each_isa import best_content
from korch.system.cores import usable_cores

if TYPE_CHECKING:
    from korch.runtime.runnable import Runnable

logger = logging.getLogger("korch.api")

_CLASSES = {
    "korch": ("korch.runtime.executable", "Executable"),
    "korch-shaped": ("korch.runtime.shaped", "ShapedExecutable"),
    "korch-ranged": ("korch.runtime.ranged", "RangedExecutable"),
    "korch-stateful": ("korch.runtime.stateful", "StatefulExecutable"),
    "korch-hosted": ("korch.host.executable", "HostedExecutable"),
    "korch-cuda": ("korch.cuda.runtime.executable", "CudaExecutable"),
}
"""The module and the class of each format. Only the needed one is imported."""


def load(path: str | os.PathLike[str]) -> Runnable:
    """Load an artifact that `save` or `korch optimize` wrote.

    Raises:
        InputError: `path` is not a path.
        ArtifactError: the artifact is damaged, or built for another machine.
        UnsupportedError: the artifact is for a CUDA device and there is none, or a part of it runs in
            ONNX Runtime, which can't run it here.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"{path!r} is not a path", expected="the name of a file that `save` or `korch optimize` wrote")
    format_name, content, absent = best_content(path)
    module, name = _CLASSES.get(format_name, _CLASSES["korch"])
    executable: Runnable = getattr(import_module(module), name).load(content)
    executable.absent = absent
    if format_name == "korch-cuda":
        return executable
    threads = executable.threads
    if threads > (cores := usable_cores()):
        logger.warning(
            "%s was built for %d threads, which share the %d cores that this process "
            "may use: it will be slow here. Optimize the model on this machine",
            path,
            threads,
            cores,
        )
    return executable
