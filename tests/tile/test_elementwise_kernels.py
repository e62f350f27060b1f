"""Every elementwise operation of the table, compiled and compared with NumPy element by element."""

import numpy as np
import pytest

from korch.errors import InvalidGraphError
from korch.primitive.op import Category
from korch.primitive.ops import OPS
from korch.primitive.ops.elementwise import CastAttributes
from korch.provider.generated import GeneratedProvider
from korch.testing.kernels import load_kernels, run_kernel
from tests.tile.tile_groups import Graph, offers_of

ROWS = {name: row for name, row in OPS.items() if row.category is Category.ELEMENTWISE}
FLOAT_INTS = [op for op in ROWS if op not in ("where", "cast")]
BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right")
# Largest error in units in the last place; the rest is exact or correctly rounded. The C library's
# float64 functions and NumPy's differ by their own errors.
F32_ULP = {
    "exp": 1.5,
    "log": 1.5,
    "tanh": 1.5,
    "erf": 5.5,
    "sigmoid": 3.0,
    "pow": 1.0,
    "reciprocal": 0.5,
    "sqrt": 0.5,
    "div": 0.5,
    "round_tf32": 4096,  # it keeps 11 of 24 bits
}
F64_ULP = {"erf": 16.0}  # of the reference's series; others 4
# Where an operation is defined, and not so steep that the argument's own rounding decides.
DOMAIN = {
    "log": (1e-30, 1e30),
    "sqrt": (0, 1e30),
    "asin": (-1, 1),
    "acos": (-1, 1),
    "atanh": (-0.99, 0.99),
    "acosh": (1, 100),
    "exp": (-80, 80),
    "sigmoid": (-80, 80),
    "sinh": (-10, 10),
    "cosh": (-10, 10),
}
WHOLE = ("i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8")
SPECIALS = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2.5, -2.5, 1e-40, -1e-40, 3e38, -3e38]


def run_all(groups, inputs, target, builder):
    """Compile one kernel for each group and return its first output."""
    offers = [offers_of(group, target)[0] for group in groups]
    build = GeneratedProvider().build
    kernels = [build(g, o, target) for g, o in zip(groups, offers, strict=True)]
    library = load_kernels(kernels, builder)
    return [
        run_kernel(k, g, o, x, builder, library=library)[0]
        for k, g, o, x in zip(kernels, groups, offers, inputs, strict=True)
    ]


def group_of(op, kinds, count, attributes=None):
    g = Graph()
    return g.group(g.add(op, [g.tensor(f"{kind}[{count}]") for kind in kinds], attributes))


def samples(rng, op, kind, count=4003):
    low, high = DOMAIN.get(op, (-8.0, 8.0))
    if op in ("log", "sqrt"):
        return np.exp(rng.uniform(np.log(max(low, 1e-30)), np.log(high), count)).astype(kind)
    x = rng.uniform(low, high, count)
    x[: count // 4] = np.clip(x[: count // 4] * 1e-3, low, high)
    return x.astype(kind)


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_accuracy(kind, target, builder, rng):
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    names = [op for op in FLOAT_INTS if op not in ("not", "and", "or", "xor", *BITS)]
    inputs = [[samples(rng, op, dtype) for _ in range(ROWS[op].arity)] for op in names]
    for op, given in zip(names, inputs, strict=True):
        if op == "pow":
            given[0] = np.abs(given[0])
    groups = [group_of(op, [kind] * ROWS[op].arity, given[0].size) for op, given in zip(names, inputs, strict=True)]
    for op, given, found in zip(names, inputs, run_all(groups, inputs, target, builder), strict=True):
        wide = [x.astype(np.float64) for x in given]
        expected = ROWS[op].reference(wide, ROWS[op].attributes())
        if expected.dtype == np.bool_:
            np.testing.assert_array_equal(found, expected, err_msg=op)
            continue
        unit = np.spacing(np.abs(expected.astype(dtype))).astype(np.float64)
        error = np.abs(found.astype(np.float64) - expected) / unit
        allowed = F64_ULP.get(op, 4.0) if kind == "f64" else F32_ULP.get(op, 0.5 + 1e-6)
        worst = int(np.argmax(error))
        assert error[worst] <= allowed + 1e-9, (op, [x[worst] for x in given], error[worst])


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_special_numbers(kind, target, builder):
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    names = [op for op in FLOAT_INTS if op not in ("not", "and", "or", "xor", *BITS)]
    special = np.array(SPECIALS, dtype)
    pairs = np.meshgrid(special, special)
    inputs = [[special] if ROWS[op].arity == 1 else [p.reshape(-1).copy() for p in pairs] for op in names]
    groups = [group_of(op, [kind] * ROWS[op].arity, given[0].size) for op, given in zip(names, inputs, strict=True)]
    for op, given, found in zip(names, inputs, run_all(groups, inputs, target, builder), strict=True):
        expected = ROWS[op].reference(given, ROWS[op].attributes())
        np.testing.assert_allclose(found, expected, rtol=5e-7, atol=3e-45, err_msg=op)
        if op in ("neg", "abs", "sqrt", "tanh", "erf", "floor", "ceil", "round", "reciprocal"):
            zeros = expected == 0
            signs = np.signbit(found[zeros]), np.signbit(expected[zeros])
            np.testing.assert_array_equal(*signs, err_msg=f"sign of zero: {op}")


@pytest.mark.parametrize("kind", WHOLE)
def test_whole_numbers(kind, target, builder, rng):
    numbers = [op for op in FLOAT_INTS if _takes(op, kind)]
    assert set(numbers) >= {"add", "sub", "mul", "div", "mod", "max", "min", "less", "equal", "abs"}
    info = np.iinfo(Graph().type_of(kind))
    low = 0 if info.min == 0 else -9
    inputs = []
    for op in numbers:
        given = [rng.integers(low, 10, 301).astype(info.dtype) for _ in range(ROWS[op].arity)]
        if op in ("max", "min", "less", "less_equal", "equal", "sign"):
            given[0][:4] = (info.min, info.max, info.min, info.max)
        if op in ("div", "mod"):
            given[1][given[1] == 0] = 3
            if low < 0:
                given[0][0], given[1][0] = info.min, -1  # its quotient does not fit: it wraps
        if op == "pow":
            given = [np.abs(x) % 4 for x in given]
        inputs.append(given)
    groups = [group_of(op, [kind] * ROWS[op].arity, 301) for op in numbers]
    for op, given, found in zip(numbers, inputs, run_all(groups, inputs, target, builder), strict=True):
        expected = ROWS[op].reference(given, ROWS[op].attributes())
        np.testing.assert_array_equal(found, expected, err_msg=op)
        assert found.dtype == expected.dtype


def _takes(op, kind):
    try:
        group_of(op, [kind] * ROWS[op].arity, 3)
    except InvalidGraphError:
        return False
    return True


def test_truth_values(target, builder):
    a, b = (x.reshape(-1).copy() for x in np.meshgrid([False, True] * 20, [False, True]))
    names = ["not", "and", "or", "xor", "equal"]
    inputs = [[a, b][: ROWS[op].arity] for op in names]
    groups = [group_of(op, ["bool"] * ROWS[op].arity, a.size) for op in names]
    for op, given, found in zip(names, inputs, run_all(groups, inputs, target, builder), strict=True):
        expected = ROWS[op].reference(given, ROWS[op].attributes())
        np.testing.assert_array_equal(found, expected, err_msg=op)


@pytest.mark.parametrize("kind", ["f32", "f64", "i64", "i8", "u8", "bool"])
def test_where(kind, target, builder, rng):
    dtype = Graph().type_of(kind)
    condition = rng.integers(0, 2, 83).astype(bool)
    branches = [rng.integers(0, 2 if kind == "bool" else 9, 83).astype(dtype) for _ in range(2)]
    group = group_of("where", ["bool", kind, kind], 83)
    (found,) = run_all([group], [[condition, *branches]], target, builder)
    np.testing.assert_array_equal(found, np.where(condition, *branches))


@pytest.mark.parametrize("source", ["f32", "f64", "bool", *WHOLE])
def test_casts(source, target, builder, rng):
    kinds = ["f32", "f64", "bool", *WHOLE]
    dtype = Graph().type_of(source)
    x = rng.integers(0, 2 if source == "bool" else 100, 83).astype(dtype)
    if source in ("f32", "f64"):
        x = x + dtype(0.75)
        x[:2] = (0.0, 0.25)
    groups = [group_of("cast", [source], 83, CastAttributes(to)) for to in kinds if to != source]
    wanted = [to for to in kinds if to != source]
    for to, found in zip(wanted, run_all(groups, [[x]] * len(groups), target, builder), strict=True):
        np.testing.assert_array_equal(found, x.astype(Graph().type_of(to)), err_msg=f"to {to}")


def test_nan_is_true(target, builder):
    x = np.array([np.nan, 0.0, -0.0, 1e-45, np.inf] * 7, np.float32)
    group = group_of("cast", ["f32"], x.size, CastAttributes("bool"))
    (found,) = run_all([group], [[x]], target, builder)
    np.testing.assert_array_equal(found, x.astype(bool))


def test_bytes_fill_registers(target, builder, rng):
    """Four bytes take the place of a float, also where a row is shorter than a register or no multiple of one."""
    sizes = (1, 3, 4, 15, 31, 32, 33, 64, 100)
    groups = [group_of("max", ["i8", "i8"], size) for size in sizes]
    inputs = [[rng.integers(-128, 128, size).astype(np.int8) for _ in "ab"] for size in sizes]
    for found, (a, b) in zip(run_all(groups, inputs, target, builder), inputs, strict=True):
        np.testing.assert_array_equal(found, np.maximum(a, b))
    source = GeneratedProvider().build(groups[-1], offers_of(groups[-1], target)[0], target).source
    assert f"load <{4 * target.lanes} x i8>" in source
