"""A file of jobs that travels to a device: kernels with their cubins, in batches, the most promising ones first.

It is a zip archive, so that batches can be added:

    about.json    kind, schema, the architecture of the cubins and the version of Triton that made them
    NNNN.json     the jobs of a batch: their keys, what the measuring process reads, estimated times
    NNNN.bin      the cubins of the batch, one after the other

Cubins resemble each other, so a batch is compressed as a whole.
"""

import json
import lzma
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from korch.cuda.compile import Cubin
from korch.errors import OptionError
from korch.system.files import open_file

KIND, SCHEMA = "korch jobs", 1
ABOUT = "about.json"
MOST_BYTES = 50 << 20
"""The largest file, so that it is quickly copied to the machine with the device."""


@dataclass(frozen=True, slots=True)
class KernelJob:
    """A kernel to measure: the key of its record, what the measuring process reads, and the estimate of its time."""

    key: str
    spec: Mapping[str, Any]
    guess_ns: int


class JobFile:
    """A file of jobs; it is created with the first batch that is added.

    Attributes:
        path: where it is.
        arch: the compute capability of its cubins; 0 if there is no file.
        triton: the version of Triton that has made them.
        keys: the keys of its jobs.

    Raises:
        OptionError: the file is damaged, or no file of jobs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arch, self.triton, self.count = 0, "", 0
        self.keys: set[str] = set()
        if path.exists():
            about = self._about()
            self.arch, self.triton = int(about["arch"]), str(about["triton"])
            for jobs, _ in self.batches(with_cubins=False):
                self.keys.update(job.key for job in jobs)
                self.count += 1

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size if self.path.exists() else 0

    def add(self, jobs: Sequence[KernelJob], cubins: Mapping[str, Cubin], arch: int, triton: str) -> bool:
        """Add a batch of jobs; return whether the file has room for it.

        Raises:
            OptionError: the file is for another architecture, or made by another version of Triton.
        """
        if self.arch and (self.arch, self.triton) != (arch, triton):
            what = f"its cubins are for sm_{self.arch}, made by Triton {self.triton}"
            raise OptionError(what, str(self.path), "another file")
        needed = dict.fromkeys(launch["symbol"] for job in jobs for launch in job.spec["launches"])
        images, at, places = [], 0, {}
        for symbol in needed:
            image = cubins[symbol].image
            places[symbol] = [at, len(image), cubins[symbol].shared_bytes]
            images.append(image)
            at += len(image)
        batch = {"cubins": places, "jobs": [[job.key, job.spec, job.guess_ns] for job in jobs]}
        packed = [lzma.compress(part) for part in (json.dumps(batch).encode(), b"".join(images))]
        if self.size_bytes + sum(map(len, packed)) + 1000 > MOST_BYTES:
            return False
        with zipfile.ZipFile(self.path, "a") as archive:  # the members are compressed already
            if not self.arch:
                about = {"kind": KIND, "schema": SCHEMA, "arch": arch, "triton": triton}
                archive.writestr(ABOUT, json.dumps(about))
            for suffix, data in zip(("json", "bin"), packed, strict=True):
                archive.writestr(f"{self.count:04d}.{suffix}", data)
        self.arch, self.triton, self.count = arch, triton, self.count + 1
        self.keys.update(job.key for job in jobs)
        return True

    def batches(self, with_cubins: bool = True) -> Iterator[tuple[list[KernelJob], dict[str, bytes]]]:
        """Yield the jobs of each batch with the cubins by symbol; the jobs' launches name their shared memory."""
        for name in self._names():
            batch = json.loads(self._read(f"{name}.json"))
            places, jobs = batch["cubins"], []
            for key, spec, guess_ns in batch["jobs"]:
                launches = [{**la, "shared_bytes": places[la["symbol"]][2]} for la in spec["launches"]]
                jobs.append(KernelJob(key, {**spec, "launches": launches}, guess_ns))
            image = self._read(f"{name}.bin") if with_cubins else b""
            yield jobs, {symbol: image[at : at + size] for symbol, (at, size, _) in places.items()}

    def _names(self) -> list[str]:
        with zipfile.ZipFile(self.path) as archive:
            return sorted(name.removesuffix(".bin") for name in archive.namelist() if name.endswith(".bin"))

    def _about(self) -> dict[str, Any]:
        try:
            with open_file(self.path) as stream, zipfile.ZipFile(stream) as archive:
                found: dict[str, Any] = json.loads(archive.read(ABOUT))
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise self._error(f"it is no file of jobs ({error})") from error
        if (found.get("kind"), found.get("schema")) != (KIND, SCHEMA):
            raise self._error(f"it is of another kind or version: {found}")
        return found

    def _read(self, name: str) -> bytes:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return lzma.decompress(archive.read(name))
        except (OSError, KeyError, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
            raise self._error(f"its member {name} is damaged ({error})") from error

    def _error(self, what: str) -> OptionError:
        return OptionError(what, str(self.path), hint="Write it with `korch prepare`")
