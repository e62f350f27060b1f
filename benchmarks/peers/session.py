"""Sessions of Korch as an engine for steps of a decoder: `SESSION`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import korch
from korch.report.peers.peer import Array, Arrays, Run
from korch.runtime.stateful import StatefulExecutable


@dataclass(frozen=True, slots=True)
class SessionPeer:
    """A session whose states are those of the inputs; each run is one step, which is then forgotten."""

    name: str = "korch session"

    def is_available(self) -> str | None:
        """Return None: always available."""
        return None

    def prepare(self, model_path: Path, inputs: Arrays, threads: int) -> Run:
        """Load the artifact at `model_path`, and give a session the states of the inputs."""
        executable = korch.load(model_path)
        if not isinstance(executable, StatefulExecutable):
            raise TypeError(f"{model_path} has no states")
        session, described = executable.session(), executable.described
        arrays = [inputs[tensor.name] for tensor in described.inputs]
        _, past = executable.counts_of(arrays)
        session.assign([arrays[state.input] for state in described.states], past)
        kept = executable.state_inputs
        named = {t.name: arrays[i] for i, t in enumerate(described.inputs) if i not in kept}
        shapes = [np.zeros(0, arrays[state.input].dtype) for state in described.states]

        def run() -> list[Array]:
            found = dict(zip(executable.plain_outputs, session.run(**named), strict=True))
            session.truncate(past)
            found |= zip((described.outputs[s.output].name for s in described.states), shapes, strict=True)
            return [found[output.name] for output in described.outputs]

        return run


SESSION = SessionPeer()
