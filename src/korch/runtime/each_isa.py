"""One file for several instruction sets: an artifact for each; the best one that the CPU has is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

from korch.runtime.artifact import Archive, read_archive
from korch.runtime.machine import best_isa

FORMAT = "korch-isas"
SCHEMA = 1
SUFFIX = ".korch"


def archive_of_isas(archives: Mapping[str, Archive]) -> Archive:
    """Return the content of a file with an artifact for each instruction set."""
    members = {f"{isa}{SUFFIX}": archive.to_bytes() for isa, archive in sorted(archives.items())}
    return Archive({"format": FORMAT, "schema": SCHEMA}, members)


def read_best(path: str | os.PathLike[str]) -> bytes:
    """Return the content of the artifact for the best instruction set that this CPU has.

    Raises:
        ArtifactError: the file can't be read or is damaged, or this CPU has none of the instruction sets.
    """
    with read_archive(path, FORMAT, SCHEMA, ()) as archive:
        isas = [name.removesuffix(SUFFIX) for name in archive.namelist() if name.endswith(SUFFIX)]
        return archive.read(f"{best_isa(isas)}{SUFFIX}")
