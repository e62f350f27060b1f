"""Concatenations in place, from a model to its artifact: all code that reads a plan must support them."""

from pathlib import Path

import numpy as np
import onnx
import pytest

import korch
from korch.ablation import Ablation
from korch.limits import SearchLimits
from korch.provider.in_place import InPlaceProvider
from korch.report.explain import explain
from korch.report.page import page_data
from korch.report.plan_onnx import plan_model
from tests.support.models import in_onnxruntime, parsed

CHANNELS = 4  # generated convolutions of more channels do not write the plain layout


def detector(height: int | str = 6, batch: int = 1, *, gives_operand: bool = False) -> bytes:
    """Return a model whose concatenations nest, share an operand, and are an output."""
    rng = np.random.default_rng(0)
    channels = {"a": CHANNELS, "b": CHANNELS, "c": 2 * CHANNELS, "d": 3 * CHANNELS}
    shape = f"float[{batch},{{}},{height},8]"
    operand = f", {shape.format(CHANNELS)} b" if gives_operand else ""
    text = f"""({shape.format(CHANNELS)} x) => ({shape.format(2 * CHANNELS)} cd{operand}) {{
        a = Conv<pads = [1, 1, 1, 1]>(x, a_w)
        b = Conv<pads = [1, 1, 1, 1]>(a, b_w)
        ab = Concat<axis = 1>(a, b)
        c = Conv<pads = [1, 1, 1, 1]>(ab, c_w)
        abc = Concat<axis = 1>(ab, c)
        d = Conv<pads = [1, 1, 1, 1]>(abc, d_w)
        cd = Concat<axis = 1>(c, d)
    }}"""
    weights = {f"{n}_w": rng.standard_normal((CHANNELS, k, 3, 3)).astype(np.float32) / 8 for n, k in channels.items()}
    return parsed(text, **weights).SerializeToString()


def optimize(model: bytes, cache_folder: Path, layouts: str = "plain", partition: str | int = "auto", **options):
    """Optimize in one layout: with several, it depends on calibrated rates what is in place."""
    options = {"threads": 2, "budget": 10.0, **options}
    few, plain = (
        SearchLimits(partition=partition, max_primitives=2),
        Ablation(rules="none", baselines=False, layouts=layouts),
    )
    return korch.optimize(model, cache_folder=cache_folder, search=few, ablation=plain, **options)


def check(executable, model: bytes, height: int = 6, batch: int = 1) -> None:
    pytest.importorskip("onnxruntime")
    x = np.random.default_rng(1).standard_normal((batch, CHANNELS, height, 8)).astype(np.float32)
    for _ in range(2):
        found = executable.run(None, {"x": x})
        for a, e in zip(found, in_onnxruntime(model, {"x": x}), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-3, atol=1e-3 * np.abs(e).max())


def in_place(plan) -> list:
    return [step for step in plan.steps if not step.runs]


def test_a_model_with_concatenations(cache_folder: Path, tmp_path: Path) -> None:
    model = detector()
    executable = optimize(model, cache_folder, measure=False)
    check(executable, model)
    plan, report = executable.plan, executable.report
    found = in_place(plan)
    # c may be a part of one only; the output is in the plain layout, the others in any.
    assert 1 <= len(found) <= 2
    assert all(step.provider == InPlaceProvider.name and step.cost_ns == 0 for step in found)
    assert report.in_place == len(found)
    assert report.kernels == plan.kernel_count == len(plan.steps) - len(found)
    executable.save(tmp_path / "d.korch")
    loaded = korch.load(tmp_path / "d.korch")
    assert loaded.plan == plan
    check(loaded, model)
    assert "in place" in explain(plan, report)
    assert len(page_data(plan, report, executable.sources)["memory"]) == len(plan.steps)
    check_plan_as_onnx(executable, model)


@pytest.mark.long
def test_kernels_that_are_measured(cache_folder: Path) -> None:
    model = detector()
    executable = optimize(model, cache_folder, budget=2.0, layouts="any")
    check(executable, model)
    steps = in_place(executable.plan)
    assert all(step.is_measured and step.cost_ns == step.bound_ns == 0 for step in steps)
    contest = executable.report.plans
    assert executable.report.kernels in {row.kernels for row in contest}


def check_plan_as_onnx(executable, model: bytes) -> None:
    written = plan_model(executable.plan, executable.artifact.weights.array)
    onnx.checker.check_model(written)

    class Session:
        def run(self, names, feeds):
            return in_onnxruntime(written, feeds)

    check(Session(), model)


def test_an_operand_that_is_an_output_is_not_in_place(cache_folder: Path) -> None:
    model = detector(gives_operand=True)
    executable = optimize(model, cache_folder, measure=False)
    check(executable, model)
    # c is a part of one of the two only, b of none: it has memory of its own.
    (found,) = in_place(executable.plan)
    assert found.origins in {("Concat abc",), ("Concat cd",)}


def test_a_batch_of_two_is_not_in_place(cache_folder: Path) -> None:
    model = detector(batch=2)
    executable = optimize(model, cache_folder, measure=False, layouts="any")
    check(executable, model, batch=2)
    assert in_place(executable.plan) == []


def test_several_shapes(cache_folder: Path, tmp_path: Path) -> None:
    model = detector(height="h")
    shapes = [{"x": (1, CHANNELS, h, 8)} for h in (4, 5)]
    executable = optimize(model, cache_folder, measure=False, shapes=shapes)
    executable.save(tmp_path / "shapes.korch")
    loaded = korch.load(tmp_path / "shapes.korch")
    for h in (4, 5):
        check(executable, model, height=h)
        check(loaded, model, height=h)
    plans = [e.plan for e in loaded.plans.values()]
    assert all(map(in_place, plans))
    assert loaded.report.kernels == sum(plan.kernel_count for plan in plans)


def test_segments(cache_folder: Path) -> None:
    model = detector()
    executable = optimize(model, cache_folder, measure=False, partition=4)
    check(executable, model)
    assert executable.report.partition.segments > 1
    # ab is of the first segment, c of both: only the second one concatenates ab.
    assert {step.origins for step in in_place(executable.plan)} >= {("Concat ab",)}
