"""What the inputs and outputs of a model with states have, for any numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from korch.errors import InputError
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.ranges.state import PAST, ROWS, TOTAL, State, counted
from korch.runtime.runnable import ArrayType


@dataclass(frozen=True, slots=True)
class StateTensor:
    """An input or an output of a model with states."""

    name: str  # its name
    dtype: str  # its element type
    axes: tuple[str, ...]  # for each axis, PAST, ROWS, TOTAL, or its size

    def shape(self, past: int, rows: int) -> tuple[int, ...]:
        """Return its shape for some numbers of rows."""
        sizes = {PAST: past, ROWS: rows, TOTAL: past + rows}
        return tuple(sizes[axis] if axis in sizes else int(axis) for axis in self.axes)

    def axis(self, role: str) -> int | None:
        """Return the axis that counts something; None if there is none."""
        return self.axes.index(role) if role in self.axes else None


@dataclass(frozen=True, slots=True)
class RowCounter:
    """An input of a model that counts rows, which need not be given."""

    tensor: StateTensor  # the input
    count: str  # what it has, as `counted`

    def at(self, past: int, rows: int) -> Array:
        """Return what the input has for some numbers of earlier and of new rows."""
        type_ = type_at(self.tensor, past, rows)
        return counted(self.count, type_.shape, past, rows).astype(type_.dtype)

    def check(self, array: Any, past: int, rows: int) -> None:
        """Raise `InputError` if an array is not what the input has for some numbers of rows."""
        found = type_at(self.tensor, past, rows).accept(array)
        wanted = self.at(past, rows)
        if not np.array_equal(found, wanted):
            what = f"it has {found.reshape(-1)[:4].tolist()}"
            expected = f"{np.unique(wanted)[:4].tolist()}, since {rows} rows follow {past}; or leave it out"
            raise InputError(what, f"input {self.tensor.name!r}", expected)


@dataclass(frozen=True, slots=True)
class StatefulModel:
    """The inputs, outputs and states of a model."""

    inputs: tuple[StateTensor, ...]  # the inputs, with those of the states
    outputs: tuple[StateTensor, ...]  # the outputs, with those of the states
    states: tuple[State, ...]  # the pairs of an input and an output
    capacity: int  # the most rows of a state
    rows: int  # the most new rows of a run
    is_causal: bool = True  # whether no row depends on later ones, so that rows can be run in parts
    # the inputs that count rows; those that have no other use are not among `inputs`
    counters: tuple[RowCounter, ...] = ()
    kept: str = "f32"  # the type in which sessions keep states that are float32 for callers
    kept_error: float = 0.0  # the largest difference that this type made to an output, relative to its largest element

    def memory_type(self, tensor: StateTensor) -> npt.DTypeLike:
        """Return the type in which sessions keep a state."""
        return DType(self.kept if tensor.dtype == "f32" else tensor.dtype).numpy

    @property
    def counter_names(self) -> set[str]:
        """The names of the inputs that count rows."""
        return {counter.tensor.name for counter in self.counters}

    def check_counters(self, given: Mapping[str, Any], past: int, rows: int) -> None:
        """Raise `InputError` if an input that counts rows is given and is not what it has for some numbers of rows."""
        for counter in self.counters:
            if counter.tensor.name in given:
                counter.check(given[counter.tensor.name], past, rows)


def type_at(tensor: StateTensor, past: int, rows: int) -> ArrayType:
    """Return the type of arrays for some numbers of rows."""
    return ArrayType(tensor.name, tensor.shape(past, rows), np.dtype(DType(tensor.dtype).numpy))
