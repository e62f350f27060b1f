"""Fission of activation functions.

Each is written so that no step overflows where the result is finite, and NaN propagates.
"""

import math

from korch.fission.context import Context
from korch.fission.rule import FissionRule, NotSplitError, Result
from korch.primitive.types import ValueId
from korch.primitive.verbs import lit


def _relu(c: Context) -> Result:
    return c.elementwise("max", c.input(0), lit(0.0))


def _leaky_relu(c: Context) -> Result:
    """max(x, a·x) if 0 < a <= 1; otherwise a selection (`where`) between x and a·x."""
    x, slope = c.input(0), c.attributes.number("alpha", 0.01)
    scaled = c.elementwise("mul", x, lit(slope))
    if 0 < slope <= 1:
        return c.elementwise("max", x, scaled)
    return c.add("where", c.elementwise("less", x, lit(0.0)), scaled, x)


def _prelu(c: Context) -> Result:
    x, slope = c.inputs
    scaled = c.elementwise("mul", x, slope)
    return c.add("where", c.elementwise("less", x, lit(0.0)), scaled, x)


def _exponential(c: Context, x: ValueId, alpha: float) -> ValueId:
    """Return alpha·(e^x - 1) computed from min(x, 0), so that e^x can't overflow."""
    power = c.elementwise("exp", c.elementwise("min", x, lit(0.0)))
    below = c.elementwise("sub", power, lit(1.0))
    return below if alpha == 1 else c.elementwise("mul", below, lit(alpha))


def _elu(c: Context) -> Result:
    x = c.input(0)
    negative = _exponential(c, x, c.attributes.number("alpha", 1.0))
    return c.elementwise("add", c.elementwise("max", x, lit(0.0)), negative)


def _selu(c: Context) -> Result:
    x = c.input(0)
    alpha = c.attributes.number("alpha", 1.67326319217681884765625)
    gamma = c.attributes.number("gamma", 1.05070102214813232421875)
    both = c.elementwise("add", c.elementwise("max", x, lit(0.0)), _exponential(c, x, alpha))
    return c.elementwise("mul", both, lit(gamma))


def _celu(c: Context) -> Result:
    x, alpha = c.input(0), c.attributes.number("alpha", 1.0)
    scaled = x if alpha == 1 else c.elementwise("div", x, lit(alpha))
    if alpha < 0:
        raise NotSplitError("a negative alpha")
    negative = _exponential(c, scaled, alpha)
    return c.elementwise("add", c.elementwise("max", x, lit(0.0)), negative)


def _unit_ramp(c: Context, x: ValueId, slope: float, shift: float) -> ValueId:
    """Return min(max(slope·x + shift, 0), 1)."""
    line = c.elementwise("add", c.elementwise("mul", x, lit(slope)), lit(shift))
    return c.elementwise("min", c.elementwise("max", line, lit(0.0)), lit(1.0))


def _hard_sigmoid(c: Context) -> Result:
    alpha, beta = c.attributes.number("alpha", 0.2), c.attributes.number("beta", 0.5)
    return _unit_ramp(c, c.input(0), alpha, beta)


def _hard_swish(c: Context) -> Result:
    return c.elementwise("mul", c.input(0), _unit_ramp(c, c.input(0), 1 / 6, 0.5))


def _log_one_plus_exp(c: Context, x: ValueId) -> ValueId:
    """Return log(1 + e^x) as max(x, 0) + log(1 + e^-|x|), which can't overflow."""
    small = c.elementwise("exp", c.elementwise("neg", c.elementwise("abs", x)))
    tail = c.elementwise("log", c.elementwise("add", small, lit(1.0)))
    return c.elementwise("add", c.elementwise("max", x, lit(0.0)), tail)


def _softplus(c: Context) -> Result:
    return _log_one_plus_exp(c, c.input(0))


def _softsign(c: Context) -> Result:
    x = c.input(0)
    return c.elementwise("div", x, c.elementwise("add", c.elementwise("abs", x), lit(1.0)))


def _mish(c: Context) -> Result:
    x = c.input(0)
    return c.elementwise("mul", x, c.elementwise("tanh", _log_one_plus_exp(c, x)))


def _gelu(c: Context) -> Result:
    x = c.input(0)
    if c.attributes.text("approximate", "none") == "tanh":
        cube = c.elementwise("mul", c.elementwise("mul", x, x), x)
        inner = c.elementwise("add", x, c.elementwise("mul", cube, lit(0.044715)))
        curve = c.elementwise("tanh", c.elementwise("mul", inner, lit(math.sqrt(2 / math.pi))))
    else:
        curve = c.elementwise("erf", c.elementwise("mul", x, lit(math.sqrt(0.5))))
    half = c.elementwise("mul", x, lit(0.5))
    return c.elementwise("mul", half, c.elementwise("add", curve, lit(1.0)))


def _swish(c: Context) -> Result:
    x, alpha = c.input(0), c.attributes.number("alpha", 1.0)
    scaled = x if alpha == 1 else c.elementwise("mul", x, lit(alpha))
    return c.elementwise("mul", x, c.elementwise("sigmoid", scaled))


def _thresholded_relu(c: Context) -> Result:
    x, alpha = c.input(0), c.attributes.number("alpha", 1.0)
    zeros = c.full(0, c.builder.type(x))
    return c.add("where", c.elementwise("less", lit(alpha), x), x, zeros)


def _shrink(c: Context) -> Result:
    x = c.input(0)
    if not c.is_float(x):
        raise NotSplitError("integers, with a bias that is real")
    bias, limit = c.attributes.number("bias", 0.0), c.attributes.number("lambd", 0.5)
    less, more = c.elementwise("sub", x, lit(bias)), c.elementwise("add", x, lit(bias))
    upper = c.add("where", c.elementwise("less", lit(limit), x), less, c.full(0, c.builder.type(x)))
    return c.add("where", c.elementwise("less", x, lit(-limit)), more, upper)


RULES: tuple[FissionRule, ...] = (
    FissionRule("Relu", _relu),
    FissionRule("LeakyRelu", _leaky_relu),
    FissionRule("PRelu", _prelu),
    FissionRule("Elu", _elu),
    FissionRule("Selu", _selu),
    FissionRule("Celu", _celu, 12),
    FissionRule("HardSigmoid", _hard_sigmoid),
    FissionRule("HardSwish", _hard_swish, 14),
    FissionRule("Softplus", _softplus),
    FissionRule("Softsign", _softsign),
    FissionRule("Mish", _mish, 18),
    FissionRule("Gelu", _gelu, 20),
    FissionRule("Swish", _swish, 24),
    FissionRule("ThresholdedRelu", _thresholded_relu, 10),
    FissionRule("Shrink", _shrink, 9),
)
