"""Mixtures of experts of the transformers library: equal to PyTorch for each implementation of experts."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import korch
from korch.fission import fission
from korch.frontend import load_model
from korch.primitive.reference import run
from korch.torch_backend import KorchFallbackWarning, KorchShapesWarning

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
    assert any(step.provider == "gemm" and "matmul_gathered" in step.primitives for step in executable.plan.steps)
    assert module.experts.config._experts_implementation == form


def test_a_compiled_mixture_of_experts_for_all_numbers_of_tokens(quick: dict[str, Any]) -> None:
    """The library's own operator is traced by torch.compile."""
    module = block("mixtral", "grouped_mm")
    compiled = torch.compile(module, backend="korch", options={**quick, "max_size": 4}, dynamic=True)
    for tokens in (4, 2):
        x = torch.randn(1, tokens, 32)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", KorchFallbackWarning)
            warnings.simplefilter("error", KorchShapesWarning)
            torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-5)


class Loop(torch.nn.Module):
    """The loop over all experts of earlier versions of the library, which can be exported to ONNX."""

    def __init__(self, width: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, experts, bias=False)
        self.up = torch.nn.ModuleList(torch.nn.Linear(width, 2 * inner, bias=False) for _ in range(experts))
        self.down = torch.nn.ModuleList(torch.nn.Linear(inner, width, bias=False) for _ in range(experts))
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        shares, numbers = torch.topk(self.gate(rows).softmax(dim=1), self.chosen, dim=-1)
        shares = shares / shares.sum(dim=-1, keepdim=True)
        result = torch.zeros_like(rows)
        mask = torch.nn.functional.one_hot(numbers, num_classes=len(self.up)).permute(2, 1, 0)
        for expert in range(len(self.up)):
            slot, token = torch.where(mask[expert])
            gate, up = self.up[expert](rows[None, token].reshape(-1, x.shape[-1])).chunk(2, dim=-1)
            own = self.down[expert](torch.nn.functional.silu(gate) * up) * shares[token, slot, None]
            result.index_add_(0, token, own)
        return result.reshape(x.shape)


@pytest.mark.parametrize("by_dynamo", [True, False])
def test_an_exported_loop_over_experts(by_dynamo: bool, tmp_path: Path) -> None:
    """As both exporters of `torch.onnx` write it out: without `NonZero`, and with two products for all experts."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    torch.manual_seed(1)
    module, x = Loop(16, 24, 5, 2).eval(), torch.randn(1, 7, 16)
    torch.onnx.export(module, (x,), tmp_path / "loop.onnx", dynamo=by_dynamo, opset_version=18)
    model = onnx.load(tmp_path / "loop.onnx")
    assert sum(node.op_type == "NonZero" for node in model.graph.node) == 5
    graph = fission(load_model(model))
    assert [p.op for p in graph.primitives].count("matmul_gathered") == 2
    (found,) = run(graph, {graph.inputs[0][0]: x.numpy()}, exact=False).values()
    with torch.no_grad():
        np.testing.assert_allclose(found, module(x).numpy(), rtol=1e-5, atol=1e-6)
