"""Less precise forms of products: their results, their errors, their shares of a budget, and whole models."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import korch
from korch.backend import has_kernels
from korch.errors import OptionError
from korch.limits import DEFAULT_LIMITS, SearchLimits
from korch.options import Options
from korch.pipeline import precision, stages
from korch.pipeline.calibration import calibration_of
from korch.pipeline.precision import Form, Kernels, Precision, affordable, error_of, find_forms, with_forms
from korch.primitive import reference
from korch.primitive.graph import GraphBuilder, PrimitiveGraph
from korch.primitive.ops.linear import ConvAttributes
from korch.primitive.types import DType, ValueType
from korch.primitive.verbs import Verbs
from korch.report.explain import explain
from korch.system.deadline import Deadline
from korch.target import OF_COMPONENTS, detect_target

LIMITS = SearchLimits(form_bytes=0, form_slack=1e9)
RNG = np.random.default_rng(5)
STATE = RNG.bit_generator.state


def product(
    shape: tuple[int, ...], weights: tuple[int, ...], attributes: ConvAttributes | None = None
) -> PrimitiveGraph:
    builder = GraphBuilder()
    x = builder.input("x", ValueType(shape, DType.F32))
    w = builder.constant(RNG.standard_normal(weights).astype(np.float32))
    verbs = Verbs(builder, "Product_0")
    y = verbs.add("matmul" if attributes is None else "conv", x, w, attributes=attributes)
    builder.output("y", y)
    return builder.freeze()


def conv(groups: int = 1) -> ConvAttributes:
    return ConvAttributes((1, 1), (1, 1), (1, 1), (1, 1), groups)


FORMS = ["product-of-bfloat16", "product-of-bytes", "product-of-float16"]

GRAPHS = {
    "product": (product((2, 9, 20), (1, 20, 7)), "normal", FORMS),
    "uneven channels": (product((9, 20), (20, 7)), "uneven", FORMS),
    "convolution with pads": (product((1, 8, 5, 6), (4, 8, 3, 3), conv()), "normal", FORMS),
    "convolution without negative data": (product((1, 8, 5, 6), (4, 8, 3, 3), conv()), "positive", FORMS),
    "grouped convolution": (product((1, 8, 5, 6), (6, 4, 3, 3), conv(2)), "uneven", FORMS),
    "one row": (product((1, 20), (20, 7)), "normal", ["weights-in-bfloat16", "weights-in-bytes"]),
    "one channel is 0": (product((9, 20), (20, 7)), "zero", FORMS),
}


def feeds(graph: PrimitiveGraph, kind: str, count: int) -> list[dict[str, Any]]:
    shape = graph.types[graph.inputs[0][1]].shape
    axis = 1 if len(shape) == 4 else -1
    found = []
    for _ in range(count):
        x = RNG.standard_normal(shape)
        x = np.abs(x) if kind == "positive" else x
        channels = np.moveaxis(x, axis, 0)
        if kind == "uneven":
            channels[...] *= np.logspace(-1, 1, len(channels)).reshape(-1, *(1,) * (x.ndim - 1))
        if kind == "zero":
            channels[1] = 0
        found.append({"x": x.astype(np.float32)})
    return found


def forms_of(
    graph: PrimitiveGraph, samples: list[dict[str, Any]], budget: float = 0.5, halves: tuple[DType, ...] = ()
) -> tuple[Form, ...]:
    kernels = Kernels(lambda group: True, lambda group: any(t.dtype in halves for t in group.body.types))
    return find_forms(graph, samples, budget, kernels, Deadline(), LIMITS)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    RNG.bit_generator.state = STATE  # the same numbers in any order of tests


@pytest.mark.parametrize("name", GRAPHS)
def test_a_form_computes_its_product_with_the_error_that_it_has(name: str) -> None:
    graph, kind, kinds = GRAPHS[name]
    samples = feeds(graph, kind, 3)
    forms = [*forms_of(graph, samples, halves=(DType.BF16,)), *forms_of(graph, samples, halves=(DType.F16,))]
    forms = [*{form.name: form for form in forms}.values()]
    assert sorted(form.name for form in forms) == [f"{kind} Product_0" for kind in kinds]
    for form in forms:
        alone = with_forms(graph, (form,), only=True)
        assert {type_.dtype for type_ in alone.types} & {DType.I8, DType.U8, DType.BF16, DType.F16}
        error = error_of(alone, samples[-1:], [reference.run(graph, samples[-1])])
        assert 1e-5 < error < 0.03 and error == pytest.approx(form.error, rel=1e-2)
        both = with_forms(graph, (form,))
        assert both.alternatives == 1
        error = error_of(both, samples, [reference.run(graph, x) for x in samples])
        assert error < 1e-6  # the model's own comes first


def test_data_beyond_the_calibrated_range_is_cut_off() -> None:
    graph, _, _ = GRAPHS["product"]
    samples = feeds(graph, "normal", 2)
    alone = with_forms(graph, forms_of(graph, samples), only=True)
    wide = {"x": 100 * samples[0]["x"]}
    assert error_of(alone, [wide], [reference.run(graph, wide)]) > 0.5


def test_products_without_a_kernel_or_with_ranges_that_are_not_finite_have_no_form() -> None:
    graph, _, _ = GRAPHS["product"]
    samples = feeds(graph, "normal", 2)
    assert not find_forms(graph, samples, 0.5, Kernels(lambda group: False, lambda group: False), Deadline(), LIMITS)
    samples[0]["x"][0, 0, 0] = np.inf
    assert not forms_of(graph, samples)


def test_products_of_bfloat16_are_less_precise_by_less_than_those_of_bytes() -> None:
    graph, _, _ = GRAPHS["product"]
    half, whole = sorted(forms_of(graph, feeds(graph, "normal", 2), halves=(DType.BF16,)), key=lambda form: form.name)
    assert half.dtype is DType.BF16 and 1e-4 < half.error < whole.error


def test_products_of_float16_are_forms_where_those_of_bfloat16_exceed_the_budget() -> None:
    graph, _, _ = GRAPHS["product"]
    samples, both = feeds(graph, "normal", 2), (DType.BF16, DType.F16)
    rough, fine = (forms_of(graph, samples, halves=(half,))[0] for half in both)
    assert (rough.dtype, fine.dtype) == both and fine.error < rough.error / 4
    for budget, wanted in ((2 * rough.error, rough), (2 * fine.error, fine)):
        found = [form for form in forms_of(graph, samples, budget, both) if form.dtype in both]
        assert [(form.name, form.error) for form in found] == [(wanted.name, wanted.error)]
    samples[0]["x"][0, 0, 0] = 1e4  # others may be beyond the largest float16
    assert DType.F16 not in {form.dtype for form in forms_of(graph, samples, halves=both)}


def test_products_of_bfloat16_are_forms_where_matrix_units_multiply_them() -> None:
    asked = has_kernels(Options(), with_few_pairs=True)
    graph, _, _ = GRAPHS["product"]
    kernels = Kernels(lambda group: False, asked)
    forms = find_forms(graph, feeds(graph, "normal", 1), 0.5, kernels, Deadline(), LIMITS)
    assert not forms  # a tile is not filled
    large = product((1, 64, 64), (1, 64, 64))
    has_units = detect_target(1, "").isa in OF_COMPONENTS
    forms = find_forms(large, feeds(large, "normal", 1), 0.5, kernels, Deadline(), LIMITS)
    assert [form.name for form in forms] == ["product-of-bfloat16 Product_0"] * has_units


def test_a_form_whose_error_exceeds_the_budget_is_left_out() -> None:
    graph, _, _ = GRAPHS["product"]
    assert not forms_of(graph, feeds(graph, "normal", 1), budget=1e-4)


def test_the_forms_that_save_most_for_their_errors_are_affordable() -> None:
    forms = [
        Form(("matmul", None, str(i)), f"f{i}", np.zeros(1), saving=saving, error=error)  # type: ignore[arg-type]
        for i, (saving, error) in enumerate([(1.0, 0.1), (9.0, 0.2), (1.0, 0.3)])
    ]
    assert [form.name for form in affordable(forms, 0.06)] == ["f1", "f0"]
    assert [form.name for form in affordable(forms, 0.01)] == ["f1"]


def test_shares_of_blocks_are_within_the_budget() -> None:
    items = [(3.0, 0, 400), (2.0, 1, 500), (1.0, 1, 100), (0.5, 0, 300)]
    assert precision._shares(items, 2, 1000) == [400, 600]
    assert precision._shares(items, 2, 950) == [500 - 100, 500]
    assert precision._shares([(1.0, 0, 2000)], 1, 950) == [950]


def checked(budget: float) -> tuple[Precision, bool]:
    """Return the state after a plan with a less precise product was checked, and whether to search again."""
    graph, kind, _ = GRAPHS["product"]
    samples = feeds(graph, kind, 2)
    forms = forms_of(graph, samples)
    found = Precision(budget, forms, samples, [reference.run(graph, x) for x in samples], "test", LIMITS)
    alone = with_forms(graph, forms, only=True)

    class Step:
        group = type("G", (), {"primitives": range(len(alone.primitives))})

    return found, found.check(alone, [Step])  # type: ignore[list-item]


def test_the_sum_of_errors_is_made_less_if_a_plan_exceeds_the_budget_and_more_if_it_uses_little() -> None:
    error = checked(0.5)[0].error
    assert 1e-3 < error < 0.03
    tight, again = checked(error / 3)
    assert again and tight.factor < 0.2
    good, again = checked(error / 0.8)
    assert not again and good.factor == 1.0
    loose, again = checked(error * 10)
    assert again and loose.factor > 1


def mlp(rows: int) -> onnx.ModelProto:
    sizes = (96, 256, 96) if rows > 1 else (512, 1024, 512)
    nodes, weights, before = [], [], "x"
    for i, (k, n) in enumerate(pairwise(sizes)):
        weights.append(numpy_helper.from_array(RNG.standard_normal((k, n)).astype(np.float32) / k**0.5, f"w{i}"))
        nodes += [
            helper.make_node("MatMul", [before, f"w{i}"], [f"p{i}"]),
            helper.make_node("Relu", [f"p{i}"], [f"r{i}"]),
        ]
        before = f"r{i}"
    info = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, size])
        for name, size in (("x", sizes[0]), (before, sizes[-1]))
    ]
    graph = helper.make_graph(nodes, "mlp", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize(("rows", "types"), [(64, ("u8", "bf16")), (1, ("i8",))])
def test_a_model_is_within_its_budget_on_inputs_that_were_not_used_for_calibration(
    rows: int,
    types: tuple[str, ...],
    tmp_path: Path,
    calibrated: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, size, budget = mlp(rows), *((96, 0.3) if rows > 1 else (512, 0.03))
    options: dict[str, Any] = {"measure": False, "cache_folder": calibrated(tmp_path / "cache"), "threads": 1}
    exact = korch.optimize(model.SerializeToString(), **options)
    if rows > 1:  # bounds do not show that bytes are faster
        monkeypatch.setattr(stages, "with_forms", partial(with_forms, only=True))
    samples = tmp_path / "samples.npz"
    np.savez(samples, x=RNG.standard_normal((8, rows, size)).astype(np.float32))
    found = korch.optimize(model.SerializeToString(), error=budget, calibrate=samples, search=LIMITS, **options)
    assert any(f"{name}[" in step.primitives for step in found.plan.steps for name in types)
    assert not any(f"{name}[" in step.primitives for step in exact.plan.steps for name in types)
    report = found.report.precision
    assert report is not None and 1e-5 < report.error <= report.budget == budget and report.forms
    text = explain(found.plan, found.report)
    assert f"of at most {budget:g}; {len(report.forms)} of {report.offered} products less precise; " in text
    assert "calibrated on samples.npz, 8 samples" in text
    for _ in range(20):
        x = RNG.standard_normal((rows, size)).astype(np.float32)
        (y,), (wanted,) = found(x), exact(x)
        assert np.abs(y - wanted).max() <= budget * np.abs(wanted).max()


def test_a_budget_that_no_form_fits_leaves_the_model_as_it_is() -> None:
    graph, kind, _ = GRAPHS["one row"]
    assert with_forms(graph, forms_of(graph, feeds(graph, kind, 2), budget=1e-7)) is graph


WRONG_OPTIONS = [
    ({"error": 1.0}, "option error: the value 1.0 is out of range; expected at least 0 and less than 1; 0.01 is 1 %"),
    ({"error": -0.1}, "option error: the value -0.1 is out of range"),
    ({"error": float("nan")}, "option error: the value nan is out of range"),
    ({"calibrate": "x.npz"}, "option calibrate: --calibrate has no effect without --error. Add --error 1e-2"),
    ({"error": 0.1, "strict": True}, "option error: less precise types do not go with --strict. Remove --strict"),
    ({"error": 0.1, "target": "cuda"}, "option error: less precise types do not go with --target cuda"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG_OPTIONS)
def test_options_that_make_no_sense_are_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        Options(**fields)


def test_limits_for_the_superoptimizer_and_interrupts_are_checked() -> None:
    with pytest.raises(OptionError, match="option superopt: the value -1 is out of range"):
        Options(superopt_s=-1)
    assert replace(SearchLimits(), on_interrupt="keep").on_interrupt == "keep"


NOT_FINITE = np.array([[1.0, np.nan]], np.float32)
WRONG_FILES = [
    ({"z": np.ones((1, 2))}, "there is no array 'x'; expected arrays x"),
    ({"x": np.ones((1, 2)), "z": np.ones(2)}, "the model has no input 'z'; expected arrays x"),
    ({"x": np.ones((3, 1, 3))}, "array 'x' has shape [3, 1, 3]; expected [samples, 1, 2], or [1, 2] of one sample"),
    ({"x": NOT_FINITE}, "array 'x' has a NaN or an infinity; expected finite numbers"),
    ({"x": np.array([["a", "b"]])}, "array 'x' is of type <U1; expected float32"),
    (
        {"x": np.ones((0, 1, 2))},
        "the numbers of samples are {'x': 0}; expected the same number of each input, at least 1",
    ),
]


@pytest.mark.parametrize(("arrays", "text"), WRONG_FILES)
def test_a_file_that_does_not_fit_is_refused_with_the_reason(arrays: dict[str, Any], text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.npz"
    np.savez(path, **arrays)
    with pytest.raises(OptionError, match=re.escape(f"option calibrate, {path}: {text}")):
        calibration_of(product((1, 2), (2, 3)), path, DEFAULT_LIMITS)


def test_a_file_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    graph, path = product((1, 2), (2, 3)), tmp_path / "c.npz"
    with pytest.raises(OptionError, match="the file can't be read: "):
        calibration_of(graph, path, DEFAULT_LIMITS)
    path.write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(OptionError, match="the file can't be read: "):
        calibration_of(graph, path, DEFAULT_LIMITS)
    with path.open("wb") as stream:
        np.save(stream, np.ones((1, 2), np.float32))
    with pytest.raises(OptionError, match="the file can't be read: File is not a zip file; expected a file"):
        calibration_of(graph, path, DEFAULT_LIMITS)


def test_samples_are_divided_into_those_for_calibration_and_those_for_checks(tmp_path: Path) -> None:
    graph, path = product((1, 2), (2, 3)), tmp_path / "c.npz"
    np.savez(path, x=np.arange(10.0).reshape(5, 1, 2))
    found = calibration_of(graph, path, DEFAULT_LIMITS)
    assert [x["x"][0, 0] for x in (*found.samples, *found.checks)] == [0, 2, 4, 6, 8] and len(found.checks) == 2
    np.savez(path, x=np.ones((1, 2)))
    one = calibration_of(graph, path, DEFAULT_LIMITS)
    assert len(one.samples) == 1 and len(one.checks) == 1 and (one.checks[0]["x"] != 1).all()
