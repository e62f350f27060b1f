"""DFT and STFT as products, compared with NumPy's transforms in float64."""

import numpy as np
import pytest

from korch.fission import fission_with_report
from korch.frontend import load_model
from korch.primitive.lowering import lower_products
from korch.primitive.reference import run
from tests.support.models import feeds_of, one_operator

TOLERANCE = {2: 2e-3, 4: 2e-6, 8: 1e-13}
"""The largest error relative to the largest element, by the bytes of an element."""


def _numbers(*shape, dtype=np.float32):
    return np.random.default_rng(5).standard_normal(shape).astype(dtype)


def _complex(x):
    wide = x.astype(np.float64)
    return wide[..., 0] if x.shape[-1] == 1 else wide[..., 0] + 1j * wide[..., 1]


def _pairs(x):
    return np.stack([x.real, x.imag], -1)


def _check(op, inputs, constants, expected, opset=20, **attributes):
    model = one_operator(op, inputs, constants=constants, opset=opset, **attributes)
    graph, report = fission_with_report(load_model(model))
    assert not report.kept
    y = run(lower_products(graph), feeds_of(inputs, constants), exact=False)["y0"]
    assert y.shape == expected.shape and y.dtype == inputs[0].dtype
    scale = np.abs(expected).max(initial=1e-30)
    np.testing.assert_allclose(y / scale, expected / scale, atol=TOLERANCE[y.itemsize], rtol=0)
    return graph


LENGTHS = [1, 2, 3, 5, 8, 9, 16, 97, 100, 251, 400, 512, 1000, 1024]


@pytest.mark.parametrize("length", LENGTHS)
def test_transforms_of_all_kinds(length):
    x, z = _numbers(3, length, 1), _numbers(3, length, 2)
    for data in (x, z):
        _check("DFT", [data], {}, _pairs(np.fft.fft(_complex(data), axis=1)))
        _check("DFT", [data], {}, _pairs(np.fft.ifft(_complex(data), axis=1)), inverse=1)
    _check("DFT", [x], {}, _pairs(np.fft.rfft(_complex(x), axis=1)), onesided=1)
    half, n = z[:, : length // 2 + 1], {1: np.array(length)}
    _check("DFT", [half], n, np.fft.irfft(_complex(half), length, axis=1)[..., None], inverse=1, onesided=1)


@pytest.mark.parametrize("given", [1, 5, 6, 8, 100])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_length_crops_or_pads_any_axis(axis, given):
    x = _numbers(3, 6, 4, 2)
    expected = _pairs(np.fft.fft(_complex(x), given, axis=axis))
    _check("DFT", [x], {1: np.array(given), 2: np.array(axis - 4)}, expected)
    _check("DFT", [x], {1: np.array(given)}, expected, opset=17, axis=axis)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_elements_of_other_types(dtype):
    x = _numbers(2, 60, 1, dtype=dtype)
    _check("DFT", [x], {}, _pairs(np.fft.rfft(_complex(x), axis=1)), onesided=1)


def test_an_inverse_of_odd_length_uses_half_of_the_spectrum():
    x = np.array([[[1, 0], [2, 1], [3, 9]]], np.float32)
    expected = np.fft.irfft([[1, 2 + 1j]], 3)[..., None]
    _check("DFT", [x], {1: np.array(3), 2: np.array(1)}, expected, inverse=1, onesided=1)


def test_long_transforms_are_split_into_products_by_small_tables():
    graph = _check("DFT", [_numbers(1, 4096, 2)], {}, _pairs(np.fft.fft(_complex(_numbers(1, 4096, 2)), axis=1)))
    assert sum(p.op == "matmul" for p in graph.primitives) > 1
    assert sum(c.array.size for c in graph.constants.values()) < 1 << 19


FRAMES = [(16, 4, 2), (17, 5, 3), (100, 16, 16), (100, 7, 9), (1, 1, 1), (40, 8, 8), (900, 400, 160), (64, 32, 2)]


@pytest.mark.parametrize(("size", "length", "step"), FRAMES)
@pytest.mark.parametrize("window", ["none", "constant", "input", "length of the window"])
def test_frames(size, length, step, window):
    shape = np.random.default_rng(2).random(length).astype(np.float32)
    for components in (1, 2):
        x = _numbers(2, size, components)
        starts = range(0, size - length + 1, step)
        frames = np.stack([_complex(x)[:, i : i + length] for i in starts], 1)
        expected = np.fft.fft(frames if window == "none" else frames * shape)
        constants = {1: np.array(step)}
        constants |= {3: np.array(length)} if window != "length of the window" else {}
        constants |= {2: shape} if window in ("constant", "length of the window") else {}
        inputs = [x, None, shape if window == "input" else None]
        _check("STFT", inputs, constants, _pairs(expected), onesided=0)
        if components == 1:
            for flag in ({}, {"onesided": 1}):
                _check("STFT", inputs, constants, _pairs(expected[..., : length // 2 + 1]), **flag)


@pytest.mark.parametrize(
    ("op", "inputs", "constants", "reason"),
    [
        ("DFT", [_numbers(1, 4099, 1)], {}, "length 4099 takes a table"),
        ("STFT", [_numbers(1, 100, 1)], {1: np.array(1), 3: np.array(90)}, "a frame overlaps 90 others"),
    ],
)
def test_what_is_left_to_a_library(op, inputs, constants, reason):
    (kept,) = fission_with_report(load_model(one_operator(op, inputs, constants=constants, opset=20)))[1].kept
    assert reason in kept.reason
