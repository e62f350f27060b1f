"""Elementwise operations: O[x] = f(I1[x], ..., In[x]), all of one shape.

Each has the meaning of the ONNX operator of the same name: max and min propagate NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from korch.primitive.op import Array, Attributes, Category, Op, flop_per_output, require
from korch.primitive.types import DType, ValueType

TRANSCENDENTAL_OPS = frozenset(("exp", "log", "erf", "tanh", "sigmoid", "pow", "sin", "cos", "tan"))
"""Operations that take many times as long as an addition."""


@dataclass(frozen=True, slots=True)
class CastAttributes(Attributes):
    """The element type to convert to, by its name in the text form."""

    to: str


ERF_STEPS, ERF_END, ERF_DEGREE = 32, 6, 7
"""The Taylor expansions of erf per unit, the point from which erf is 1 in float64, and the degree.

The error is below 1e-16.
"""


@cache
def _expansions_of_erf() -> Array:
    """Return the Taylor coefficients of erf at multiples of 1 / ERF_STEPS, one row for each power.

    erf'' = -2 x erf', so each coefficient of erf' follows from the two before it.
    """
    x = np.arange(ERF_STEPS * ERF_END + 1) / ERF_STEPS
    slopes = [2 / math.sqrt(math.pi) * np.exp(-x * x)]
    slopes.append(-2 * x * slopes[0])
    for k in range(1, ERF_DEGREE - 1):
        slopes.append(-2 * (x * slopes[k] + slopes[k - 1]) / (k + 1))
    return np.stack([np.array([math.erf(v) for v in x]), *(slope / (k + 1) for k, slope in enumerate(slopes))])


def _erf(x: Array) -> Array:
    """Error function: the Taylor polynomial around the nearest expansion point, in float64."""
    y = np.abs(np.asarray(x, np.float64))
    y = np.where(y < ERF_END, y, ERF_END)
    nearest = np.rint(y * ERF_STEPS)
    y -= nearest / ERF_STEPS
    table, place = _expansions_of_erf(), nearest.astype(np.intp)
    result = table[-1][place]
    for row in table[-2::-1]:
        result *= y
        result += row[place]
    return np.where(np.isnan(x), np.nan, np.copysign(result, x)).astype(x.dtype)


def _sigmoid(x: Array) -> Array:
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small)).astype(x.dtype)


def _divide(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        down = np.floor_divide(a, b)  # 0 for a division by 0; a quotient that does not fit wraps around
        is_below = (b != 0) & (down * b != a) & ((a < 0) != (b < 0))
        return np.asarray(down + is_below.astype(a.dtype))
    return np.asarray(np.divide(a, b))


def _power(a: Array, b: Array) -> Array:
    if np.issubdtype(a.dtype, np.integer):
        return np.power(a.astype(np.float64), b).astype(a.dtype)
    return np.asarray(np.power(a, b))


def _remainder(a: Array, b: Array) -> Array:
    return np.asarray(np.fmod(a, b) if DType.of(a.dtype).is_float else np.mod(a, b))


def _cast(inputs: Sequence[Array], attributes: CastAttributes) -> Array:
    x, to = inputs[0], DType(attributes.to)
    # A run in float64 represents exact arithmetic, so it does not round to a narrower float type.
    if to.is_float and x.dtype == np.float64:
        return x
    with np.errstate(all="ignore"):
        return x.astype(to.numpy)


def _same_types(name: str, inputs: Sequence[ValueType]) -> ValueType:
    for position, given in enumerate(inputs[1:], 1):
        require(given == inputs[0], f"{name}: argument {position} is {given}, not {inputs[0]}")
    return inputs[0]


def _infer_same(name: str, kind: str) -> Callable[[Sequence[ValueType], Attributes], ValueType]:
    def infer(inputs: Sequence[ValueType], attributes: Attributes) -> ValueType:
        type_ = _same_types(name, inputs)
        is_bool = type_.dtype is DType.BOOL
        if kind == "float":
            require(type_.dtype.is_float, f"{name}: argument 0 is {type_}, not of floats")
        elif kind == "number":
            require(not is_bool, f"{name}: argument 0 is {type_}, not of numbers")
        elif kind == "integer":
            is_integer = not is_bool and not type_.dtype.is_float
            require(is_integer, f"{name}: argument 0 is {type_}, not of integers")
        elif kind == "bool":
            require(is_bool, f"{name}: argument 0 is {type_}, not bool")
        return type_

    return infer


def _infer_predicate(name: str, kind: str) -> Callable[[Sequence[ValueType], Attributes], ValueType]:
    def infer(inputs: Sequence[ValueType], attributes: Attributes) -> ValueType:
        return ValueType(_infer_same(name, kind)(inputs, attributes).shape, DType.BOOL)

    return infer


def _infer_where(inputs: Sequence[ValueType], attributes: Attributes) -> ValueType:
    condition, *branches = inputs
    require(condition.dtype is DType.BOOL, f"where: argument 0 is {condition}, not bool")
    require(condition.shape == branches[0].shape, f"where: argument 1 is {branches[0]}, argument 0 is {condition}")
    return _same_types("where", branches)


def _infer_cast(inputs: Sequence[ValueType], attributes: CastAttributes) -> ValueType:
    try:
        return ValueType(inputs[0].shape, DType(attributes.to))
    except ValueError:
        require(False, f"cast: there is no element type {attributes.to!r}")
        raise


def as_tf32(x: Array) -> Array:
    """Return float32 rounded to 11 significant bits, as matrix units need factors; other types are returned as is."""
    if x.dtype != np.float32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(1 << 12)) & ~np.uint32((1 << 13) - 1)).view(np.float32)
    return np.where(np.isfinite(x), rounded, x).reshape(x.shape)


def _row(name: str, arity: int, kind: str, function: Callable[..., Array], predicate: bool = False) -> Op:
    def reference(inputs: Sequence[Array], attributes: Attributes) -> Array:
        with np.errstate(all="ignore"):
            return np.asarray(function(*inputs))

    return Op(
        name=name,
        category=Category.ELEMENTWISE,
        arity=arity,
        attributes=Attributes,
        infer=(_infer_predicate if predicate else _infer_same)(name, kind),
        reference=reference,
        work_flop=flop_per_output,
        source=f"numpy.{getattr(function, '__name__', name)}",
    )


UNARY: tuple[tuple[str, str, Callable[..., Array]], ...] = (
    ("neg", "number", np.negative),
    ("abs", "number", np.abs),
    ("sign", "number", np.sign),
    ("reciprocal", "float", np.reciprocal),
    ("sqrt", "float", np.sqrt),
    ("exp", "float", np.exp),
    ("log", "float", np.log),
    ("erf", "float", _erf),
    ("tanh", "float", np.tanh),
    ("sigmoid", "float", _sigmoid),
    ("sin", "float", np.sin),
    ("cos", "float", np.cos),
    ("tan", "float", np.tan),
    ("asin", "float", np.arcsin),
    ("acos", "float", np.arccos),
    ("atan", "float", np.arctan),
    ("sinh", "float", np.sinh),
    ("cosh", "float", np.cosh),
    ("asinh", "float", np.arcsinh),
    ("acosh", "float", np.arccosh),
    ("atanh", "float", np.arctanh),
    ("floor", "float", np.floor),
    ("ceil", "float", np.ceil),
    ("round", "float", np.rint),
    ("round_tf32", "float", as_tf32),
    ("not", "bool", np.logical_not),
    ("bitwise_not", "integer", np.invert),
)
BINARY: tuple[tuple[str, str, Callable[..., Array]], ...] = (
    ("add", "number", np.add),
    ("sub", "number", np.subtract),
    ("mul", "number", np.multiply),
    ("div", "number", _divide),
    ("pow", "number", _power),
    ("mod", "number", _remainder),
    ("max", "number", np.maximum),
    ("min", "number", np.minimum),
    ("and", "bool", np.logical_and),
    ("or", "bool", np.logical_or),
    ("xor", "bool", np.logical_xor),
    ("bitwise_and", "integer", np.bitwise_and),
    ("bitwise_or", "integer", np.bitwise_or),
    ("bitwise_xor", "integer", np.bitwise_xor),
    ("shift_left", "integer", np.left_shift),
    ("shift_right", "integer", np.right_shift),
)
PREDICATES: tuple[tuple[str, int, str, Callable[..., Array]], ...] = (
    ("equal", 2, "any", np.equal),
    ("less", 2, "number", np.less),
    ("less_equal", 2, "number", np.less_equal),
    ("isnan", 1, "float", np.isnan),
    ("isinf", 1, "float", np.isinf),
)

_NO_ONNX_NAME = ("round_tf32", "mod", "shift_left", "shift_right")  # ONNX's operators have attributes, or there is none
_NAMES = (*(row[0] for row in UNARY), *(row[0] for row in BINARY), *(row[0] for row in PREDICATES))
ONNX_NAMES: dict[str, str] = {
    **{name: name.title().replace("_", "") for name in _NAMES if name not in _NO_ONNX_NAME},
    "less_equal": "LessOrEqual",
    "isnan": "IsNaN",
    "isinf": "IsInf",
}
"""The ONNX operators that compute the same without attributes, by the name of the operation."""

ROWS: tuple[Op, ...] = (
    *(_row(name, 1, kind, function) for name, kind, function in UNARY),
    *(_row(name, 2, kind, function) for name, kind, function in BINARY),
    *(_row(name, arity, kind, function, predicate=True) for name, arity, kind, function in PREDICATES),
    Op(
        name="where",
        category=Category.ELEMENTWISE,
        arity=3,
        attributes=Attributes,
        infer=_infer_where,
        reference=lambda inputs, _: np.where(*inputs),
        work_flop=flop_per_output,
        source="ONNX Where-16",
    ),
    Op(
        name="cast",
        category=Category.ELEMENTWISE,
        arity=1,
        attributes=CastAttributes,
        infer=_infer_cast,
        reference=_cast,
        work_flop=flop_per_output,
        source="ONNX Cast-13",
    ),
)
