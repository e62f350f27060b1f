"""Modules that torch.export exported with dynamic dimensions."""

import pytest

torch = pytest.importorskip("torch")

import korch  # noqa: E402
from korch.errors import InputError, UnsupportedError  # noqa: E402
from korch.frontend.torch import export  # noqa: E402
from korch.frontend.torch.free import FreeModule  # noqa: E402
from korch.runtime.ranged import RangedExecutable  # noqa: E402


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, tokens, mask):
        x = self.table(tokens)
        weights = torch.softmax(self.linear(x) @ x.transpose(1, 2) + mask[:, None, :], -1)
        return {"y": weights @ x, "mean": x.mean(1)}


def call(length: int):
    torch.manual_seed(length)
    return torch.randint(0, 11, (2, length)), torch.randn(2, length)


def exported(**bounds: int):
    torch.manual_seed(0)
    length = torch.export.Dim("length", **bounds)
    return torch.export.export(Attention().eval(), call(5), dynamic_shapes=({1: length}, {1: length}))


def test_all_sizes_of_a_dynamic_dimension_run_after_one_export(cache_folder, monkeypatch) -> None:
    exports, translate = [], export.to_held_model
    monkeypatch.setattr(export, "to_held_model", lambda *args: exports.append(args) or translate(*args))
    program = exported(min=1, max=20)
    limits = korch.SearchLimits(range_least=16)
    found = korch.optimize(program, measure=False, threads=1, search=limits, cache_folder=cache_folder)
    assert isinstance(found.flat, RangedExecutable) and len(exports) == 1
    module = program.module()
    for length in range(1, 21):
        given, wanted = call(length), module(*call(length))
        results = found(*given)
        assert results.keys() == {"y", "mean"}
        for name, result in results.items():
            torch.testing.assert_close(result, wanted[name], rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match=r"the size 21 of 'tokens\[1\]' is out of its range.*1\.\.20"):
        found(*call(21))
    with pytest.raises(InputError, match="is 4; expected 3"):
        found(call(3)[0], call(4)[1])


def test_a_number_that_is_a_free_size_is_no_result() -> None:
    class Counted(torch.nn.Module):
        def forward(self, x):
            return x + 1, x.shape[0]

    length = torch.export.Dim("length", min=1, max=20)
    program = torch.export.export(Counted(), (torch.ones(5),), dynamic_shapes=({0: length},))
    with pytest.raises(UnsupportedError, match="returns a number that is computed from sizes"):
        korch.optimize(program)


def test_a_dimension_without_a_largest_size_is_refused(cache_folder) -> None:
    with pytest.raises(UnsupportedError, match=r"input 'tokens', axis 1.*its dynamic size has no largest value.*max="):
        korch.optimize(exported(), cache_folder=cache_folder)


@pytest.mark.parametrize("axes", [(0, 1), (1,)])
def test_a_size_that_the_module_fixes_is_not_free(axes) -> None:
    """PyTorch then gives the size as a symbolic number."""

    class Scaled(torch.nn.Module):
        def forward(self, x):
            return x.softmax(1) + torch.arange(5)

    auto = {axis: torch.export.Dim.AUTO(min=2, max=9) for axis in axes}
    found = FreeModule.of(torch.export.export(Scaled(), (torch.ones(3, 5),), dynamic_shapes=(auto,)))
    assert (found and [(d.axis, d.low, d.high) for d in found.dimensions]) == ([(0, 2, 9)] if 0 in axes else None)
