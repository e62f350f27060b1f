"""The comparison of kernels: which rows its file of results keeps."""

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
    found = {row["key"]: row["korch_us"] for row in json.loads(path.read_text("utf-8"))["rows"]}
    assert found == {"a": 1.0, "c": 1.0}
    path.unlink()
    assert kernels.main() == 0
    assert [row["key"] for row in json.loads(path.read_text("utf-8"))["rows"]] == ["c"]


def test_a_pointwise_convolution_is_the_product_that_computes_the_same() -> None:
    pointwise = {**row("a", "convolution", 9.0), "what": "f32[1,64,4,5] f32[3,64,1,1] -> f32[1,3,4,5]"}
    strided = {**row("b", "convolution", 9.0), "what": "f32[1,64,8,10] f32[3,64,1,1] -> f32[1,3,4,5]"}
    product = {**row("c", "product", 6.0), "what": "f32[3,64] f32[64,20] -> f32[3,20]"}
    product["onednn_us"] = 2 * pointwise["onednn_us"]
    expected = {**pointwise, "korch_us": 6.0}
    rows = [pointwise, dict(strided), dict(product)]
    kernels.join_products(rows)
    assert rows == [expected, strided, product]
