"""The errors of outputs against exact results, and the errors that a plan may have.

A `Standard` holds the model's results in float64, which stands for exact arithmetic, and the error of
the model itself when each operator computes in its own types. A plan may differ from the exact results
by a tolerance, or by twice the model's own error; `docs/numerics.md` derives the rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.ops.elementwise import as_tf32
from korch.primitive.rounding import allow_rounding
from korch.primitive.types import UNIT_ROUNDOFF, DType
from korch.system.blas import side_by_side

TOLERANCE = 1e-3
"""The error that any plan may have, relative to the largest element of the output."""

ROUNDINGS = 10
"""Number of successive roundings to 16 bits that are always allowed."""

FACTOR = 2
"""Largest error of a plan, as a multiple of the error of the model in its own types."""

SAMPLES = 8
"""Most further runs of the model with other roundings before a plan is refused."""


def _as_type(dtype: DType, array: Array) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(dtype.numpy).astype(np.float32) if array.dtype == np.float32 else array


ROUNDED_FACTORS: Mapping[str, Callable[[Array], Array]] = {
    "tf32": as_tf32,
    "float16": functools.partial(_as_type, DType.F16),
    "bfloat16": functools.partial(_as_type, DType.BF16),
}
"""How each value of `--precision` rounds the factors of products."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The error of an output against the reference, or the worst of several errors."""

    of_largest: float = 0.0  # the largest difference, relative to the largest element of its output
    of_rms: float = 0.0  # the largest difference, relative to the root mean square of its output's elements
    rms: float = 0.0  # the root mean square of all differences, relative to the root mean square of the elements

    def merged(self, other: Difference) -> Difference:
        """Return the larger value of each attribute."""
        return Difference(
            max(self.of_largest, other.of_largest), max(self.of_rms, other.of_rms), max(self.rms, other.rms)
        )


INFINITE = Difference(*[float("inf")] * 3)
Differences = Mapping[str, Difference]
"""The errors by output name."""


def difference(actual: Array, wanted: Array, own: Array | None = None) -> Difference:
    """Return the error of an array against another.

    `wanted`: the exact result. `own`: the result of the model in its own types. Differences are relative to the larger
    of its size and that of `wanted`, so that an exact result of 0 everywhere can be compared.

    Returns:
        Infinite differences if the shapes are not equal, or if NaN or infinities are not at the same
        places. A result outside the range of the computed array's type counts as infinite in that type.
    """
    if actual.shape != wanted.shape:
        return INFINITE
    a, e = actual.astype(np.float64), wanted.astype(np.float64)
    if actual.dtype.kind not in "iub":
        most = ml_dtypes.finfo(actual.dtype).max  # type: ignore[no-untyped-call]
        a, e = _with_overflow(a, e, float(most))
    finite = np.isfinite(e)
    others = np.where(finite, 0.0, e)
    if not np.array_equal(np.where(np.isfinite(a), 0.0, a), others, equal_nan=True):
        return INFINITE
    if not finite.any():
        return Difference()
    off, sizes = np.abs(a[finite] - e[finite]), [e[finite]]
    if actual.dtype.kind in "iub":  # different 64-bit integers may be equal as float64
        off = np.maximum(off, (actual != wanted).reshape(finite.shape)[finite])
    if own is not None:
        sizes.append(np.nan_to_num(own.astype(np.float64)[finite], posinf=0.0, neginf=0.0))
    largest = float(off.max())
    size, rms = (max(1e-30, *map(f, sizes)) for f in (_largest, _rms))
    return Difference(largest / size, largest / rms, _rms(off) / rms)


def differences(
    found: Mapping[str, Array], expected: Mapping[str, Array], own: Mapping[str, Array] | None = None
) -> dict[str, Difference]:
    """Return the errors of arrays against others, by name."""
    return {
        name: difference(np.asarray(array), np.asarray(expected[name]), None if own is None else np.asarray(own[name]))
        for name, array in found.items()
    }


def worst(errors: Differences) -> Difference:
    """Return the largest value of each attribute over several errors."""
    return functools.reduce(Difference.merged, errors.values(), Difference())


def max_error(outputs: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest difference over all outputs, relative to the largest element of each output.

    >>> max_error([np.array([1.0, 8.5])], [np.array([1.0, 8.0])])
    0.0625
    """
    if len(outputs) != len(expected):
        return float("inf")
    pairs = zip(outputs, expected, strict=True)
    return max((difference(np.asarray(a), np.asarray(e)).of_largest for a, e in pairs), default=0.0)


def least_tolerance(graph: PrimitiveGraph, allow_tf32: bool = False) -> float:
    """Return the error that any plan for a graph with these element types may have.

    A factor in TF32 has as many bits as one in float16.
    """
    found = {type_.dtype for type_ in graph.types} & {DType.F16, DType.BF16} | ({DType.F16} if allow_tf32 else set())
    return max([TOLERANCE, *(ROUNDINGS * UNIT_ROUNDOFF[dtype] for dtype in found)])


class Standard:
    """The exact results of a model on given inputs, and the errors that a plan may have.

    Attributes:
        inputs: the model's inputs by name.
        expected: the outputs in exact arithmetic.
        given: the errors of the model as given, run operator by operator in its own types.
        own: the worst of these errors and of those of runs with other roundings.
        overflows: whether an output of the model in its own types has an infinity or NaN.
        tolerance: the error that any plan may have.
        user: the tolerance that the user has set; None if there is none.
    """

    def __init__(
        self,
        model: PrimitiveGraph,
        inputs: Mapping[str, Array],
        planned: PrimitiveGraph,
        tolerance: float | None = None,
        seed: int = 0,
        *,
        precision: str = "float32",
    ) -> None:
        """Run the model in float64, and in its own types.

        Args:
            model: the model as given.
            inputs: the model's inputs by name.
            planned: the graph that plans are for; its element types may be narrower.
            tolerance: the error that the user allows, whatever the model's own error; None for the rule.
            seed: random seed of the roundings in further runs.
            precision: the type to which plans may round the factors of products, as in the option `--precision`. The
                model's own error is then the error with such factors, if that is larger.
        """
        self._model, self.inputs, self._seed = model, inputs, seed
        self.user = tolerance
        self.tolerance = least_tolerance(planned, precision == "tf32") if tolerance is None else tolerance
        self.expected, self._own = side_by_side(
            [functools.partial(reference.run, model, inputs, exact=exact) for exact in (True, False)]
        )
        self.overflows = not all(np.isfinite(a).all() for a in self._own.values() if a.dtype.kind not in "iub")
        self.given = differences(self._own, self.expected, self._own)
        self.own = {name: _finite(error) for name, error in self.given.items()}
        if precision in ROUNDED_FACTORS or precision == "int8":
            factors = ROUNDED_FACTORS.get(precision)
            rounded = reference.run(model if factors else allow_rounding(model), inputs, exact=False, factors=factors)
            for name, error in differences(rounded, self.expected, self._own).items():
                self.own[name] = self.own[name].merged(_finite(error))
        self._undetermined = {name: np.zeros(array.shape, bool) for name, array in self.expected.items()}
        self._runs = 0

    def differences(self, found: Mapping[str, Array]) -> dict[str, Difference]:
        """Return the errors of a plan's outputs, at the elements whose exact value is determined."""
        determined = {
            name: np.where(mask, self.expected[name], found[name]).astype(found[name].dtype)
            for name, mask in self._undetermined.items()
            if mask.any() and found[name].shape == mask.shape
        }
        return differences({**found, **determined}, self.expected, self._own)

    def judge(self, found: Mapping[str, Array]) -> tuple[Differences, tuple[str, ...]]:
        """Return the errors of a plan's outputs, and the names of the outputs whose error is too large.

        The model's own error depends on the roundings of a run: in a quantized model only few elements, or
        none, are near the boundary between two numbers. So before a plan is refused, the model runs again
        with other roundings, until the plan is accepted or `SAMPLES` runs are done.
        """
        errors = self.differences(found)
        while names := tuple(name for name in errors if not self._is_within(name, errors)):
            if self.user is not None or self._runs == SAMPLES:
                break
            self._run_again()
            errors = self.differences(found)
        return errors, names

    def allowed(self, name: str) -> float:
        """Return the error that an output may have, relative to its largest element."""
        if self.user is not None:
            return self._least(name)
        return max(self._least(name), FACTOR * self.own[name].of_largest)

    def _least(self, name: str) -> float:
        """Return the tolerance of an output, whatever the model's error; integers must be exact."""
        is_rounded = self.expected[name].dtype.kind not in "iub"
        return self.tolerance if is_rounded else 0.0

    def _is_within(self, name: str, errors: Differences) -> bool:
        error, own, least = errors[name], self.own[name], self._least(name)
        if error.of_largest <= least:
            return True
        # In a quantized model, one element with a large error says little; the number of such elements matters.
        return self.user is None and (
            error.of_largest <= FACTOR * own.of_largest and error.rms <= max(least, FACTOR * own.rms)
        )

    def _run_again(self) -> None:
        """Run the model with other roundings, and keep the larger errors."""
        rng = np.random.default_rng((self._seed, self._runs))
        self._runs += 1
        (found,) = side_by_side(
            [functools.partial(reference.run, self._model, self.inputs, exact=False, roundings=rng)]
        )
        for name, array in found.items():  # 0 * inf: a product over- or underflows if computed in another order
            self._undetermined[name] |= np.isnan(array) & ~np.isnan(self.expected[name])
        for name, error in self.differences(found).items():
            self.own[name] = self.own[name].merged(_finite(error))


def _finite(error: Difference) -> Difference:
    """Return an error, or an error of 0 if the model's own types can't hold its numbers.

    Such an overflow says nothing about the error of a plan that computes in wider types.
    """
    return error if np.isfinite(error.of_largest) else Difference()


def _with_overflow(actual: Array, wanted: Array, most: float) -> tuple[Array, Array]:
    """Return both arrays, changed so that an infinity from overflow is compared fairly.

    If the exact result is beyond the type's largest finite number `most`, an infinity of its sign is
    right. If the exact result is more than half of `most` and at most `most`, rounding errors may have
    caused the overflow: the infinity is then compared as `most`.
    """
    size = np.abs(wanted)
    is_overflow = np.isinf(actual) & np.isfinite(wanted) & (np.sign(actual) == np.sign(wanted))
    near = is_overflow & (size > most / 2) & (size <= most)
    return (np.where(near, np.copysign(most, actual), actual), np.where(is_overflow & (size > most), actual, wanted))


def _largest(array: Array) -> float:
    return float(np.abs(array).max())


def _rms(array: Array) -> float:
    largest = _largest(array) or 1.0  # scaled: the squares of large numbers would overflow
    return largest * float(np.sqrt(np.mean(np.square(array / largest))))
