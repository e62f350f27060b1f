"""Mixtures of experts of the transformers library: equal to PyTorch, in whatever form the library computes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import korch

mixtral = pytest.importorskip("transformers.models.mixtral", reason="transformers is not installed")
qwen2_moe = pytest.importorskip("transformers.models.qwen2_moe", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("default")


def block(name: str, form: str) -> Any:
    torch.manual_seed(0)
    if name == "mixtral":
        config = mixtral.MixtralConfig(hidden_size=32, intermediate_size=48, num_local_experts=8, num_experts_per_tok=2)
        module = mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)
    else:
        config = qwen2_moe.Qwen2MoeConfig(
            hidden_size=32,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=40,
            num_experts=12,
            num_experts_per_tok=4,
        )
        module = qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock(config)
    config._experts_implementation = form
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module.eval()


@pytest.mark.parametrize("form", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("name", "tokens"), [("mixtral", 1), ("mixtral", 9), ("qwen", 5)])
def test_a_mixture_of_experts(name: str, tokens: int, form: str, quick: dict[str, Any]) -> None:
    module, x = block(name, form), torch.randn(1, tokens, 32)
    with torch.no_grad():
        expected = module(x)
    executable = korch.optimize(module, (x,), **quick)
    torch.testing.assert_close(executable(x), expected, rtol=1e-4, atol=1e-5)
    assert "sort_rows" in "".join(executable.sources.values())
    assert module.experts.config._experts_implementation == form
