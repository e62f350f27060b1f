"""The least budget of a module, estimated before it is exported."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import korch
from korch.errors import ModelError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.frontend.torch import export_module
from korch.frontend.torch.graph import BoundGraph
from korch.options import Options
from korch.pipeline.least import work_of
from korch.pytorch.least import announce_call, work_of_call
from korch.system.deadline import Deadline


class _WritesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(3))
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.state.add_(x)
        self.calls += 1
        return self.state * 2


MODULES = {
    "layers": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(4, 64)),
    "images": (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)),
        torch.randn(1, 3, 16, 16),
    ),
    "attention": (nn.TransformerEncoderLayer(32, 4, batch_first=True), torch.randn(1, 10, 32)),
}


@pytest.mark.parametrize("name", MODULES)
def test_the_work_of_a_call_is_about_that_of_the_exported_module(name: str) -> None:
    module, x = MODULES[name]
    early = work_of_call(module.eval(), (x,), {})
    assert early is not None
    late = work_of(fission(load_model(export_module(module, (x,)).model)))
    assert early.flop == pytest.approx(late.flop, rel=0.2)
    assert 0.7 * late.kernels < early.kernels < 3 * late.kernels
    assert 0.7 * late.primitives < early.primitives < 3 * late.primitives
    assert early.read_s > 0 == late.read_s


def test_equal_layers_are_compiled_once() -> None:
    one, two = (work_of_call(nn.Sequential(*[nn.Linear(4, 4)] * n), (torch.randn(2, 4),), {}) for n in (1, 2))
    assert one is not None and two is not None
    assert one.kernels == two.kernels and 2 * one.primitives == two.primitives and 2 * one.flop == two.flop


def test_shapes_of_a_graph_are_computed_without_writes() -> None:
    module, x = _WritesState(), torch.ones(3)
    graph = BoundGraph(torch.fx.symbolic_trace(module), {}, {}, {})
    assert work_of_call(graph, (x,), {}) is not None
    assert torch.equal(module.state, torch.zeros(3)) and torch.equal(x, torch.ones(3))


def test_a_module_in_training_mode_is_refused_before_it_is_run() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4)).train()
    with pytest.raises(ModelError, match="training mode"):
        korch.optimize(module, torch.randn(3, 4), budget=1)
    assert int(module[0].num_batches_tracked) == 0


def test_a_module_whose_call_fails_has_no_estimate() -> None:
    assert work_of_call(nn.Linear(4, 4), (torch.randn(2, 5),), {}) is None


def test_the_least_is_announced_before_an_export(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = Options(budget_s=0.1, cache_folder=tmp_path)
    deadline = Deadline.after(0.1, 0.0)
    with caplog.at_level(logging.WARNING):
        announce_call(nn.Linear(4, 4), (torch.randn(2, 4),), {}, (), options, deadline)
    assert "the budget of 0.1 s is too short: the least is about" in caplog.text
    assert deadline.whole.least_s
