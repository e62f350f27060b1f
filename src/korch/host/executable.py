"""An executable of several segments, some of which the host runs.

Its file is a zip archive without compression: `manifest.json` (schema and checksums of the other members),
`program.json` (inputs, outputs and the order of the segments), an artifact for each segment that
Korch runs, an ONNX model for each segment that the host runs, and constant outputs.
"""

import io
import json
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import IO, Any, Self

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from korch.cuda.runtime.executable import CudaExecutable
from korch.errors import ArtifactError
from korch.frontend.shapes import dtype_of
from korch.host.engine import HostEngine
from korch.primitive.op import Array
from korch.records import plain, read_object, read_record
from korch.runtime.artifact import Archive, read_archive
from korch.runtime.executable import Executable
from korch.runtime.record import ModelRecord
from korch.runtime.report import HostedReport
from korch.runtime.runnable import ArrayType, Runnable, TensorInfo
from korch.runtime.weights import Weights

FORMAT = "korch-hosted"
SCHEMA = 4
PROGRAM = "program.json"


@dataclass(frozen=True, eq=False)
class HostPart:
    """A segment that the host runs.

    Attributes:
        model: the segment.
        engine: the engine that runs it.
        nodes: each node's name and operator, and why the host runs it.
    """

    model: onnx.ModelProto
    engine: HostEngine
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class NativePart:
    """A segment that Korch runs, with the names of its inputs and outputs."""

    executable: Executable | CudaExecutable
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Part = HostPart | NativePart


def accepted(inputs: Sequence[TensorInfo], arrays: Sequence[Any]) -> dict[str, Any]:
    """Return the values of a model's inputs by name.

    Raises:
        InputError: an array has another shape or type.
    """
    return {
        info.name: value if info.dtype == np.dtype(object) else ArrayType.of(info).accept(value)
        for info, value in zip(inputs, arrays, strict=True)
    }


def run_part(part: Part, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs of a segment by name, for the values that are known before it."""
    if isinstance(part, HostPart):
        return part.engine.run({item.name: known[item.name] for item in part.model.graph.input})
    results = part.executable(*(known[name] for name in part.inputs))
    return dict(zip(part.outputs, results, strict=True))


def _is_shared(value: Any, kept: Iterable[Any]) -> bool:
    """Return whether a value shares memory with another one."""
    arrays = [each for each in kept if isinstance(each, np.ndarray)] if isinstance(value, np.ndarray) else []
    return any(value is each for each in kept) or any(np.may_share_memory(value, each) for each in arrays)


class HostedExecutable(Runnable):
    """Runs segments one after another, with arrays in host memory between them.

    Its interface is that of `Executable`. Values that are not numeric tensors have the same types as in ONNX
    Runtime: a list for a sequence, None for an empty optional, an array of objects for strings.

    Attributes:
        parts: the segments.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[str, Any]],
        outputs: Sequence[tuple[str, Any]],
        parts: Sequence[Part],
        constants: Mapping[str, Array],
        threads: int,
        report: HostedReport,
    ) -> None:
        """Combine the segments.

        Args:
            inputs: name and ONNX type of each input.
            outputs: name and ONNX type of each output; the type is None if it is unknown.
            parts: the segments.
            constants: outputs with a known value.
            threads: the number of threads of the host.
            report: how the plans of the segments were found.
        """
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._constants, self._threads = dict(constants), threads
        self.parts = tuple(parts)
        self._report = report

    @property
    def report(self) -> HostedReport:
        """How the plans of the segments were found; `save` stores it."""
        return self._report

    @property
    def threads(self) -> int:
        """The number of threads of the host and of the plans."""
        return self._threads

    @property
    def model(self) -> ModelRecord:
        """The model file that it was built from."""
        return self.report.model

    def facts(self) -> str:
        """Return a line about its segments."""
        natives = [p.executable for p in self.parts if isinstance(p, NativePart)]
        facts = f"segments on the host: {len(self.parts) - len(natives)}, native: {len(natives)}"
        return "; ".join([facts, *(executable.facts() for executable in natives)])

    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the model's inputs, in the order of a call's arguments."""
        return [describe(name, proto) for name, proto in self._inputs]

    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the model's outputs, in the order in which a call returns them."""
        return [describe(name, proto) for name, proto in self._outputs]

    def compute(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Run the segments in order; each reads inputs, constants and the outputs of earlier segments."""
        known = {**self._constants, **accepted(self.get_inputs(), self.complete(arrays))}
        kept = list(known.values())  # what the caller must not change by a result
        for part in self.parts:
            known |= run_part(part, known)
        results = [known[name] for name, _ in self._outputs]
        return tuple(deepcopy(value) if _is_shared(value, kept) else value for value in results)

    def archive(self) -> Archive:
        """Return the content of its file."""
        segments: list[dict[str, Any]] = []
        members: dict[str, bytes | Weights] = {}
        for i, part in enumerate(self.parts):
            if isinstance(part, HostPart):
                member = f"segments/{i}.onnx"
                members[member] = part.model.SerializeToString()
                segments.append({"host": member, "nodes": part.nodes, "avoided": part.engine.avoided})
            else:
                member = f"segments/{i}.korch"
                members[member] = part.executable.to_bytes()
                segments.append(
                    {
                        "native": member,
                        "inputs": part.inputs,
                        "outputs": part.outputs,
                        "cuda": isinstance(part.executable, CudaExecutable),
                    }
                )
        for i, array in enumerate(self._constants.values()):
            members[f"constants/{i}"] = onnx.numpy_helper.from_array(array).SerializeToString()
        program = {
            "threads": self._threads,
            "segments": segments,
            "constants": list(self._constants),
            "inputs": [_store(*item) for item in self._inputs],
            "outputs": [_store(*item) for item in self._outputs],
            "report": plain(self.report),
        }
        members[PROGRAM] = json.dumps(program, default=str, sort_keys=True).encode()
        return Archive({"format": FORMAT, "schema": SCHEMA}, members)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | IO[bytes]) -> Self:
        """Load a file that `save` wrote.

        Raises:
            ArtifactError: it is damaged, has another schema, or is for another machine.
            UnsupportedError: the host does not run a segment here.
        """
        with read_archive(path, FORMAT, SCHEMA, (PROGRAM,)) as archive:
            try:
                return cls(*_read(archive))
            except DecodeError as error:
                raise ArtifactError("it is damaged", hint="Build the artifact again") from error


def _read(archive: zipfile.ZipFile) -> tuple[Any, ...]:
    """Return the arguments of `HostedExecutable` from an archive."""
    program = read_object(archive.read(PROGRAM), PROGRAM)
    threads = int(program["threads"])
    parts: list[Part] = []
    for segment in program["segments"]:
        if "host" in segment:
            model = onnx.ModelProto.FromString(archive.read(segment["host"]))
            nodes = tuple((str(name), str(reason)) for name, reason in segment["nodes"])
            parts.append(HostPart(model, HostEngine(model, threads, str(segment["avoided"])), nodes))
        else:
            kind = CudaExecutable if segment.get("cuda") else Executable
            native = kind.load(io.BytesIO(archive.read(segment["native"])))
            parts.append(NativePart(native, tuple(segment["inputs"]), tuple(segment["outputs"])))
    constants = {
        name: onnx.numpy_helper.to_array(onnx.TensorProto.FromString(archive.read(f"constants/{i}")))
        for i, name in enumerate(program["constants"])
    }
    return (
        [_restore(item) for item in program["inputs"]],
        [_restore(item) for item in program["outputs"]],
        parts,
        constants,
        threads,
        read_record(HostedReport, program["report"], "report"),
    )


def _store(name: str, proto: Any) -> list[str | None]:
    return [name, None if proto is None else proto.SerializeToString().hex()]


def _restore(item: Sequence[Any]) -> tuple[str, Any]:
    name, text = item
    proto = None if text is None else onnx.TypeProto.FromString(bytes.fromhex(text))
    return str(name), proto


def describe(name: str, proto: Any) -> TensorInfo:
    """Return the description of a value, like that of an ONNX Runtime session; an unknown size is -1."""
    kind = proto.WhichOneof("value") if proto is not None else None
    if kind != "tensor_type":
        return TensorInfo(name, [], (kind or "unknown").removesuffix("_type"), np.dtype(object))
    tensor = proto.tensor_type
    dtype = dtype_of(tensor.elem_type)
    numpy_type = np.dtype(object) if dtype is None else dtype.numpy
    sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
    text = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return TensorInfo(name, sizes, f"tensor({text})", numpy_type)
