"""The kernel database: measurements by candidate and target, in SQLite.

It is safe with several processes at once. A damaged file is moved aside and a new one is created. If the folder
can't be written, the database is in memory. A file that is locked, or whose disk is full, is not damaged:
entries that can't be read count as unknown, and entries that can't be written are not stored. Each of these
conditions is reported once, as a warning.
"""

import fcntl
import logging
import sqlite3
import time
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from korch.measure.record import Record, from_text, to_text

logger = logging.getLogger("korch.measure")

SCHEMA_VERSION = 10
"""Since 9, workspaces hold zeros, not random bytes: kernels that pad lanes there took up to 1.5 times as long.
Since 10, entries have a time, and targets are described."""

SWITCH_SECONDS = 0.7
"""How long to wait for another process that holds a new file, when switching the write-ahead log on."""

LOCK_SECONDS = 0.7
"""How long to wait for another process that holds the file, when reading or writing. After that a search
continues without the entry, because it has a time budget."""

LATER_MS = 50
"""The same, in milliseconds, after one wait was too long."""
_TABLES = """
CREATE TABLE IF NOT EXISTS records (
    target TEXT NOT NULL, candidate TEXT NOT NULL, record TEXT NOT NULL, at INTEGER NOT NULL,
    PRIMARY KEY (target, candidate)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS facts (
    target TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (target, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS targets (target TEXT PRIMARY KEY, fields TEXT NOT NULL) WITHOUT ROWID;
"""

NOW = "CAST(strftime('%s', 'now') AS INTEGER)"
"""Seconds since 1970, in SQL."""

_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

_DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""The errors that reading a damaged file raises; the second if SQLite's message quotes the damaged bytes."""


class Database:
    """Records and facts of one target, measured under the same conditions."""

    def __init__(self, folder: Path, target: str, conditions: str = "", fields: str = "") -> None:
        """Open the file.

        `conditions`: how kernels are timed, if not in the usual way; part of every key. `fields`: the target's fields
        as JSON, for `korch database`.
        """
        self.target = f"{target} {conditions}".rstrip()
        self.path = folder / f"kernels-{SCHEMA_VERSION}.sqlite"
        self._said: set[str] = set()
        self._connection = self._open()
        if fields:
            self._do("INSERT OR IGNORE INTO targets VALUES (?, ?)", (self.target, fields))

    def record(self, candidate: str) -> Record | None:
        """Return the record of a candidate, or None if there is none."""
        text = self._one("SELECT record FROM records WHERE target = ? AND candidate = ?", candidate)
        if text is None:
            return None
        try:
            return from_text(text)
        except ValueError:
            logger.warning("the record of candidate %s is damaged; it is measured again", candidate)
            return None

    def put_record(self, candidate: str, record: Record) -> None:
        """Store the record of a candidate."""
        self._write(f"INSERT OR REPLACE INTO records VALUES (?, ?, ?, {NOW})", candidate, to_text(record))

    def fact(self, name: str) -> str | None:
        """Return a fact about the target (a calibration, a plan), or None."""
        return self._one("SELECT value FROM facts WHERE target = ? AND name = ?", name)

    def put_fact(self, name: str, value: str) -> None:
        """Store a fact about the target."""
        self._write(f"INSERT OR REPLACE INTO facts VALUES (?, ?, ?, {NOW})", name, value)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def _one(self, query: str, key: str) -> str | None:
        try:
            row = self._connection.execute(query, (self.target, key)).fetchone()
        except sqlite3.OperationalError as error:  # locked, or its disk fails: not damaged
            self._say_once("read", error)
            return None
        except _DAMAGE as error:
            self._heal(error)
            return None
        return None if row is None else self._opened(key, str(row[0]))

    def _opened(self, key: str, text: str) -> str | None:
        if is_sealed(self.target, key, text):
            return text[9:]
        logger.warning("the stored value of %s is damaged; it is determined again", key)
        return None

    def _write(self, statement: str, key: str, value: str) -> None:
        self._do(statement, (self.target, key, sealed(self.target, key, value)))

    def _do(self, statement: str, values: Sequence[object]) -> int:
        """Execute a statement; return the number of rows that it changed, 0 if it fails."""
        try:
            with self._connection:
                return self._connection.execute(statement, values).rowcount
        except sqlite3.OperationalError as error:  # read-only, full or locked: go on without
            self._say_once("written", error)
        except _DAMAGE as error:
            self._heal(error)
            with self._connection:
                return self._connection.execute(statement, values).rowcount
        return 0

    def rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query over all targets; none if the file can't be read."""
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.OperationalError as error:
            self._say_once("read", error)
        except _DAMAGE as error:
            self._heal(error)
        return []

    def add(self, rows: Iterable[Sequence[Any]]) -> int:
        """Add rows, each after its table's name, unless an equal key is known; return how many were added."""
        return sum(
            max(0, self._do(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row))
            for table, *row in rows
        )

    def remove_before(self, at_s: int) -> int:
        """Remove entries that are older than a time in seconds since 1970; return how many there were."""
        removed = sum(max(0, self._do(f"DELETE FROM {table} WHERE at < ?", (at_s,))) for table in ("records", "facts"))
        for statement in ("VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            self._do(statement, ())
        return removed

    def _say_once(self, what: str, error: sqlite3.Error) -> None:
        if is_locked := getattr(error, "sqlite_errorcode", 0) & 0xFF in _LOCKED:
            self._connection.execute(f"PRAGMA busy_timeout = {LATER_MS}")
        if what not in self._said:
            reason = f"another process holds it ({error})" if is_locked else error
            logger.warning("the kernel database %s can't be %s: %s", self.path, what, reason)
            self._said.add(what)

    def _open(self) -> sqlite3.Connection:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._connect(str(self.path))
        except (OSError, sqlite3.OperationalError) as error:
            return self._in_memory(error)
        except _DAMAGE as error:
            return self._begin_anew(error)

    def _connect(self, name: str) -> sqlite3.Connection:
        connection = sqlite3.connect(name, timeout=LOCK_SECONDS)
        try:
            _keep_a_log(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(_TABLES)
            _check_structure(connection)
        except (sqlite3.Error, *_DAMAGE):
            connection.close()
            raise
        return connection

    def _in_memory(self, error: Exception) -> sqlite3.Connection:
        logger.warning("the kernel database %s can't be opened (%s); measurements are not kept", self.path, error)
        return self._connect(":memory:")

    def _heal(self, error: Exception) -> None:
        self._connection.close()
        self._connection = self._begin_anew(error)

    def _begin_anew(self, error: Exception) -> sqlite3.Connection:
        try:
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    return self._connect(str(self.path))  # another process may have replaced the file
                except sqlite3.OperationalError:  # locked, or its disk fails
                    raise
                except _DAMAGE:
                    self._move_aside(error)
                return self._connect(str(self.path))
        except (OSError, sqlite3.Error, *_DAMAGE) as worse:
            return self._in_memory(worse)

    def _move_aside(self, error: Exception) -> None:
        aside = self.path.with_suffix(".damaged")
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        if self.path.exists():
            self.path.replace(aside)
        logger.warning("the kernel database is damaged (%s); it is moved to %s and a new one is created", error, aside)


def sealed(target: str, key: str, value: str) -> str:
    """Return a value with a preceding checksum of its keys and itself: SQLite has no checksums of rows."""
    return f"{zlib.crc32(f'{target} {key} {value}'.encode()):08x} {value}"


def is_sealed(target: str, key: str, text: str) -> bool:
    """Return whether a stored text is as `sealed` made it."""
    return sealed(target, key, text[9:]) == text


def _check_structure(connection: sqlite3.Connection) -> None:
    """Check what the checksums of rows don't cover: in a tree with wrong order, new rows would be lost.

    Raises:
        sqlite3.DatabaseError: the file is damaged.
    """
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    for columns in ("target, candidate, record, at FROM records", "target, name, value, at FROM facts"):
        try:
            connection.execute(f"SELECT {columns} LIMIT 0")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            raise sqlite3.DatabaseError(str(error)) from error  # a table that is not ours


def _keep_a_log(connection: sqlite3.Connection) -> None:
    """Switch the write-ahead log on, waiting for other processes: SQLite's own timeout does not apply here."""
    deadline_s = time.monotonic() + SWITCH_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)
        else:
            return
