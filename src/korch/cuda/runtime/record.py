"""A plan for a CUDA device as data: what its executable loads, and what its artifact contains.

The file is a zip archive like all artifacts:

    manifest.json          format, schema, checksums of the other members
    plan.json              a `PlanRecord`
    program.json           launches and calls in order, with the place of each buffer
    report.json            how the plan was found
    weights.safetensors    the packed constants
    cubins/SYMBOL.cubin    the compiled kernels
    engines/SYMBOL.engine  TensorRT engines
    sources/SYMBOL.py      the sources of kernels: Triton, or calls of PyTorch
    sources/SYMBOL.onnxtxt the networks of engines, without weights
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import IO

from korch.cuda.kernel import Launch
from korch.primitive.types import DType
from korch.records import from_json, read_object, read_record, to_json
from korch.runtime.artifact import Archive, read_archive, read_folder, read_texts, read_weights
from korch.runtime.record import PlanRecord
from korch.runtime.report import Report
from korch.runtime.weights import Weights

FORMAT = "korch-cuda"
SCHEMA = 11
PLAN, PROGRAM, REPORT = "plan.json", "program.json", "report.json"
WEIGHTS = "weights.safetensors"
CUBINS, ENGINES, SOURCES = "cubins/", "engines/", "sources/"
NETWORK = ".onnxtxt"


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """The place of a buffer."""

    memory: str  # arena, constant, input, output or table
    at: int  # the offset in the arena in bytes, or the index among the buffers of this kind
    size_bytes: int  # its size
    dtype: str = "u8"  # the element type, as text
    shape: tuple[int, ...] = ()  # elements per axis of the value; empty for scratch memory
    layout: str = ""  # its layout, as text


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One launch: the function, how it is launched, and its buffers by number in its step."""

    symbol: str  # the function
    grid: int  # the number of programs
    warps: int  # the warps of a program
    shared_bytes: int  # shared memory of a program
    signature: tuple[str, ...]  # the element types of its buffers
    arguments: tuple[int, ...]  # the numbers of its buffers in the step

    def launch(self, sources: Mapping[str, str]) -> Launch:
        """Return the launch with the function's source, which is looked up in `sources` by symbol."""
        types = tuple(map(DType, self.signature))
        return Launch(self.symbol, sources[self.symbol], types, self.arguments, self.grid, self.warps)


@dataclass(frozen=True, slots=True)
class StepProgram:
    """One kernel: its buffers (inputs, outputs, scratch, tables), and what runs over them."""

    buffers: tuple[BufferRecord, ...]  # the place of each buffer
    inputs: int  # the number of input buffers, which come first
    outputs: int  # the number of output buffers, which follow the inputs
    launches: tuple[LaunchRecord, ...] = ()  # the launches in order
    call: str = ""  # the symbol of a call of PyTorch; "" if there is none
    engine: str = ""  # the symbol of a TensorRT engine; "" if there is none
    known: tuple[int, ...] = ()  # indices of the inputs that are constants inside the engine


@dataclass(frozen=True)
class CudaProgram:
    """Everything that an executable needs."""

    plan: PlanRecord  # the record of the plan, with its kernels in order
    arch: int  # the architecture of the cubins
    allow_tf32: bool  # whether calls may round float32 factors
    steps: tuple[StepProgram, ...]  # the steps in the order in which they run
    copies: tuple[tuple[int, BufferRecord], ...]  # (output, source) of the outputs that no kernel writes directly
    tables: tuple[tuple[int, ...], ...]  # constant tables of 32-bit integers
    weights: Weights  # the packed constants
    cubins: Mapping[str, bytes]  # the cubins by symbol
    sources: Mapping[str, str]  # the sources by symbol
    engines: Mapping[str, bytes] = field(default_factory=dict)  # the TensorRT engines by symbol
    engine_maker: str = ""  # what built the engines: the version of TensorRT and the device; "" if there are none
    is_parallel: bool = False  # whether independent kernels run on branches of the graph
    is_early: bool = False  # whether kernels may begin before the kernel in front of them has ended
    report: Report = field(default_factory=Report)  # how the plan was found

    @property
    def launches(self) -> dict[str, LaunchRecord]:
        """The launches by symbol."""
        return {launch.symbol: launch for step in self.steps for launch in step.launches}


def archive_of(program: CudaProgram) -> Archive:
    """Return the content of a program's file."""
    data = {
        "arch": program.arch,
        "allow_tf32": program.allow_tf32,
        "is_parallel": program.is_parallel,
        "is_early": program.is_early,
        "engine_maker": program.engine_maker,
        "steps": program.steps,
        "copies": program.copies,
        "tables": program.tables,
    }
    texts = {PLAN: program.plan.to_json(), PROGRAM: to_json(data), REPORT: to_json(program.report)} | {
        f"{SOURCES}{name}{NETWORK if name.startswith('n_') else '.py'}": text for name, text in program.sources.items()
    }
    members: dict[str, bytes | Weights] = {name: text.encode() for name, text in texts.items()}
    members |= {f"{CUBINS}{name}.cubin": image for name, image in program.cubins.items()}
    members |= {f"{ENGINES}{name}.engine": image for name, image in program.engines.items()}
    members[WEIGHTS] = program.weights
    return Archive({"format": FORMAT, "schema": SCHEMA}, members)


def read_program(path: str | os.PathLike[str] | IO[bytes]) -> CudaProgram:
    """Read an artifact and check that it is complete.

    Raises:
        ArtifactError: it can't be read, is not such an artifact, or is damaged.
    """
    with read_archive(path, FORMAT, SCHEMA, (PLAN, PROGRAM, REPORT, WEIGHTS)) as archive:
        data = read_object(archive.read(PROGRAM), PROGRAM)
        return CudaProgram(
            plan=PlanRecord.from_json(archive.read(PLAN)),
            arch=int(data["arch"]),
            allow_tf32=bool(data["allow_tf32"]),
            is_parallel=bool(data["is_parallel"]),
            is_early=bool(data["is_early"]),
            steps=tuple(read_record(StepProgram, step, PROGRAM) for step in data["steps"]),
            copies=tuple((int(i), read_record(BufferRecord, place, PROGRAM)) for i, place in data["copies"]),
            tables=tuple(tuple(map(int, table)) for table in data["tables"]),
            weights=read_weights(archive),
            cubins=read_folder(archive, CUBINS, ".cubin"),
            engines=read_folder(archive, ENGINES, ".engine"),
            engine_maker=str(data["engine_maker"]),
            sources=read_texts(archive, ".py") | read_texts(archive, NETWORK),
            report=from_json(Report, archive.read(REPORT), REPORT),
        )
