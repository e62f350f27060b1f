"""The kernel database as files that travel between machines.

A file is lines of JSON, gzipped if `korch database` has written it: first the schema, then one line for each target,
record and fact, with the checksum and the time of the entry. A last line without an end was being written when its
process was stopped, and is left out. Entries count only where target, versions and kernel are equal, so a file from
another kind of machine does no harm; it is named.
"""

import gzip
import json
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from korch.errors import OptionError
from korch.measure.database import SCHEMA_VERSION, Database, is_sealed
from korch.system.files import open_file
from korch.system.scratch import write_atomically

KIND = "korch kernel database"
GZIP = b"\x1f\x8b"
HEAD = {"kind": KIND, "schema": SCHEMA_VERSION}
TABLES = ("targets", "records", "facts")

_COUNTS = """
SELECT target, sum(is_record), sum(1 - is_record), min(at), max(at)
FROM (SELECT target, 1 AS is_record, at FROM records UNION ALL SELECT target, 0, at FROM facts)
GROUP BY target ORDER BY target
"""

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TargetStats:
    """What a database has of one target; `fields` are those of the target, and times are in seconds since 1970."""

    target: str
    fields: Mapping[str, Any]
    records: int
    facts: int
    first_s: int
    last_s: int

    def differences(self, here: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the fields in which the target differs from this machine, as text."""
        both = (name for name in here if name in self.fields)
        return tuple(f"{n}: {here[n]!r} here, {self.fields[n]!r} there" for n in both if here[n] != self.fields[n])


def stats(folder: Path) -> list[TargetStats]:
    """Return what the database in a folder has, by target."""
    with closing(Database(folder, "")) as database:
        fields = {target: json.loads(text) for target, text in database.rows("SELECT target, fields FROM targets")}
        return [TargetStats(target, fields.get(target, {}), *row) for target, *row in database.rows(_COUNTS)]


def export_to(folder: Path, path: Path) -> int:
    """Write the database of a folder to a file, atomically; return the number of entries."""
    with closing(Database(folder, "")) as database:
        rows = [(table, row) for table in TABLES for row in database.rows(f"SELECT * FROM {table}")]
    text = "".join(map(as_line, [HEAD, *([table, *row] for table, row in rows)]))
    write_atomically(path, gzip.compress(text.encode(), mtime=0))
    return len(rows)


def as_line(entry: object) -> str:
    """Return a line of a file: the head, or the name of a table with the values of a row."""
    return json.dumps(entry, separators=(",", ":")) + "\n"


def import_from(folder: Path, paths: Iterable[Path]) -> tuple[int, int]:
    """Add the entries of files to the database of a folder; entries that it has already stay as they are.

    Returns:
        The number of entries that were added, and of those in the files.

    Raises:
        OptionError: a file is damaged, or of another version; nothing of any file is added.
    """
    rows = [row for path in paths for row in read_rows(path)]
    with closing(Database(folder, "")) as database:
        return database.add(rows), len(rows)


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the entries of a file, each after the name of its table.

    Raises:
        OptionError: the file is damaged, or of another version.
    """
    hint = "Write it with `korch database export` or `korch measure`"
    try:
        with open_file(path) as stream:
            content = stream.read()
        is_whole = content.startswith(GZIP)
        content = gzip.decompress(content) if is_whole else content[: content.rfind(b"\n") + 1]
        head, *lines = content.decode().splitlines()
        first = json.loads(head)
        if first.get("kind") != KIND:
            raise ValueError("it is no kernel database")
        if first["schema"] != SCHEMA_VERSION:
            raise ValueError(f"it has schema {first['schema']}; this version of Korch has schema {SCHEMA_VERSION}")
        for number, line in enumerate(lines, 2):
            row = json.loads(line)
            if not _is_row(row):
                raise ValueError(f"line {number} is damaged")
            yield tuple(row)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError, KeyError, AttributeError) as error:
        raise OptionError(f"it can't be imported: {error}", where=str(path), hint=hint) from error


def _is_row(row: object) -> bool:
    """Return whether a line is an entry with a correct checksum."""
    match row:
        case ["targets", str(), str(fields)]:
            return isinstance(json.loads(fields), dict)
        case ["records" | "facts", str(target), str(key), str(text), int()]:
            return is_sealed(target, key, text)
    return False


def prune(folder: Path, days: float | None, most_bytes: int | None) -> int:
    """Remove entries older than some days, and then the oldest ones until the file is small enough.

    Returns:
        The number of entries that were removed.
    """
    with closing(Database(folder, "")) as database:
        removed = 0
        if days is not None:
            removed += database.remove_before(max(0, int(time.time() - 86400 * days)))
        while most_bytes is not None and database.path.exists() and database.path.stat().st_size > most_bytes:
            times = sorted(at for table in TABLES[1:] for (at,) in database.rows(f"SELECT at FROM {table}"))
            found = database.remove_before(times[len(times) // 4] + 1) if times else 0
            if not found:  # none is left, or the file can't be written
                break
            removed += found
        return removed
