"""The float32 vector functions for all widths, compared with float64: errors in units in the last place."""

import ctypes
import math

import numpy as np
import pytest

from korch.system.native import Code
from korch.tile.llvm import functions, wide
from korch.tile.llvm.arithmetic import Arithmetic
from korch.tile.llvm.emit import Emit, SsaValue
from korch.tile.llvm.isa import ISAS
from korch.tile.llvm.print import module

FUNCTIONS = ("exp", "log", "tanh", "erf", "sigmoid")
WIDTHS = (1, 4, 8, 16)
COUNT = 1 << 18
SPECIALS = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-45,
        1e-38,
        -1e-38,
        1e38,
        -1e38,
        88.7,
        88.73,
        89.5,
        -87.3,
        -103.0,
        -104.5,
        1.0,
        -1.0,
        0.625,
        -0.625,
        0.70710677,
        1.4142135,
        3.99,
        4.01,
        20.0,
        -20.0,
        1e-20,
        -1e-20,
        3.4e38,
        -3.4e38,
        0.5,
        88.0,
        -88.0,
        88.1,
        -88.39,
        -88.41,
        -88.5,
        -89.0,
        104.0,
        -104.0,
        1e30,
        -1e30,
        1e20,
        9.02,
        -9.02,
        3.925,
        -3.925,
    ],
    np.float32,
)
EDGES = {
    "exp": np.arange(-4600, 4096) * (math.log(2) / 32),
    "log": np.outer(2.0 ** np.arange(-149, 128), np.arange(32, 64) / 32).ravel(),
    "tanh": np.outer(2.0 ** np.arange(-8, 4), np.arange(4, 8) / 4).ravel(),
    "erf": np.arange(64) / 16,
    "sigmoid": np.arange(-4096, 4096) * (math.log(2) / 32),
}
"""Where one polynomial ends and the next begins, and where a table's next entry is taken."""


@pytest.fixture
def worst_ulp(target):
    """The largest error allowed, in units in the last place, of a function at a width."""
    is_wide = target.lanes == 16
    return lambda name, width: (wide.ERRORS if is_wide and width == 16 else functions.ERRORS)[name]


@pytest.fixture(scope="module")
def library(builder, target):
    names = [(f, w) for f in (*FUNCTIONS, "exp_of_nonpositive") for w in WIDTHS]
    return Code(builder.objects([module_of(names, ISAS[target.isa])]))


def module_of(names, isa):
    """Return LLVM IR of loops that apply functions to arrays, each at a number of lanes."""
    emit = Emit()
    for name, width in names:
        with emit.function(f"void @korch_test_{name}{width}(ptr %x, ptr %y, i64 %n) #0"):

            def body(i, name=name, width=width):
                x, y = (emit.place("float", SsaValue(p, "ptr"), i) for p in ("%x", "%y"))
                own = Arithmetic(emit, isa).functions(width)
                emit.store(getattr(own, name)(emit.load("float", width, x, 4, emit.depth)), y, 4)

            emit.loop(emit.index(0), SsaValue("%n", "i64"), width, body)
            emit.effect("ret void")
    return module(emit, isa, "")


@pytest.mark.parametrize("width", WIDTHS)
def test_the_exponential_of_numbers_that_are_not_positive(library, worst_ulp, rng, width):
    x = -np.concatenate(
        [rng.uniform(0, 86.9, COUNT - 16), np.zeros(4), np.full(4, np.inf), np.full(4, np.nan), np.full(4, 200.0)]
    ).astype(np.float32)
    y = call(library, "exp_of_nonpositive", width, x)
    expected = np.exp(x[:-16].astype(np.float64))
    unit = np.spacing(expected.astype(np.float32)).astype(np.float64)
    assert (np.abs(y[:-16] - expected) / unit).max() <= worst_ulp("exp", width)
    assert (y[-16:-12] == 1).all() and (y[-12:-8] == 0).all() and (y[-4:] == 0).all()
    assert np.isnan(y[-8:-4]).all()


def call(library, name, width, x):
    y = np.full_like(x, np.nan)
    pointers = (ctypes.c_void_p(a.ctypes.data) for a in (x, y))
    library.function(f"korch_test_{name}{width}")(*pointers, ctypes.c_long(x.size))
    return y


def exact(name, x):
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        match name:
            case "erf":
                return np.array([math.erf(v) for v in wide])
            case "sigmoid":
                return 1 / (1 + np.exp(-wide))
        return getattr(np, name)(wide)


def arguments(name, rng):
    if name == "log":
        return np.exp(rng.uniform(-100, 88, COUNT)).astype(np.float32)
    if name == "exp":
        return rng.uniform(-103, 88.7, COUNT).astype(np.float32)
    spread = rng.standard_normal(COUNT) * np.exp(rng.uniform(-15, 4, COUNT))
    return np.clip(spread, -88 if name == "sigmoid" else -1e9, 1e9).astype(np.float32)


def worst_error(library, name, width, x):
    """Return the largest error, in units in the last place, and where it is."""
    expected = exact(name, x)
    unit = np.spacing(np.abs(expected).astype(np.float32)).astype(np.float64)
    error = np.abs(call(library, name, width, x).astype(np.float64) - expected) / unit
    worst = int(np.argmax(error))
    return error[worst], x[worst]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error(name, library, worst_ulp, rng):
    x = arguments(name, rng)
    for width in WIDTHS:
        error, where = worst_error(library, name, width, x)
        assert error <= worst_ulp(name, width), (width, where, error)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_beside_edges(name, library, worst_ulp):
    """At 16 floats on both sides of each place where a formula changes."""
    low, high = {"exp": (-103, 88.7), "sigmoid": (-88, 100)}.get(name, (-np.inf, np.inf))
    edges = EDGES[name].astype(np.float32)
    edges = edges[(edges > low) & (edges < high)]
    steps = np.arange(-16, 16, dtype=np.int32)
    x = (edges.view(np.int32)[:, None] + steps).view(np.float32).ravel()
    x = x[(x > low) & (x < high) & (x != 0)]
    x = np.concatenate([x, np.ones(-x.size % 16, np.float32)])
    for width in WIDTHS:
        error, where = worst_error(library, name, width, x)
        assert error <= worst_ulp(name, width), (width, where, error)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_special_numbers(name, width, library):
    found = call(library, name, width, SPECIALS)
    with np.errstate(all="ignore"):
        expected = exact(name, SPECIALS).astype(np.float32)
    # Below -88 a sigmoid is denormal: there it may be 0.
    np.testing.assert_allclose(found, expected, rtol=4e-7, atol=2e-38 * (name == "sigmoid"))
    if name in ("tanh", "erf"):
        np.testing.assert_array_equal(np.signbit(found[:2]), [False, True])


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("exp", (-104, -104.3, -105, -105.3, -105.5, -1e30, -np.inf), 0),
        ("exp", (89, 1e30, np.inf), np.inf),
        ("tanh", (10, 88, 1e30, np.inf), 1),
        ("tanh", (-10, -88, -1e30, -np.inf), -1),
        ("erf", (4.2, 88, 1e30, np.inf), 1),
        ("erf", (-4.2, -88, -1e30, -np.inf), -1),
        ("sigmoid", (18, 88.5, 104, 1e30, np.inf), 1),
        ("sigmoid", (-89.5, -104, -1e30, -np.inf), 0),
    ],
)
@pytest.mark.parametrize("width", WIDTHS)
def test_limits_are_exact(name, x, expected, width, library):
    """So that x sigmoid(x) is 0, and not large, far below zero."""
    assert (call(library, name, width, np.resize(np.float32(x), 16)) == expected).all()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_number_is_not_what_others_are(name, width, library):
    """Each lane has its own result, whatever stands in the others; of a NaN the sign may be any."""
    x = np.tile(np.float32([0.3, np.nan, 80.0, -np.nan, np.inf, 1.7, -np.inf, 1e-40]), 4)
    together = call(library, name, width, x)
    for i in range(8):
        alone = call(library, name, width, np.full(16, x[i]))
        np.testing.assert_array_equal(alone, np.full(16, together[i]))
        assert np.isnan(together[i]) or not np.isnan(x[i])


def test_monotonic_ends(library):
    """No function leaves its range beside the places where its formula changes."""
    x = np.linspace(-30, 30, 1 << 16).astype(np.float32)
    for name, low, high in (("tanh", -1, 1), ("erf", -1, 1), ("sigmoid", 0, 1)):
        y = call(library, name, 16, x)
        assert y.min() >= low and y.max() <= high
        assert np.diff(y).min() >= -4e-7, name
