"""A database that is locked, full or cannot be moved is not treated as damaged, and is reported once."""

import sqlite3
from pathlib import Path

import pytest

from korch.measure.database import LATER_MS, SWITCH_SECONDS, Database
from korch.measure.record import Measured

KNOWN = Measured(1200, (1200, 1300, 1500))


@pytest.fixture
def database(tmp_path):
    opened = Database(tmp_path, "here")
    yield opened
    opened.close()


@pytest.fixture
def locked(database):
    """A database that another connection keeps locked: WAL seldom blocks, old journals do."""
    database.put_record("a", KNOWN)
    database._connection.execute("PRAGMA journal_mode = DELETE")
    database._connection.execute("PRAGMA busy_timeout = 1")
    other = sqlite3.connect(database.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    yield database, other
    other.close()


def test_a_locked_database_is_not_taken_for_a_damaged_one(locked, caplog):
    database, other = locked
    assert database.record("a") is None
    assert database.fact("calibration") is None
    assert caplog.messages == [
        f"the kernel database {database.path} can't be read: another process holds it (database is locked)"
    ]
    other.execute("ROLLBACK")
    assert database.record("a") == KNOWN
    assert not database.path.with_suffix(".damaged").exists()


def test_a_database_that_takes_nothing_says_so_once(database, caplog):
    pages = database._connection.execute("PRAGMA page_count").fetchone()[0]
    database._connection.execute(f"PRAGMA max_page_count = {pages}")  # as a full disk does
    large = Measured(1, tuple(range(10_000)))
    for name in "abc":
        database.put_record(name, large)
        assert database.record(name) is None
    assert caplog.messages == [f"the kernel database {database.path} can't be written: database or disk is full"]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # the header is sound, the tables are not
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("is_found_on_opening", [True, False])
def test_damage_that_can_not_be_moved_aside_gives_a_database_in_memory(tmp_path, caplog, is_found_on_opening):
    first = Database(tmp_path, "here")
    for i in range(200):
        first.put_record(f"a{i}", KNOWN)
    first.close()
    damage(first.path)
    if is_found_on_opening:
        first.path.write_bytes(b"this is no database" * 100)
    (first.path.with_suffix(".damaged") / "in the way").mkdir(parents=True)
    database = Database(tmp_path, "here")
    database.put_record("b", KNOWN)
    assert database.record("b") == KNOWN
    database.close()
    (message,) = caplog.messages
    assert message.endswith("measurements are not kept")


def test_what_another_process_has_healed_is_kept(tmp_path):
    first, second = Database(tmp_path, "here"), Database(tmp_path, "here")
    for i in range(200):
        first.put_record(f"a{i}", KNOWN)
    first._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(first.path)
    for database in (first, second):
        database._connection.execute("PRAGMA shrink_memory")  # it reads the file anew
        assert database.record("a7") is None
        database.put_record("new", KNOWN)
    first.put_record("newer", KNOWN)
    again = Database(tmp_path, "here")
    assert again.record("new") == again.record("newer") == second.record("newer") == KNOWN
    for database in (first, second, again):
        database.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"herekey25", b"herekey99"),  # rows in another order
        (b"candidate TEXT NOT NULL, record TEXT", b"candidate TEXT NOT NULL, recard TEXT"),
        (b"records (", b"records \xe5"),  # no UTF-8, which SQLite quotes
    ],
)
def test_what_is_damaged_within_is_moved_aside(tmp_path, old, new):
    database = Database(tmp_path, "here")
    for i in range(10, 40):
        database.put_record(f"key{i}", KNOWN)
    database.close()
    data = database.path.read_bytes()
    assert old in data
    database.path.write_bytes(data.replace(old, new))
    healed = Database(tmp_path, "here")
    healed.put_record("new", KNOWN)
    assert database.path.with_suffix(".damaged").exists()
    assert healed.record("new") == KNOWN
    healed.close()


def test_a_lock_costs_a_search_little_even_if_it_stays(database, caplog):
    """What is waited for is told by SQLite's own settings: a test must not look at the clock."""

    def timeout_ms():
        return database._connection.execute("PRAGMA busy_timeout").fetchone()[0]

    assert timeout_ms() <= 1000
    assert timeout_ms() / 1000 + SWITCH_SECONDS < 2
    database._connection.execute("PRAGMA journal_mode = DELETE")
    other = sqlite3.connect(database.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    database.put_record("a", KNOWN)
    assert timeout_ms() == LATER_MS
    another = Database(database.path.parent, "here")
    another.put_record("b", KNOWN)
    assert another.record("b") == KNOWN  # in memory
    assert [text.split("(")[0] for text in caplog.messages] == [
        f"the kernel database {database.path} can't be written: another process holds it ",
        f"the kernel database {database.path} can't be opened ",
    ]
    another.close()
    other.close()
