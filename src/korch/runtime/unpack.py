"""Artifact -> a folder from which a C program runs the plan, without Python and without Korch.

    libkorch_runtime.so   the runtime, to which C programs are linked
    korch.h               the header of its C interface
    kernels.a             the objects of the kernels and of the plans' tables
    weights.bin           the packed constants, in the form in which the runtime reads them
    sizes.bin             which shapes of the inputs each plan takes (`korch.runtime.sizes`)
    lib*.so*              libraries that the kernels call and that Python packages contain, such as ONNX Runtime
    manifest.json         requirements on the machine, threads, inputs and outputs; SHA-256 of the other files
    plans/*.json          the plans
    sources/*             the sources of the objects

weights.bin consists of 64-bit integers in the machine's byte order, followed by tensors: the number of
offsets; the offset of each constant of the first plan, in its order, then those of
the next plan, and so on; and the tensors, each at a multiple of 64. With it, one C program can load the
weights of any artifact.

The folder is written under a temporary name and then renamed: it exists completely or not at all.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from korch.errors import ArtifactError, OptionError, UnsupportedError
from korch.records import to_json
from korch.runtime import artifact as artifact_module
from korch.runtime import ranged, shaped, stateful
from korch.runtime.artifact import MANIFEST, SOURCES, Artifact, read_artifact
from korch.runtime.each_isa import best_content
from korch.runtime.machine import best_isa
from korch.runtime.record import PlanRecord
from korch.runtime.shaped import Shared
from korch.runtime.sizes import sizes_of_plans, sizes_of_states
from korch.runtime.weights import CHUNK_BYTES, Weights
from korch.system.alignment import align_up
from korch.system.libraries import ONNXRUNTIME, find_onnxruntime
from korch.system.native import runtime_path
from korch.system.native_build import FOLDER

FORMAT = "korch-folder"
SCHEMA = 6
RUNTIME = "libkorch_runtime.so"
HEADER = "korch.h"
KERNELS = "kernels.a"
WEIGHTS = "weights.bin"
SIZES = "sizes.bin"

Chunks = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A description of what `unpack` wrote.

    Attributes:
        folder: the folder.
        files: size in bytes of each file except plans and sources, by name.
        brought: the files among these that are libraries which the plan calls.
        missing: libraries that the plan calls and that no Python package here contains, with the names of the
            compiler's option -l; they must be installed on the machine that runs the plan.
        threads: the number of threads that the plan was built for.
        cpu_flags: the flags that the CPU must have, as /proc/cpuinfo names them.
    """

    folder: Path
    files: dict[str, int]
    brought: tuple[str, ...]
    missing: tuple[str, ...]
    threads: int
    cpu_flags: tuple[str, ...]

    def to_text(self) -> str:
        """Return a description of a few lines for the user."""
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        flags = ", ".join(self.cpu_flags) or "no special instructions"
        lines = [f"{self.folder}: for {threads} on a CPU with {flags}"]
        width = max(map(len, self.files))
        lines += [f"  {name:{width}} {size / 1024:9.1f} KiB" for name, size in self.files.items()]
        lines += [f"  {name} must be installed where it runs" for name in self.missing]
        return "\n".join(lines)


def unpack(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Unpacked:
    """Write the files that a C program needs to run an artifact.

    Args:
        path: an artifact for the CPU, also for a range; of several instruction sets, the best of this CPU is written.
        folder: the folder to write; it must be empty or not exist.

    Raises:
        ArtifactError: the artifact can't be read, or the folder can't be written.
        OptionError: the folder is not empty.
        UnsupportedError: the artifact is for a CUDA device, has parts that run on the host, or has rows that programs
            in C can't give or take.
    """
    target = Path(os.path.realpath(folder))
    _check_folder(target)
    artifacts, shared, sizes = _read(path)
    _check_names(shared.sources, path)
    plans = [artifact.plan for artifact in artifacts]
    brought, missing = _companions(plans)
    members: dict[str, Chunks] = {
        RUNTIME: [runtime_path().read_bytes()],
        HEADER: [(FOLDER / HEADER).read_bytes()],
        KERNELS: [shared.objects[best_isa(shared.objects)]],
        WEIGHTS: weight_chunks(shared.weights, shared.places),
        SIZES: [sizes],
        **{f"plans/{i}.json": [plan.to_json().encode()] for i, plan in enumerate(plans)},
        **{SOURCES + name: [text.encode()] for name, text in sorted(shared.sources.items())},
    }
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        temporary.mkdir(parents=True)
        for name, chunks in members.items():
            _write(temporary / name, chunks)
        for name, source in brought.items():
            shutil.copyfile(source, temporary / name)
        flags = artifacts[0].requirements.cpu_flags
        manifest = {
            "format": FORMAT,
            "schema": SCHEMA,
            "requires": artifacts[0].requirements,
            "libraries": missing,
            "threads": plans[0].threads,
            "plans": [{"inputs": plan.inputs, "outputs": plan.outputs} for plan in plans],
            "sha256": {name: _digest(temporary / name) for name in (*members, *brought)},
        }
        _write(temporary / MANIFEST, [to_json(manifest).encode()])
        temporary.replace(target)
    except OSError as error:
        raise ArtifactError(
            f"it can't be written: {error.strerror or error}",
            where=str(target),
            hint="Choose a folder that may be written to and has room",
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shown = (RUNTIME, HEADER, KERNELS, WEIGHTS, SIZES, *brought)
    lengths = {name: (target / name).stat().st_size for name in shown}
    return Unpacked(Path(folder), lengths, tuple(brought), missing, plans[0].threads, flags)


def weight_chunks(weights: Weights, places: Sequence[Sequence[int]]) -> Iterator[bytes]:
    """Yield the bytes of weights.bin.

    Args:
        weights: the different packed constants.
        places: for each plan, the indices of its constants in `weights`, in the plan's order.
    """
    chosen = [i for plan in places for i in plan]
    start = align_up(8 * (1 + len(chosen)))
    table = np.array([len(chosen), *(start + weights.offsets[i] for i in chosen)], np.int64)
    yield table.tobytes().ljust(start, b"\0")
    for begin in range(0, weights.block.size, CHUNK_BYTES):
        yield weights.block[begin : begin + CHUNK_BYTES].tobytes()


def _read(path: str | os.PathLike[str]) -> tuple[Sequence[Artifact], Shared, bytes]:
    """Return the plans, what they share, and the numbers that say how they serve sizes."""
    kind, content, _ = best_content(path)
    served: tuple[tuple[type[shaped.ShapedExecutable], Callable[..., bytes]], ...] = (
        (shaped.ShapedExecutable, sizes_of_plans),
        (ranged.RangedExecutable, sizes_of_plans),
        (stateful.StatefulExecutable, sizes_of_states),
    )
    for one, sizes_of in served:
        if kind == one.format:
            artifacts, shared, *more = shaped.read_shaped(content, one)
            return artifacts, shared, sizes_of([artifact.plan for artifact in artifacts], *more)
    if kind not in (artifact_module.FORMAT, ""):
        raise UnsupportedError(
            "it is for a CUDA device, or parts of it run on the host: only Python runs it",
            where=str(path),
            expected="an artifact for the CPU without parts on the host",
        )
    found = read_artifact(content)
    shared = Shared(found.objects, found.sources, found.weights, [range(len(found.weights))])
    return [found], shared, sizes_of_plans([found.plan])


def _check_folder(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise OptionError(
            f"{folder} exists and is not an empty folder",
            where="option FOLDER",
            hint="Choose another name, or remove it first",
        )


def _check_names(names: Iterable[str], path: str | os.PathLike[str]) -> None:
    """Check that the names are plain file names, so that no file is written outside of its folder."""
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise ArtifactError(
                f"a source has the name {name!r}", str(path), "the name of a file", "Build the artifact again"
            )


def _companions(plans: Sequence[PlanRecord]) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the libraries to copy, by their new file name, and the names of those that were not found."""
    names = sorted({name for plan in plans for name in plan.opens})
    paths = {name: find_onnxruntime() if name == ONNXRUNTIME else None for name in names}
    # Kernels open a library by its name with the major version.
    found = {f"lib{name}.so.1": path for name, path in paths.items() if path is not None}
    return found, tuple(name for name, path in paths.items() if path is None)


def _write(path: Path, chunks: Chunks) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as stream:
        for chunk in chunks:
            stream.write(chunk)
        stream.flush()
        os.fsync(stream.fileno())


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
