"""Fission of elementwise operators: one primitive each, after broadcasting."""

import numpy as np

from korch.fission.context import Context
from korch.fission.rule import Build, FissionRule, NotSplitError, Result
from korch.primitive.op import NONE, TypeMismatchError
from korch.primitive.ops import OPS
from korch.primitive.ops.elementwise import ONNX_NAMES
from korch.primitive.types import DType, ValueType
from korch.primitive.verbs import lit

LARGEST = float(np.finfo(np.float32).max)


def _direct(op: str, swap: bool = False) -> Build:
    """Build the primitive `op` from the operator's inputs."""

    def build(c: Context) -> Result:
        values = c.inputs[::-1] if swap else c.inputs
        try:
            OPS[op].infer([ValueType((), c.dtype(value)) for value in values], NONE)
        except TypeMismatchError as error:
            raise NotSplitError(str(error)) from error
        return c.elementwise(op, *values)

    return build


def _variadic(op: str) -> Build:
    def build(c: Context) -> Result:
        result, *rest = c.inputs
        for value in rest:
            result = c.elementwise(op, result, value)
        return result

    return build


def _mean(c: Context) -> Result:
    total = c.inputs[0]
    for value in c.inputs[1:]:
        total = c.elementwise("add", total, value)
    return c.divide_exactly(total, len(c.inputs))


def _pow(c: Context) -> Result:
    """x^y; small integral exponents become products, which are exact where the power is exact."""
    base, exponent = c.inputs
    known = c.array(1)
    is_scalar = known is not None and known.size == 1
    if is_scalar and known is not None and c.shape(exponent) == (1,) * c.rank(exponent):
        number = float(known.reshape(-1)[0])
        if number in (1.0, 2.0, 3.0) and c.rank(exponent) <= c.rank(base):
            square = c.elementwise("mul", base, base) if number > 1 else base
            return c.elementwise("mul", square, base) if number == 3.0 else square
    if not c.is_float(base) and c.is_float(exponent):
        raise NotSplitError("an integer to a fractional power")
    return c.elementwise("pow", base, c.cast(exponent, c.dtype(base)))


def _mod(c: Context) -> Result:
    """The remainder has the sign of the divisor (integers) or of the dividend (fmod): a - trunc(a / b)·b."""
    a, b = c.inputs
    truncates = bool(c.attributes.integer("fmod", 0))
    if c.is_float(a):
        if not truncates:
            raise NotSplitError("a floored remainder of reals")
        return c.elementwise("mod", a, b)
    if not truncates:
        return c.elementwise("mod", a, b)
    return c.elementwise("sub", a, c.elementwise("mul", c.elementwise("div", a, b), b))


def _clip(c: Context) -> Result:
    x = c.input(0)
    if c.version < 11:
        scalar, known = ValueType((), c.dtype(x)), c.attributes
        least = -np.inf if scalar.dtype is DType.F16 else -LARGEST  # all numbers of float16 are less
        ends = (known.number("min", least), -np.inf), (known.number("max", -least), np.inf)
        bounds = [None if number == none else c.full(number, scalar) for number, none in ends]
    else:
        bounds = [c.optional(1), c.optional(2)]
    if bounds[0] is not None:
        x = c.elementwise("max", x, c.reshape(bounds[0], ()))
    if bounds[1] is not None:
        x = c.elementwise("min", x, c.reshape(bounds[1], ()))
    return x


def _cast(c: Context) -> Result:
    return c.cast(c.input(0), c.output_type().dtype)


def _is_inf(c: Context) -> Result:
    x = c.input(0)
    signs = c.attributes.integer("detect_negative", 1), c.attributes.integer("detect_positive", 1)
    if all(signs):
        return c.elementwise("isinf", x)
    if not any(signs):
        return c.full(False, ValueType(c.shape(x), DType.BOOL))
    return c.elementwise("equal", x, lit(-np.inf if signs[0] else np.inf))


def _where(c: Context) -> Result:
    condition, x, y = c.inputs
    shape = np.broadcast_shapes(*map(c.shape, c.inputs))
    return c.add("where", *(c.broadcast(value, shape) for value in (condition, x, y)))


def _identity(c: Context) -> Result:
    return c.input(0)


def _dropout(c: Context) -> Result:
    """Dropout does nothing outside of training."""
    x = c.input(0)
    if c.version >= 12 and c.is_given(2):
        training = c.array(2)
        ratio = c.array(1)
        drops_none = ratio is not None and not ratio.any()
        if (training is None or bool(training.reshape(-1)[0])) and not drops_none:
            raise NotSplitError("dropout in training mode is random")
    if not c.is_read(1):
        return x
    return x, c.full(1, c.output_type(1))


def _bit_shift(c: Context) -> Result:
    """Shift by the number of bits in the second operand, in the direction that the attribute gives."""
    op = {"LEFT": "shift_left", "RIGHT": "shift_right"}.get(c.attributes.text("direction", ""))
    if op is None:
        raise NotSplitError("direction must be LEFT or RIGHT")
    return c.elementwise(op, *c.inputs)


_OTHERS: tuple[tuple[str, Build], ...] = (
    ("Sum", _variadic("add")),
    ("Max", _variadic("max")),
    ("Min", _variadic("min")),
    ("Mean", _mean),
    ("Pow", _pow),
    ("Mod", _mod),
    ("Clip", _clip),
    ("Cast", _cast),
    ("CastLike", _cast),
    ("IsInf", _is_inf),
    ("Where", _where),
    ("Identity", _identity),
    ("Dropout", _dropout),
    ("BitShift", _bit_shift),
)

RULES: tuple[FissionRule, ...] = (
    *(FissionRule(name, _direct(op)) for op, name in ONNX_NAMES.items() if name not in dict(_OTHERS)),
    FissionRule("Greater", _direct("less", swap=True)),
    FissionRule("GreaterOrEqual", _direct("less_equal", swap=True)),
    *(FissionRule(name, build) for name, build in _OTHERS),
)
