"""The inputs on which plans are compared with the model: random ones, scaled if needed, or the user's."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import parser

import korch
from korch.ablation import Ablation
from korch.errors import InaccurateError, InputError, OptionError
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.inputs import given_arrays
from korch.numerics import Standard
from korch.options import Options
from korch.primitive.graph import PrimitiveGraph
from korch.system.memory import available_bytes
from korch.validation.standard import random_inputs, standard_of
from tests.support.models import parsed

QUICK: dict[str, Any] = {"measure": False, "threads": 1, "ablation": Ablation(baselines=False)}

GROWS = "g (float[8] x) => (float[8] y) <float k = {1e20}> { a = Mul (x, k) b = Mul (a, a) y = Sqrt (b) }"


def model_of(graph: str, opset: int = 20) -> Any:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> {graph}')


def graph_of(graph: str) -> PrimitiveGraph:
    return fission(load_model(model_of(graph)))


@pytest.mark.parametrize(
    "graph",
    [
        GROWS,
        "g (float[3,4] x) => (float[3,4] y) <float k = {200}> { a = Mul (x, k) y = Exp (a) }",
        "g (float16[4] x) => (float16[4] y) <float16 k = {60000}> { a = Mul (x, k) y = Mul (a, a) }",
        "g (float[4] x, float[4] z) => (float[4] y) <float k = {1e21}> { a = Mul (x, k) b = Mul (a, a) y = Sub (b, z)}",
        "g (float[5] x, int64[2] i) => (float[2] y) <float k={1e20}> { a = Mul (x, k) b = Mul (a, k) y = Gather (b,i)}",
    ],
)
def test_random_inputs_are_scaled_until_the_models_own_outputs_are_finite(graph: str) -> None:
    model = graph_of(graph)
    assert not standard_of(model, model, Options()).overflows
    plain = random_inputs(model, 0)
    used = standard_of(model, model, Options()).inputs
    for name, array in used.items():
        is_index = array.dtype.kind == "i"
        assert np.array_equal(array, plain[name]) == is_index
        assert array.any()


@pytest.mark.parametrize(
    "graph",
    [
        "g (float[8] x) => (float[8] y) { y = Relu (x) }",
        "g (float[8] x) => (float[8] y) <float k = {0}> { a = Abs (x) b = Neg (a) y = Log (b) }",  # NaN at any scale
        "g (float[2] x) => (float[2] y) <float[2] k = {0, inf}> { y = Add (x, k) }",
    ],
)
def test_inputs_are_not_scaled_in_vain(graph: str) -> None:
    model = graph_of(graph)
    assert np.array_equal(standard_of(model, model, Options()).inputs["x"], random_inputs(model, 0)["x"])


def test_outputs_that_are_infinite_anyway_do_not_hide_others_that_overflow() -> None:
    steps = "{ a = Mul (x, c) b = Mul (a, a) y = Add (b, k) }"
    model = graph_of(f"g (float[2] x) => (float[2] y) <float[2] k = {{0, inf}}, float c = {{1e22}}> {steps}")
    assert np.isfinite(standard_of(model, model, Options()).expected["y"]).tolist() == [True, False]


TENSORS = {"x": ((2, 3), np.dtype(np.float32)), "i": ((4,), np.dtype(np.int64))}
GOOD = {"x": np.ones((2, 3)), "i": np.arange(4, dtype=np.int32)}


def test_given_inputs_have_the_models_order_and_types(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **GOOD)
    for given in (tmp_path / "x.npz", {"i": [0, 1, 2, 3], "x": np.ones((2, 3))}):
        found = given_arrays(given, TENSORS)
        assert list(found) == ["x", "i"]
        assert [a.dtype for a in found.values()] == [np.float32, np.int64]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": None}, "option inputs: there is no array 'x'; expected arrays x, i"),
        ({"z": np.ones(1)}, "option inputs: the model has no input 'z'; expected arrays x, i"),
        ({"x": np.ones((3, 2))}, "option inputs: array 'x' has shape [3, 2]; expected [2, 3]"),
        ({"x": np.ones((2, 3), complex)}, "option inputs: array 'x' is of type complex128; expected float32"),
        ({"x": [["a"]]}, "option inputs: array 'x' has shape [1, 1]; expected [2, 3]"),
        ({"i": np.ones(4)}, "option inputs: array 'i' is of type float64; expected int64"),
        (
            {"i": np.full(4, 2**63, np.uint64)},
            "option inputs: array 'i' has numbers that int64 can't hold; expected int64",
        ),
    ],
)
def test_given_inputs_that_do_not_fit_are_one_clear_error(change: dict[str, Any], text: str) -> None:
    arrays = {name: array for name, array in {**GOOD, **change}.items() if array is not None}
    with pytest.raises(OptionError, match=f"^{re.escape(text)}"):
        given_arrays(arrays, TENSORS)


def test_a_file_of_inputs_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with pytest.raises(OptionError, match=re.escape(f"option inputs, {path}: the file can't be read: No such file")):
        given_arrays(path, TENSORS)
    path.write_bytes(b"PK")
    with pytest.raises(OptionError, match=re.escape(f"option inputs, {path}: the file can't be read: ")):
        given_arrays(path, TENSORS)


def test_plans_are_compared_on_the_given_inputs(cache_folder: Path, tmp_path: Path) -> None:
    """No random input is large enough to overflow in the first model; in the second, every one is."""
    grows = "g (float[8] x) => (float[8] y) { a = Exp (x) b = Exp (a) c = Exp (b) y = Exp (c) }"
    executable: Any = korch.optimize(
        model_of(grows), inputs={"x": np.full(8, -50.0)}, cache_folder=cache_folder, **QUICK
    )
    assert executable(np.zeros(8, np.float32))[0].shape == (8,)
    assert "inputs" in executable.plan.options and executable.plan.options["inputs"] is None
    np.savez(tmp_path / "x.npz", x=np.full(8, 1e-3, np.float32))
    executable = korch.optimize(model_of(GROWS), inputs=tmp_path / "x.npz", cache_folder=cache_folder, **QUICK)
    assert np.allclose(executable(np.full(8, 1e-3, np.float32))[0], 1e17, rtol=1e-4)
    executable = korch.optimize(model_of(GROWS), cache_folder=cache_folder, **QUICK)
    assert np.allclose(executable(np.full(8, 1e-3, np.float32))[0], 1e17, rtol=1e-4)


def test_the_message_says_how_to_give_inputs(cache_folder: Path) -> None:
    with pytest.raises(InaccurateError, match="gives infinities or NaN") as error:
        korch.optimize(model_of(GROWS), inputs={"x": np.full(8, 3.0)}, cache_folder=cache_folder, strict=True, **QUICK)
    assert "--inputs FILE.npz" in str(error.value)


def test_inputs_of_a_model_with_a_range_are_one_of_its_sizes(cache_folder: Path) -> None:
    model = model_of("g (float[n] x) => (float[n] y) { a = Exp (x) y = Exp (a) }")
    options = {"shapes": {"n": range(1, 9)}, "cache_folder": cache_folder, **QUICK}
    executable: Any = korch.optimize(model, inputs={"x": np.full(5, -3.0)}, **options)
    x = np.linspace(-1, 1, 7, dtype=np.float32)
    assert np.allclose(executable(x)[0], np.exp(np.exp(x)))
    with pytest.raises(OptionError, match=re.escape("array 'x' has shape [9]; expected at most [8]")):
        korch.optimize(model, inputs={"x": np.zeros(9)}, **options)
    with pytest.raises(OptionError, match="no input 'z'"):
        korch.optimize(model, inputs={"x": np.zeros(3), "z": np.zeros(3)}, **options)


def test_inputs_reach_parts_behind_those_of_the_host(cache_folder: Path) -> None:
    """The number of elements that NonZero finds is unknown, so it runs on the host; the rest is native."""
    nodes = "a = Mul(x, k) i = NonZero(a) s = Shape(i) b = Mul(a, a) y = Sqrt(b)"
    model = parsed(f"(float[8] x) => (float[8] y, int64[2] s) {{ {nodes} }}", 20, k=np.float32(1e20))
    small = {"x": np.full(8, 1e-3, np.float32)}
    executable: Any = korch.optimize(model, inputs=small, cache_folder=cache_folder, **QUICK)
    assert np.allclose(executable(small["x"])[0], 1e17, rtol=1e-4)
    with pytest.raises(OptionError, match="no input 'z'"):
        korch.optimize(model, inputs={**small, "z": np.ones(1)}, cache_folder=cache_folder, **QUICK)
    with pytest.raises(InputError, match="x"):
        korch.optimize(model, inputs={"x": np.ones((2, 4), np.float32)}, cache_folder=cache_folder, **QUICK)


@pytest.mark.parametrize(("left", "is_refused"), [(2950, False), (2949, True)])
def test_outputs_that_do_not_fit_into_memory_are_refused_before_they_are_computed(
    monkeypatch: pytest.MonkeyPatch, left: int, is_refused: bool
) -> None:
    """100 floats and 50 doubles are 1,300 and 850 bytes in all types and as masks; a difference is 800 at most."""
    model = graph_of("g (float[100] x, double[50] d) => (float[100] y, double[50] z) { y = Relu (x) z = Neg (d) }")
    monkeypatch.setattr("korch.validation.standard.available_bytes", lambda: left)
    if not is_refused:
        standard_of(model, model, Options())
        return
    monkeypatch.setattr(Standard, "__init__", None)
    with pytest.raises(MemoryError, match=r"^outputs need 0\.0 GB in several types, and 0\.0 GB are left$"):
        standard_of(model, model, Options())


def test_the_memory_that_is_left_is_read_from_the_system(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  24684096 kB\nMemAvailable:     3 kB\nBuffers: 1 kB\n")
    assert available_bytes(tmp_path) == 3072
