"""Korch itself as a peer: an artifact, loaded and called through the public interface."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from korch.report.peers.peer import Array, Arrays, Run, contiguous


@dataclass(frozen=True, slots=True)
class ArtifactPeer:
    """Korch. The number of threads is the artifact's own; the argument is not used."""

    name: str = "korch"

    def is_available(self) -> str | None:
        """Return None: always available."""
        return None

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Load the artifact at `model_path`; its inputs and outputs are bound once if it has a single plan."""
        # Imported late: only a worker process calls this, and the package imports this module.
        load = importlib.import_module("korch").load
        single = importlib.import_module("korch.runtime.executable").Executable
        stateful = importlib.import_module("korch.runtime.stateful").StatefulExecutable
        executable: Callable[..., tuple[Array, ...]] = load(model_path)
        if isinstance(executable, stateful):  # by name: an input that counts rows may be none of the artifact's
            given = contiguous(inputs)
            return lambda: list(executable.run(None, given))
        arrays = tuple(contiguous(inputs).values())
        if isinstance(executable, single):
            bound: Callable[[], tuple[Array, ...]] = executable.bind(*arrays)
            return lambda: list(bound())

        def run() -> list[Array]:
            return list(executable(*arrays))

        return run
