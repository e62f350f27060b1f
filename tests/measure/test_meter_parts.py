"""Parts of the meter: timing in a separate process, the database, the compile cache, the calibration."""

import logging
import multiprocessing
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from korch.costs.rates import Calibration, MemoryLevel, Work
from korch.errors import CompileError
from korch.measure import database as database_module
from korch.measure.compiler import Builder, CompileFailure, usable_folder
from korch.measure.database import SCHEMA_VERSION, Database
from korch.measure.record import Failed, Measured, from_text, summarize, to_text
from korch.measure.timer import BufferSpec, Job, Setup, time_kernels
from korch.system.native import Code
from korch.tile.llvm.print import MARK
from tests.support.c_code import llvm_of

RUN = "int NAME_run(void *state, void *const *b) {"
FINE = RUN + " ((float *)b[1])[0] = ((float *)b[0])[0]; return 0; }\n"
KERNELS = {
    name: llvm_of(text.replace("NAME", name))
    for name, text in {
        "fine": FINE,
        "segfault": RUN + " *(volatile int *)8 = 1; return 0; }\n",
        "forever": RUN + " for (volatile int i = 0;; ++i); }\n",
        "refuses": RUN + " return 7; }\n",
        "later": FINE,
        "unmade": "void *NAME_create(int threads, char *e, unsigned long n)\n"
        '{ __builtin_memcpy(e, "no such thing", 14); return 0; }\n'
        + RUN
        + " return 0; }\nvoid NAME_destroy(void *state) {}\n",
    }.items()
}
BUFFERS = (BufferSpec(64, "f32"), BufferSpec(64, "f32"), BufferSpec(64, "u8"))


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder("generic", tmp_path_factory.mktemp("cache"))


def test_what_goes_wrong_in_a_kernel_stays_there(builder: Builder) -> None:
    objects = [path for path in builder.compile(list(KERNELS.values())) if isinstance(path, Path)]
    jobs = [Job(name, name == "unmade", BUFFERS) for name in KERNELS]
    found = dict(zip(KERNELS, time_kernels(jobs, Setup(objects, hang_seconds=2.0)), strict=True))
    assert isinstance(found["fine"], Measured) and isinstance(found["later"], Measured)
    assert found["segfault"] == Failed("crashed", "the process ended by SIGSEGV")
    assert found["forever"] == Failed("hung", "it did not return within 2 s")
    assert found["refuses"] == Failed("failed", "run returned an error")
    assert found["unmade"] == Failed("not created", "no such thing")


def test_records_keep_all_facts_apart() -> None:
    measured = summarize([50, 10, 20, 30, 40])
    assert measured.time_ns == 20 and measured.samples_ns == (50, 10, 20, 30, 40)
    for record in (measured, Failed("hung", "it did not return")):
        assert from_text(to_text(record)) == record
    for text in ("", "{}", "[1]", '{"time_ns": "x"}'):
        with pytest.raises(ValueError):
            from_text(text)


def _write(folder: str, first: int) -> None:
    # On a busy machine an entry is left out after a short wait; here each is written.
    database_module.LOCK_SECONDS = database_module.SWITCH_SECONDS = 300
    database = Database(Path(folder), "target")
    for i in range(first, first + 40):
        database.put_record(f"c{i}", Failed("crashed", str(i)))
    database.close()


def test_two_processes_share_a_database(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_write, args=(str(tmp_path), n)) for n in (0, 40)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
        assert process.exitcode == 0
    database = Database(tmp_path, "target")
    assert all(database.record(f"c{i}") == Failed("crashed", str(i)) for i in range(80))
    assert database.record("c0") is not None and Database(tmp_path, "other").record("c0") is None
    database.close()


def test_a_damaged_database_is_moved_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"kernels-{SCHEMA_VERSION}.sqlite"
    path.write_bytes(b"this is no database, but long enough to look like a file" * 100)
    with caplog.at_level(logging.WARNING):
        database = Database(tmp_path, "target")
    assert "is damaged" in caplog.text and path.with_suffix(".damaged").exists()
    database.put_record("c", Measured(5, (5,)))
    assert database.record("c") == Measured(5, (5,))
    database.close()


def test_a_damaged_record_counts_as_not_tried(tmp_path: Path) -> None:
    database = Database(tmp_path, "target")
    database.put_record("c", Measured(5, (5,)))
    connection = sqlite3.connect(database.path)
    with connection:
        connection.execute("UPDATE records SET record = '{'")
    connection.close()
    assert database.record("c") is None
    database.close()


def test_a_database_that_cannot_be_written_is_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        database = Database(tmp_path / "file" / "folder", "target")
    assert "measurements are not kept" in caplog.text
    database.put_fact("a", "b")
    assert database.fact("a") == "b"
    database.close()


def test_a_refused_source_blames_only_itself(builder: Builder) -> None:
    good, bad = builder.compile([KERNELS["fine"], f"{MARK}generic\nthis is nothing"])
    assert isinstance(good, Path)
    assert isinstance(bad, CompileFailure) and "error" in bad.message
    with pytest.raises(CompileError, match="the compiler refused a source"):
        builder.objects([f"{MARK}generic\nnor is this"])


def test_damaged_cache_entries_are_built_again(builder: Builder) -> None:
    (found,) = builder.compile([KERNELS["fine"]])
    assert isinstance(found, Path)
    found.write_bytes(found.read_bytes()[:100])
    assert Code(builder.objects([KERNELS["fine"]])).address("fine_run")


def test_a_folder_that_cannot_be_written_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        folder = usable_folder(tmp_path / "file" / "cache")
    assert "can't be written" in caplog.text and os.access(folder, os.W_OK)
    assert usable_folder(tmp_path / "good") == tmp_path / "good"


CALIBRATION = Calibration((MemoryLevel(1000, 4e9, 2e9), MemoryLevel(0, 1e9, 1e9)), 1e9, 10.0, 100.0)


def test_bounds_are_what_the_rates_say() -> None:
    assert CALIBRATION.bound_ns(Work(400, 0, 0)) == 110
    assert CALIBRATION.bound_ns(Work(0, 400, 0)) == 210
    assert CALIBRATION.bound_ns(Work(4000, 0, 0)) == 4010
    assert CALIBRATION.bound_ns(Work(1, 1, 1_000_000)) == 1_000_010
    assert CALIBRATION.bound_ns(Work(1, 1, 1_000_000, pairs=6)) == 1_000_010
    with_units = replace(CALIBRATION, split_flop_per_s=4e9)
    assert with_units.bound_ns(Work(1, 1, 1_000_000)) == 1_000_010
    assert with_units.bound_ns(Work(1, 1, 1_000_000, pairs=6)) == 250_010
    assert with_units.bound_ns(Work(1, 1, 12_000_000, pairs=0.5)) == 250_010  # bytes
    assert with_units.raised(Work(1, 1, 10**6, pairs=6), 1e-5).rate_flop_per_s == 1e9


@pytest.mark.parametrize("work", [(400, 0, 0), (0, 400, 0), (300, 300, 0), (9, 9, 500), (0, 0, 0)])
def test_a_corrected_calibration_allows_what_was_measured(work: tuple[int, int, int]) -> None:
    own, far = Work(*work), Work(5000, 0, 0)
    time_ns = max(2, CALIBRATION.bound_ns(own) // 3)
    corrected = CALIBRATION.raised(own, time_ns * 1e-9)
    assert corrected.bound_ns(own) <= time_ns
    assert corrected.bound_ns(far) == CALIBRATION.bound_ns(far) or work == (0, 0, 0)
    assert Calibration.from_text(corrected.to_text()) == corrected
