"""The PyTorch calls of the CUDA target, run on the CPU: their results are those of the primitives."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch

from korch.candidate.candidate import Refusal, make_group
from korch.cuda.flags import library_flags, switches
from korch.cuda.kernel import TorchCall
from korch.cuda.layout import strided
from korch.cuda.target import NOMINAL
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.primitive import reference
from korch.provider.torch_library import TorchProvider
from korch.provider.torch_opaque import TorchOpaqueProvider
from korch.testing.samples import random_arrays
from korch.testing.tolerance import assert_same
from tests.cuda.cuda_groups import IN_LIBRARY, PRODUCTS
from tests.support.models import chain


def check(provider: Any, group: Any) -> int:
    """Compare each offer's call with the reference; return how many there are."""
    rng = np.random.default_rng(0)
    offers = provider.offer(group, NOMINAL[90])
    assert not isinstance(offers, Refusal), offers
    for offer in offers:
        kernel = provider.build(group, offer, NOMINAL[90])
        (call,) = kernel.steps
        assert isinstance(call, TorchCall)
        arrays = random_arrays(rng, group.input_types)
        names: dict[str, Any] = {}
        exec(call.source, names)
        tensors = [
            strided(torch.from_numpy(layout.pack(a).reshape(-1)), a.shape, layout)
            for a, layout in zip(arrays, offer.inputs, strict=True)
        ]
        found = names[call.symbol](torch, *tensors)
        feeds = {name: a for (name, _), a in zip(group.body.inputs, arrays, strict=True)}
        expected = reference.run(group.body, feeds)
        for (name, _), tensor, layout in zip(group.body.outputs, found, offer.outputs, strict=True):
            form = torch.contiguous_format if layout.is_plain else torch.channels_last
            assert tensor.is_contiguous(memory_format=form)
            assert_same(tensor.numpy(), expected[name], terms=1000, name=name)
    return len(offers)


@pytest.mark.parametrize("name", sorted(IN_LIBRARY - {"bfloat16"}))
def test_the_library(name):
    group = PRODUCTS[name]()
    if "half" in name or "float16" in name:
        pytest.skip("PyTorch rounds sums of float16 otherwise on a CPU")
    assert check(TorchProvider(), group) >= 1


def opaque(op: str, inputs: dict[str, Any], constants: dict[str, Any], outputs: int = 1, **more):
    """Return the group of one operator."""
    results = [f"y{i}" for i in range(outputs)]
    nodes = [onnx.helper.make_node(op, [*inputs, *constants], results, **more)]
    model = chain(nodes, {n: (onnx.TensorProto.FLOAT, s) for n, s in inputs.items()}, results, constants, 20)
    found = fission(load_model(onnx.shape_inference.infer_shapes(model).SerializeToString()))
    return make_group(found, range(len(found.primitives)), [v for _, v in found.outputs])


@pytest.mark.parametrize(
    "group",
    [
        opaque("TopK", {"x": (4, 9)}, {"k": np.array([3])}, 2, axis=1),
        opaque("TopK", {"x": (4, 9)}, {"k": np.array([2])}, 2, axis=0, largest=0),
        opaque("GridSample", {"x": (1, 2, 5, 6), "g": (1, 3, 4, 2)}, {}, align_corners=1),
        opaque("Hardmax", {"x": (3, 7)}, {}),
        opaque("Det", {"x": (2, 3, 3)}, {}),
    ],
    ids=["topk", "smallest", "grid", "hardmax", "det"],
)
def test_opaque_operators(group):
    assert check(TorchOpaqueProvider(), group) == 1


def test_what_is_not_in_the_table_is_refused():
    group = opaque("LpPool", {"x": (1, 2, 4, 4)}, {}, kernel_shape=[2, 2], p=3)
    found = TorchOpaqueProvider().offer(group, NOMINAL[90])
    assert isinstance(found, Refusal) and "LpPool" in found.reason


def test_switches_of_pytorch_are_put_back():
    def state():
        return [getattr(holder, name) for holder, name, _ in switches(torch, True)]

    before = state()
    with library_flags(torch, False):
        libraries = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
        assert [library.fp32_precision for library in libraries] == ["ieee"] * 3
    with library_flags(torch, True):
        assert state() == [value for _, _, value in switches(torch, True)]
        with library_flags(torch, False):
            assert state() == [value for _, _, value in switches(torch, False)]
    assert state() == before
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(ZeroDivisionError), library_flags(torch, True):
        raise ZeroDivisionError
    assert state()[:3] == before[:3] and isinstance(torch.backends.cuda.matmul.allow_tf32, bool)
