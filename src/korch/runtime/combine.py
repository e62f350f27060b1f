"""Executables of one model for several shapes -> their plans with shared objects and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from korch.measure.compiler import Builder
from korch.runtime.artifact import Artifact
from korch.runtime.build import LIST
from korch.runtime.executable import Executable
from korch.runtime.shaped import Shared
from korch.runtime.source import PLAN, print_list
from korch.runtime.weights import Weights


def combine(executables: Iterable[Executable], builder: Builder) -> tuple[list[Artifact], Shared]:
    """Combine executables of one model into plans that share kernels and weights.

    Raises:
        CompileError: their list can't be compiled.
    """
    combined = Combined()
    combined.take(executables)
    return combined.finish(builder)


class Combined:
    """Plans of one model that share their weights; executables that were taken need not be kept."""

    def __init__(self) -> None:
        """Begin without plans."""
        self._artifacts: list[Artifact] = []  # without weights
        self._place_of: dict[tuple[str, str], int] = {}  # of a tensor in `_tensors` by its type and content
        self._tensors: list[Weights] = []  # each with one tensor, without duplicates
        self._places: list[list[int]] = []

    def take(self, executables: Iterable[Executable]) -> None:
        """Add plans; their weights that no plan before them has are copied."""
        for executable in executables:
            artifact = executable.artifact
            self._places.append([self._place(artifact.weights, i) for i in range(len(artifact.weights))])
            self._artifacts.append(replace(artifact, weights=Weights.allocate(())))

    def _place(self, weights: Weights, i: int) -> int:
        array = weights.array(i)
        digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
        place = self._place_of.setdefault((str(weights.types[i]), digest), len(self._tensors))
        if place == len(self._tensors):
            self._tensors.append(Weights.allocate([weights.types[i]]))
            self._tensors[-1].array(0)[...] = array
        return place

    def finish(self, builder: Builder) -> tuple[list[Artifact], Shared]:
        """Return the plans and what they share; no plans can be added after it.

        Raises:
            CompileError: the list of plans can't be compiled.
        """
        sources: dict[str, str] = {}
        for artifact in self._artifacts:
            sources |= artifact.sources
        names = [Path(name).stem for artifact in self._artifacts for name in artifact.sources if name.startswith(PLAN)]
        sources[LIST] = print_list(names, builder.isa)
        objects = builder.objects([text for name, text in sources.items() if name.endswith(".ll")])
        union = Weights.allocate([tensor.types[0] for tensor in self._tensors])
        for i in reversed(range(len(self._tensors))):
            union.array(i)[...] = self._tensors.pop().array(0)
        return self._artifacts, Shared({builder.isa: objects}, sources, union, self._places)
