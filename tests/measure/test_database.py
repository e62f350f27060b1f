"""The kernel database returns what was stored, recovers from damage, and works if its folder is read-only."""

import sqlite3
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from korch.measure.database import SCHEMA_VERSION, Database, sealed
from korch.measure.record import Failed, Measured, confirmed, from_text, summarize, to_text

SLOW = Measured(1200, (1200, 1300, 1500))
BROKEN = Failed("crashed", "the process ended by SIGSEGV")

numbers = st.integers(1, 1 << 50)
RECORDS = st.one_of(
    st.builds(Measured, numbers, st.lists(numbers, max_size=5).map(tuple)),
    st.builds(
        Failed, st.sampled_from(("refused", "not compiled", "not created", "failed", "crashed", "hung")), st.text()
    ),
)


@pytest.fixture
def database(tmp_path):
    opened = Database(tmp_path, "here")
    yield opened
    opened.close()


@given(RECORDS)
def test_the_text_of_a_record_comes_back(record):
    text = to_text(record)
    assert from_text(text) == record
    assert "\n" not in text


@pytest.mark.parametrize(
    "text", ["", "nothing", "[]", "3", "{}", '{"kind": "hung"}', '{"time_ns": 3}', '{"time_ns": "x", "samples_ns": []}']
)
def test_what_is_no_record_is_refused(text):
    with pytest.raises(ValueError):
        from_text(text)


def test_a_summary_is_a_low_quantile__of_the_samples():
    found = summarize([100, 110, 120, 130, 900])
    assert found == Measured(110, (100, 110, 120, 130, 900))
    assert summarize([0]).time_ns == 1


def test_of_two_measurements_the_longer_counts_and_a_failure_more():
    quick = Measured(1000, (1000,))
    for first, again in ((quick, SLOW), (SLOW, quick)):
        assert confirmed(first, again) == replace(SLOW, is_confirmed=True)
    assert confirmed(quick, BROKEN) == BROKEN
    assert confirmed(quick, Failed("killed", "")) == replace(quick, is_confirmed=True)


def test_what_is_put_comes_back_also_after_reopening(database, tmp_path):
    assert database.record("a") is None
    assert database.fact("calibration") is None
    database.put_record("a", BROKEN)
    database.put_record("a", SLOW)
    database.put_record("b", BROKEN)
    database.put_fact("calibration", "text")
    assert (database.record("a"), database.record("b")) == (SLOW, BROKEN)
    database.close()
    again = Database(tmp_path, "here")
    assert (again.record("a"), again.fact("calibration")) == (SLOW, "text")
    again.close()
    database._connection = again._open()


def test_targets_do_not_see_each_other(database, tmp_path):
    database.put_record("a", SLOW)
    database.put_fact("calibration", "text")
    other = Database(tmp_path, "there")
    assert other.record("a") is None
    assert other.fact("calibration") is None
    other.close()


WRITER = """
import sys
from pathlib import Path
from korch.measure.database import SCHEMA_VERSION, Database, sealed
from korch.measure.record import Measured
database = Database(Path(sys.argv[1]), "here")
for i in range(100):
    database.put_record(f"{sys.argv[2]}{i}", Measured(i + 1, (i,)))
    assert database.record(f"{sys.argv[2]}{i}") is not None
database.close()
"""


def test_two_processes_write_at_once(database, tmp_path):
    command = [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in "xy"]
    for writer in writers:
        _, text = writer.communicate(timeout=600)
        assert (writer.returncode, text) == (0, "")
    for name in "xy":
        assert all(database.record(f"{name}{i}") == Measured(i + 1, (i,)) for i in range(100))


def test_a_damaged_file_is_moved_aside(tmp_path, caplog):
    path = tmp_path / f"kernels-{SCHEMA_VERSION}.sqlite"
    path.write_bytes(b"this is no database" * 100)
    database = Database(tmp_path, "here")
    database.put_record("a", SLOW)
    assert database.record("a") == SLOW
    database.close()
    assert path.with_suffix(".damaged").read_bytes().startswith(b"this is no database")
    assert caplog.messages == [
        "the kernel database is damaged (file is not a database); it is moved to "
        f"{path.with_suffix('.damaged')} and a new one is created"
    ]


@pytest.mark.parametrize("is_write", [False, True])
def test_damage_while_it_is_open_is_healed(tmp_path, is_write):
    database = Database(tmp_path, "here")
    for i in range(200):
        database.put_record(f"a{i}", SLOW)
    database.close()
    path = tmp_path / f"kernels-{SCHEMA_VERSION}.sqlite"
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # the header is sound, the tables are not
    path.write_bytes(bytes(data))
    database = Database(tmp_path, "here")
    if is_write:
        database.put_record("b", SLOW)
    else:
        assert database.record("a7") is None
        database.put_record("b", SLOW)
    assert database.record("b") == SLOW
    database.close()
    assert path.with_suffix(".damaged").exists()


def test_a_damaged_record_is_measured_again(database, caplog):
    with database._connection as connection:
        text = sealed("here", "a", '{"time_ns": ')
        connection.execute("INSERT INTO records VALUES ('here', 'a', ?, 0)", (text,))
    assert database.record("a") is None
    assert caplog.messages == ["the record of candidate a is damaged; it is measured again"]


def test_a_folder_that_can_not_be_written_gives_a_database_in_memory(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    database = Database(blocked / "folder", "here")
    database.put_record("a", SLOW)
    assert database.record("a") == SLOW
    database.close()
    (message,) = caplog.messages
    assert "can't be opened" in message
    assert message.endswith("measurements are not kept")


def test_a_file_that_can_only_be_read_is_read(database, caplog):
    database.put_record("a", SLOW)
    database._connection.execute("PRAGMA query_only = ON")
    database.put_record("b", SLOW)
    assert database.record("a") == SLOW
    assert database.record("b") is None
    (message,) = caplog.messages
    assert message == (f"the kernel database {database.path} can't be written: attempt to write a readonly database")


def test_a_row_that_was_changed_behind_its_checksum_is_not_believed(tmp_path):
    database = Database(tmp_path, "target")
    database.put_record("key", Measured(1000, (1000,)))
    database.put_fact("name", "value")
    with sqlite3.connect(database.path) as connection:
        connection.execute("UPDATE records SET record = replace(record, '1000', '1001')")
        connection.execute("UPDATE facts SET value = replace(value, 'value', 'other')")
    assert database.record("key") is None
    assert database.fact("name") is None
    database.put_fact("name", "value")
    assert database.fact("name") == "value"
    database.close()
