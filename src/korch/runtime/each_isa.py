"""One file for several instruction sets: an artifact for each; the best one that the CPU has is loaded."""

import io
import os
from collections.abc import Mapping

from korch.runtime.artifact import Archive, format_in, read_archive, read_format
from korch.runtime.machine import best_isa

FORMAT = "korch-isas"
SCHEMA = 1
SUFFIX = ".korch"


def archive_of_isas(archives: Mapping[str, Archive]) -> Archive:
    """Return the content of a file with an artifact for each instruction set."""
    members = {f"{isa}{SUFFIX}": archive.to_bytes() for isa, archive in sorted(archives.items())}
    return Archive({"format": FORMAT, "schema": SCHEMA}, members)


def best_content(path: str | os.PathLike[str]) -> tuple[str, str | os.PathLike[str] | io.BytesIO, tuple[str, ...]]:
    """Return the format and the content of an artifact, and the instruction sets that are left out.

    Of several, they are those of the best instruction set of this CPU.

    Raises:
        ArtifactError: the file can't be read or is damaged, or this CPU has none of the instruction sets.
    """
    kind = read_format(path)
    if kind != FORMAT:
        return kind, path, ()
    with read_archive(path, FORMAT, SCHEMA, ()) as archive:
        isas = [name.removesuffix(SUFFIX) for name in archive.namelist() if name.endswith(SUFFIX)]
        best = best_isa(isas)
        content = archive.read(f"{best}{SUFFIX}")
    return format_in(content), io.BytesIO(content), tuple(isa for isa in isas if isa != best)
