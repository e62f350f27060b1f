"""Computes special functions that ONNX lacks, in float64.

Sources: NIST Digital Library of Mathematical Functions, 5.4, 5.5, 5.11 (recurrence, reflection and asymptotic
expansions of the gamma function's logarithm and its derivative) and 7.9 (continued fraction of the complementary error
function); Giles, Approximating the erfinv function, 2010.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

aten = torch.ops.aten

_STEPS = 8
"""How often the recurrence is applied before an asymptotic expansion."""

_NEAR, _TERMS = 3.0, 40
"""From 3 on, erfcx is computed as a continued fraction of 40 terms; below 3, erfc is exact enough."""

_CENTER = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503),
    *(-0.00417768164, 0.246640727, 1.50140941),
)
_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613),
    *(0.00943887047, 1.00167406, 2.83297682),
)


def _wide(x: Any) -> tuple[Any, Any]:
    """Return the numbers in float64, and the type of the result."""
    return x.to(torch.float64), x.dtype if x.is_floating_point() else torch.get_default_dtype()


def _log_gamma(x: Any) -> Any:
    x, dtype = _wide(x)
    z = torch.where(x < 0.5, 1 - x, x)
    is_near = z < 100  # the product of others could overflow, and their expansion needs no steps
    factors = z
    for i in range(1, _STEPS):
        factors = factors * (z + i)
    factors, large = torch.where(is_near, factors, 1.0), torch.where(is_near, z + _STEPS, z)
    series = (1 / 12 - (1 / 360 - 1 / (1260 * large**2)) / large**2) / large
    constant = 0.5 * math.log(2 * math.pi) - 0.5
    found = (large - 0.5) * (torch.log(large) - 1) + constant + series - torch.log(factors)
    turned = math.log(math.pi) - torch.log(torch.sin(math.pi * (x - torch.floor(x + 0.5))).abs()) - found
    found = torch.where((x == 1) | (x == 2), 0.0, torch.where(x < 0.5, turned, found))
    return torch.where(torch.isinf(x), torch.inf, found).to(dtype)


def _digamma(x: Any) -> Any:
    x, dtype = _wide(x)
    z = torch.where(x < 0, 1 - x, x)
    shifted = torch.zeros_like(z)
    for i in range(_STEPS):
        shifted = shifted + 1 / (z + i)
    square = 1 / (z + _STEPS) ** 2
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    found = torch.log(z + _STEPS) - 0.5 / (z + _STEPS) - series - shifted
    turned = found - math.pi / torch.tan(math.pi * (x - torch.floor(x + 0.5)))
    is_pole = (x < 0) & (x == torch.floor(x))
    return torch.where(x == 0, -1 / x, torch.where(is_pole, torch.nan, torch.where(x < 0, turned, found))).to(dtype)


def _inverse_error(x: Any) -> Any:
    if x.dtype is torch.float64:
        return NotImplemented  # the approximation has the precision of float32
    x, dtype = _wide(x)
    w = -torch.log((1 - x) * (1 + x))
    near, far = _polynomial(_CENTER, w - 2.5), _polynomial(_TAIL, torch.sqrt(w) - 3)
    return torch.where(x.abs() == 1, x * torch.inf, torch.where(w < 5, near, far) * x).to(dtype)


def _scaled_complement(x: Any) -> Any:
    x, dtype = _wide(x)
    return _erfcx(x).to(dtype)


def _erfcx(x: Any) -> Any:
    size = x.abs()
    fraction = size  # 7.9.2 in the Library of Mathematical Functions
    for i in range(_TERMS, 0, -1):
        fraction = size + 0.5 * i / fraction
    small = torch.clamp(size, max=_NEAR)
    near = torch.exp(small * small) * torch.erfc(small)
    found = torch.where(size < _NEAR, near, 1 / (math.sqrt(math.pi) * fraction))
    return torch.where(x < 0, 2 * torch.exp(x * x) - found, found)


def _log_of_normal(x: Any) -> Any:
    x, dtype = _wide(x)
    z = x * math.sqrt(0.5)
    below = torch.log(_erfcx(torch.clamp(-z, min=0.0)) / 2) - z * z
    return torch.where(x < -1, below, torch.log1p(-torch.erfc(torch.clamp(z, min=-1.0)) / 2)).to(dtype)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    found = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        found = found * x + coefficient
    return found


SPECIAL: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys([aten.lgamma.default, aten.special_gammaln.default], _log_gamma),
    **dict.fromkeys([aten.digamma.default, aten.special_digamma.default, aten.special_psi.default], _digamma),
    **dict.fromkeys(
        [aten.mvlgamma.default, aten.special_multigammaln.default], decomposition_table[aten.mvlgamma.default]
    ),
    aten.special_erfcx.default: _scaled_complement,
    aten.special_log_ndtr.default: _log_of_normal,
    **dict.fromkeys([aten.erfinv.default, aten.special_erfinv.default], _inverse_error),
}
"""Functions that the exporter has no translation of."""
