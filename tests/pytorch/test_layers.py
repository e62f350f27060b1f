"""Layers of torch.nn with odd sizes: Korch computes the same as PyTorch."""

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import korch
from tests.pytorch.layers import LAYERS, spread

EXAMPLES = int(os.environ.get("KORCH_TORCH_EXAMPLES", "2"))


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_computes_what_it_does_in_pytorch(name: str, quick: dict[str, object]) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        torch.manual_seed(0)
        module, inputs = LAYERS[name](data.draw)
        spread(module)
        executable = korch.optimize(module, inputs, **quick)
        with torch.no_grad():
            expected = module(*inputs)
        torch.testing.assert_close(executable(*inputs), expected, rtol=1e-4, atol=1e-4)

    check()
