"""Executables of one model for several shapes -> their plans with shared objects and weights."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from korch.measure.compiler import Builder
from korch.primitive.op import Array
from korch.runtime.artifact import Artifact
from korch.runtime.build import LIST
from korch.runtime.executable import Executable
from korch.runtime.shaped import Shared
from korch.runtime.source import PLAN, print_list
from korch.runtime.weights import Weights


def combine(executables: Sequence[Executable], builder: Builder) -> tuple[list[Artifact], Shared]:
    """Combine executables of one model into plans that share kernels and weights.

    Raises:
        CompileError: their list can't be compiled.
    """
    artifacts = [executable.artifact for executable in executables]
    sources: dict[str, str] = {}
    for artifact in artifacts:
        sources |= artifact.sources
    names = [Path(name).stem for artifact in artifacts for name in artifact.sources if name.startswith(PLAN)]
    sources[LIST] = print_list(names, builder.isa)
    objects = builder.objects([text for name, text in sources.items() if name.endswith(".ll")])
    weights, places = _union([artifact.weights for artifact in artifacts])
    return artifacts, Shared({builder.isa: objects}, sources, weights, places)


def _union(all_weights: Sequence[Weights]) -> tuple[Weights, list[list[int]]]:
    """Return all tensors without duplicates, and for each plan the indices of its tensors."""
    place_of: dict[tuple[str, str], int] = {}
    arrays: list[Array] = []
    types = []
    places: list[list[int]] = []
    for weights in all_weights:
        chosen = []
        for i, type_ in enumerate(weights.types):
            array = weights.array(i)
            digest = hashlib.sha256(array.reshape(-1).view(np.uint8).data).hexdigest()
            key = (str(type_), digest)
            if key not in place_of:
                place_of[key] = len(arrays)
                arrays.append(array)
                types.append(type_)
            chosen.append(place_of[key])
        places.append(chosen)
    union = Weights.allocate(types)
    for i, array in enumerate(arrays):
        union.array(i)[...] = array
    return union, places
