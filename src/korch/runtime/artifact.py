"""Built plan <-> one file (`.korch`).

The file is a zip archive without compression, so any unzip tool shows its content:

    manifest.json          schema version, requirements on the machine, checksums of the other members
    kernels-*.a            the objects of the plan's kernels and tables, for each instruction set: an archive of `ar`
    weights.safetensors    the packed constants
    plan.json              a `PlanRecord`, whose steps have their symbols only
    steps.json             the steps, which are not read to run the plan
    report.json            a `Report`: how the plan was found, times, errors
    sources/*              the sources of the objects

Equal contents give equal bytes. The file is written under a temporary name and then renamed, so a reader
sees the old file or the new one. Reading checks the content of every member. The checksums detect damage
and careless edits. They are not a signature: running an artifact runs its machine code.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from korch.errors import ArtifactError
from korch.records import from_json, read_object, to_json
from korch.runtime.machine import Requirements
from korch.runtime.record import PLAN, STEPS, PlanRecord
from korch.runtime.weights import CHUNK_BYTES, ReadAt, Weights, checksum
from korch.system.files import open_file
from korch.system.scratch import scratch_folder

if TYPE_CHECKING:
    from korch.runtime.report import Report

SCHEMA = 10
FORMAT = "korch"
MANIFEST = "manifest.json"
OBJECTS, ARCHIVE = "kernels-", ".a"
"""The begin and the end of the name of an archive of objects; the instruction set is between them."""

WEIGHTS = "weights.safetensors"
REPORT = "report.json"
SOURCES = "sources/"
_FIRST_BYTES = b"PK\x03\x04"
_NAME_AT = 30
_ENCRYPTED = 1
_REBUILD = "Build the artifact again"


@dataclass(frozen=True)
class Artifact:
    """A built plan.

    Attributes:
        objects: the archive of objects for each instruction set; all have the same plan.
        weights: the packed constants, in the order in which the plan takes them.
        plan: the record of the plan.
        requirements: the requirements on the machine.
        sources: the sources by file name.
        report_json: how the plan was found: the JSON text of a `Report`; empty if nothing is known.
        path: the file that it was read from, for messages; "" if it was not read from a file with a name.
    """

    objects: Mapping[str, bytes]
    weights: Weights
    plan: PlanRecord
    requirements: Requirements
    sources: Mapping[str, str] = field(default_factory=dict)
    report_json: bytes = b""
    path: str = ""

    @cached_property
    def report(self) -> Report:
        """How the plan was found. It is read when it is needed, because a run does not need it.

        Raises:
            ArtifactError: it can't be read.
        """
        from korch.runtime.report import Report  # imports most of the optimizer

        with _named(self.path):
            return from_json(Report, self.report_json, REPORT) if self.report_json else Report()

    def with_report(self, report: Report) -> Artifact:
        """Return the artifact with another report."""
        return replace(self, report_json=to_json(report).encode())


def write_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that `path` has either its previous content or the complete new content.

    Raises:
        ArtifactError: the file can't be written.
    """
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a null character, or half of a surrogate pair
        raise _not_written(path, error) from error
    try:
        if target.exists() and not target.is_file():
            raise OSError(errno.EINVAL, "it is no regular file")
        with scratch_folder(target.parent) as folder:
            temporary = folder / "file"
            with temporary.open("xb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        raise _not_written(path, error) from error


def _not_written(path: str | os.PathLike[str], error: Exception) -> ArtifactError:
    reason = (error.strerror if isinstance(error, OSError) else "") or error
    return ArtifactError(
        f"it can't be written: {reason}",
        where=str(path),
        hint="Choose a name of a file in a folder that exists, may be written to and has room",
    )


Members = Mapping[str, bytes | Weights]
"""The content of each member of an archive, by name."""


@dataclass(frozen=True)
class Archive:
    """The content of an artifact's file.

    Attributes:
        manifest: format, schema and requirements; the checksums of the members are added when the file
            is written.
        members: the members by name.
    """

    manifest: Mapping[str, Any]
    members: Members

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file as `write_file` does.

        Raises:
            ArtifactError: the file can't be written.
        """
        write_file(path, self._write)

    def to_bytes(self) -> bytes:
        """Return the content of the file that `write` writes."""
        stream = io.BytesIO()
        self._write(stream)
        return stream.getvalue()

    def _write(self, stream: IO[bytes]) -> None:
        digests = {n: _digest([content]) for n, content in self.members.items() if isinstance(content, bytes)}
        weights = {n: checksum(w.chunks()) for n, w in self.members.items() if isinstance(w, Weights)}
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            manifest = to_json({**self.manifest, "sha256": digests, "xxh3": weights})
            for name, content in {MANIFEST: manifest.encode(), **self.members}.items():
                entry = zipfile.ZipInfo(name)  # dated 1980: equal contents give equal bytes
                entry.external_attr = 0o644 << 16
                with archive.open(entry, "w", force_zip64=name == WEIGHTS) as member:
                    for chunk in content.chunks() if isinstance(content, Weights) else [content]:
                        member.write(chunk)


@contextlib.contextmanager
def read_archive(
    path: str | os.PathLike[str] | IO[bytes], format_name: str, schema: int, needed: Sequence[str]
) -> Iterator[zipfile.ZipFile]:
    """Open a file that `Archive.write` wrote, after checking the members.

    An error that the reader of a member raises for unexpected data (ValueError, LookupError, TypeError)
    is reported as damage.

    Raises:
        ArtifactError: it can't be read, is not such an archive, is damaged, or has another schema.
    """
    if not isinstance(path, str | os.PathLike):
        yield from _opened(path, format_name, schema, needed)
        return
    try:
        with _named(str(path)), open_file(path) as stream:
            yield from _opened(stream, format_name, schema, needed)
    except OSError as error:
        raise ArtifactError(f"it can't be read: {error.strerror or error}", where=str(path)) from error


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Add the path of a file to the errors of its content."""
    try:
        yield
    except ArtifactError as error:
        where = ": ".join(part for part in (path, error.where) if part)
        raise ArtifactError(error.what, where, error.expected, error.hint) from error


def _opened(stream: IO[bytes], format_name: str, schema: int, needed: Sequence[str]) -> Iterator[zipfile.ZipFile]:
    head = stream.read(_NAME_AT + len(MANIFEST))
    if not head.startswith(_FIRST_BYTES) or head[_NAME_AT:] != MANIFEST.encode():
        raise _no_artifact()
    try:
        with zipfile.ZipFile(stream) as archive:
            if any(e.compress_type or e.flag_bits & _ENCRYPTED for e in archive.infolist()):
                raise zipfile.BadZipFile("a member is compressed or encrypted")
            manifest = _read_manifest(archive, format_name, schema)
            _check_digests(archive, manifest, needed)
            yield archive
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError, LookupError, TypeError) as error:
        # zipfile raises some of these errors for a damaged archive structure, and readers others for damaged data.
        raise ArtifactError("it is truncated or damaged", hint=_REBUILD) from error


def read_format(path: str | os.PathLike[str]) -> str:
    """Return the format of artifact that a file declares; "" if it declares none.

    Raises:
        ArtifactError: it can't be read.
    """
    try:
        with open_file(path) as stream:
            head = stream.read(4096)
    except OSError as error:
        raise ArtifactError(f"it can't be read: {error.strerror or error}", where=str(path)) from error
    return format_in(head)


def format_in(content: bytes) -> str:
    """Return the format that the begin of an artifact's content declares; "" if it declares none."""
    found = re.search(rb'"format":\s*"([a-z-]+)"', content[:4096])
    return found[1].decode() if found else ""


def read_artifact(path: str | os.PathLike[str] | IO[bytes]) -> Artifact:
    """Read an artifact and check that it is complete and that this machine can run it.

    Raises:
        ArtifactError: it can't be read, is not an artifact, is damaged or tampered with, has another
            schema, or needs another machine.
    """
    with read_archive(path, FORMAT, SCHEMA, (WEIGHTS, PLAN, STEPS, REPORT)) as archive:
        return _artifact(archive, str(path) if isinstance(path, str | os.PathLike) else "")


def archive_of(artifact: Artifact) -> Archive:
    """Return the content of an artifact's file."""
    members: dict[str, bytes | Weights] = {
        **objects_by_name(artifact.objects),
        **artifact.plan.members(),
        REPORT: artifact.report_json or to_json(artifact.report).encode(),
    }
    members |= {SOURCES + name: text.encode() for name, text in sorted(artifact.sources.items())}
    members[WEIGHTS] = artifact.weights
    return Archive({"format": FORMAT, "schema": SCHEMA, "requires": artifact.requirements}, members)


def _digest(chunks: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()


def _artifact(archive: zipfile.ZipFile, path: str) -> Artifact:
    requirements = _requirements(_read_manifest(archive, FORMAT, SCHEMA))
    requirements.check()
    weights = read_weights(archive)
    return Artifact(
        objects=read_folder(archive, OBJECTS, ARCHIVE),
        weights=weights,
        plan=PlanRecord.from_members(archive.read(PLAN), archive.read(STEPS)),
        requirements=requirements,
        sources=read_texts(archive),
        report_json=archive.read(REPORT),
        path=path,
    )


def objects_by_name(objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return archives of objects by the names of their files."""
    return {f"{OBJECTS}{isa}{ARCHIVE}": content for isa, content in sorted(objects.items())}


def read_folder(archive: zipfile.ZipFile, folder: str, suffix: str = "") -> dict[str, bytes]:
    """Return the members whose names begin with `folder` and end with `suffix`, by the rest of their names."""
    return {
        name.removeprefix(folder).removesuffix(suffix): archive.read(name)
        for name in archive.namelist()
        if name.startswith(folder) and name.endswith(suffix)
    }


def read_texts(archive: zipfile.ZipFile, suffix: str = "") -> dict[str, str]:
    """Return the sources whose names end with `suffix`, by the rest of their names."""
    return {name: content.decode() for name, content in read_folder(archive, SOURCES, suffix).items()}


def _no_artifact() -> ArtifactError:
    return ArtifactError("it is no Korch artifact", expected="a file that `korch optimize` wrote")


def _read_manifest(archive: zipfile.ZipFile, format_name: str, schema: int) -> dict[str, Any]:
    try:
        manifest = read_object(archive.read(MANIFEST), MANIFEST)
        is_artifact = manifest["format"] == format_name
        found_schema = manifest["schema"]
    except KeyError as error:
        raise ArtifactError("it can't be read", where=MANIFEST, hint=_REBUILD) from error
    if not is_artifact:
        raise _no_artifact()
    if found_schema != schema:
        raise ArtifactError(
            f"its schema has version {found_schema!r}",
            expected=f"version {schema}",
            hint="Build it again with this version of Korch",
        )
    found: dict[str, Any] = manifest
    return found


def _check_digests(archive: zipfile.ZipFile, manifest: Mapping[str, Any], needed: Sequence[str]) -> None:
    """Check that the archive holds exactly the members that the manifest names, unchanged.

    Weights are checked when they are read.
    """
    digests, of_weights = manifest.get("sha256"), manifest.get("xxh3")
    names = archive.namelist()
    if (
        not isinstance(digests, dict)
        or not isinstance(of_weights, dict)
        or sorted(names) != sorted((MANIFEST, *digests, *of_weights))
    ):
        raise ArtifactError("its members are not those that its manifest names", where=MANIFEST, hint=_REBUILD)
    for name in needed:
        if name not in (of_weights if name == WEIGHTS else digests):
            raise ArtifactError(f"{name} is missing", where=MANIFEST, hint=_REBUILD)
    for name, expected in digests.items():
        try:
            with archive.open(name) as member:
                found = _digest(_chunks(member))
        except zipfile.BadZipFile as error:
            raise ArtifactError("it is damaged", where=name, hint=_REBUILD) from error
        if found != expected:
            raise ArtifactError("it is not what was written: its checksum differs", where=name, hint=_REBUILD)


def read_weights(archive: zipfile.ZipFile) -> Weights:
    """Read and check the weights of an archive that `read_archive` opened.

    Raises:
        ArtifactError: they are damaged.
    """
    entry, stream = archive.getinfo(WEIGHTS), archive.fp
    if stream is None:
        raise ValueError("the archive is closed")
    stream.seek(entry.header_offset + _NAME_AT - 4)
    sizes = stream.read(4)
    start = entry.header_offset + _NAME_AT
    start += int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little")
    try:
        weights, found = Weights.read(_reader(stream, start), entry.file_size)
    except (EOFError, ArtifactError):
        found = ""
    if found != json.loads(archive.read(MANIFEST))["xxh3"][WEIGHTS]:
        raise ArtifactError("it is damaged", where=WEIGHTS, hint=_REBUILD)
    return weights


def _reader(stream: IO[bytes], start: int) -> ReadAt:
    """Return a function that reads at an offset from `start`; several threads may call it at once."""
    if isinstance(stream, io.BytesIO):
        content = stream.getbuffer()

        def copy(at: int, into: memoryview) -> None:
            part = content[start + at : start + at + len(into)]
            if len(part) < len(into):
                raise EOFError
            into[:] = part

        return copy
    descriptor = stream.fileno()

    def read(at: int, into: memoryview) -> None:
        while into:
            count = os.preadv(descriptor, [into], start + at)
            if count == 0:
                raise EOFError
            at, into = at + count, into[count:]

    return read


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _requirements(manifest: Mapping[str, Any]) -> Requirements:
    try:
        requires = manifest["requires"]
        flags = tuple(str(flag) for flag in requires["cpu_flags"])
        return Requirements(str(requires["system"]), str(requires["machine"]), flags)
    except (KeyError, TypeError) as error:
        raise ArtifactError("it does not say which machine it is for", where=MANIFEST, hint=_REBUILD) from error


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
