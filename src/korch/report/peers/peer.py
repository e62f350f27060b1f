"""Model, inputs and a number of threads -> a call that runs the model once.

A `Peer` is another engine that Korch is compared with. Each peer is in its own file, imports its
engine only when it is asked to prepare a model, and says how to install the engine if it is missing.
Peers run in worker processes (`process.py`), never in the process that compares them.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from korch.errors import OptionError, UnsupportedError
from korch.system.extras import install_command

Array = NDArray[Any]
Arrays = dict[str, Array]
Run = Callable[[], list[Array]]


class Peer(Protocol):
    """An engine that runs ONNX models (or, for Korch itself, artifacts).

    Attributes:
        name: the engine's name in tables and messages.
    """

    @property
    def name(self) -> str:
        """The engine's name."""

    def is_available(self) -> str | None:
        """Return None if the engine can be used, else what is missing and how to install it."""

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Load a model with the engine's best settings for many runs on the same inputs.

        `inputs`: name of each model input -> its array, in the model's order.

        Returns:
            A call that runs the model once and returns its outputs in the model's order. The arrays
            are valid until the next call.

        Raises:
            UnsupportedError: the engine isn't installed, or can't run the model.
        """


def import_object(name: str) -> Any:
    """Return the object "package.module:OBJECT".

    Raises:
        OptionError: the module can't be imported, or has no such object.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"can't load the peer {name!r} ({error})", "peers", "package.module:OBJECT") from error


def missing(extra: str, *modules: str) -> str | None:
    """Return None if all modules are installed, else how to install them (the modules are not imported).

    `modules`: names of modules; the package of a submodule must come before it.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"the Python package {module} is not installed; run: {install_command(extra)}"
    return None


def require(peer: Peer) -> None:
    """Raise `UnsupportedError`, which says how to install the peer, unless the peer is available."""
    reason = peer.is_available()
    if reason is not None:
        problem, _, remedy = reason.partition("; ")
        raise UnsupportedError(problem, where=f"peer {peer.name}", hint=remedy[:1].upper() + remedy[1:])


def contiguous(inputs: Mapping[str, Array]) -> Arrays:
    """Return the inputs as contiguous arrays, so that engines can use their memory directly."""
    return {name: np.asarray(array, order="C") for name, array in inputs.items()}
