"""How far outputs are from exact results, and how far those of a plan may be.

A `Standard` holds what a model computes in float64, which stands for exact arithmetic, and how far
the model itself is from that when each operator computes in its own types. A plan may differ from
the exact results by a tolerance, or by twice what the model itself does; `docs/numerics.md` derives
the rule.
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
from korch.primitive.types import UNIT_ROUNDOFF, DType

TOLERANCE = 1e-3
"""Of plans, relative to the largest element, where the model's own error is less."""

ROUNDINGS = 10
"""Number of successive roundings to 16 bits that are always allowed."""

FACTOR = 2
"""Largest error of a plan, as a multiple of the error of the model in its own types."""

SAMPLES = 8
"""Runs of the model with other roundings, before a plan is refused."""


def _as_tf32(array: Array) -> Array:
    """Return float32 rounded to 11 bits, as matrix units of NVIDIA's GPUs take factors."""
    if array.dtype != np.float32:
        return array
    bits = np.ascontiguousarray(array).view(np.uint32)
    with np.errstate(over="ignore"):
        rounded = ((bits + np.uint32(1 << 12)) & ~np.uint32((1 << 13) - 1)).view(np.float32)
    return np.where(np.isfinite(array), rounded, array).reshape(array.shape)


def _as_type(dtype: DType, array: Array) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(dtype.numpy).astype(np.float32) if array.dtype == np.float32 else array


ROUNDED_FACTORS: Mapping[str, Callable[[Array], Array]] = {
    "tf32": _as_tf32,
    "float16": functools.partial(_as_type, DType.F16),
    "bfloat16": functools.partial(_as_type, DType.BF16),
}
"""What `--precision` makes of the factors of products."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far an output is from the reference, or the worst of several.

    Attributes:
        of_largest: the largest difference, relative to the largest element of its output.
        of_rms: the same, relative to the root of the mean square of its output's elements.
        rms: the root of the mean square of all differences, relative to the latter.
    """

    of_largest: float = 0.0
    of_rms: float = 0.0
    rms: float = 0.0

    def merged(self, other: Difference) -> Difference:
        """Return the worse of both, each number for itself."""
        return Difference(
            max(self.of_largest, other.of_largest), max(self.of_rms, other.of_rms), max(self.rms, other.rms)
        )


INFINITE = Difference(*[float("inf")] * 3)
Differences = Mapping[str, Difference]
"""By output."""


def difference(actual: Array, wanted: Array, own: Array | None = None) -> Difference:
    """Return how far an array is from another.

    Args:
        actual: what was computed.
        wanted: what is right.
        own: what the model computes in its own types: where the right result is 0 everywhere, its
            elements are the size that differences are relative to.

    Returns:
        Infinite differences if the shapes are not equal, or NaN or infinities are not at the same
        places. What exceeds the range of the computed array's type counts as infinite in it.
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
    if actual.dtype.kind in "iub":  # float64 can't tell all of them apart
        off = np.maximum(off, (actual != wanted).reshape(finite.shape)[finite])
    if own is not None:
        sizes.append(np.nan_to_num(own.astype(np.float64)[finite], posinf=0.0, neginf=0.0))
    largest = float(off.max())
    size, rms = (max(1e-30, *map(f, sizes)) for f in (_largest, _rms))
    return Difference(largest / size, largest / rms, _rms(off) / rms)


def differences(
    found: Mapping[str, Array], expected: Mapping[str, Array], own: Mapping[str, Array] | None = None
) -> dict[str, Difference]:
    """Return how far arrays are from others, by name."""
    return {
        name: difference(np.asarray(array), np.asarray(expected[name]), None if own is None else np.asarray(own[name]))
        for name, array in found.items()
    }


def worst(errors: Differences) -> Difference:
    """Return the worst of several, each number for itself."""
    return functools.reduce(Difference.merged, errors.values(), Difference())


def max_error(outputs: Sequence[Array], expected: Sequence[Array]) -> float:
    """Return the largest difference of all outputs, relative to the largest element of each.

    >>> max_error([np.array([1.0, 8.5])], [np.array([1.0, 8.0])])
    0.0625
    """
    if len(outputs) != len(expected):
        return float("inf")
    pairs = zip(outputs, expected, strict=True)
    return max((difference(np.asarray(a), np.asarray(e)).of_largest for a, e in pairs), default=0.0)


def least_tolerance(graph: PrimitiveGraph, allow_tf32: bool = False) -> float:
    """Return what a plan for a graph of these element types may always differ by.

    Factors in TF32 have as many bits as those in float16.
    """
    found = {type_.dtype for type_ in graph.types} & {DType.F16, DType.BF16} | ({DType.F16} if allow_tf32 else set())
    return max([TOLERANCE, *(ROUNDINGS * UNIT_ROUNDOFF[dtype] for dtype in found)])


class Standard:
    """What is right for a model on given inputs, and how far from it a plan may be.

    Attributes:
        inputs: the model's inputs by name.
        expected: the outputs in exact arithmetic.
        given: the errors of the model as given, operator by operator in its own types.
        own: the worst of these and of runs with other roundings.
        tolerance: what any plan may differ by.
        user: the same, if the user has set it.
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
            inputs: what to feed it.
            planned: the graph that plans are for: its element types may be narrower.
            tolerance: what the user allows, whatever the model's own error; None for the rule.
            seed: of the roundings in further runs.
            precision: to which plans may round the factors of products, as the option `--precision` says. The
                model's own error is then that of the model with such factors, if that is larger.
        """
        self._model, self.inputs, self._seed = model, inputs, seed
        self.user = tolerance
        self.tolerance = least_tolerance(planned, precision == "tf32") if tolerance is None else tolerance
        self.expected = reference.run(model, inputs)
        self._own = reference.run(model, inputs, exact=False)
        self.given = differences(self._own, self.expected, self._own)
        self.own = {name: _finite(error) for name, error in self.given.items()}
        if precision in ROUNDED_FACTORS:
            rounded = reference.run(model, inputs, exact=False, factors=ROUNDED_FACTORS[precision])
            for name, error in differences(rounded, self.expected, self._own).items():
                self.own[name] = self.own[name].merged(_finite(error))
        self._undetermined = {name: np.zeros(array.shape, bool) for name, array in self.expected.items()}
        self._runs = 0

    def differences(self, found: Mapping[str, Array]) -> dict[str, Difference]:
        """Return how far a plan's outputs are from the exact ones, as far as these are determined."""
        determined = {
            name: np.where(mask, self.expected[name], found[name]).astype(found[name].dtype)
            for name, mask in self._undetermined.items()
            if mask.any() and found[name].shape == mask.shape
        }
        return differences({**found, **determined}, self.expected, self._own)

    def judge(self, found: Mapping[str, Array]) -> tuple[Differences, tuple[str, ...]]:
        """Return how far a plan's outputs are from the exact ones, and those that differ by too much.

        The model's error in one run may be less than in another, whose roundings fall otherwise: of
        a quantized model few elements, or none, are next to the border between two numbers. So
        before a plan is refused the model runs again with other roundings, as often as it takes.
        """
        errors = self.differences(found)
        while names := tuple(name for name in errors if not self._is_within(name, errors)):
            if self.user is not None or self._runs == SAMPLES:
                break
            self._run_again()
            errors = self.differences(found)
        return errors, names

    def allowed(self, name: str) -> float:
        """Return how much an output may differ, relative to its largest element."""
        if self.user is not None:
            return self._least(name)
        return max(self._least(name), FACTOR * self.own[name].of_largest)

    def _least(self, name: str) -> float:
        """Return the tolerance of an output whatever the model's error; whole numbers are exact."""
        is_rounded = self.expected[name].dtype.kind not in "iub"
        return self.tolerance if is_rounded else 0.0

    def _is_within(self, name: str, errors: Differences) -> bool:
        error, own, least = errors[name], self.own[name], self._least(name)
        if error.of_largest <= least:
            return True
        # That one element is far away says little where values are quantized; how many are, much.
        return self.user is None and (
            error.of_largest <= FACTOR * own.of_largest and error.rms <= max(least, FACTOR * own.rms)
        )

    def _run_again(self) -> None:
        """Run the model with other roundings, and keep the larger errors."""
        rng = np.random.default_rng((self._seed, self._runs))
        self._runs += 1
        found = reference.run(self._model, self.inputs, exact=False, roundings=rng)
        for name, array in found.items():  # a product with a zero that overflows in another order
            self._undetermined[name] |= np.isnan(array) & np.isfinite(self.expected[name])
        for name, error in self.differences(found).items():
            self.own[name] = self.own[name].merged(_finite(error))


def _finite(error: Difference) -> Difference:
    """Return an error, or none where the model's own types can't hold its numbers.

    That says nothing about how far a plan may be that computes in wider types.
    """
    return error if np.isfinite(error.of_largest) else Difference()


def _with_overflow(actual: Array, wanted: Array, most: float) -> tuple[Array, Array]:
    """Return both so that an infinity is compared as the overflow of a type that it may be.

    Where the right result is beyond the type's largest finite number `most`, an infinity of its
    sign is right. Where it is at most that, but more than the half of it, rounding errors may have
    caused the overflow: the infinity is as far away as `most` is.
    """
    size = np.abs(wanted)
    is_overflow = np.isinf(actual) & np.isfinite(wanted) & (np.sign(actual) == np.sign(wanted))
    near = is_overflow & (size > most / 2) & (size <= most)
    return (np.where(near, np.copysign(most, actual), actual), np.where(is_overflow & (size > most), actual, wanted))


def _largest(array: Array) -> float:
    return float(np.abs(array).max())


def _rms(array: Array) -> float:
    largest = _largest(array) or 1.0  # the squares of large numbers would overflow
    return largest * float(np.sqrt(np.mean(np.square(array / largest))))
