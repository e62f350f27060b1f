"""korch.optimize on modules: forms of calls and results, weights that change in place, refusals."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import korch
from korch.errors import InputError, ModelError, OptionError, UnsupportedError
from korch.frontend.torch import export_module
from korch.pytorch.tensors import as_array, as_tensor


class Nested(nn.Module):
    """Takes and returns trees; one result twice, an input, a weight, and what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(40, 5)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, x: Any, k: int = 2, *, more: Any = None) -> dict[str, Any]:
        y = self.linear(x) * k + more["a"][0]
        return {"y": y, "rest": (x, y, None, self.shift), "k": k}


def nested_call() -> tuple[Nested, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    call = (torch.randn(3, 40), 3), {"more": {"a": [torch.randn(5), "name"]}}
    return Nested().eval(), *call


@pytest.fixture(scope="module")
def nested(quick: dict[str, Any]) -> tuple[Any, ...]:
    module, args, kwargs = nested_call()
    executable = korch.optimize(module, args, example_kwargs=kwargs, **quick)
    return executable, module, args, kwargs


def test_trees_go_in_and_come_out(nested: tuple[Any, ...]) -> None:
    executable, module, args, kwargs = nested
    with torch.no_grad():
        expected = module(*args, **kwargs)
    result = executable(*args, **kwargs)
    assert result["k"] == 3
    assert result["rest"][2] is None
    assert result["y"] is result["rest"][1]
    torch.testing.assert_close(result, expected)
    assert [t.name for t in executable.get_inputs()] == ["x", "more.a.0"]
    names = [t.name for t in executable.get_outputs()]
    assert names == ["output.y", "output.rest.0", "output.rest.3"]


def test_arrays_of_numpy_give_arrays(nested: tuple[Any, ...]) -> None:
    executable, _, args, kwargs = nested
    x, (shift, name) = args[0].numpy(), kwargs["more"]["a"]
    result = executable(x, 3, more={"a": [shift.numpy(), name]})
    assert isinstance(result["y"], np.ndarray)
    np.testing.assert_array_equal(result["y"], executable(*args, **kwargs)["y"].numpy())


def test_it_is_an_executable(nested: tuple[Any, ...], tmp_path: Path) -> None:
    executable, _, args, kwargs = nested
    executable.save(tmp_path / "a.korch")
    flat = [args[0].numpy(), kwargs["more"]["a"][0].numpy()]
    found = korch.load(tmp_path / "a.korch")(*flat)
    torch.testing.assert_close(torch.from_numpy(found[0]), executable(*args, **kwargs)["y"])
    feeds = dict(zip(["x", "more.a.0"], flat, strict=True))
    np.testing.assert_array_equal(executable.run(["output.y"], feeds)[0], found[0])
    assert executable.report.max_error < 1e-5
    assert len(executable.time([args[0], kwargs["more"]["a"][0]], 2).run_ns) == 2
    assert executable.plan.steps
    assert executable.sources


def test_calls_of_another_form_are_refused(nested: tuple[Any, ...]) -> None:
    executable, _, (x, k), kwargs = nested
    shift = kwargs["more"]["a"][0]
    for args, keywords, text in (
        ((x, k), {}, "it was called with the keyword arguments none; expected 'more'"),
        ((x,), kwargs, "its arguments are nested as"),
        ((x, 4), kwargs, "argument 2 is 4; expected 3"),
        ((x, x), kwargs, "argument 2 is a tensor; expected 3"),
        ((x[:2], k), kwargs, "input 'x': it is f32[2,40]; expected f32[3,40]"),
        ((x.double(), k), kwargs, "input 'x': it is f64[3,40]; expected f32[3,40]"),
        ((x.to("meta"), k), kwargs, "input 'x': it lies on meta"),
        ((x, k), {"more": {"a": [shift, "other"]}}, "argument 4 is 'other'; expected 'name'"),
    ):
        with pytest.raises(InputError, match=re.escape(text)):
            executable(*args, **keywords)


def test_gradients_stop_and_odd_strides_are_read(nested: tuple[Any, ...]) -> None:
    executable, module, (_, k), kwargs = nested
    turned = torch.randn(40, 3).t().requires_grad_()
    result = executable(turned, k, **kwargs)
    assert not result["y"].requires_grad
    torch.testing.assert_close(result["y"], module(turned, k, **kwargs)["y"].detach())


def test_weights_are_not_copied() -> None:
    module, args, kwargs = nested_call()
    exported = export_module(module, args, kwargs)
    owned = {tensor.data_ptr() for tensor in module.parameters() if tensor.nbytes >= 256}
    held = {array.__array_interface__["data"][0] for array in exported.model.arrays.values()}
    assert owned
    assert owned <= held
    stored = [t for t in exported.model.proto.graph.initializer if t.name in exported.model.arrays]
    assert stored
    assert not any(t.raw_data or t.float_data for t in stored)


def test_tensors_and_arrays_share_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int64):
        tensor = torch.ones(4, dtype=dtype)
        array = as_array(tensor, "x")
        assert array.__array_interface__["data"][0] == tensor.data_ptr()
        back = as_tensor(array)
        assert back.dtype is dtype
        assert back.data_ptr() == tensor.data_ptr()


def test_an_exported_program_is_optimized(quick: dict[str, Any]) -> None:
    module, x = nn.Sequential(nn.Linear(7, 5), nn.ReLU()).eval(), torch.randn(3, 7)
    program = torch.export.export(module, (x,))
    executable = korch.optimize(program, **quick)
    torch.testing.assert_close(executable(x), module(x).detach())


class Inner(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.linalg.eigh(x)[0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any) -> Any:
        return self.inner(x) + 1


class Branching(nn.Module):
    def forward(self, x: Any) -> Any:
        return x if x.sum() > 0 else -x


class Writing(nn.Module):
    """Has rows of earlier calls, as a static cache of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("rows", torch.zeros(1, 6, 3))

    def forward(self, x: Any) -> Any:
        places = torch.arange(x.shape[1]) + self.count
        self.count.add_(x.shape[1])
        self.rows.index_copy_(1, places, x)
        return self.rows.sum(1) * 2, self.count


def test_buffers_that_are_written_are_states(quick: dict[str, Any]) -> None:
    module, x = Writing().eval(), torch.randn(1, 2, 3)
    program = torch.export.export(Writing().eval(), (x,))
    for executable in (korch.optimize(module, x, **quick), korch.optimize(program, **quick)):
        assert module.count == 0 and sorted(executable.states) == ["count", "rows"]
        assert {t.name for t in executable.get_inputs()} == {"x", "count", "rows"}
        for _ in range(2):
            right = Writing().eval()
            for n in range(3):
                torch.testing.assert_close(executable(x * n), right(x * n))
            torch.testing.assert_close(executable.states, dict(right.named_buffers()))
            executable.reset()


class Raising(nn.Module):
    """Writes to an argument before it reads another one."""

    def forward(self, x: Any, y: Any) -> Any:
        x.add_(1)
        return x + y


def test_written_arguments_share_no_memory(quick: dict[str, Any]) -> None:
    x, y = torch.ones(2, 3), torch.ones(2, 3)
    executable, both = korch.optimize(Raising().eval(), (x.clone(), y), **quick), torch.ones(3, 3)
    torch.testing.assert_close(executable(x, y), y * 3)
    for args in ((y, y), (both[1:], both[:2]), (y.numpy(), y.numpy()), (both[1:].numpy(), both[:2]), (y, y.numpy())):
        with pytest.raises(InputError, match="writes to shares memory with another one"):
            executable(*args)
    for first in (torch.ones(4, 3), torch.ones(2, 6)):
        args = (first[:2], first[2:]) if len(first) == 4 else (first[:, :3], first[:, 3:])
        torch.testing.assert_close(executable(*args), y * 3)


class Cache(nn.Module):
    """Reads rows of earlier calls, which it has as [heads, rows, features]; `is_old` also returns those before."""

    def __init__(self, is_old: bool = False) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 70, 16))
        self.is_old = is_old

    def forward(self, x: Any, place: Any) -> Any:
        old = self.keys.clone() if self.is_old else x
        self.keys.index_copy_(1, place, x * 2)
        return x @ self.keys.transpose(1, 2), old


def test_rows_of_a_state_are_written_in_its_memory(quick: dict[str, Any]) -> None:
    x, place = torch.randn(2, 1, 16), torch.tensor([3])
    executable, right = korch.optimize(Cache().eval(), (x, place), **quick), Cache().eval()
    (pair,) = executable.plan.in_place
    assert [executable.get_outputs()[pair[0]].name, executable.get_inputs()[pair[1]].name] == ["new.keys", "keys"]
    writes = [s for s in executable.plan.steps if any(t.type == "f32[2,70,16]" for t in s.outputs)]
    assert [step.provider for step in writes] == ["state"]  # it copies only if the memory is not the same
    keys = executable.states["keys"]
    for n in (3, 69, -70, 3):
        place[0] = n
        copied = executable.flat(x, place, keys.clone())
        found = executable(x * 1, place)
        torch.testing.assert_close(found, right(x, place % 70))
        assert np.array_equal(found[0], copied[0]) and np.array_equal(keys, copied[2])
        assert executable.states["keys"].data_ptr() == keys.data_ptr()
    for n in (70, -71):
        before = keys.clone()
        with pytest.raises(InputError, match=rf"input 'place': it has the index {n}; expected -70 to 69"):
            executable(x, torch.tensor([n]))
        assert torch.equal(keys, before)
    shared = keys[:, 5:6]  # an argument in the state's memory is read before, as if the state were copied
    wanted = right(right.keys[:, 5:6].clone(), torch.tensor([5]))
    torch.testing.assert_close(executable(shared, torch.tensor([5])), wanted)
    executable.reset()
    assert not keys.any()


def test_a_state_that_is_read_before_is_copied(quick: dict[str, Any]) -> None:
    x, place = torch.randn(2, 1, 16), torch.tensor([3])
    executable, right = korch.optimize(Cache(is_old=True).eval(), (x, place), **quick), Cache(is_old=True).eval()
    assert executable.plan.in_place == ()
    for n in (3, 4):
        place[0] = n
        torch.testing.assert_close(executable(x * n, place), right(x * n, place))
        torch.testing.assert_close(executable.states["keys"], right.keys)


class Looked(nn.Module):
    """Takes rows of a table, by an operator that takes no negative indices, and by one that does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, x: Any, y: Any) -> Any:
        return self.table(x) + self.table.weight[y]


def test_indices_are_those_that_the_module_takes(quick: dict[str, Any]) -> None:
    module, x = Looked().eval(), torch.tensor([1, 4])
    executable = korch.optimize(module, (x, x), **quick)
    torch.testing.assert_close(executable(x, -x - 1), module(x, -x - 1).detach())
    for given, message in (
        ((-x, x), "input 'x': it has the index -1; expected 0 to 4"),
        ((x, x + 1), "input 'y': it has the index 5; expected -5 to 4"),
    ):
        with pytest.raises(IndexError):
            module(*given)
        with pytest.raises(InputError, match=message):
            executable(*given)


class Aliased(nn.Module):
    """Writes to a tensor that it has under two names, of which only one is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 4, 3))
        self.others = [self.rows]

    def forward(self, x: Any, place: Any) -> Any:
        self.others[0].index_copy_(1, place, x)
        return self.rows.sum(1)


def test_a_state_with_two_names_is_named(quick: dict[str, Any]) -> None:
    call = (torch.ones(1, 1, 3), torch.tensor([1]))
    program = torch.export.export(Aliased().eval(), call, strict=False)
    with pytest.raises(UnsupportedError, match=r"tensors 'rows', 'lifted_tensor_0' have the same memory.*strict=True"):
        korch.optimize(program, **quick)
    executable = korch.optimize(torch.export.export(Aliased().eval(), call, strict=True), **quick)
    torch.testing.assert_close(executable(*call), Aliased()(*call))


class Noisy(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.randn_like(x)


class Silent(nn.Module):
    def forward(self, x: Any) -> None:
        return None


@pytest.mark.parametrize(
    ("module", "kind", "text"),
    [
        (nn.Linear(3, 3), ModelError, "module Linear: it is in training mode; expected"),
        (Outer(), UnsupportedError, "module Outer: inner: PyTorch has no translation of the"),
        (Branching(), UnsupportedError, "module Branching: what it does depends on the values"),
        (Noisy(), UnsupportedError, "module Noisy: the operator aten.randn_like.default draws"),
        (Silent(), ModelError, "module Silent: it returns no tensor"),
        (nn.Linear(3, 3, device="meta"), UnsupportedError, "module Linear: a tensor of it is on"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_can_not_be_exported_is_named(module: Any, kind: type, text: str) -> None:
    module.train("training mode" in text)
    with pytest.raises(kind, match=re.escape(text)):
        korch.optimize(module, torch.ones(3, 3))


def test_a_part_in_training_mode_is_named() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    module[1].train()
    with pytest.raises(ModelError, match="module Sequential: 1: it is in training mode"):
        korch.optimize(module, torch.ones(3))


def test_wrong_arguments_are_named() -> None:
    module = nn.Linear(3, 3).eval()
    with pytest.raises(ModelError, match="can't be optimized without example inputs"):
        korch.optimize(module)
    with pytest.raises(OptionError, match="takes its shapes from the example inputs"):
        korch.optimize(module, torch.ones(3), shapes={"x": (3,)})
    with pytest.raises(OptionError, match="only modules of PyTorch take example inputs"):
        korch.optimize("model.onnx", torch.ones(3))
    with pytest.raises(ModelError, match="the model is of type int"):
        korch.optimize(3)


def test_convolutions_in_bfloat16_keep_their_type_through_a_batch_normalization(quick: dict[str, Any]) -> None:
    """ONNX's Conv has no bfloat16 in the exporter's opset, and its optimizer would widen the weights."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Hardswish(), nn.ConvTranspose2d(4, 2, 2), nn.AvgPool2d(2)
    module, x = nn.Sequential(*layers).eval().bfloat16(), torch.randn(1, 3, 7, 8).bfloat16()
    with torch.no_grad():
        exact = module.float()(x.float())
    found = korch.optimize(module.bfloat16(), (x,), **quick)(x)
    assert found.dtype is torch.bfloat16
    assert (found.float() - exact).abs().max() <= 2e-2 * exact.abs().max()


def test_an_exported_graph_has_no_mode(quick: dict[str, Any]) -> None:
    """It is what quantizers of PyTorch return; it refuses eval() and says that it is in training mode."""
    x = torch.randn(2, 5)
    graph = torch.export.export(nn.Linear(5, 3).eval(), (x,)).module()
    graph.training = True
    with torch.no_grad():
        torch.testing.assert_close(korch.optimize(graph, (x,), **quick)(x), graph(x))


class Quantized(nn.Module):
    """Quantizes its input as quantizers of PyTorch write it: by a range computed at run time, or to fewer bits."""

    def __init__(self, most: int, is_dynamic: bool) -> None:
        super().__init__()
        self.most, self.is_dynamic = most, is_dynamic

    def forward(self, x: Any) -> Any:
        ops, limits = torch.ops.quantized_decomposed, (0, self.most, torch.uint8)
        if not self.is_dynamic:
            q = ops.quantize_per_tensor.default(x, 0.0625, 60, *limits)
            return ops.dequantize_per_tensor.default(q, 0.0625, 60, *limits)
        scale, zero = ops.choose_qparams.tensor(x, 0, self.most, 1e-5, torch.uint8)
        q = ops.quantize_per_tensor.tensor(x, scale, zero, *limits)
        return ops.dequantize_per_tensor.tensor(q, scale, zero, *limits)


@pytest.mark.parametrize(("most", "is_dynamic"), [(255, True), (127, True), (255, False), (127, False)])
@pytest.mark.parametrize("factor", [0.0, 1.0, 30.0])
def test_quantizers_have_the_range_and_the_scale_that_pytorch_has(
    most: int, is_dynamic: bool, factor: float, quick: dict[str, Any]
) -> None:
    import torch.ao.quantization.fx._decomposed  # it defines the operators

    torch.manual_seed(0)
    module, x = Quantized(most, is_dynamic).eval(), torch.randn(4, 9) * factor
    torch.testing.assert_close(korch.optimize(module, (x,), **quick)(x), module(x), rtol=1e-6, atol=1e-6)


class QuantizedChannels(torch.nn.Module):
    """Rounds each column to its own range of integers, narrower than their type, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.linspace(0.01, 0.2, 9))
        self.register_buffer("zeros", torch.arange(-4, 5))

    def forward(self, x: Any) -> Any:
        ops, how = torch.ops.quantized_decomposed, (self.scales, self.zeros, 1, -63, 63, torch.int8)
        return ops.dequantize_per_channel.default(ops.quantize_per_channel.default(x, *how), *how)


def test_quantizers_of_channels_have_the_range_that_pytorch_has(quick: dict[str, Any]) -> None:
    import torch.ao.quantization.fx._decomposed  # it defines the operators

    torch.manual_seed(0)
    module, x = QuantizedChannels().eval(), torch.randn(4, 9) * 3
    torch.testing.assert_close(korch.optimize(module, (x,), **quick)(x), module(x), rtol=1e-6, atol=1e-6)
