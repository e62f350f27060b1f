"""One executable for a model with states: sessions keep the states in memory that each step extends in place.

A *state* is an input of the model that an output has with rows appended, such as the keys and values of attention.
Plans for a few new rows read the rows so far from a session's memory and write the new ones behind them; a plan for the
first rows follows none. The file has the format of an executable for several shapes, plus `states.json`.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakSet

import numpy as np

from korch.errors import ArtifactError, InputError, quoted
from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.ranges.state import PAST, ROWS, TOTAL
from korch.runtime.artifact import Artifact
from korch.runtime.executable import Executable
from korch.runtime.padding import NO_STATES, Fitting
from korch.runtime.ranged import MOST_REMEMBERED, RangedExecutable, Ranges
from korch.runtime.record import TensorRecord
from korch.runtime.rows import StatefulModel, StateTensor, type_at
from korch.runtime.runnable import Runnable, TensorInfo
from korch.runtime.shaped import ShapedExecutable, Shared

if TYPE_CHECKING:
    from korch.runtime.report import KernelCost, Report, ShapedReport, SizeRecord

FORMAT = "korch-stateful"
STATES = "states.json"

_STEP = {0: "first rows", 1: "steps of 1 row"}


@dataclass(frozen=True, slots=True)
class Steps:
    """The plans of one number of new rows."""

    rows: int  # this number; 0 for plans of any number of first rows
    ranges: Ranges  # how the plans serve numbers of rows: of all rows after the step, or of the first rows


@dataclass(frozen=True, slots=True)
class States:
    """The states of a model, and its plans."""

    model: StatefulModel  # the inputs, outputs and states
    steps: tuple[Steps, ...]  # the plans by the number of new rows, in their order


class StatefulExecutable(ShapedExecutable):
    """Runs a model with states: as a function of its inputs, or in sessions that keep the states.

    Attributes:
        described: the inputs, outputs and states.
        steps: the plans by the number of new rows.
    """

    format = FORMAT
    more: ClassVar[Mapping[str, type[Any]]] = {STATES: States}

    def __init__(self, artifacts: Sequence[Artifact], shared: Shared, states: States) -> None:
        """Load the plans.

        Args:
            artifacts: the plans.
            shared: the objects, sources and weights of all plans.
            states: the states, and the plans by the number of new rows, in the order of `artifacts`.

        Raises:
            ArtifactError: the objects can't be loaded here, or have other plans.
        """
        super().__init__(artifacts, shared)
        self.described, self.steps = states.model, states.steps
        self.by_rows: dict[int, RangedExecutable] = {}
        left = list(self.executables)
        for own in states.steps:
            part, left = left[: len(own.ranges.plans)], left[len(own.ranges.plans) :]
            self.by_rows[own.rows] = RangedExecutable.of_loaded(part, shared, own.ranges)
        if left or not self.by_rows.keys() - {0}:
            raise ArtifactError("its steps are not those of its plans")
        self.fitting = lru_cache(MOST_REMEMBERED)(self._fit)  # for the rows of a step, and the size of its plans

    def session(self, capacity: int | None = None) -> Session:  # type: ignore[override]  # its states are known
        """Return a session without rows.

        `capacity`: the most rows of its states, at most that of the executable, which is the default.

        Raises:
            InputError: the capacity is not possible.
        """
        most = self.described.capacity
        count = most if capacity is None else _whole(capacity)
        if not 1 <= count <= most:
            raise InputError(f"the capacity is {capacity}", "session", f"1 to {most} rows; optimize for more (--shape)")
        return Session(self, count)

    def compute(self, arrays: Sequence[Any]) -> tuple[Array, ...]:
        """Run the model on all of its inputs, with the states among them, and return all outputs."""
        arrays = self.complete(arrays)
        inputs, states = self.described.inputs, self.described.states
        named = {t.name: a for i, (t, a) in enumerate(zip(inputs, arrays, strict=True)) if i not in self.state_inputs}
        _, past = self.counts_of(arrays)
        session = self.session()
        session.assign([arrays[state.input] for state in states], past)
        found = dict(zip(self.plain_outputs, session.run(**named), strict=True))
        found |= zip((self.described.outputs[s.output].name for s in states), session.states(), strict=True)
        return tuple(found[output.name] for output in self.described.outputs)

    def _fed(self, feeds: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        counters = self.described.counter_names - set(names)
        arrays = super()._fed({name: array for name, array in feeds.items() if name not in counters}, names)
        rows, past = self.counts_of(arrays)
        self.described.check_counters(feeds, past, rows)
        return arrays

    def counters_at(self, past: int, rows: int) -> dict[str, Array]:
        """Return what each input that counts rows has, for some numbers of earlier and of new rows."""
        return {counter.tensor.name: counter.at(past, rows) for counter in self.described.counters}

    def counts_of(self, arrays: Sequence[Any]) -> tuple[int, int]:
        """Return the numbers of new and of earlier rows that arrays for all inputs have.

        Raises:
            InputError: an array has another number of axes.
        """
        counts: dict[str, int] = {}
        for tensor, array in zip(self.described.inputs, arrays, strict=True):
            shape = np.shape(array)
            if len(shape) != len(tensor.axes):
                raise InputError(f"it has {len(shape)} axes", f"input {tensor.name!r}", str(len(tensor.axes)))
            for role, size in zip(tensor.axes, shape, strict=True):
                counts.setdefault(role, size)
        return counts.get(ROWS, self.described.rows), counts[PAST]

    @cached_property
    def state_inputs(self) -> dict[int, int]:
        """The position of the output of each state, by that of its input; the scales of states come last."""
        return dict(self.described.places)

    @cached_property
    def plain_outputs(self) -> list[str]:
        """The names of the outputs that are no states."""
        kept = set(self.state_inputs.values())
        return [output.name for i, output in enumerate(self.described.outputs) if i not in kept]

    def _fit(self, rows: int, size: int) -> Fitting:
        return self.by_rows[rows].fitting_at((size,), self.state_inputs if rows else NO_STATES)

    def get_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the inputs; an axis of rows is given like "1..128"."""
        return list(map(self._info, self.described.inputs))

    def get_outputs(self) -> list[TensorInfo]:
        """Return descriptions of the outputs; an axis of rows is given like "1..128"."""
        return list(map(self._info, self.described.outputs))

    def _info(self, tensor: StateTensor) -> TensorInfo:
        most = self.described.capacity
        ends = {PAST: f"0..{most - 1}", ROWS: f"1..{self.described.rows}", TOTAL: f"1..{most}"}
        shape = [ends[axis] if axis in ends else int(axis) for axis in tensor.axes]
        return replace(TensorInfo.of(TensorRecord(tensor.name, tensor.dtype, ())), shape=shape)

    def inputs_at(self, past: int, rows: int) -> list[TensorInfo]:
        """Return descriptions of the inputs for some numbers of earlier and of new rows."""
        found = zip(self.get_inputs(), self.described.inputs, strict=True)
        return [replace(info, shape=list(tensor.shape(past, rows))) for info, tensor in found]

    def example_inputs(self) -> list[TensorInfo]:
        """Return descriptions of the inputs of the shortest step in the middle of the capacity."""
        return self.inputs_at(self.described.capacity // 2, min(self.by_rows.keys() - {0}))

    def serving(self, past: int, rows: int) -> Executable:
        """Return the plan that runs some new rows after others.

        Raises:
            InputError: no single plan runs them.
        """
        steps = self.by_rows.get(rows if past else 0)
        size = past + rows
        if steps is None or not all(d.low <= size <= d.high for d in steps.ranges.dimensions):
            raise InputError(
                f"no plan runs {rows} rows after {past}", expected=f"{quoted(map(str, self.by_rows))} rows"
            )
        return steps.serving((size,))[0]

    def facts(self) -> str:
        """Return a line about the plans of each step."""
        lines = (f"{_STEP.get(rows, f'steps of {rows} rows')}: {own.facts()}" for rows, own in self.by_rows.items())
        known = self.described
        kept = f", states in {known.kept} (error {known.kept_error:.1e})" if known.kept != "f32" else ""
        return "\n  ".join([f"sessions of at most {known.capacity} rows{kept}", *lines])

    @property
    def report(self) -> ShapedReport:
        """The reports of all plans."""
        plans: dict[str, Report] = {}
        costs: dict[str, tuple[KernelCost, ...]] = {}
        sizes: list[SizeRecord] = []
        for rows, own in self.by_rows.items():
            found, name = own.report, f"{_STEP.get(rows, f'steps of {rows} rows')} "
            plans |= {name + text: report for text, report in found.plans.items()}
            costs |= {name + text: cost for text, cost in found.costs.items()}
            sizes += [replace(record, plan=name + record.plan) for record in found.sizes]
        return replace(super().report, plans=plans, costs=costs, sizes=tuple(sizes))

    def plan_for(self, arrays: Sequence[Any]) -> Executable:
        """Return the first executable of the shortest step."""
        return self.by_rows[min(self.by_rows.keys() - {0})].executables[0]

    def stopwatch(self, arrays: Sequence[Any]) -> Any:
        """Return a function that runs the model once and returns the nanoseconds."""
        return Runnable.stopwatch(self, arrays)

    def time(self, arrays: Sequence[Any], repeat: int) -> Any:
        """Time runs of the model as a function."""
        return Runnable.time(self, arrays, repeat)

    @property
    def further(self) -> tuple[object, ...]:
        """The states and steps, which are in its file, too."""
        return (States(self.described, self.steps),)


class _Rows:
    """The memory of the states of one or several sessions, which all have its rows."""

    lock: ClassVar[threading.Lock] = threading.Lock()  # held by a session that copies its rows

    def __init__(self, arrays: list[Array], user: Session) -> None:
        self.arrays, self.users = arrays, WeakSet([user])


class Session:
    """The states of a model between runs. It is used by one thread at a time.

    Attributes:
        executable: the model.
        capacity: the most rows.
        length: the number of rows so far.
    """

    def __init__(self, executable: StatefulExecutable, capacity: int) -> None:
        """Begin without rows; `StatefulExecutable.session` makes it."""
        self.executable, self.capacity, self.length = executable, capacity, 0
        model = executable.described
        self._inputs = [t for i, t in enumerate(model.inputs) if i not in executable.state_inputs]
        self._limits = executable.model.limits
        self._dimensions = {n: own.ranges.dimensions[0] for n, own in executable.by_rows.items()}
        memory = model.memory()
        self._memory, self._axes = _Rows([array for array, _ in memory], self), [axis for _, axis in memory]

    def run(self, *arrays: Any, **named: Any) -> tuple[Array, ...]:
        """Run the model on new rows, behind those so far.

        Args:
            arrays: one for each input that is no state, in the model's order.
            named: instead of `arrays`, one for each input by its name. Masks of all rows may be missing, which are
                then 1, positions, which are then those of the new rows, and numbers of rows.

        Returns:
            The outputs that are no states, in the model's order.

        Raises:
            InputError: an input is missing or has another type or shape, or the capacity does not suffice.
        """
        given = self._named(arrays, named)
        rows = self._count(given)
        self.executable.described.check_counters(given, self.length, rows)
        if self.length + rows > self.capacity:
            where = f"session with {self.length} rows"
            raise InputError(
                f"{rows} more rows exceed its capacity of {self.capacity}", where, "fewer rows, or `truncate`"
            )
        feeds = self._complete(given, rows)
        pieces = [self._run_piece(feeds, begin, end) for begin, end in self._pieces(rows)]
        return self.joined(pieces)

    def truncate(self, length: int) -> None:
        """Forget all rows but the first ones.

        Raises:
            InputError: there are not as many rows.
        """
        length = _whole(length)
        if not 0 <= length <= self.length:
            raise InputError(f"it can't be cut to {length} rows", "session", f"0 to {self.length}")
        self._own()
        self._clear(length, self.length)
        self.length = length

    def fork(self) -> Session:
        """Return another session with the same rows; they are copied when either of them changes."""
        found = Session.__new__(Session)
        found.__dict__.update(self.__dict__)
        self._memory.users.add(found)
        return found

    __copy__ = fork

    def states(self) -> list[Array]:
        """Return a copy of the rows of each state, in the order and the types of the model's states."""
        return self.executable.described.restored(self.views(self.length))

    def views(self, length: int) -> list[Array]:
        """Return the memory of the first rows of each state, and of the scales of bytes, which later runs change."""
        return [array[_part(axis, 0, length)] for array, axis in zip(self._memory.arrays, self._axes, strict=True)]

    def _clear(self, begin: int, end: int) -> None:
        """Write zeros over rows of each state: plans rely on zeros behind the rows."""
        for array, axis in zip(self._memory.arrays, self._axes, strict=True):
            array[_part(axis, begin, end)] = 0

    def _keep(self, stored: Sequence[Array], length: int) -> None:
        """Set the first rows of each array of the memory."""
        for array, own, axis in zip(stored, self._memory.arrays, self._axes, strict=True):
            own[_part(axis, 0, length)] = array

    def assign(self, arrays: Sequence[Any], length: int) -> None:
        """Set the rows of each state.

        Raises:
            InputError: an array is missing or has another type or shape, or too many rows; no row is changed.
        """
        length = _whole(length)
        if not 0 <= length <= self.capacity:
            raise InputError(f"{length} rows can't be assigned", "session", f"0 to {self.capacity}, its capacity")
        model = self.executable.described
        tensors = [model.inputs[state.input] for state in model.states]
        if len(arrays) != len(tensors):
            names = quoted(tensor.name for tensor in tensors)
            raise InputError(f"{len(arrays)} states are given", "session", f"{len(tensors)}: {names}")
        accepted = [type_at(t, length, 0).accept(a) for t, a in zip(tensors, arrays, strict=True)]
        self.truncate(0)
        self._keep(model.stored(accepted), length)
        self.length = length

    def _own(self) -> None:
        """Copy the rows if another session has the same memory."""
        with _Rows.lock:
            shared = self._memory
            if len(shared.users) == 1:
                return
            found = _Rows([array for array, _ in self.executable.described.memory()], self)
            for to, array, axis in zip(found.arrays, shared.arrays, self._axes, strict=True):
                to[_part(axis, 0, self.length)] = array[_part(axis, 0, self.length)]
            self._memory = found
            shared.users.discard(self)

    def _named(self, arrays: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        names = [tensor.name for tensor in self._inputs]
        counters = self.executable.described.counter_names
        if unknown := [name for name in named if name not in names and name not in counters]:
            raise InputError(f"there is no input {unknown[0]!r}", "session", quoted(names))
        if arrays and (named or len(arrays) != len(names)):
            raise InputError(f"{len(arrays)} arrays are given by position", "session", f"{len(names)}: {quoted(names)}")
        return dict(zip(names, arrays, strict=True)) if arrays else dict(named)

    def _count(self, given: Mapping[str, Any]) -> int:
        """Return the number of new rows."""
        for tensor in self._inputs:
            axis = tensor.axis(ROWS)
            if axis is not None and tensor.name in given:
                shape = np.shape(given[tensor.name])
                if len(shape) == len(tensor.axes) and shape[axis] > 0:
                    return int(shape[axis])
                text = "x".join(map(str, shape)) or "a number"
                raise InputError(f"it has shape {text}", f"input {tensor.name!r}", f"{len(tensor.axes)} axes, and rows")
        names = [tensor.name for tensor in self._inputs if ROWS in tensor.axes]
        if not names:
            return self.executable.described.rows
        raise InputError("no input says how many rows are new", "session", quoted(names))

    def _complete(self, given: Mapping[str, Any], rows: int) -> list[Array]:
        """Return an array for each input."""
        found = []
        for tensor in self._inputs:
            type_ = type_at(tensor, self.length, rows, self._limits.get(tensor.name, ()))
            if tensor.name in given:
                found.append(type_.accept(given[tensor.name]))
            elif TOTAL in tensor.axes:
                found.append(np.ones(type_.shape, type_.dtype))
            elif "position" in tensor.name and (axis := self._row_axis(tensor, rows)) is not None:
                places = np.arange(self.length, self.length + rows, dtype=type_.dtype)
                if math.prod(type_.shape) == rows:
                    found.append(places.reshape(type_.shape))
                    continue
                along = [-1 if i == axis else 1 for i in range(len(tensor.axes))]
                found.append(np.ascontiguousarray(np.broadcast_to(places.reshape(along), type_.shape)))
            else:
                raise InputError("it is missing", f"input {tensor.name!r}", "an array for each input that is no state")
        return found

    def _row_axis(self, tensor: StateTensor, rows: int) -> int | None:
        """Return the axis of new rows: that of their number if the model fixes it; None if there is none."""
        if tensor.dtype[0] not in "iu":
            return None
        if not any(ROWS in other.axes for other in self._inputs) and str(rows) in tensor.axes:
            return len(tensor.axes) - 1 - tensor.axes[::-1].index(str(rows))
        return tensor.axis(ROWS)

    def _pieces(self, rows: int) -> list[tuple[int, int]]:
        """Return the begins and ends of parts of new rows for which there are plans."""
        plans = self._dimensions
        begin, found = 0, list[tuple[int, int]]()
        if self.length == 0 and 0 in plans and rows >= plans[0].low:
            begin = min(rows, plans[0].high)
            found.append((0, begin))
        while begin < rows:
            past = self.length + begin
            fitting = [n for n, own in plans.items() if 0 < n <= rows - begin and own.low <= past + n <= own.high]
            is_part = begin > 0 or max(fitting, default=0) < rows
            if not fitting or (is_part and not self.executable.described.is_causal):
                counts = " or ".join(str(n) for n in plans if n)
                least = min(own.low - n for n, own in plans.items() if n)
                more = "" if past >= least or 0 in plans else f" behind {least} or more others; `assign` these first"
                raise InputError(f"no plan runs {rows} rows after {self.length}", "session", f"{counts} rows{more}")
            found.append((begin, begin + max(fitting)))
            begin += max(fitting)
        return found

    def _run_piece(self, feeds: Sequence[Array], begin: int, end: int) -> tuple[Array, ...]:
        """Run one plan on a part of the new rows."""
        executable, past = self.executable, self.length
        arrays = [_piece(t, a, begin, end, past) for t, a in zip(self._inputs, feeds, strict=True)]
        rows = end - begin
        kept, left = executable.state_inputs, iter(arrays)
        self._own()
        try:
            if past:
                memory = iter(self._memory.arrays)
                inputs = [next(memory) if i in kept else next(left) for i in range(len(executable.described.inputs))]
                found = executable.fitting(rows, past + rows).run([*inputs, *memory])
            else:
                empty = [np.zeros(t.shape(0, rows), DType(t.dtype).numpy) for t in executable.described.inputs]
                inputs = [empty[i] if i in kept else next(left) for i in range(len(empty))]
                found = executable.fitting(0, rows).run(inputs)
                self._keep([found[output] for output in kept.values()], rows)
            self.length += rows
        except BaseException:
            self._clear(past, past + rows)
            raise
        outputs = set(kept.values())
        return tuple(array for i, array in enumerate(found) if i not in outputs)

    def joined(self, pieces: Sequence[tuple[Array, ...]]) -> tuple[Array, ...]:
        """Return the outputs of all rows of several runs; of an output without rows, that of the last run."""
        if len(pieces) == 1:
            return pieces[0]
        outputs = {output.name: output for output in self.executable.described.outputs}
        found = []
        for name, parts in zip(self.executable.plain_outputs, zip(*pieces, strict=True), strict=True):
            axis = outputs[name].axis(ROWS)
            found.append(parts[-1] if axis is None else np.concatenate(parts, axis))
        return tuple(found)


def _whole(count: Any) -> int:
    """Return a number of rows that a caller gives."""
    try:
        return operator.index(count)
    except TypeError:
        raise InputError(f"the number of rows is {count!r}", "session", "a whole number") from None


def _part(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    return (*(slice(None),) * axis, slice(begin, end))


def _piece(tensor: StateTensor, array: Array, begin: int, end: int, past: int) -> Array:
    """Return what an input has for a part of the new rows; `past` counts those before the part."""
    for axis, role in enumerate(tensor.axes):
        if role == ROWS:
            array = array[_part(axis, begin, end)]
        elif role == TOTAL:
            array = array[_part(axis, 0, past + end - begin)]
    return np.ascontiguousarray(array)
