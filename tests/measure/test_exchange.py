"""The kernel database as files: export, import, merge, stats and prune."""

import gzip
import json
from contextlib import closing
from pathlib import Path

import pytest

from korch.cli import main
from korch.measure.compiler import target_of
from korch.measure.database import Database
from korch.measure.exchange import export_to, import_from, prune, stats
from korch.measure.record import Failed, Measured
from korch.options import Options
from korch.records import plain


def filled(folder: Path, names: str, target: str = "here", time_ns: int = 5) -> Path:
    with closing(Database(folder, target, fields=json.dumps({"cpu": target, "isa": "avx2"}))) as database:
        for name in names:
            database.put_record(name, Measured(time_ns, (time_ns,)))
        database.put_fact("plan", "p")
    return folder


def test_records_travel_and_known_ones_stay(tmp_path: Path) -> None:
    first, second = filled(tmp_path / "a", "xy"), filled(tmp_path / "b", "yz", time_ns=9)
    with closing(Database(first, "here")) as database:
        database.put_record("w", Failed("crashed", "\u00e4"))
    assert export_to(first, tmp_path / "a.gz") == 5  # a target, three records and a fact
    assert import_from(second, [tmp_path / "a.gz"]) == (2, 5)
    with closing(Database(second, "here")) as database:
        assert [database.record(name) for name in "wxyz"] == [
            Failed("crashed", "\u00e4"),
            Measured(5, (5,)),
            Measured(9, (9,)),
            Measured(9, (9,)),
        ]
        assert Database(second, "there").record("x") is None
    assert import_from(second, [tmp_path / "a.gz"]) == (0, 5)


def test_two_exports_of_one_database_are_equal(tmp_path: Path) -> None:
    folder = filled(tmp_path / "a", "xy")
    for name in ("one", "two"):
        export_to(folder, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("damage", ["text", "schema", "record", "cut", "missing", "row", "kind"])
def test_of_a_damaged_file_nothing_is_imported(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "a.gz", tmp_path / "b"
    export_to(filled(tmp_path / "a", "xy"), path)
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    match damage:
        case "text":
            path.write_text("no file of ours")
        case "schema":
            lines[0] = lines[0].replace('"schema":', '"schema":9')
        case "kind":
            lines[0] = "[]"
        case "record":
            lines[-2] = lines[-2].replace("5", "4")
        case "row":
            lines[-1] = '["secrets", "x"]'
        case "missing":
            path.unlink()
    if damage in ("schema", "record", "row", "kind"):
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-20])
    good = tmp_path / "good.gz"
    export_to(filled(tmp_path / "c", "z"), good)
    assert main(["database", "import", str(good), str(path), "--cache-folder", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"korch: {path}: it can't be imported") and error.count("\n") == 1
    assert stats(folder) == []


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    export_to(filled(tmp_path / "a", "xy"), tmp_path / "a.gz")
    text = gzip.decompress((tmp_path / "a.gz").read_bytes())
    (tmp_path / "a.jsonl").write_bytes(text[:-5])
    assert import_from(tmp_path / "b", [tmp_path / "a.jsonl"]) == (3, 3)
    assert import_from(tmp_path / "b", [tmp_path / "a.gz"]) == (1, 4)


def test_stats_name_the_fields_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = plain(target_of(Options()))
    for cpu, names in ((here["cpu"], "xy"), ("another", "z")):
        with closing(Database(tmp_path, cpu, fields=json.dumps({**here, "cpu": cpu}))) as database:
            for name in names:
                database.put_record(name, Measured(5, (5,)))
    assert main(["database", "stats", "--cache-folder", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"cpu: {here['cpu']!r} here, 'another' there" in text
    assert "used here" in text and text.endswith("3 records\n")
    assert main(["database", "stats", "--json", "--cache-folder", str(tmp_path)]) == 0
    assert sum(row["records"] for row in json.loads(capsys.readouterr().out)) == 3


def test_files_are_merged(tmp_path: Path) -> None:
    for name, records in (("a", "xy"), ("b", "yz")):
        export_to(filled(tmp_path / name, records), tmp_path / f"{name}.gz")
    merged = tmp_path / "c.gz"
    assert main(["database", "merge", str(tmp_path / "a.gz"), str(tmp_path / "b.gz"), "-o", str(merged)]) == 0
    assert import_from(tmp_path / "c", [merged]) == (5, 5)
    assert [one.records for one in stats(tmp_path / "c")] == [3]


def test_old_records_are_removed(tmp_path: Path) -> None:
    folder = filled(tmp_path, "xyz")
    assert prune(folder, 1.0, None) == prune(folder, 1e30, None) == 0
    assert prune(folder, None, 1 << 30) == 0
    with closing(Database(folder, "")) as database:
        database.add([("records", "here", "old", "0 {}", 1000)])
    assert prune(folder, 1.0, None) == 1
    assert prune(folder, None, 0) == 4
    assert stats(folder) == []


@pytest.mark.parametrize("arguments", [["--days", "0"], ["--megabytes", "0"]])
def test_a_database_that_is_locked_is_not_pruned(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Database(filled(tmp_path, "xyz"), "")) as database:
        database.add([("records", "here", "old", "0 {}", 1000)])
        database._connection.execute("BEGIN IMMEDIATE")
        assert main(["database", "prune", *arguments, "--cache-folder", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 entries were removed\n"
    (message,) = caplog.messages
    assert message.endswith("can't be written: another process holds it (database is locked)")


@pytest.mark.parametrize("arguments", [[], ["--days", "-1"], ["--megabytes", "nan"]])
def test_prune_needs_a_limit(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["database", "prune", *arguments, "--cache-folder", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
