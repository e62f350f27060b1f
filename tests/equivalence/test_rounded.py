"""Products whose data may be rounded to bytes: the forms that are added, what they compute, and when they are used."""

import numpy as np
import onnx
import pytest

import korch
from korch.backend import has_kernels
from korch.equivalence.rounded import in_groups, with_rounded_data
from korch.fission import fission
from korch.frontend.onnx import load_model
from korch.options import Options
from korch.pipeline.quantized import in_bytes
from korch.primitive.ops.stored import StoredAttributes, rounded, unpacked
from korch.primitive.reference import run
from korch.system.deadline import Deadline
from tests.support.models import in_onnxruntime, one_operator

TERMS, COLUMNS, BLOCK = 96, 48, 32


def model(rng: np.random.Generator, bits: int, level: int, rows: int = 3, has_zeros: bool = True) -> onnx.ModelProto:
    """Return a model of one product by weights of few bits."""
    blocks = TERMS // BLOCK
    arrays = {
        1: rng.integers(0, 256, (COLUMNS, blocks, BLOCK * bits // 8)).astype(np.uint8),
        2: rng.uniform(0.01, 0.1, COLUMNS * blocks).astype(np.float32),
    }
    if has_zeros:
        arrays[3] = rng.integers(0, 256, (COLUMNS, -(-blocks * bits // 8))).astype(np.uint8)
    options = {"K": TERMS, "N": COLUMNS, "block_size": BLOCK, "bits": bits, "accuracy_level": level}
    x = np.zeros((rows, TERMS), np.float32)
    return one_operator("MatMulNBits", [x], constants=arrays, domain="com.microsoft", **options)


@pytest.mark.parametrize("bits", [2, 4])
def test_groups_of_bytes_have_the_same_integers(rng, bits):
    packed, each = rng.integers(0, 256, (16, 5)).astype(np.uint8), 8 // bits
    found = unpacked(in_groups(packed, bits), StoredAttributes(bits, 4 * each, is_rounded=True))
    np.testing.assert_array_equal(found, unpacked(packed, StoredAttributes(bits, 4 * each)))


def test_signed_bytes_become_unsigned_ones():
    np.testing.assert_array_equal(in_groups(np.array([[-128, 0, 127]], np.int8), 8), [[0, 128, 255]])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("level", "is_allowed"), [(4, False), (0, True)])
def test_a_form_multiplies_rounded_data(rng, bits, level, is_allowed):
    given = fission(load_model(model(rng, bits, level)))
    graph = in_bytes(given, has_kernels(Options(threads=1)), Deadline())
    found = with_rounded_data(graph, is_allowed)
    assert [p.attributes.is_rounded for p in found.linear] == [False, True]
    x = rng.standard_normal((3, TERMS)).astype(np.float32)
    only = found.with_primitives([p for p, q in enumerate(found.primitives) if q is not found.linear[0]])
    expected = run(given, {"x0": rounded(x, BLOCK)})["y0"]
    np.testing.assert_allclose(run(only, {"x0": x})["y0"], expected, rtol=0, atol=1e-5 * abs(expected).max())


def test_data_is_not_rounded_unless_the_model_or_the_option_allows_it(rng):
    graph = in_bytes(fission(load_model(model(rng, 4, 1))), has_kernels(Options(threads=1)), Deadline())
    assert with_rounded_data(graph, is_allowed=False) is graph


def test_a_rounded_row_has_multiples_of_a_127th_of_its_largest_element():
    x = np.array([[254.0, 3.0, -2.9, 0.0, 0.0, 0.0]], np.float32)
    np.testing.assert_array_equal(rounded(x, 3), [[254.0, 4.0, -2.0, 0.0, 0.0, 0.0]])
    special = rounded(np.array([[np.inf, 1.0, 2.0, 1.0]], np.float32), 2)
    np.testing.assert_array_equal(
        special, [[np.nan, np.nan, 2.0, np.float32(64 * np.float32(2 * np.float32(1 / 127)))]]
    )


@pytest.mark.parametrize(("kwargs", "is_rounded"), [({}, True), ({"strict": True}, False)])
def test_the_plan_computes_what_onnx_runtime_computes(rng, kwargs, is_rounded):
    pytest.importorskip("onnxruntime")
    given = model(rng, 4, 4, rows=64, has_zeros=False)
    x = rng.standard_normal((64, TERMS)).astype(np.float32)
    (found,) = korch.optimize(given, threads=1, measure=False, progress=False, **kwargs).run(None, {"x0": x})
    (expected,) = in_onnxruntime(given, {"x0": x})
    exact = run(fission(load_model(given)), {"x0": x})["y0"]
    scale = np.abs(exact).max()
    assert (np.abs(found - exact).max() > 1e-4 * scale) == is_rounded
    if is_rounded:
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)
