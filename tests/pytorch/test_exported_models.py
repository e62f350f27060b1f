"""Benchmark models that PyTorch's exporters write: every form computes the same function."""

import numpy as np
import onnxruntime
import pytest

from benchmarks.models.exported import FORMS, build_vision, export_model
from korch.errors import OptionError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize("form", [form for form in FORMS if not form.endswith("-slim")])
def test_an_exported_model_is_the_module(form: str) -> None:
    model = export_model(f"mobilenetv2:{form}", size=32, classes=10)
    module, inputs = build_vision("mobilenetv2", size=32, classes=10)
    (node,) = model.graph.input
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (found,) = session.run(None, {node.name: inputs[node.name].numpy()})
    with torch.no_grad():
        expected = module(**inputs).logits.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_unknown_models_and_forms_are_refused() -> None:
    with pytest.raises(OptionError, match="there is no exported form 'slim'; expected script, "):
        export_model("mobilenetv2:slim")
    with pytest.raises(OptionError, match="there is no model 'mobilenet' to export; expected segf"):
        export_model("mobilenet:dynamo")
