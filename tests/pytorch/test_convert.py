"""The translation of exported programs by PyTorch's exporter."""

from typing import Any

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from korch.frontend.torch import export_module
from korch.frontend.torch.convert import decomposed

aten = torch.ops.aten


class Decomposed(torch.nn.Module):
    """Its operator has no translation to ONNX, and must be decomposed."""

    def forward(self, x: Any) -> Any:
        return torch.special.xlog1py(x, x)


@pytest.mark.filterwarnings("ignore")
def test_what_others_export_meanwhile_is_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    export, exported = torch.onnx.export, []

    def with_another(program: Any, **options: Any) -> Any:
        exported.append(export(Decomposed().eval(), (torch.ones(3),), dynamo=True, verbose=False))
        return export(program, **options)

    monkeypatch.setattr(torch.onnx, "export", with_another)
    found = export_module(Decomposed().eval(), (torch.ones(3),))
    ours, (theirs,) = found.model.proto.graph, exported
    assert {"Log"} <= {node.op_type for node in ours.node} & {node.op_type for node in theirs.model.graph}


@pytest.mark.filterwarnings("ignore")
def test_sizes_of_one_are_not_fixed_by_decompositions() -> None:
    found = []

    def relu(x: Any) -> Any:
        found.append(torch.fx.experimental._config.backed_size_oblivious)
        return x.clamp(min=0)

    decomposed(torch.export.export(torch.nn.ReLU(), (torch.ones(3),)), {aten.relu.default: relu})
    assert found == [True]


class Zeros(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return 1 / torch.where(x > 0, -0.0, 1.0), 1 / torch.where(x > 0, 0.0, x)


class Numbers(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return 1e60 * x, x + 0.1, x.clamp(0.1, 0.7), (2**53 - 1) * x


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [Zeros(), Numbers()], ids=["zeros of both signs", "all digits of float64"])
def test_constants_are_the_numbers_of_the_module(module: Any) -> None:
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    found = ReferenceEvaluator(export_module(module.eval(), (x,)).model.proto).run(None, {"x": x.numpy()})
    for ours, theirs in zip(found, module(x), strict=True):
        np.testing.assert_array_equal(ours, theirs.numpy())
