"""A file of model inputs -> samples that determine the ranges of less precise types, and samples for checks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from korch.errors import OptionError
from korch.inputs import converted, named_arrays
from korch.limits import SearchLimits
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Array
from korch.primitive.types import ValueType
from korch.validation.standard import random_inputs

CALIBRATION_SAMPLES = 4  # random inputs for calibration
CALIBRATION_CHECKS = 2  # inputs on which less precise plans are checked
CALIBRATION_MOST = 16  # largest number of samples of a file that are used

Feeds = Mapping[str, Array]

RANDOM = "random normal inputs: ranges of real inputs may differ, so give some with --calibrate"


@dataclass(frozen=True)
class CalibrationInputs:
    """Inputs of a model for calibration (`samples`) and for checks, and a description of their source."""

    samples: Sequence[Feeds]
    checks: Sequence[Feeds]
    source: str


def calibration_of(graph: PrimitiveGraph, path: Path | None, limits: SearchLimits) -> CalibrationInputs:
    """Return the samples in a file, or random ones.

    The last samples of a file are used for checks; if it has only one sample, a random input is used for them.

    `path`: the file, None for random samples.

    Raises:
        OptionError: the file can't be read, or does not have the model's inputs.
    """
    count, checks = CALIBRATION_SAMPLES, CALIBRATION_CHECKS
    rolled = [random_inputs(graph, limits.seed + 1 + i) for i in range(count + checks)]
    if path is None:
        return CalibrationInputs(rolled[:count], rolled[count:], RANDOM)
    samples = _read(graph, path, CALIBRATION_MOST)
    kept = max(1, len(samples) - checks)
    text = f"{path.name}, {len(samples)} sample{'s' * (len(samples) != 1)}"
    return CalibrationInputs(samples[:kept], samples[kept:] or rolled[:1], text)


def _read(graph: PrimitiveGraph, path: Path, most: int) -> list[Feeds]:
    where = f"option calibrate, {path}"
    types = {name: graph.types[value] for name, value in graph.inputs}
    arrays = named_arrays(path, types, where)
    stacks = {name: _stack(name, array, types[name], where) for name, array in arrays.items()}
    counts = {name: len(stack) for name, stack in stacks.items()}
    if len(set(counts.values())) != 1 or not min(counts.values()):
        raise OptionError(f"the numbers of samples are {counts}", where, "the same number of each input, at least 1")
    total = min(most, *counts.values())
    return [{name: stack[i] for name, stack in stacks.items()} for i in range(total)]


def _stack(name: str, array: Array, type_: ValueType, where: str) -> Array:
    """Return the samples of an input as one array whose first axis is the sample."""
    if tuple(array.shape) == type_.shape:
        array = array[np.newaxis]
    if tuple(array.shape[1:]) != type_.shape or array.ndim == 0:
        raise OptionError(
            f"array {name!r} has shape {list(array.shape)}",
            where,
            f"[samples{''.join(f', {n}' for n in type_.shape)}], or {list(type_.shape)} of one sample",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise OptionError(f"array {name!r} has a NaN or an infinity", where, "finite numbers")
    return converted(name, array, type_.dtype.numpy, where)
