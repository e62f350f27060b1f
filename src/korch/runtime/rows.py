"""What the inputs and outputs of a model with states have, for any numbers of rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from korch.errors import InputError
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.ranges.state import PAST, ROWS, TOTAL, State, counted, kept_type, quantized
from korch.runtime.runnable import ArrayType
from korch.system.alignment import zeroed_array


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

    @property
    def with_scales(self) -> list[int]:
        """The numbers of the states that sessions keep as bytes."""
        pairs = enumerate((self.inputs[state.input], state.axis) for state in self.states)
        return [k for k, (tensor, axis) in pairs if tensor.dtype != "i8" and self._kept(tensor, axis) is DType.I8]

    def _kept(self, tensor: StateTensor, axis: int) -> DType:
        return kept_type(DType(tensor.dtype), len(tensor.axes), axis, DType(self.kept))

    def memory(self) -> list[tuple[Array, int]]:
        """Return zeros for the capacity of each state as sessions keep them, each with the axis of its rows.

        Behind them are the scales of states that are kept as bytes.
        """
        pairs = [(self.inputs[state.input], state.axis) for state in self.states]
        types = [(t.shape(self.capacity, 0), np.dtype(self._kept(t, axis).numpy), axis) for t, axis in pairs]
        types += [((*types[k][0][:-1], 1), np.dtype(np.float32), types[k][2]) for k in self.with_scales]
        return [(zeroed_array(shape, dtype), axis) for shape, dtype, axis in types]

    @property
    def places(self) -> list[tuple[int, int]]:
        """The positions of the input and the output of each array of `memory`; those of scales come last."""
        found = [(state.input, state.output) for state in self.states]
        return found + [(len(self.inputs) + k, len(self.outputs) + k) for k in range(len(self.with_scales))]

    def stored(self, states: Sequence[Array]) -> list[Array]:
        """Return what `memory` has for rows of each state."""
        parts = {k: quantized(states[k]) for k in self.with_scales}
        return [*(parts[k][0] if k in parts else a for k, a in enumerate(states)), *(s for _, s in parts.values())]

    def restored(self, memory: Sequence[Array]) -> list[Array]:
        """Return rows of each state in the model's types."""
        types = [DType(self.inputs[state.input].dtype).numpy for state in self.states]
        found = [array.astype(type_) for array, type_ in zip(memory, types, strict=False)]
        with np.errstate(invalid="ignore"):  # 0 times the infinite scale of a row with an infinity
            for k, scale in zip(self.with_scales, memory[len(types) :], strict=True):
                found[k] *= scale
        return found

    @property
    def counter_names(self) -> set[str]:
        """The names of the inputs that count rows."""
        return {counter.tensor.name for counter in self.counters}

    def check_counters(self, given: Mapping[str, Any], past: int, rows: int) -> None:
        """Raise `InputError` if an input that counts rows is given and is not what it has for some numbers of rows."""
        for counter in self.counters:
            if counter.tensor.name in given:
                counter.check(given[counter.tensor.name], past, rows)


def type_at(tensor: StateTensor, past: int, rows: int, limits: tuple[int, ...] = ()) -> ArrayType:
    """Return the type of arrays for some numbers of rows; `limits`: those of indices."""
    return ArrayType(tensor.name, tensor.shape(past, rows), _numpy_type(tensor.dtype), limits)


@cache
def _numpy_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(DType(dtype).numpy)
