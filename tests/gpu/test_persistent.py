"""Persistent kernels on the device: correct in repeated runs and on two streams, and kept only if faster."""

from __future__ import annotations

import pytest
import torch

import korch
from benchmarks.models import build


@pytest.fixture(scope="module")
def executables(tmp_path_factory):
    """Return a block of a transformer with separate launches, and twice with persistent kernels."""
    options = {"target": "cuda", "budget": 8, "cache_folder": tmp_path_factory.mktemp("cache")}
    model = build("transformer_block")
    return [korch.optimize(model, schedule=schedule, **options) for schedule in ("joins", "tasks", "tasks")]


def test_persistent_kernels_are_right(executables):
    joins, *tasks = executables
    x = torch.randn(tuple(joins.get_inputs()[0].shape), device="cuda")
    for executable in tasks:
        assert executable.report.max_error < 1e-4
        torch.testing.assert_close(executable(x)[0], joins(x)[0], rtol=1e-4, atol=1e-4)
    if not any(executable._persistent for executable in tasks):
        pytest.skip("the plans have no segment of launches")


def test_counters_go_on_from_run_to_run(executables):
    bound = executables[1].bind()
    bound.inputs[0].normal_()
    bound.replay()
    expected = bound.outputs[0].clone()
    for _ in range(2000):
        bound.outputs[0].zero_()
        bound.replay()
    torch.cuda.synchronize()
    assert torch.equal(bound.outputs[0], expected)


def test_two_of_them_run_on_two_streams(executables):
    """Neither may have half of the multiprocessors while it waits for the other half."""
    first, second = (executable.bind() for executable in executables[1:])
    for bound in (first, second):
        bound.inputs[0].normal_()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(200):
        for bound, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                bound.replay()
    torch.cuda.synchronize()
    for bound, executable in zip((first, second), executables[1:], strict=True):
        assert torch.equal(bound.outputs[0], executable(bound.inputs[0])[0])


def test_the_faster_schedule_is_kept(tmp_path):
    found = korch.optimize(build("mlp"), target="cuda", schedule="fastest", budget=8, cache_folder=tmp_path)
    times = found.report.schedule
    assert times is not None and times.joins_ms > 0 and times.tasks_ms > 0
