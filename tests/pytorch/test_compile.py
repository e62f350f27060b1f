"""torch.compile with the backend korch: results are correct, and PyTorch runs what Korch must not run."""

import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from korch import torch_backend
from korch.errors import KorchError
from korch.frontend.torch import export_module
from korch.frontend.torch.graph import default_high
from korch.runtime.ranged import RangedExecutable
from korch.torch_backend import KorchFallbackWarning, KorchShapesWarning

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Compile anew, and say each reason again."""
    torch.compiler.reset()
    torch_backend.SAID.clear()
    torch_backend.FALLBACKS.clear()
    torch.manual_seed(0)
    yield


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were compiled."""
    graphs: list[Any] = []
    init = torch_backend.CompiledGraph.__init__

    def noted(self: Any, *args: Any) -> None:
        init(self, *args)
        graphs.append(self)

    monkeypatch.setattr(torch_backend.CompiledGraph, "__init__", noted)
    return graphs


def same(compiled: Any, module: Any, *args: Any) -> None:
    """Call both without gradients; no graph may fall back."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", KorchFallbackWarning)
        torch.testing.assert_close(compiled(*args), module(*args))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(7, 5), nn.LayerNorm(5)

    def forward(self, x: Any) -> dict[str, Any]:
        y = torch.relu(self.linear(x))
        torch._dynamo.graph_break()
        return {"y": y + 1, "z": (self.norm(y), y.shape[0])}


def test_a_graph_break_gives_two_graphs(made: list[Any], quick: dict[str, Any]) -> None:
    module = Net().eval()
    compiled = torch.compile(module, backend="korch", options=quick)
    for _ in range(2):
        same(compiled, module, torch.randn(3, 7))
    assert [len(graph.plans) for graph in made] == [1, 1]


def resized(x: Any) -> Any:
    """The ratio of the rows depends on their number."""
    return torch.nn.functional.interpolate(x[None, None], size=(4, 2), mode="bilinear")[0, 0]


def test_other_shapes_get_plans_up_to_a_limit(made: list[Any], quick: dict[str, Any]) -> None:
    compiled = torch.compile(resized, backend="korch", options={**quick, "max_shapes": 2}, dynamic=True)
    with pytest.warns(KorchShapesWarning, match=r"gets a plan for each shape: Resize .*"):
        same(compiled, resized, torch.randn(3, 2))
    for n in (4, 3):
        same(compiled, resized, torch.randn(n, 2))
    assert sum(len(graph.plans) for graph in made) == 2
    with torch.no_grad(), pytest.warns(KorchFallbackWarning, match="more than 2 different shapes"):
        x = torch.randn(6, 2)
        torch.testing.assert_close(compiled(x), resized(x))


class Cached(nn.Module):
    def forward(self, x: Any, keys: Any, values: Any) -> Any:
        keys, values = torch.cat((keys, x), 1), torch.cat((values, x), 1)
        return torch.softmax(x @ keys.transpose(1, 2), -1) @ values


def step(length: int) -> tuple[Any, ...]:
    x, *cache = torch.randn(2, 1, 4), torch.randn(2, length, 4), torch.randn(2, length, 4)
    for tensor in cache:
        torch._dynamo.mark_dynamic(tensor, 1)
    return x, *cache


def test_sizes_that_are_always_equal_are_one_dimension(made: list[Any], quick: dict[str, Any]) -> None:
    """PyTorch gives each tensor of a cache a symbol of its own."""
    module = Cached()
    compiled = torch.compile(module, backend="korch", options={**quick, "max_size": 16})
    for length in (5, 6, 11):
        same(compiled, module, *step(length))
    (graph,) = made
    (plan,) = graph.plans
    assert isinstance(plan.flat, RangedExecutable)
    assert [d.range_text for d in plan.flat.ranges.dimensions] == ["2..16"]


def test_dimensions_are_split_when_their_sizes_differ(made: list[Any], quick: dict[str, Any]) -> None:
    compiled = torch.compile(torch.tanh, backend="korch", options={**quick, "max_size": 16}, dynamic=True)
    for shape in ((3, 3), (4, 4), (2, 4), (3, 2)):
        same(compiled, torch.tanh, torch.randn(shape))
    texts = [[d.range_text for d in p.flat.ranges.dimensions] for graph in made for p in graph.plans]
    assert texts == [["2..16"], ["2..4", "2..4"]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(11, 8), nn.Linear(8, 8)

    def forward(self, tokens: Any, mask: Any) -> tuple[Any, int, Any]:
        x = self.table(tokens)
        weights = torch.softmax(self.linear(x) @ x.transpose(1, 2) + mask[:, None, :], -1)
        return weights @ x, tokens.shape[1], x.mean(1)


def call(length: int) -> tuple[Any, Any]:
    return torch.randint(0, 11, (2, length)), torch.randn(2, length)


def test_a_symbolic_dimension_gets_one_executable_for_its_range(made: list[Any], quick: dict[str, Any]) -> None:
    module = Attention().eval()
    compiled = torch.compile(module, backend="korch", options=quick)
    marked = call(5)
    for tensor in marked:
        torch._dynamo.mark_dynamic(tensor, 1, min=2, max=20)
    same(compiled, module, *marked)
    for length in (2, 3, 16, 17, 20):
        same(compiled, module, *call(length))
    (graph,) = made
    (plan,) = graph.plans
    assert isinstance(plan.flat, RangedExecutable)
    (dimension,) = plan.flat.ranges.dimensions
    assert dimension.range_text == "2..20"


def test_a_dimension_without_an_upper_end_gets_one(made: list[Any], quick: dict[str, Any]) -> None:
    """Larger calls get a larger one."""
    module = nn.Linear(7, 5).eval()
    compiled = torch.compile(module, backend="korch", options={**quick, "max_size": 16})
    for n in (3, 4, 9, 16, 17, 16):  # the first one is static
        same(compiled, module, torch.randn(n, 7))
    _, graph = made
    assert all(isinstance(plan.flat, RangedExecutable) for plan in graph.plans)
    assert [d.range_text for plan in graph.plans for d in plan.flat.ranges.dimensions] == ["2..16", "2..32"]


@pytest.mark.parametrize(
    ("elements", "now", "most", "high"),
    [(1, 3, 512, 512), (1, 700, 512, 1024), (3 * 224 * 224, 1, 512, 4), (3 * 224 * 224, 5, 512, 8), (1, 3, 100, 64)],
)
def test_the_default_upper_end(elements: int, now: int, most: int, high: int) -> None:
    arg = torch.empty(now, elements, device="meta")
    assert default_high([arg], [(0, 0)], most) == high


def sizes_computed(x: Any) -> tuple[Any, Any]:
    return x * 2, x.shape[0] * 3 + 1


def test_sizes_that_are_computed_are_right(quick: dict[str, Any]) -> None:
    compiled = torch.compile(sizes_computed, backend="korch", options=quick)
    for n in (3, 4, 5):
        x = torch.randn(n, 4)
        with torch.no_grad():
            found, number = compiled(x)
        torch.testing.assert_close(found, x * 2)
        assert number == 3 * n + 1


class Floats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.LayerNorm(6), nn.Dropout(0.3), nn.ELU(0.7), nn.RMSNorm(6, eps=1e-3))
        self.norms = nn.Sequential(nn.BatchNorm1d(4), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4))
        self.temperature = 1.7

    def forward(self, x: Any) -> Any:
        return torch.softmax(self.norms(self.layers(x)) / self.temperature, -1)


def test_floats_of_a_graph_with_dynamic_shapes_are_constants(made: list[Any], quick: dict[str, Any]) -> None:
    module, x = Floats().eval(), torch.randn(3, 4, 6)
    torch._dynamo.mark_static(x)
    compiled = torch.compile(module, backend="korch", options=quick, dynamic=True)
    same(compiled, module, x)
    module.temperature = 0.6
    same(compiled, module, x)
    assert [len(graph.plans) for graph in made] == [1, 1]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.rnn = nn.GRU(4, 3), nn.LSTM(3, 3), nn.RNN(3, 2)

    def forward(self, x: Any) -> Any:
        return self.rnn(self.lstm(self.gru(x)[0])[0])


def test_recurrent_modules_are_compiled(made: list[Any], quick: dict[str, Any]) -> None:
    module = Recurrent().eval()
    same(torch.compile(module, backend="korch", options=quick), module, torch.randn(3, 2, 4))
    assert [len(graph.plans) for graph in made] == [1]


class Branch(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + 1 if x.sum() > 0 else x * 2


def test_what_pytorch_prints_about_a_failed_export_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KorchError, match="depends on the values of a tensor"):
        export_module(Branch().eval(), (torch.ones(3),))
    assert capsys.readouterr() == ("", "")


def test_threads_build_one_plan(quick: dict[str, Any]) -> None:
    module, x = nn.Sequential(nn.Linear(7, 5), nn.Tanh()).eval(), torch.randn(3, 7)
    with torch.no_grad():
        compiled = torch_backend.korch(torch.fx.symbolic_trace(module), [x], options=quick)
    expected, results = module(x).detach(), []

    def call() -> None:
        with torch.no_grad():
            results.append(compiled(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, expected)
    assert len(compiled.plans) == 1


def test_changed_weights_are_seen(quick: dict[str, Any]) -> None:
    module, x = nn.Linear(7, 5).eval(), torch.randn(3, 7)
    compiled = torch.compile(module, backend="korch", options=quick)
    same(compiled, module, x)
    with torch.no_grad(), pytest.warns(KorchFallbackWarning, match="was changed or replaced"):
        module.weight.mul_(2)
        torch.testing.assert_close(compiled(x), module(x))
    torch.compiler.reset()
    same(compiled, module, x)
    module.weight = nn.Parameter(torch.randn(5, 7))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    module.weight.data = torch.randn(5, 7)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))


def test_changed_weights_of_inference_mode_are_seen(quick: dict[str, Any]) -> None:
    with torch.inference_mode():
        module, x = nn.Linear(7, 5).eval(), torch.randn(3, 7)
        compiled = torch.compile(module, backend="korch", options=quick)
        same(compiled, module, x)
        module.weight.mul_(2)
        same(compiled, module, x)


def effects(x: Any, table: Any, place: int) -> Any:
    """Write to inputs, and return a view of one, and a number."""
    y = x * 2
    table.index_copy_(1, torch.arange(2) + place, y)
    x[0].mul_(torch.arange(2)[:, None] + max(place - 3, 0))
    return (x + 1).sum(), table[:, 1:], place + x.shape[0]


@pytest.mark.parametrize("first", [0, 5])
def test_what_a_graph_writes_is_written(first: int, made: list[Any], quick: dict[str, Any]) -> None:
    compiled = torch.compile(effects, backend="korch", options=quick)
    mine, tables = torch.randn(4, 2, 2).permute(1, 2, 0), (torch.zeros(2, 10, 4)[:, 1:], torch.zeros(2, 9, 4))
    theirs = mine.clone()
    for place in range(first, first + 3):
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("error", KorchFallbackWarning)
            found, right = compiled(mine, tables[0], place), effects(theirs, tables[1], place)
        torch.testing.assert_close(found, right)
        torch.testing.assert_close(mine, theirs)
        torch.testing.assert_close(*tables)
        assert found[1].data_ptr() == tables[0][:, 1:].data_ptr()
    assert [len(graph.plans) for graph in made] == [1, 1]  # the place is a constant first, and then a tensor
    with pytest.raises(IndexError):
        compiled(mine, tables[0], 8)
    # PyTorch ignores warnings while it compiles again, so the warning itself may not be shown.
    assert any("it failed while it ran" in text for text in torch_backend.SAID)


def twice(x: Any, y: Any) -> Any:
    x.add_(1)
    return x * y


def test_inputs_that_share_memory_are_written_in_pytorch(made: list[Any], quick: dict[str, Any]) -> None:
    compiled = torch.compile(twice, backend="korch", options=quick)
    for shift, is_shared in ((4, False), (2, True)):
        mine, theirs = torch.arange(8.0), torch.arange(8.0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", KorchFallbackWarning)
            torch.testing.assert_close(
                compiled(mine[:4], mine[shift : shift + 4]), twice(theirs[:4], theirs[shift : shift + 4])
            )
        torch.testing.assert_close(mine, theirs)
        assert [("shares memory with another input" in str(w.message)) for w in said] == [True] * is_shared


def view_of_first(x: Any, y: Any) -> Any:
    return x.view(2, 2), x + y


def test_a_view_of_one_of_inputs_that_share_memory_is_made_by_pytorch(made: list[Any], quick: dict[str, Any]) -> None:
    compiled, x, y = torch.compile(view_of_first, backend="korch", options=quick), torch.randn(8), torch.randn(8)
    with torch.no_grad(), pytest.warns(KorchFallbackWarning, match="its result 0 shares memory with several inputs"):
        compiled(x[:4], x[4:])
    with torch.no_grad():
        found = compiled(x[:4].clone(), y[4:])
    assert len(made) == 1  # the graph is the first call's
    torch.testing.assert_close(found, view_of_first(x[:4], y[4:]))


def parts(x: Any) -> Any:
    y = x * 2
    return y[1:], y.t(), x + 1, y[:, ::2]


def test_results_that_share_memory_share_it(made: list[Any], quick: dict[str, Any]) -> None:
    """The tensor whose parts they are is no result; the results are views of it, in PyTorch's order of elements."""
    compiled, x = torch.compile(parts, backend="korch", options=quick), torch.randn(3, 3)
    same(compiled, parts, x)
    found, right = compiled(x), parts(x)
    assert [r.stride() for r in found] == [r.stride() for r in right]
    for results in (found, right):
        results[0].zero_()
    torch.testing.assert_close(found, right)
    assert all(graph.plans for graph in made)


def part(x: Any) -> Any:
    torch.empty(2)
    return x[1:], x.shape[0], None


def test_a_graph_that_computes_no_tensor_has_no_plan(made: list[Any], quick: dict[str, Any]) -> None:
    compiled, x = torch.compile(part, backend="korch", options=quick), torch.randn(3, 3)
    same(compiled, part, x)
    assert compiled(x)[0].data_ptr() == x[1:].data_ptr()
    assert not any(graph.plans for graph in made)


def bits(x: Any) -> Any:
    y = x * 2
    return y, y.view(torch.int32)


def bits_of_input(x: Any) -> Any:
    return x.view(torch.int32), x + 1


def random(x: Any) -> Any:
    return x + 0 * torch.rand_like(x)


def eigenvalues(x: Any) -> Any:
    return torch.linalg.eigvalsh(x @ x.t())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (bits, r"its results \[0, 1\] share memory"),
        (bits_of_input, "its result 0 shares memory with an input of another type"),
        (random, r"draws random numbers.*\. Pass random tensors as inputs"),
        (eigenvalues, "PyTorch has no translation of the operator .*linalg"),
    ],
)
def test_what_korch_could_not_do_alike_runs_in_pytorch(
    function: Any, reason: str, made: list[Any], quick: dict[str, Any]
) -> None:
    compiled = torch.compile(function, backend="korch", options=quick)
    mine, theirs = torch.ones(3, 3), torch.ones(3, 3)
    with pytest.warns(KorchFallbackWarning, match=reason):
        result = compiled(mine)
    torch.testing.assert_close(result, function(theirs))
    torch.testing.assert_close(mine, theirs)
    assert not any(graph.plans for graph in made)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KorchFallbackWarning)
        compiled(torch.ones(3, 3))  # it was said once, and counted twice
    assert [n for text, n in torch_backend.FALLBACKS.items() if re.search(reason, text)] == [2]


def test_gradients_flow_through_pytorch(quick: dict[str, Any]) -> None:
    module, x = nn.Linear(7, 5), torch.randn(3, 7)
    compiled = torch.compile(module, backend="korch", options=quick)
    with pytest.warns(KorchFallbackWarning, match="it needs gradients"):
        compiled(x).sum().backward()
    assert module.weight.grad is not None
    same(compiled, module, x)


def test_batch_statistics_are_updated_in_pytorch(quick: dict[str, Any]) -> None:
    """The operation does not say that it writes to them."""
    module, x = nn.BatchNorm1d(4).train(), torch.randn(6, 4)
    compiled = torch.compile(module, backend="korch", options=quick)
    with torch.no_grad(), pytest.warns(KorchFallbackWarning, match=r"graph: it writes to .*`torch\.compiler\.disable`"):
        compiled(x)
    torch.testing.assert_close(module.running_mean, 0.1 * x.mean(0))


def test_autocast_stays_with_pytorch(quick: dict[str, Any]) -> None:
    module, x = nn.Linear(7, 5).eval(), torch.randn(3, 7)
    compiled = torch.compile(module, backend="korch", options=quick)
    with torch.no_grad(), torch.autocast("cpu"):
        with pytest.warns(KorchFallbackWarning, match=r"torch\.autocast is on"):
            result = compiled(x)
        assert result.dtype is module(x).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nothing": 1}, "there is no option 'nothing'; expected one of ablation, background, budget, "),
        ({"max_shapes": 0}, "option max_shapes: the value 0 is no number of shapes"),
        ({"threads": 0}, "option threads: the value 0 is out of range"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], text: str) -> None:
    compiled = torch.compile(nn.Linear(3, 3).eval(), backend="korch", options=options)
    with torch.no_grad(), pytest.raises(Exception, match=text):
        compiled(torch.ones(3))
