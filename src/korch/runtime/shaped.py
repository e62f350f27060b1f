"""One executable for several shapes of the inputs: one plan for each, with shared weights and kernels.

Its file is a zip archive without compression with `manifest.json` (schema and checksums of the other members),
`kernels-*.a` (all plans, and their kernels without duplicates), `sources/*`, `program.json` (the indices of
each plan's weights, in its order), `weights.safetensors` (the packed constants of all plans without duplicates)
and `plans/*.korch`, which are artifacts without objects, sources and weights.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from korch.errors import ArtifactError, InputError, OptionError
from korch.primitive.op import Array
from korch.records import plain, read_object, read_record
from korch.runtime.artifact import (
    ARCHIVE,
    OBJECTS,
    SOURCES,
    WEIGHTS,
    Archive,
    Artifact,
    archive_of,
    objects_by_name,
    read_archive,
    read_artifact,
    read_folder,
    read_texts,
    read_weights,
)
from korch.runtime.executable import Executable
from korch.runtime.library import load_plans
from korch.runtime.record import ModelRecord
from korch.runtime.runnable import Runnable, TensorInfo, Timing
from korch.runtime.weights import Weights

if TYPE_CHECKING:
    from korch.runtime.report import ShapedReport

FORMAT = "korch-shaped"
SCHEMA = 5
PROGRAM = "program.json"

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shared:
    """The parts that several plans share."""

    objects: Mapping[str, bytes]  # for each instruction set, the archive of objects, which has the plans in their order
    sources: Mapping[str, str]  # the sources of the objects, by file name
    weights: Weights  # the packed constants of all plans without duplicates
    places: Sequence[Sequence[int]]  # for each plan, the indices of its constants in `weights`, in the plan's order


class ShapedExecutable(Runnable):
    """Selects the plan by the shapes of the arrays that it is called with.

    Attributes:
        format: the name of its file's format.
        more: the classes of the further records in its file, by the member's name; `further` has these records.
        executables: the plans.
        plans: the executables by the shapes of their inputs.
    """

    format = FORMAT
    more: ClassVar[Mapping[str, type[Any]]] = {}

    def __init__(self, artifacts: Sequence[Artifact], shared: Shared) -> None:
        """Load the plans.

        Args:
            artifacts: the plans; their own objects, sources and weights are ignored.
            shared: the objects, sources and weights of all plans.

        Raises:
            ArtifactError: the objects can't be loaded here, or have other plans.
        """
        found = load_plans(shared.objects)
        if not artifacts or not len(found) == len(shared.places) == len(artifacts):
            raise ArtifactError("its kernels are not those that its plans describe", hint="Build it again")
        self._shared = shared
        self.executables: list[Executable] = []
        for artifact, plan, chosen in zip(artifacts, found, shared.places, strict=True):
            whole = replace(
                artifact, objects=shared.objects, sources=shared.sources, weights=_part(shared.weights, chosen)
            )
            self.executables.append(Executable(whole, plan))
        self.plans: dict[Shapes, Executable] = {_shapes(e.artifact): e for e in self.executables}

    @property
    def report(self) -> ShapedReport:
        """The report of all plans, with the sizes before and after sharing."""
        from korch.runtime.report import ShapedReport  # not needed to load and run

        symbols = [symbol for e in self.executables for symbol in e.plan.symbols if symbol]
        return ShapedReport(
            plans={_text(shapes): e.report for shapes, e in self.plans.items()},
            weights_bytes=sum(e.plan.weights_bytes for e in self.executables),
            shared_weights_bytes=self._shared.weights.size_bytes,
            kernels=len(symbols),
            shared_kernels=len(set(symbols)),
        )

    @property
    def threads(self) -> int:
        """The largest number of threads of a plan."""
        return max(one.plan.threads for one in self.executables)

    @property
    def model(self) -> ModelRecord:
        """The model file that the plans were built from."""
        return self.executables[0].model

    def facts(self) -> str:
        """Return a line about each plan."""
        plans = (f"{_text(s)}: {e.facts()}" for s, e in self.plans.items())
        return "\n  ".join([f"{len(self.plans)} plans by shape", *plans])

    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the inputs; a dimension that differs between plans is given like "128|256"."""
        return _merged([e.get_inputs() for e in self.executables])

    def example_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the inputs of the first plan."""
        return self.executables[0].get_inputs()

    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the outputs; a dimension that differs between plans is given like "128|256"."""
        return _merged([e.get_outputs() for e in self.executables])

    def plan_for(self, arrays: Sequence[Any]) -> Executable:
        """Return the executable for arrays of these shapes.

        Raises:
            InputError: there is no plan for these shapes.
        """
        shapes = tuple(tuple(np.shape(a)) for a in self.complete(arrays))
        found = self.plans.get(shapes)
        if found is None:
            raise InputError(
                f"no plan was made for inputs of the shapes {_text(shapes)}",
                expected="one of " + "; ".join(map(_text, self.plans)),
                hint="Optimize the model again with these shapes too (--shape)",
            )
        return found

    def compute(self, arrays: Sequence[Any]) -> tuple[Array, ...]:
        """Run the plan for arrays of these shapes."""
        return self.plan_for(arrays).compute(arrays)

    def stopwatch(self, arrays: Sequence[Any]) -> Callable[[], int]:
        """Return a function that runs the plan for these arrays once and returns the nanoseconds."""
        return self.plan_for(arrays).stopwatch(arrays)

    def time(self, arrays: Sequence[Any], repeat: int) -> Timing:
        """Time the plan for some arrays, as `Executable.time` does."""
        return self.plan_for(arrays).time(arrays, repeat)

    def archive(self) -> Archive:
        """Return the content of its file."""
        shared, bare = self._shared, Weights.allocate(())
        members: dict[str, bytes | Weights] = {
            **objects_by_name(shared.objects),
            PROGRAM: json.dumps({"weights": shared.places}, sort_keys=True).encode(),
        }
        for i, executable in enumerate(self.executables):
            artifact = replace(executable.artifact, objects={}, sources={}, weights=bare)
            members[f"plans/{i}.korch"] = archive_of(artifact).to_bytes()
        members |= {SOURCES + name: text.encode() for name, text in sorted(shared.sources.items())}
        members[WEIGHTS] = shared.weights
        further = zip(self.more, (json.dumps(plain(record)).encode() for record in self.further), strict=True)
        return Archive({"format": self.format, "schema": SCHEMA}, {**dict(further), **members})

    @property
    def further(self) -> tuple[object, ...]:
        """The further records in its file, in the order of `more`."""
        return ()

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Self:
        """Load a file that `save` wrote; all plans share the weights in memory.

        Raises:
            ArtifactError: it is damaged, has another schema, or is for another machine.
        """
        found = read_shaped(path, cls)
        try:
            return cls(*found)
        except (ValueError, TypeError, IndexError) as error:
            raise ArtifactError("it is damaged", where=str(path)) from error


def check_different(executables: Sequence[Executable]) -> None:
    """Check that executables take inputs of different shapes.

    Raises:
        OptionError: two of them take the same shapes.
    """
    seen: set[Shapes] = set()
    for shapes in (_shapes(executable.artifact) for executable in executables):
        if shapes in seen:
            raise OptionError(
                f"two bindings give the inputs the same shapes, {_text(shapes)}",
                where="option --shape",
                expected="different ones",
            )
        seen.add(shapes)


def read_shaped(
    path: str | os.PathLike[str] | IO[bytes], kind: type[ShapedExecutable] = ShapedExecutable
) -> tuple[Any, ...]:
    """Return the plans of a file, the parts that they share, and the records of `kind.more`.

    Raises:
        ArtifactError: it is damaged, has another schema, or is for another machine.
    """
    with read_archive(path, kind.format, SCHEMA, (PROGRAM, WEIGHTS, *kind.more)) as archive:
        more = [read_record(one, read_object(archive.read(name), name), name) for name, one in kind.more.items()]
        places = read_object(archive.read(PROGRAM), PROGRAM)["weights"]
        weights = read_weights(archive)
        if not places or any(not 0 <= i < len(weights) for chosen in places for i in chosen):
            raise ValueError("a plan takes weights that are not there")
        artifacts = [read_artifact(io.BytesIO(archive.read(f"plans/{i}.korch"))) for i in range(len(places))]
        objects = read_folder(archive, OBJECTS, ARCHIVE)
        return artifacts, Shared(objects, read_texts(archive), weights, places), *more


def _shapes(artifact: Artifact) -> Shapes:
    return tuple(t.type.shape for t in artifact.plan.inputs)


def _part(union: Weights, chosen: Sequence[int]) -> Weights:
    """Return a selection of the weights, without a copy."""
    return Weights(tuple(union.types[i] for i in chosen), tuple(union.offsets[i] for i in chosen), union.block)


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
