"""BERT, GPT-2, ViT and Llama blocks that are built from configurations: equal to PyTorch."""

import warnings
from typing import Any

import pytest
import torch

import korch
from benchmarks.models.transformers import TRANSFORMERS, build_transformer, export_transformer
from korch.errors import OptionError
from korch.frontend.onnx import load_model
from korch.torch_backend import KorchFallbackWarning

pytestmark = pytest.mark.filterwarnings("default")
CLOSE = {"rtol": 1e-3, "atol": 1e-4}


def test_there_are_four() -> None:
    assert list(TRANSFORMERS) == ["bert", "gpt2", "vit", "llama"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_optimized(name: str, quick: dict[str, Any]) -> None:
    module, inputs = TRANSFORMERS[name].build_tiny()
    with torch.no_grad():
        expected = module(**inputs)
    result = korch.optimize(module, inputs, **quick)(**inputs)
    assert type(result) is type(expected)
    torch.testing.assert_close(dict(result), dict(expected), **CLOSE)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformer_compiled(name: str, quick: dict[str, Any]) -> None:
    module, inputs = TRANSFORMERS[name].build_tiny()
    compiled = torch.compile(module, backend="korch", options=quick)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", KorchFallbackWarning)
        torch.testing.assert_close(dict(compiled(**inputs)), dict(module(**inputs)), **CLOSE)


def test_a_real_block_is_read() -> None:
    graph = load_model(export_transformer("llama", layers=1, hidden=512, wide=1024, sequence=32))
    assert len(graph.operators) > 20
    with pytest.raises(OptionError, match="there is no transformer 'nobody'; expected bert, gpt2"):
        build_transformer("nobody")
