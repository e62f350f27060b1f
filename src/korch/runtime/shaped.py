"""One executable for several shapes of the inputs: a plan for each, weights stored and loaded once.

One file: a zip archive without compression with `manifest.json` (schema and SHA-256 of the rest),
`program.json` (which weights each plan takes, in its order), `weights.safetensors` (the different
packed constants of all plans) and `plans/*.korch`, artifacts without weights.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from korch.errors import ArtifactError, InputError, OptionError
from korch.primitive.op import Array
from korch.runtime.artifact import (
    WEIGHTS,
    Artifact,
    artifact_bytes,
    read_archive,
    read_artifact,
    write_archive,
)
from korch.runtime.executable import Executable, TensorInfo, Timing
from korch.runtime.weights import Weights

FORMAT = "korch-shaped"
SCHEMA = 1
PROGRAM = "program.json"

Shapes = tuple[tuple[int, ...], ...]


class ShapedExecutable:
    """Picks the plan by the shapes of the arrays that it is called with.

    Attributes:
        plans: an executable for each planned tuple of input shapes.
        report: of all plans, with what their sharing saves.
    """

    def __init__(self, executables: Sequence[Executable]) -> None:
        """Put executables of one model together.

        Raises:
            OptionError: two of them take the same shapes.
        """
        self.plans: dict[Shapes, Executable] = {}
        for executable in executables:
            shapes = tuple(tuple(t.shape) for t in executable.get_inputs())
            if shapes in self.plans:
                raise OptionError(
                    f"two bindings give the inputs the same shapes, {_text(shapes)}",
                    where="option --shape", expected="different ones",
                )  # fmt: skip
            self.plans[shapes] = executable
        first = next(iter(self.plans.values()))
        self._names = [t.name for t in first.get_inputs()]
        self._offered = [t.name for t in first.get_outputs()]
        self.report: dict[str, Any] = {
            "plans": {_text(shapes): e.report for shapes, e in self.plans.items()},
            **_shared([e.artifact.weights for e in self.plans.values()]),
        }

    def get_inputs(self) -> list[TensorInfo]:
        """Describe the inputs; a dimension that differs between plans is like "128|256"."""
        return _merged([e.get_inputs() for e in self.plans.values()])

    def get_outputs(self) -> list[TensorInfo]:
        """Describe the outputs; a dimension that differs between plans is like "128|256"."""
        return _merged([e.get_outputs() for e in self.plans.values()])

    def plan_for(self, arrays: Sequence[Any]) -> Executable:
        """Return the executable for arrays of these shapes.

        Raises:
            InputError: none was planned for them.
        """
        shapes = tuple(tuple(np.shape(a)) for a in arrays)
        found = self.plans.get(shapes)
        if found is None:
            raise InputError(
                f"no plan was made for inputs of the shapes {_text(shapes)}",
                expected="one of " + "; ".join(map(_text, self.plans)),
                hint="Optimize the model again with these shapes too (--shape)",
            )
        return found

    def __call__(self, *arrays: Any) -> tuple[Array, ...]:
        """Run the model, as `Executable` does."""
        return self.plan_for(arrays)(*arrays)

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any],
            run_options: None = None) -> list[Array]:  # fmt: skip
        """Run the model as `onnxruntime.InferenceSession.run` does."""
        if missing := [name for name in self._names if name not in feeds]:
            raise InputError(f"input {missing[0]!r} is missing", expected=", ".join(self._names))
        chosen = self.plan_for([feeds[name] for name in self._names])
        return chosen.run(output_names, feeds, run_options)

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Time the plan for some arrays, as `Executable.time` does."""
        return self.plan_for(arrays).time(arrays, repeat)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the executable to one file, which `load` reads.

        Raises:
            ArtifactError: the file can't be written; what was there before is unharmed.
        """
        artifacts = [e.artifact for e in self.plans.values()]
        union, places = _union([a.weights for a in artifacts])
        bare = Weights.allocate(())
        program = json.dumps({"weights": places}, sort_keys=True).encode()
        members: dict[str, Callable[[], Any]] = {PROGRAM: partial(list, [program])}
        for i, artifact in enumerate(artifacts):
            content = artifact_bytes(replace(artifact, weights=bare))
            members[f"plans/{i}.korch"] = partial(list, [content])
        members[WEIGHTS] = union.chunks
        write_archive(path, {"format": FORMAT, "schema": SCHEMA}, members)


def load_shaped(path: str | os.PathLike[str]) -> ShapedExecutable:
    """Load what `ShapedExecutable.save` wrote; all plans read the same weights in memory.

    Raises:
        ArtifactError: it is damaged, of another schema, or for another machine.
    """
    with read_archive(path, FORMAT, SCHEMA, (PROGRAM, WEIGHTS)) as archive:
        try:
            places = json.loads(archive.read(PROGRAM))["weights"]
            with archive.open(WEIGHTS) as stream:
                union = Weights.read(stream)
            found = [
                _with_weights(read_artifact(io.BytesIO(archive.read(f"plans/{i}.korch"))),
                              _part(union, chosen))
                for i, chosen in enumerate(places)
            ]  # fmt: skip
        except (KeyError, ValueError, TypeError, IndexError, zipfile.BadZipFile) as error:
            raise ArtifactError("it is damaged", where=str(path)) from error
    return ShapedExecutable(found)


def _with_weights(artifact: Artifact, weights: Weights) -> Executable:
    return Executable(replace(artifact, weights=weights))


def _part(union: Weights, chosen: Sequence[int]) -> Weights:
    """Return some of the weights, in the same memory."""
    return Weights(
        tuple(union.types[i] for i in chosen), tuple(union.offsets[i] for i in chosen), union.block
    )


def _union(all_weights: Sequence[Weights]) -> tuple[Weights, list[list[int]]]:
    """Return the different tensors, and for each plan where among them its own are."""
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


def _shared(all_weights: Sequence[Weights]) -> dict[str, int]:
    """Return the bytes of the weights of all plans, and of the different ones among them."""
    seen: dict[tuple[str, str], int] = {}
    for weights in all_weights:
        for i, type_ in enumerate(weights.types):
            data = weights.array(i).reshape(-1).view(np.uint8).data
            seen[str(type_), hashlib.sha256(data).hexdigest()] = type_.size_bytes
    total = sum(weights.size_bytes for weights in all_weights)
    return {"weights_bytes": total, "shared_weights_bytes": total - sum(seen.values())}


def _merged(described: Sequence[Sequence[TensorInfo]]) -> list[TensorInfo]:
    merged = []
    for same in zip(*described, strict=True):
        sizes: list[Any] = []
        for found in zip(*(info.shape for info in same), strict=True):
            different = list(dict.fromkeys(found))
            sizes.append(different[0] if len(different) == 1 else "|".join(map(str, different)))
        merged.append(replace(same[0], shape=sizes))
    return merged


def _text(shapes: Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes) or "none"
