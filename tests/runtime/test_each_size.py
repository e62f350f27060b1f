"""Ranges of few image sizes: each size has its own plan, with the kernels of one search."""

import re
import time
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import korch
from korch.candidate.candidate import Candidate, Group, Offer, Refusal
from korch.errors import InfeasibleError, InputError, UnsupportedError
from korch.options import Options
from korch.pipeline import transfer
from korch.pipeline.each_size import has_time_for_each
from korch.pipeline.source import onnx_source
from korch.provider.conv.provider import ConvProvider
from korch.provider.provider import Kernel
from korch.runtime.ranged import RangedExecutable
from korch.system.deadline import Deadline
from korch.target import Target
from tests.ranges.range_models import conv_net, model, pyramid, weight

QUICK = {"measure": False, "threads": 2, "ablation": korch.Ablation(baselines=False, rules="none")}

ODD = """
g (float[batch, 3, h, w] image) => (float[batch, 4, oh, ow] y, float[batch, 4] mean)
{
    a = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (image, w1)
    b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1], group = 4> (b, w2)
    d = MaxPool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c)
    y = Add(d, c)
    mean = ReduceMean <axes = [2, 3], keepdims = 0> (y)
}
"""


def check(found: RangedExecutable, source: bytes, image: np.ndarray) -> None:
    session = onnxruntime.InferenceSession(source)
    results, wanted = found.run(None, {"image": image}), session.run(None, {"image": image})
    for own, right in zip(results, wanted, strict=True):
        assert own.shape == right.shape
        np.testing.assert_allclose(own, right, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def detector(cache_folder) -> RangedExecutable:
    found = korch.optimize(pyramid(), shapes={"size": range(8, 21, 4)}, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, RangedExecutable)
    return found


def test_each_size_has_a_plan_without_masks(detector: RangedExecutable) -> None:
    plans = detector.ranges.plans
    assert sorted(plan.sizes for plan in plans) == [(n,) for n in range(2, 6)]
    assert all(plan.is_exact and not plan.hidden for plan in plans)
    for executable, plan in zip(detector.executables, plans, strict=True):
        assert executable.get_inputs()[0].shape == [1, 3, 4 * plan.sizes[0], 4 * plan.sizes[0]]
        assert detector.serving(plan.sizes) == (executable, plan)
    for size in range(8, 21, 4):
        image = np.random.default_rng(size).standard_normal((1, 3, size, size)).astype(np.float32)
        check(detector, pyramid(), image)


PADDED = """
g (float[n, 8] image) => (float[m, 32] y)
<int64[1] four = {4}, int64[1] zero = {0}, int64[2] zeros = {0, 0}, int64[2] wide = {-1, 32}>
{
    size = Shape <start = 0, end = 1> (image)
    less = Neg(size)
    more = Mod(less, four)
    pads = Concat <axis = 0> (zeros, more, zero)
    whole = Pad(image, pads)
    groups = Reshape(whole, wide)
    y = Relu(groups)
}
"""


def test_sizes_with_different_steps_have_a_plan_each(cache_folder) -> None:
    found = korch.optimize(model(PADDED), shapes={"n": range(5, 10)}, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, RangedExecutable) and len(found.executables) == 5
    for size in range(5, 10):
        check(found, model(PADDED), np.random.default_rng(size).standard_normal((size, 8)).astype(np.float32))
    with pytest.raises(UnsupportedError, match="depending on the size"):
        korch.optimize(model(PADDED), shapes={"n": range(5, 100)}, cache_folder=cache_folder, **QUICK)


def test_other_sizes_are_refused(detector: RangedExecutable) -> None:
    for size in (4, 18, 24):
        with pytest.raises(InputError, match=rf"the size {size} of 'size' is out of its range.* 8\.\.20:4"):
            detector.run(None, {"image": np.zeros((1, 3, size, size), np.float32)})


def test_it_describes_its_range_and_is_saved(detector: RangedExecutable, tmp_path: Path) -> None:
    detector.save(tmp_path / "a.korch")
    loaded = korch.load(tmp_path / "a.korch")
    assert isinstance(loaded, RangedExecutable) and loaded.ranges == detector.ranges
    assert [info.shape for info in loaded.get_inputs()] == [[1, 3, "8..20", "8..20"]]
    assert [info.shape for info in loaded.get_outputs()] == [[1, "20..125", 5], [1, 5, 1], [1, 5, "20..125"]]
    assert "at size=20" in loaded.facts()


def test_odd_sizes_of_two_dimensions_and_numbers_that_are_not_finite(cache_folder) -> None:
    source = model(ODD, w1=weight(4, 3, 3, 3), w2=weight(4, 1, 3, 3))
    shapes = {"batch": 1, "h": range(1, 4), "w": range(5, 8)}
    found = korch.optimize(source, shapes=shapes, cache_folder=cache_folder, **QUICK)
    assert isinstance(found, RangedExecutable) and len(found.executables) == 9
    rng = np.random.default_rng(0)
    for height in range(1, 4):
        for width in range(5, 8):
            check(found, source, rng.standard_normal((1, 3, height, width)).astype(np.float32))
    image = rng.standard_normal((1, 3, 3, 7)).astype(np.float32)
    image[0, 0, 2, 6] = np.inf  # a larger size does not see the infinity of a smaller one
    found.run(None, {"image": image})
    check(found, source, np.ones((1, 3, 2, 7), np.float32))


def test_a_size_whose_kernels_have_no_counterpart_is_searched(cache_folder, monkeypatch) -> None:
    texts: list[str] = []

    def refused(*args: object) -> None:
        texts.append("refused")
        raise InfeasibleError("no counterpart")

    monkeypatch.setattr(transfer, "_options", refused)
    shapes = {"height": 8, "width": range(8, 11)}
    found = korch.optimize(conv_net(), shapes=shapes, cache_folder=cache_folder, **QUICK)
    assert len(texts) == 2 and isinstance(found, RangedExecutable)
    assert [plan.is_exact for plan in found.ranges.plans] == [True] * 3


def test_a_kernel_that_cannot_be_printed_for_a_size_is_replaced(cache_folder, monkeypatch) -> None:
    build, refused, options = ConvProvider.build, {}, transfer._options
    replaced: list[tuple[Offer, Offer]] = []

    def builds(provider: ConvProvider, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        if group.output_types[0].shape[-1] == 10:
            refused.setdefault(group.key, offer)
        return Refusal("no") if refused.get(group.key) == offer else build(provider, group, offer, target)

    def found(step: Candidate, *others: object) -> list[Candidate]:
        able = options(step, *others)
        replaced.extend((c.offer, refused[c.group.key]) for c in able if c.group.key in refused)
        return able

    monkeypatch.setattr(ConvProvider, "build", builds)
    monkeypatch.setattr(transfer, "_options", found)
    source = model(ODD, w1=weight(4, 3, 3, 3), w2=weight(4, 1, 3, 3))
    shapes = {"batch": 1, "h": 18, "w": range(17, 20)}  # of 9, 9 and 10 columns after the first
    ranged = korch.optimize(source, shapes=shapes, cache_folder=cache_folder, **QUICK)
    assert replaced and all(own != other for own, other in replaced)
    for width in range(17, 20):
        check(ranged, source, np.random.default_rng(width).standard_normal((1, 3, 18, width)).astype(np.float32))


def test_only_few_sizes_of_windows_have_plans_each_if_there_is_time() -> None:
    options = Options()

    def has_time(source: bytes, shapes: dict[str, tuple[range, ...]], budget_s: float | None = None) -> bool:
        end = Deadline.after(budget_s, time.monotonic())
        return has_time_for_each(onnx_source(source, shapes), options, end)

    assert has_time(pyramid(), {"size": (range(8, 41, 4),)})
    assert not has_time(pyramid(), {"size": (range(8, 321, 4),)})
    assert not has_time(pyramid(), {"size": (range(8, 41, 4),)}, 1.0)
    text = "g (float[n, 6] x) => (float[n, 6] y) { y = MatMul(x, w) }"
    assert not has_time(model(text, w=weight(6, 6)), {"n": (range(1, 9),)})


def test_the_budget_or_the_number_of_sizes_for_a_plan_each_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("korch.pipeline.each_size.slowness", lambda: 1.0)  # the load may change between two calls
    source = onnx_source(pyramid(), {"size": (range(8, 41, 4),)})
    assert not has_time_for_each(source, Options(budget_s=5.0), Deadline.after(5.0, time.monotonic()))
    told = re.search(r"all 9 sizes.*for a plan for each, give a budget of (\d+) s, or fewer sizes", caplog.text)
    assert told is not None and has_time_for_each(source, Options(), Deadline.after(float(told[1]), time.monotonic()))
    caplog.clear()
    source = onnx_source(pyramid(), {"size": (range(8, 321, 4),)})
    for budget_s in (20.0, None):
        assert not has_time_for_each(source, Options(budget_s=budget_s), Deadline.after(budget_s, time.monotonic()))
    assert [m.rpartition("; ")[2] for m in caplog.messages] == 2 * ["for a plan for each, give at most 64 sizes"]
