"""What is exported, and its executable, is compared with the module on inputs that reach its special cases."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

import korch
from korch.errors import InaccurateError, ProviderError, UnsupportedError
from korch.frontend.torch import Exported, export, export_module
from korch.frontend.torch.graph import like
from korch.frontend.torch.samples import samples
from korch.frontend.torch.ties import FirstOfEqual
from korch.options import Options
from korch.pytorch.check import check_module
from korch.pytorch.tensors import as_array
from tests.support.torch_calls import difference, exported_results


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def exported(function: Callable[..., Any], *args: Any) -> Exported:
    return export_module(Function(function).eval(), args)


def attention(q: Any, mask: Any) -> Any:
    return nnf.scaled_dot_product_attention(q, q, q, mask)


Q, LABELS = torch.linspace(-1, 2, 12).reshape(1, 1, 3, 4), torch.tensor([0, 1, 2])

FAULTS = [
    (attention, (Q, torch.ones(3, 3, dtype=torch.bool)), "with a masked row: output 'output' differs by"),
    (lambda x: nnf.avg_pool2d(x, 2, divisor_override=3), (torch.zeros(1, 1, 4, 4),), "with the example inputs"),
    (lambda x, y: nnf.cross_entropy(x, y, label_smoothing=0.1), (Q[0, 0], LABELS), "with the example inputs"),
    (lambda x: torch.atan2(x, -1 - x.abs()), (Q,), "with zeros: output 'output' differs by 2.00e+00 of its largest"),
    (lambda x: torch.sign(torch.log(x)), (Q.abs() + 1,), "with negative numbers: output 'output' has NaN"),
    (lambda x: torch.linalg.norm(x, keepdim=True), (Q[0, 0],), "with the example inputs"),
]
"""Functions that PyTorch's exporter translates wrongly, with example inputs, and what the message says."""


@pytest.mark.parametrize(("function", "args", "text"), FAULTS, ids=range(len(FAULTS)))
def test_a_wrong_translation_is_refused(
    function: Any, args: Any, text: str, monkeypatch: pytest.MonkeyPatch, quick: dict[str, object]
) -> None:
    check_module(exported(function, *args), Options())
    monkeypatch.setattr(export, "decompositions", dict)
    with pytest.raises((UnsupportedError, InaccurateError), match=re.escape(text)):  # of the graph or the executable
        korch.optimize(Function(function).eval(), args, **quick)


def orders(x: Any) -> list[Any]:
    return [
        *(*x.sort(), *x.sort(descending=True), *x.topk(5), *x.topk(4, 0, sorted=False)),
        *(*x.kthvalue(9), *x.median(-1), *x.nanmedian(0)),
    ]


def test_the_first_of_equal_elements_is_taken(quick: dict[str, object]) -> None:
    """PyTorch takes any of them, by the CPU."""
    x = torch.zeros(6, 40)
    x[:, 3], x[2, 5] = 1, torch.nan
    with FirstOfEqual():
        values, places = x[:2].topk(5)
    assert places.tolist() == [[3, 0, 1, 2, 4]] * 2
    assert values.tolist() == [[1, 0, 0, 0, 0]] * 2
    for given in (x, x.to(torch.int64)):
        check_module(exported(orders, given), Options())
    executable = korch.optimize(Function(orders).eval(), (x,), **quick)
    with FirstOfEqual():
        assert not difference(executable(x), orders(x))


def test_an_executable_that_differs_in_a_masked_row_is_refused() -> None:
    """It is right with the example inputs."""
    model = exported(attention, Q, torch.ones(3, 3, dtype=torch.bool))

    def execute(q: Any, mask: Any) -> list[Any]:
        right = as_array(attention(torch.from_numpy(q), torch.from_numpy(mask)), "y")
        return [right if mask.all() else np.where(mask.any(-1, keepdims=True), right, 0.5)]

    with pytest.raises(
        InaccurateError, match="the executable computes something else than the module with a masked row"
    ):
        check_module(model, Options(), execute)
    check_module(model, Options(), lambda q, mask: [as_array(attention(*map(torch.from_numpy, (q, mask))), "y")])


def test_inputs_that_an_executable_refuses_are_left_out() -> None:
    """PyTorch may compute something of memory outside of a tensor."""
    model, seen = exported(attention, Q, torch.ones(3, 3, dtype=torch.bool)), list[bool]()

    def execute(q: Any, mask: Any) -> list[Any]:
        seen.append(bool(mask.all()))
        if not mask.all():
            raise ProviderError("no such place")
        return [as_array(attention(torch.from_numpy(q), torch.from_numpy(mask)), "y")]

    check_module(model, Options(), execute)
    assert {True, False} == set(seen)


def test_an_executable_with_another_element_type_is_refused() -> None:
    model = exported(torch.exp, Q)
    with pytest.raises(
        InaccurateError, match=re.escape("output 'output' is float64[1, 1, 3, 4], not float32[1, 1, 3, 4]")
    ):
        check_module(model, Options(), lambda q: [np.exp(q.astype(np.float64))])


def values(function: Callable[..., Any], *args: Any) -> dict[str, list[Any]]:
    """The samples of a function by name: the last input of each as nested lists."""
    return {sample.name: sample.inputs[-1].tolist() for sample in exported(function, *args).samples(60.0)}


def test_samples_reach_masks_and_boundaries() -> None:
    table = torch.randn(5, 2)
    assert values(lambda i: table[i], torch.tensor([1, 2, 3])) == {
        "the example inputs": [1, 2, 3],
        "a masked row": [0, 0, 0],
        "the largest index": [4, 4, 4],
        "the least index": [-1, -1, 3],
    }
    embedded = values(lambda i: nnf.embedding(i, table), torch.tensor([1, 2, 3]))  # it refuses -1
    assert [name for name in embedded if "index" in name] == ["the largest index"]
    labels = values(nnf.cross_entropy, Q[0, 0], LABELS)
    assert labels["the least index"] == [-100, -100, 2]
    mask = values(lambda x, m: torch.softmax(x.abs() + m, -1), torch.eye(2), torch.zeros(2, 2))
    assert mask["a masked row"] == [[-np.inf, -np.inf], [0, 0]]
    assert values(lambda m: ~m, torch.tensor([[True, False], [True, True]])) == {
        "the example inputs": [[True, False], [True, True]],
        "a masked row": [[False, False], [True, True]],
        "zeros": [[True, True], [True, True]],
    }
    floats = values(torch.exp, torch.tensor([1.0, -2.0]))
    assert floats == {"the example inputs": [1, -2], "negative numbers": [-1, -2], "zeros": [0, 0]}
    assert values(torch.exp, torch.zeros(2))["the example inputs"] != [0, 0]  # zeros would show little


def test_a_graph_is_compared_on_the_numbers_of_its_first_call() -> None:
    wide = torch.arange(12.0).view(3, 4)[:, 1:].t()
    assert torch.equal(like(wide), wide) and like(wide).stride() == wide.stride()
    assert torch.equal(like(wide[:1].expand(5, -1)), wide[:1].expand(5, -1)) and like(wide[:0]).shape == (0, 3)
    assert like(wide).data_ptr() != wide.data_ptr() and like(3) == 3


@torch.library.custom_op("korch_tests::rows", mutates_args=())
def rows(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows at places that are floats, as torchvision's boxes have the numbers of images."""
    return x[places.long()]


@rows.register_fake
def _(x: Any, places: Any) -> Any:
    return x.new_empty((len(places), *x.shape[1:]))


def test_operators_of_other_packages_get_no_inputs_that_they_may_not_check() -> None:
    inputs, seen = [torch.ones(3, 2), torch.zeros(2)], list[Any]()
    program = torch.export.export(Function(rows), tuple(inputs))

    def run(given: Any) -> list[Any]:
        seen.append(given)
        return [rows(*given)]

    assert [sample.name for sample in samples(program, inputs, run, 60.0)] == ["the example inputs"]
    assert all(map(torch.equal, seen[0], inputs))


RECURRENT = [
    *(kind(3, 4, 2, bidirectional=True, batch_first=True) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
    nn.LSTM(3, 4, proj_size=2),
    nn.LSTM(3, 4, 2, proj_size=1, bias=False, bidirectional=True, batch_first=True),
    nn.GRU(3, 4, bias=False),
    nn.RNN(3, 4, nonlinearity="relu", bias=False),
]


class All(nn.Module):
    """All recurrent layers of an input, which are exported together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RECURRENT)

    def forward(self, x: Any) -> Any:
        return [layer(x) for layer in self.layers]


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("shape", [(5, 2, 3), (1, 1, 3), (4, 3)])
def test_recurrent_layers_are_exported_as_they_compute(shape: tuple[int, ...]) -> None:
    module, x = All().eval(), torch.randn(shape)
    with torch.no_grad():
        pairs = zip(exported_results(module, (x,)), module(x), strict=True)
        assert [difference(*pair) for pair in pairs] == [""] * len(RECURRENT)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_an_lstm_with_a_projection_takes_a_state() -> None:
    module, x = nn.LSTM(3, 4, proj_size=2).eval(), torch.randn(5, 2, 3)
    state = torch.randn(1, 2, 2), torch.randn(1, 2, 4)
    with torch.no_grad():
        assert difference(exported_results(module, (x, state)), module(x, state)) == ""


def test_sizes_may_follow_from_elements() -> None:
    x, ends = torch.arange(14.0).reshape(7, 2), torch.tensor([2, 5])
    executable = korch.optimize(
        Function(torch.tensor_split).eval(), (x, ends), measure=False, threads=1, progress=False
    )
    for own in (ends, torch.tensor([1, 3])):
        pairs = zip(executable(x, own), torch.tensor_split(x, own), strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs)
