"""Modules whose plan is replaced while they are called, by korch.optimize and by torch.compile."""

import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import korch
from korch import torch_backend
from korch.pipeline.background import BackgroundSearch


@pytest.fixture
def options(cache_folder: Path) -> dict[str, Any]:
    return {"budget": 20, "threads": 1, "cache_folder": cache_folder}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BackgroundSearch]]:
    """The searches in the background, which are stopped at the end."""
    searches: list[BackgroundSearch] = []
    init = BackgroundSearch.__init__

    def noted(self: BackgroundSearch, *args: Any) -> None:
        init(self, *args)
        searches.append(self)

    monkeypatch.setattr(BackgroundSearch, "__init__", noted)
    yield searches
    for search in searches:
        search.stop()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: Any) -> Any:
        return self.linear(torch.relu(self.conv(x)).flatten(1)).softmax(-1)


def test_a_module_is_right_before_while_and_after_its_plan_is_swapped(
    options: dict[str, Any], found: list[BackgroundSearch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("korch.pipeline.background.is_faster", lambda new, old: True)
    module, x = Both().eval(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        wanted = module(x)
    exe = korch.optimize(module, x, background=True, **options)
    first, right, stop = exe.flat, [0], threading.Event()

    def call() -> None:
        while not stop.is_set():
            torch.testing.assert_close(exe(x), wanted)
            right[0] += 1

    callers = [threading.Thread(target=call) for _ in range(2)]
    for caller in callers:
        caller.start()
    assert exe.wait(120)
    before = right[0]
    stop.set()
    for caller in callers:
        caller.join()
    assert before > 0 and found[0].error is None
    assert exe.flat is not first and exe.report.untimed == 0
    torch.testing.assert_close(exe(x), wanted)


def test_torch_compile_serves_a_first_plan_and_swaps_a_better_one(
    options: dict[str, Any], found: list[BackgroundSearch]
) -> None:
    torch.compiler.reset()
    torch_backend.SAID.clear()
    module, x = Both().eval(), torch.randn(2, 3, 6, 6)
    compiled = torch.compile(module, backend="korch", options=options)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", torch_backend.KorchFallbackWarning)
        for _ in range(3):
            torch.testing.assert_close(compiled(x), module(x))
        (search,) = found
        assert search.wait(120) and search.error is None
        torch.testing.assert_close(compiled(x), module(x))


def test_a_weight_that_changes_while_the_search_runs_runs_in_pytorch(
    options: dict[str, Any], found: list[BackgroundSearch]
) -> None:
    torch.compiler.reset()
    torch_backend.SAID.clear()
    module, x = Both().eval(), torch.randn(2, 3, 6, 6)
    compiled = torch.compile(module, backend="korch", options=options)
    with torch.no_grad():
        compiled(x)
        module.linear.bias.add_(1.0 + torch.arange(10))
        with pytest.warns(torch_backend.KorchFallbackWarning, match="was changed or replaced"):
            torch.testing.assert_close(compiled(x), module(x))
        assert found[0].wait(120)
        torch.testing.assert_close(compiled(x), module(x))


def test_the_search_may_be_waited_for(options: dict[str, Any], found: list[BackgroundSearch]) -> None:
    torch.compiler.reset()
    module, x = nn.Linear(6, 4).eval(), torch.randn(3, 6)
    compiled = torch.compile(module, backend="korch", options={**options, "background": False})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
    assert not found
    assert korch.optimize(module, x, **options).wait(0)
