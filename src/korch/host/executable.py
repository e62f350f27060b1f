"""An executable of several segments, some of which the host runs.

Its file is a zip archive without compression: `manifest.json` (schema and checksums of the rest),
`program.json` (inputs, outputs and the order of the segments), an artifact for each segment that
Korch runs, and an ONNX model for each segment that the host runs.
"""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from korch.errors import ArtifactError, InputError
from korch.frontend.shapes import dtype_of
from korch.host.engine import Engine
from korch.primitive.op import Array
from korch.records import plain, read_object, read_record
from korch.runtime.artifact import Members, archive_bytes, read_archive, read_artifact, write_archive
from korch.runtime.cuda.executable import CudaExecutable, load_cuda_bytes
from korch.runtime.executable import Executable, TensorInfo, Timing, check_feeds, import_array
from korch.runtime.report import HostedReport
from korch.runtime.text import executable_text, plan_facts

FORMAT = "korch-hosted"
SCHEMA = 3
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
    engine: Engine
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class NativePart:
    """A segment that Korch runs, with the names of its inputs and outputs."""

    executable: Executable | CudaExecutable
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


Part = HostPart | NativePart


class HostedExecutable:
    """Runs segments one after another, with arrays in host memory between them.

    Its interface is that of `Executable`. Values that are not tensors have the types of ONNX
    Runtime: a list for a sequence, None for an empty optional, an array of objects for strings.

    Attributes:
        parts: the segments.
        threads: the number of threads of the host and of the plans.
        report: how they were found; `save` stores it.
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
        """Join the parts.

        Args:
            inputs: name and type, as ONNX writes it, of each input.
            outputs: name and type of each output; None where it is unknown.
            parts: the segments.
            constants: outputs with a known value.
            threads: of the host.
            report: how they were found.
        """
        self._inputs, self._outputs = tuple(inputs), tuple(outputs)
        self._constants, self.threads = dict(constants), threads
        self.parts = tuple(parts)
        self.report = report

    def __repr__(self) -> str:
        natives = [p.executable for p in self.parts if isinstance(p, NativePart)]
        facts = f"segments on the host: {len(self.parts) - len(natives)}, native: {len(natives)}"
        plans = [plan_facts(e.plan, e.report) for e in natives]
        return executable_text(self, "; ".join([facts, *plans]))

    def get_inputs(self) -> list[TensorInfo]:
        """Describe the model's inputs, in the order in which a call takes them."""
        return [describe(name, proto) for name, proto in self._inputs]

    def get_outputs(self) -> list[TensorInfo]:
        """Describe the model's outputs, in the order in which a call returns them."""
        return [describe(name, proto) for name, proto in self._outputs]

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        """Run the model.

        Args:
            values: one for each input, in the model's order.

        Returns:
            A value for each output, in the model's order.

        Raises:
            InputError: a value has another shape or type, or there are too few or too many.
            ProviderError: a kernel or the host failed.
        """
        if len(values) != len(self._inputs):
            names = ", ".join(repr(name) for name, _ in self._inputs) or "none"
            raise InputError(f"it was called with {len(values)} values", expected=f"{len(self._inputs)}: {names}")
        known: dict[str, Any] = dict(self._constants)
        for (name, proto), value in zip(self._inputs, values, strict=True):
            known[name] = _accept(name, proto, value)
        for part in self.parts:
            if isinstance(part, HostPart):
                feeds = {item.name: known[item.name] for item in part.model.graph.input}
                known |= part.engine.run(feeds)
            else:
                results = part.executable(*(known[name] for name in part.inputs))
                known |= dict(zip(part.outputs, results, strict=True))
        return tuple(known[name] for name, _ in self._outputs)

    def run(self, output_names: Sequence[str] | None, feeds: Mapping[str, Any], run_options: None = None) -> list[Any]:
        """Run the model as `onnxruntime.InferenceSession.run` does.

        Args:
            output_names: the outputs wanted, in this order; None for all.
            feeds: a value for each input, by name.
            run_options: for ONNX Runtime only; must be None.

        Raises:
            InputError: a name is unknown or missing, or a value has another shape or type.
            ProviderError: a kernel or the host failed.
        """
        if run_options is not None:
            raise InputError("run_options is for ONNX Runtime only", expected="None")
        names, offered = ([name for name, _ in pairs] for pairs in (self._inputs, self._outputs))
        check_feeds(feeds, names)
        wanted = offered if output_names is None else list(output_names)
        for name in wanted:
            if name not in offered:
                raise InputError(f"there is no output {name!r}", expected=", ".join(offered))
        found = dict(zip(offered, self(*(feeds[name] for name in names)), strict=True))
        return [found[name] for name in wanted]

    def time(self, values: Sequence[Any], repeat: int) -> Timing:
        """Return the times of several runs, without times of kernels.

        Args:
            values: one for each input, in the model's order.
            repeat: the number of runs.

        Raises:
            InputError: a value has another shape or type.
            ProviderError: a kernel or the host failed.
        """
        run_ns = []
        for _ in range(repeat):
            start = time.perf_counter_ns()
            self(*values)
            run_ns.append(time.perf_counter_ns() - start)
        return Timing(tuple(run_ns), ((),) * repeat)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the executable to one file, which `load` reads.

        Raises:
            ArtifactError: the file can't be written; what was there before is unharmed.
        """
        write_archive(path, {"format": FORMAT, "schema": SCHEMA}, self._chunks())

    def __reduce__(self) -> tuple[Callable[[Any], HostedExecutable], tuple[io.BytesIO]]:
        """Pickle and copy it as the bytes of its artifact."""
        content = archive_bytes({"format": FORMAT, "schema": SCHEMA}, self._chunks())
        return load, (io.BytesIO(content),)

    def _chunks(self) -> Members:
        segments: list[dict[str, Any]] = []
        members: dict[str, bytes] = {}
        for i, part in enumerate(self.parts):
            if isinstance(part, HostPart):
                member = f"segments/{i}.onnx"
                members[member] = part.model.SerializeToString()
                segments.append({"host": member, "nodes": part.nodes})
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
            "threads": self.threads,
            "segments": segments,
            "constants": list(self._constants),
            "inputs": [_store(*item) for item in self._inputs],
            "outputs": [_store(*item) for item in self._outputs],
            "report": plain(self.report),
        }
        members[PROGRAM] = json.dumps(program, default=str, sort_keys=True).encode()
        return {name: partial(_one_chunk, content) for name, content in members.items()}


def _one_chunk(content: bytes) -> list[bytes | memoryview]:
    return [content]


def load(path: str | os.PathLike[str] | IO[bytes]) -> HostedExecutable:
    """Load what `HostedExecutable.save` wrote.

    Raises:
        ArtifactError: it is damaged, of another schema, or for another machine.
        UnsupportedError: the host does not run a segment here.
    """
    with read_archive(path, FORMAT, SCHEMA, (PROGRAM,)) as archive:
        try:
            return _read(archive)
        except (KeyError, ValueError, TypeError, DecodeError, zipfile.BadZipFile) as error:
            raise ArtifactError("it is damaged", hint="Build the artifact again") from error


def _read(archive: zipfile.ZipFile) -> HostedExecutable:
    program = read_object(archive.read(PROGRAM), PROGRAM)
    threads = int(program["threads"])
    parts: list[Part] = []
    for segment in program["segments"]:
        if "host" in segment:
            model = onnx.ModelProto.FromString(archive.read(segment["host"]))
            nodes = tuple((str(name), str(reason)) for name, reason in segment["nodes"])
            parts.append(HostPart(model, Engine(model, threads), nodes))
        else:
            native = _read_native(archive.read(segment["native"]), bool(segment.get("cuda")))
            parts.append(NativePart(native, tuple(segment["inputs"]), tuple(segment["outputs"])))
    constants = {
        name: onnx.numpy_helper.to_array(onnx.TensorProto.FromString(archive.read(f"constants/{i}")))
        for i, name in enumerate(program["constants"])
    }
    return HostedExecutable(
        [_restore(item) for item in program["inputs"]],
        [_restore(item) for item in program["outputs"]],
        parts,
        constants,
        threads,
        read_record(HostedReport, program["report"], "report"),
    )


def _read_native(content: bytes, is_cuda: bool) -> Executable | CudaExecutable:
    return load_cuda_bytes(content) if is_cuda else Executable(read_artifact(io.BytesIO(content)))


def _store(name: str, proto: Any) -> list[str | None]:
    return [name, None if proto is None else proto.SerializeToString().hex()]


def _restore(item: Sequence[Any]) -> tuple[str, Any]:
    name, text = item
    proto = None if text is None else onnx.TypeProto.FromString(bytes.fromhex(text))
    return str(name), proto


def describe(name: str, proto: Any) -> TensorInfo:
    """Return the description of a value, as of ONNX Runtime's sessions; an unknown size is -1."""
    kind = proto.WhichOneof("value") if proto is not None else None
    if kind != "tensor_type":
        return TensorInfo(name, [], (kind or "unknown").removesuffix("_type"), np.dtype(object))
    tensor = proto.tensor_type
    dtype = dtype_of(tensor.elem_type)
    numpy_type = np.dtype(object) if dtype is None else dtype.numpy
    sizes = [d.dim_value if d.HasField("dim_value") else -1 for d in tensor.shape.dim]
    text = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    return TensorInfo(name, sizes, f"tensor({text})", numpy_type)


def _accept(name: str, proto: Any, value: Any) -> Any:
    info = describe(name, proto)
    if info.dtype == np.dtype(object):
        return value
    expected = f"{info.dtype}{info.shape}"
    is_numpy = isinstance(value, np.ndarray | np.generic)
    array: Array = np.asarray(value) if is_numpy else import_array(value, name, expected)
    if (
        array.dtype.newbyteorder("=") != info.dtype
        or array.ndim != len(info.shape)
        or any(n not in (-1, m) for n, m in zip(info.shape, array.shape, strict=True))
    ):
        raise InputError(f"it is {array.dtype}{list(array.shape)}", f"input {name!r}", expected)
    return array.astype(info.dtype, copy=False)
