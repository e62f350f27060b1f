"""The benchmark of blocks of experts: all forms of a block compute the same, and the form that counts."""

import numpy as np
import onnx
import pytest

from benchmarks import experts
from benchmarks.models.experts import BLOCKS, FORMS, Block, onnx_of, tokens_of
from korch.fission import fission
from korch.frontend import load_model

pytest.importorskip("transformers", reason="transformers is not installed")
SMALL = {"mixtral": Block(32, 48, 8, 2), "qwen": Block(32, 24, 12, 4, 40)}


@pytest.mark.parametrize("name", SMALL)
def test_all_forms_mean_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BLOCKS, name, SMALL[name])
    x = tokens_of(name, 5)
    models = {form: onnx_of(name, 5, form) for form in FORMS}
    assert [form for form, model in models.items() if model is None] == (["operator"] if name == "qwen" else [])
    found = {
        form: onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})[0]
        for form, model in models.items()
        if model is not None and form != "operator"
    }
    for result in found.values():
        np.testing.assert_allclose(result, found["dense"], rtol=1e-4, atol=1e-5)
    gathered = fission(load_model(models["gather"]))
    assert [p.op for p in gathered.primitives].count("matmul_gathered") == 2


def test_the_fastest_form_that_is_right_counts() -> None:
    rows = [
        {"name": name, "median_ms": ms, "times_ns": [ms * 1e6] * 3, "max_error": error}
        for name, ms, error in (
            ("korch", 2.0, 0.0),
            ("onnxruntime loop", 3.0, 1e-6),
            ("onnxruntime dense", 4.0, 1e-6),
            ("onnxruntime operator", 1.0, 0.5),
        )
    ]
    found = experts.best_of({"comparison": {"rows": rows}}, "onnxruntime")
    assert found is not None and found[0] == "loop" and found[1].tolist() == [1.5] * 3
    assert experts.best_of({"comparison": {"rows": rows}}, "openvino") is None
