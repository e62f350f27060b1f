"""The distance of outputs from exact ones, and the distance that is allowed for a plan."""

import ml_dtypes
import numpy as np
import pytest

from korch.numerics import FACTOR, ROUNDED_FACTORS, Difference, Standard, differences, least_tolerance, max_error, worst
from korch.primitive import reference
from korch.primitive.text import parse_graph


def test_errors_are_told_by_output() -> None:
    expected = {
        "close": np.array([3.0, -4.0]),
        "counts": np.array([1, 2]),
        "empty": np.zeros(0),
        "infinite": np.array([1.0, np.inf]),
    }
    found = {**expected, "close": np.array([3.0, -3.0], np.float32)}
    errors = differences(found, expected)
    rms = 12.5**0.5
    assert errors["close"].of_largest == pytest.approx(1 / 4)
    assert errors["close"].of_rms == pytest.approx(1 / rms)
    assert errors["close"].rms == pytest.approx(0.5**0.5 / rms)
    assert {name: errors[name] for name in ("counts", "empty", "infinite")} == dict.fromkeys(
        ("counts", "empty", "infinite"), Difference()
    )
    assert worst(errors) == errors["close"]
    assert worst({}) == Difference()
    other = differences({"counts": np.array([1, 3]), "infinite": np.array([1.0, 2.0])}, expected)
    assert other["counts"].of_largest == pytest.approx(1 / 2)
    assert other["infinite"].rms == float("inf")


@pytest.mark.parametrize(
    ("found", "is_same"),
    [
        ((1, np.inf, -np.inf, np.nan), True),
        ((1, np.inf, np.inf, np.nan), False),
        ((1, np.nan, -np.inf, np.nan), False),
        ((1, np.inf, -np.inf, np.inf), False),
    ],
)
def test_nan_is_no_infinity_and_infinities_have_signs(found, is_same) -> None:
    expected = np.array([1, np.inf, -np.inf, np.nan])
    error = differences({"y": np.array(found, np.float32)}, {"y": expected})["y"]
    assert error.rms == (0 if is_same else float("inf"))


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([1.0, 100.0], [1.0, 200.0], 0.5),
        ([0.1], [0.2], 0.5),
        ([1 << 53], [(1 << 53) + 1], 2.0**-53),
        ([True, False], [True, True], 1.0),
        ([np.nan, np.inf, -np.inf, 1.0], [np.nan, np.inf, -np.inf, 1.0], 0.0),
        ([np.inf], [-np.inf], np.inf),
        ([1.0], [np.nan], np.inf),
        ([np.nan], [1.0], np.inf),
        ([np.inf], [1.0], np.inf),
        ([1.0, 1.0], [1.0], np.inf),
        ([], [], 0.0),
    ],
)
def test_max_error(got, expected, error):
    assert max_error([np.array(got)], [np.array(expected)]) == pytest.approx(error)


F32_MAX = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("dtype", "got", "wanted", "error"),
    [
        (np.float32, [np.inf, 1.0], [1e40, 1.0], 0.0),
        (np.float32, [-np.inf], [-1e300], 0.0),
        (np.float16, [np.inf], [70000.0], 0.0),
        (ml_dtypes.bfloat16, [np.inf], [3.4e38 * 1.01], 0.0),
        (np.float32, [np.inf], [-1e40], np.inf),  # of the other sign
        (np.float32, [np.nan], [1e40], np.inf),
        (np.float16, [np.inf], [30000.0], np.inf),  # far from an overflow
        (np.float16, [np.inf], [65504 / 1.25], 0.25),
        (np.float16, [np.inf], [65000.0], 504 / 65000),
        (np.float32, [F32_MAX], [F32_MAX * 1.0001], 1e-4),
        (np.float16, [65504.0], [65536.0], 32 / 65536),
        (np.float32, [F32_MAX], [1e300], 1.0),
        (np.float32, [np.inf, 0.0], [1e40, 1.0], 1.0),  # what overflows hides no other error
        (np.float32, [1.0], [np.inf], np.inf),
    ],
)
def test_an_overflow_of_the_outputs_type_is_no_error(dtype, got, wanted, error) -> None:
    found = max_error([np.array(got, dtype)], [np.array(wanted)])
    assert found == pytest.approx(error, rel=1e-2)


def test_a_plan_may_overflow_where_the_model_does() -> None:
    text = 'graph(%0 "x": f32[4]) -> (%1 "y")\n%1: f32[1] = reduce_prod(%0) {axes=(0,)}\n'
    model = standard(text, x=np.full(4, -1e10))
    assert model.expected["y"] == pytest.approx(1e40)
    for value, is_right in ((np.inf, True), (-np.inf, False), (1e38, False)):
        assert (model.judge({"y": np.array([value], np.float32)})[1] == ()) == is_right


def test_an_element_that_depends_on_the_order_of_a_product_is_not_compared() -> None:
    """Huge factors overflow before they meet a zero, or after it: 0, infinity times 0, or NaN."""
    text = 'graph(%0 "x": f32[2,4]) -> (%1 "y")\n%1: f32[2,1] = reduce_prod(%0) {axes=(1,)}\n'
    model = standard(text, x=np.array([[0.0, 1e30, 1e30, 1.0], [2.0, 1.0, 3.0, 1.0]]))
    for first in (0.0, np.nan, np.inf):
        assert model.judge({"y": np.array([[first], [6.0]], np.float32)})[1] == ()
    assert model.judge({"y": np.array([[np.nan], [7.0]], np.float32)})[1] == ("y",)


def test_a_product_that_may_underflow_before_it_meets_infinity_is_not_compared() -> None:
    text = 'graph(%0 "x": f32[2,4]) -> (%1 "y")\n%1: f32[2,1] = reduce_prod(%0) {axes=(1,)}\n'
    model = standard(text, x=np.array([[1e-30, 1e-30, np.inf, 1.0], [1e-30, 1.0, np.inf, 1.0]]))
    assert (model.expected["y"] == np.inf).all()
    for first in (np.inf, np.nan):
        assert model.judge({"y": np.array([[first], [np.inf]], np.float32)})[1] == ()
    assert model.judge({"y": np.array([[np.nan], [np.nan]], np.float32)})[1] == ("y",)


def test_a_zero_in_a_product_that_does_not_overflow_is_determined() -> None:
    text = 'graph(%0 "x": f32[4]) -> (%1 "y")\n%1: f32[1] = reduce_prod(%0) {axes=(0,)}\n'
    model = standard(text, x=np.array([0.0, 1e10, 1e10, 1.0]))
    assert model.judge({"y": np.array([np.nan], np.float32)})[1] == ("y",)


def test_max_error_of_another_number_of_outputs_is_infinite():
    assert max_error([np.ones(1)], []) == float("inf")


QUANTIZED = """graph(%0 "x": f32[{n}], %1 "s": f32[{n}]) -> (%8 "y")
%2: f32[{n}] = mul(%0, %1)
%3: f32[{n}] = round(%2)
%4: i8[{n}] = cast(%3) {{to='i8'}}
%5: f32[{n}] = cast(%4) {{to='f32'}}
%6: f32[{n}] = div(%5, %1)
%7: f32[1] = reduce_sum(%6) {{axes=(0,)}}
%8: f32[{n}] = broadcast(%7) {{shape=({n},)}}
"""


CENTRED = """graph(%0 "x": f32[64]) -> (%6 "y")
%1: f32[1] = reduce_sum(%0) {axes=(0,)}
%2: f32[1] = constant {uniform=0.015625}
%3: f32[1] = mul(%1, %2)
%4: f32[64] = broadcast(%3) {shape=(64,)}
%5: f32[64] = sub(%0, %4)
%6: f32[1] = reduce_sum(%5) {axes=(0,)}
"""

THREE_WAYS = """graph(%0 "x": f32[8]) -> (%1 "whole", %2 "moved", %3 "rounded")
%1: f32[8] = round(%0)
%2: f32[2,4] = reshape(%0) {shape=(2, 4)}
%3: f32[8] = mul(%0, %0)
"""


def standard(text: str, tolerance: float | None = None, **given: np.ndarray) -> Standard:
    graph = parse_graph(text)
    inputs = {name: given[name].astype(np.float32) for name, _ in graph.inputs}
    return Standard(graph, inputs, graph, tolerance)


def quantized(offset: float, tolerance: float | None = None) -> Standard:
    """Sixteen numbers, of which the products of some are `offset` from a border between two."""
    x = np.arange(16) / 8 + 0.06
    return standard(QUANTIZED.format(n=16), tolerance, x=x, s=(np.rint(8 * x) + 0.5 - offset) / x)


def plan_of(standard: Standard, steps: float) -> dict[str, np.ndarray]:
    """What a plan gives that rounds some products to another number."""
    return {"y": standard.expected["y"] + steps / 8}


def test_a_plan_may_err_as_much_as_the_model_does_in_its_own_types() -> None:
    """A product next to a border is rounded to either side, by a model and by its plan."""
    model = quantized(2e-6)
    for steps, is_right in ((0.0, True), (0.9, True), (1e3, False)):
        errors = model.differences(plan_of(model, steps))
        assert (errors["y"].of_largest > 1e-3) == (steps > 0)
        assert (model.judge(plan_of(model, steps))[1] == ()) == is_right
    assert model.own["y"].of_largest > 1e-3 > model.given["y"].of_largest


def test_far_from_a_border_no_plan_may_be_on_its_other_side() -> None:
    model = quantized(0.3)
    assert model.judge(plan_of(model, 0.9))[1] == ("y",)
    assert model.allowed("y") == 1e-3


def test_what_the_user_allows_is_all_that_is_allowed() -> None:
    model = quantized(2e-7, tolerance=1e-6)
    assert model.judge(plan_of(model, 0.9))[1] == ("y",)
    assert model.judge(plan_of(model, 0.0))[1] == ()
    assert model.allowed("y") == 1e-6


def test_what_is_zero_in_exact_arithmetic_is_judged_by_the_models_own_error() -> None:
    model = standard(CENTRED, x=np.random.default_rng(0).standard_normal(64))
    for off, is_right in ((1e-7, True), (1e-3, False)):
        assert (model.judge({"y": np.array([off], np.float32)})[1] == ()) == is_right


def test_whole_numbers_may_differ_only_where_the_models_do() -> None:
    """The same model up to its int8 numbers."""
    text = QUANTIZED.format(n=16).replace('(%8 "y")', '(%4 "y")')
    for offset, is_right in ((2e-7, True), (0.3, False)):
        x = np.arange(16) / 8 + 0.06
        model = standard(text, x=x, s=(np.rint(8 * x) + 0.5 - offset) / x)
        plan = model.expected["y"].copy()
        plan[3] += 1
        assert (model.judge({"y": plan})[1] == ()) == is_right


def test_types_of_16_bits_may_always_round_ten_times() -> None:
    text = 'graph(%0 "x": f32[4]) -> (%1 "y")\n%1: f32[4] = exp(%0)\n'
    least = [least_tolerance(parse_graph(text.replace("f32", t))) for t in ("f32", "f16", "bf16")]
    assert least == [1e-3, 10 * 2.0**-11, 10 * 2.0**-8]
    assert least_tolerance(parse_graph(text), allow_tf32=True) == 10 * 2.0**-11
    assert FACTOR == 2


def test_factors_are_rounded_as_the_option_says() -> None:
    x = np.array([1 + 2.0**-11, 1 + 2.0**-12, -3.0, np.inf, -np.inf, np.nan, 3.4028235e38, 0.0], np.float32)
    found = ROUNDED_FACTORS["tf32"](x)
    np.testing.assert_array_equal(found, [1 + 2.0**-10, 1, -3, np.inf, -np.inf, np.nan, np.inf, 0])
    np.testing.assert_array_equal(ROUNDED_FACTORS["bfloat16"](x[:3]), [1, 1, -3])
    assert ROUNDED_FACTORS["float16"](x[6:7])[0] == np.inf
    assert ROUNDED_FACTORS["tf32"](np.arange(3)).dtype == np.arange(3).dtype


def test_a_model_that_amplifies_rounded_factors_allows_plans_the_same() -> None:
    text = (
        'graph(%0 "x": f32[1,64], %1 "w": f32[64,8]) -> (%4 "y")\n'
        "%2: f32[1,8] = matmul(%0, %1)\n"
        "%3: f32[1,8] = constant {uniform=64.0}\n"
        "%4: f32[1,8] = sub(%2, %3)\n"
    )
    graph, rng = parse_graph(text), np.random.default_rng(0)
    x, w = (1 + 1e-3 * rng.random(shape, np.float32) for shape in ((1, 64), (64, 8)))
    allowed = [Standard(graph, {"x": x, "w": w}, graph, precision=p).allowed("y") for p in ("float32", "tf32")]
    assert allowed[0] == 1e-3 and allowed[1] > 0.1


def test_random_roundings_leave_whole_numbers_and_moves_alone() -> None:
    graph, x = parse_graph(THREE_WAYS), np.linspace(0.1, 3, 8, dtype=np.float32)
    rng = np.random.default_rng(0)
    exact = reference.run(graph, {"x": x}, exact=False)
    found = reference.run(graph, {"x": x}, exact=False, roundings=rng)
    assert np.array_equal(found["whole"], exact["whole"])
    assert np.array_equal(found["moved"], exact["moved"])
    off = np.abs(found["rounded"] / exact["rounded"] - 1)
    assert 0 < off.max() <= 5 * 2.0**-24
