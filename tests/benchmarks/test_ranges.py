"""The benchmark of artifacts for ranges of sizes, with a small model."""

import json
from pathlib import Path

import onnx
import pytest

import korch
from benchmarks import ranges
from korch.runtime.ranged import RangedExecutable
from tests.ranges.range_models import model, weight

TEXT = """
g (float[n, 6] x) => (float[n, 6] y)
{
    a = MatMul(x, w)
    y = Softmax <axis = 0> (a)
}
"""


def test_a_range_is_compared_with_exact_plans_and_engines(tmp_path: Path, monkeypatch, cache_folder) -> None:
    pytest.importorskip("openvino")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder))
    source = onnx.load_from_string(model(TEXT, w=weight(6, 6)))
    monkeypatch.setitem(ranges.MODELS, "small", ranges.Ranged(lambda: source, {"n": range(2, 33, 2)}, (8,)))  # type: ignore
    output = tmp_path / "out.json"
    flags = ["--models", "small", "--budget", "4", "--sizes", "1", "--exact", "1", "--rounds", "1", "--pairs", "4"]
    monkeypatch.setattr("sys.argv", ["ranges", *flags, "--artifacts", str(tmp_path), "--output", str(output)])
    assert ranges.main() in (0, 1)
    found = json.loads(output.read_text("utf-8"))["models"]["small"]
    assert {2, 8, 32} < {row["size"] for row in found["sizes"]}
    assert [row["size"] for row in found["sizes"] if "exact" in row["quotients"]] == [8]
    assert found["search"].keys() == found["search_quotients"].keys() == {"seconds", "timed"}
    assert found["search"]["seconds"] > 0 and found["alone"].keys() == {"8"}
    assert found["pairs"]["count"] == len(found["pairs"]["pairs"])


def test_choices_are_judged_at_sizes_that_no_fit_has_seen(cache_folder) -> None:
    limits = korch.SearchLimits(range_least=4, range_factor=4)
    options = {"measure": False, "threads": 1, "ablation": korch.Ablation(baselines=False)}
    source, shapes = model(TEXT, w=weight(6, 6)), {"n": range(1, 33)}
    found = korch.optimize(source, shapes=shapes, search=limits, cache_folder=cache_folder, **options)
    assert isinstance(found, RangedExecutable) and len(found.executables) > 1
    judged = ranges.judge(found, 5, 1)
    seen = {s.sizes[0] for plan in found.ranges.plans for cost in plan.costs for s in cost.samples}
    assert judged["count"] >= 1 and not seen & {pair["size"] for pair in judged["pairs"]}
    assert judged["worst"] == max(pair["chosen"] for pair in judged["pairs"]) >= 1
    assert judged["within"] == sum(pair["chosen"] <= ranges.NEAR for pair in judged["pairs"]) / judged["count"]
