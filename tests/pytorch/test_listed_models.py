"""The judge of listed models: what counts as right, and its table."""

import pytest

torch = pytest.importorskip("torch")

from benchmarks.judges import models, table  # noqa: E402


def test_results_are_compared_with_eager_mode_and_with_float64() -> None:
    own, off = torch.tensor([1.0, 1e-4]), torch.tensor([1.01, 1e-4])
    never = lambda: pytest.fail("float64 is computed only where it is needed")  # noqa: E731
    assert not models.wrong([own + 1e-5, 3], [own, 3], never)
    assert "2 results instead of 1" in models.wrong([own, own], [own], never)
    assert "instead of float32[2]" in models.wrong([own[:1]], [own], never)
    assert "off by 1.00e-02; from float64" in models.wrong([off], [own], lambda: [own.double()])
    assert not models.wrong([off], [own], lambda: [off.double() + 0.009])  # eager mode itself is further away
    runs = iter([own, own + 0.006])
    exact = lambda: [own.double()]  # noqa: E731
    assert not models.wrong([off], [own], exact, lambda seed: [next(runs)])  # within twice a disturbed run
    assert "limit 0.00e+00" in models.wrong([off], [own], exact, lambda seed: [own])
    assert "limit 0.00e+00" in models.wrong([off], [own], exact, lambda seed: [own / 0])  # an infinite run says nothing
    assert models.wrong([torch.tensor([1, 2])], [torch.tensor([1, 3])], lambda: [torch.tensor([1, 3])])


def test_disturbed_runs_differ_by_roundings() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    x = torch.randn(1, 64)
    listed = models.Listed(module, lambda seed: {"args": (x,)})
    own = module(x).detach()
    (found,), (again,), (other,) = (models._disturbed(listed, {"args": (x,)}, seed) for seed in (1, 1, 2))
    assert torch.equal(found, again) and not torch.equal(found, other)
    assert 0 < (found - own).abs().max() < 1e-5 * own.abs().max()
    assert torch.equal(module(x), own)


def test_times_are_relative_to_korch() -> None:
    times = ({"eager": 4.0, "korch": 2.0}, {"eager": 1.0, "korch": 2.0, "inductor": 3.0}, {})
    rows = [{"item": "a", "counts": {"timm": {"right": 1}}, "times_ms": t} for t in times]
    rows.append({"item": "b", "counts": {"torchvision": {"wrong": 1}}})
    assert table(rows, ["right", "wrong"]).splitlines() == [
        "| | right | wrong | timed | eager / Korch | inductor / Korch |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| timm | 3 | 0 | 2 | 1.00 | 1.50 |",
        "| torchvision | 0 | 1 | 0 |  |  |",
        "| all | 3 | 1 | 2 | 1.00 | 1.50 |",
    ]
    assert table(rows[3:], ["right", "wrong"]).splitlines()[0] == "| | right | wrong |"
