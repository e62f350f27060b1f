"""Korch itself as a peer: an artifact, loaded and called through the public interface.

If the artifact has states, a session has those of the inputs, and a run is one step, which the next run forgets.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

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
        if isinstance(executable, stateful):
            return _step(executable, contiguous(inputs))
        arrays = tuple(contiguous(inputs).values())
        if isinstance(executable, single):
            bound: Callable[[], tuple[Array, ...]] = executable.bind(*arrays)
            return lambda: list(bound())

        def run() -> list[Array]:
            return list(executable(*arrays))

        return run


class _Restored:
    """A state that is kept as bytes; it is computed when it is read, not in the runs that are timed."""

    def __init__(self, described: Any, views: Sequence[Array], number: int) -> None:
        self._described, self._views, self._number = described, views, number

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self._described.restored(self._views)[self._number], dtype)


def _step(executable: Any, inputs: Arrays) -> Run:
    """Return a run of one step of a session; the outputs that are states lie in the session's memory.

    `inputs`: all inputs by name, also those that only count rows.
    """
    described, session = executable.described, executable.session()
    rows, past = executable.counts_of([inputs[tensor.name] for tensor in described.inputs])
    states = [(described.inputs[state.input], described.outputs[state.output]) for state in described.states]
    session.assign([inputs[before.name] for before, _ in states], past)
    given = {name: array for name, array in inputs.items() if name not in {before.name for before, _ in states}}
    views = session.views(past + rows)
    kept: dict[str, Any] = {after.name: view for (_, after), view in zip(states, views, strict=False)}
    kept |= {states[k][1].name: _Restored(described, views, k) for k in described.with_scales}

    def run() -> list[Array]:
        session.truncate(past)
        found = kept | dict(zip(executable.plain_outputs, session.run(**given), strict=True))
        return [found[output.name] for output in described.outputs]

    return run
