"""The comparison of kernels: what its file of results keeps."""

import json

from benchmarks import kernels


def row(key: str, table: str, korch_us: float) -> kernels.Row:
    return {"key": key, "table": table, "what": "", "korch_us": korch_us, "onednn_us": 2.0}


def test_rows_of_tables_that_are_not_measured_stay(tmp_path, monkeypatch):
    asked = []

    def measure(name, cache, tables):
        asked.append((name, tuple(tables)))
        return [row("c", "pair", 1.0)]

    monkeypatch.setattr(kernels, "measure", measure)
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"rows": [row("a", "product", 1.0), row("b", "pair", 3.0)]}))
    arguments = ["kernels", "--models", "candy", "--tables", "pair", "--output", str(path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert kernels.main() == 0
    assert asked == [("candy", ("pair",))]
    found = {row["key"]: row["korch_us"] for row in json.loads(path.read_text())["rows"]}
    assert found == {"a": 1.0, "c": 1.0}
    path.unlink()
    assert kernels.main() == 0
    assert [row["key"] for row in json.loads(path.read_text())["rows"]] == ["c"]
