import numpy as np
import pytest

from korch.primitive.op import NONE, Category, Op, TypeMismatchError, require_arity
from korch.primitive.ops import OPS
from korch.primitive.ops.layout import TakeAttributes
from korch.primitive.types import DType, ValueType, row_major_strides
from korch.testing.samples import random_arrays
from tests.support.samples_of_ops import ILLEGAL, LEGAL

ROWS = list(OPS.values())
SAMPLES = [(OPS[name], sample) for name, own in LEGAL.items() for sample in own]
REFUSALS = [(OPS[name], sample) for name, own in ILLEGAL.items() for sample in own]


def _name(item):
    return item.name if isinstance(item, Op) else str(getattr(item, "inputs", item))


@pytest.mark.parametrize(("row", "sample"), SAMPLES, ids=_name)
def test_inferred_type_is_the_reference_s(row, sample):
    require_arity(row.name, row.arity, len(sample.inputs))
    inferred = row.infer(sample.types, sample.attributes)
    arrays = random_arrays(np.random.default_rng(0), sample.types)
    if row.name == "mod":
        arrays[1] = np.where(arrays[1] == 0, 1, arrays[1]).astype(arrays[1].dtype)
    result = row.reference(arrays, sample.attributes)
    assert result.shape == inferred.shape
    assert DType.of(result.dtype) is inferred.dtype
    assert row.work_flop(sample.types, sample.attributes, inferred) >= 0


@pytest.mark.parametrize(("row", "sample"), SAMPLES, ids=_name)
def test_reference_serves_in_float64(row, sample):
    arrays = random_arrays(np.random.default_rng(0), sample.types)
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arrays]
    with np.errstate(all="ignore"):
        narrow = row.reference(arrays, sample.attributes)
        exact = row.reference(wide, sample.attributes)
    if narrow.dtype == np.float32:
        # An opaque operator computes in its own types, a cast in the one that it names.
        assert exact.dtype == np.float64 or row.name in ("cast", "opaque")
        np.testing.assert_allclose(narrow, exact, rtol=5e-4 if row.name == "round_tf32" else 2e-4, atol=1e-5)


@pytest.mark.parametrize(("row", "sample"), REFUSALS, ids=_name)
def test_illegal_inputs_are_refused_with_a_text(row, sample):
    with pytest.raises(TypeMismatchError, match=row.name if row.name != "opaque" else "opaque"):
        row.infer(sample.types, sample.attributes)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_a_wrong_number_of_inputs_is_refused(row):
    with pytest.raises(TypeMismatchError, match="takes"):
        require_arity(row.name, row.arity, 0)
    if row.arity is not None:
        with pytest.raises(TypeMismatchError, match=str(row.arity)):
            require_arity(row.name, row.arity, row.arity + 1)


def test_every_category_has_a_row_and_every_row_has_samples():
    assert {row.category for row in ROWS} == set(Category)
    assert LEGAL.keys() == ILLEGAL.keys() == OPS.keys()
    assert all(LEGAL.values()) and all(ILLEGAL.values())


@pytest.mark.parametrize("dtype", list(DType))
def test_types_print_and_parse_back(dtype):
    for shape in ((), (0,), (2, 1, 7)):
        type_ = ValueType(shape, dtype)
        assert ValueType.parse(str(type_)) == type_
        assert DType.of(dtype.numpy) is dtype
        assert type_.size_bytes == np.zeros(shape, dtype.numpy).nbytes


@pytest.mark.parametrize("text", ["f32", "f32[2", "f31[2]", "f32[a]"])
def test_what_is_no_type_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        ValueType.parse(text)


def test_strides_are_those_of_a_dense_array():
    assert row_major_strides((2, 3, 5)) == (15, 5, 1)
    assert row_major_strides(()) == ()


def test_erf_agrees_with_the_standard_library():
    import math

    points = np.concatenate([np.linspace(-6, 6, 401), [0.0, -0.0, np.inf, -np.inf, 40.0]])
    found = OPS["erf"].reference([points], NONE)
    expected = np.array([math.erf(x) for x in points])
    np.testing.assert_allclose(found, expected, rtol=1e-13, atol=1e-300)
    assert np.isnan(OPS["erf"].reference([np.array([np.nan])], NONE)).all()


def test_integer_division_truncates_toward_zero():
    a, b = np.array([7, -7, 7, -7]), np.array([2, 2, -2, -2])
    np.testing.assert_array_equal(OPS["div"].reference([a, b], NONE), [3, -3, -3, 3])


def test_maximum_and_minimum_propagate_nan():
    a, b = np.array([np.nan, 1.0]), np.array([1.0, np.nan])
    assert np.isnan(OPS["max"].reference([a, b], NONE)).all()
    assert np.isnan(OPS["min"].reference([a, b], NONE)).all()


def test_attributes_of_another_kind_are_refused():
    row, types = OPS["transpose"], (ValueType.parse("f32[2,3]"),)
    for function in (lambda: row.infer(types, NONE), lambda: row.reference([np.zeros((2, 3))], NONE)):
        with pytest.raises(TypeMismatchError, match=r"transpose takes TransposeAttributes, not Attributes\(\)"):
            function()


def test_indices_that_repeat_nothing_have_no_count() -> None:
    indices = {(0, 0, 1, 1): 2, (0, 1, 2): 1, (1, 2): 0, (0, 2, 2): 0, (): 0}
    assert {own: TakeAttributes(0, own).repeats for own in indices} == indices
