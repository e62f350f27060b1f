"""A model with states -> an executable of sessions: plans for a few new rows after any number, and for the first ones.

The model's outputs include inputs with rows appended (`korch.ranges.state`). A step of a fixed number of rows has one
free size, the rows after the step. The first rows, which follow none, are a range of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from korch.backend import builder_of
from korch.errors import InaccurateError, ModelError, OptionError, UnsupportedError
from korch.fission import fission
from korch.frontend.appended import AppendingModel, appending, unreturned
from korch.frontend.onnx import LoadedModel
from korch.frontend.operator import OperatorGraph
from korch.frontend.shapes import is_batch
from korch.inputs import converted, named_arrays, where_of
from korch.numerics import ROUNDINGS, max_error
from korch.options import Options
from korch.pipeline.optimize import Watch
from korch.pipeline.ranges import plans_for_all
from korch.pipeline.source import Primitives, Source
from korch.pipeline.stages import HALF
from korch.primitive import reference
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.types import DType
from korch.ranges.binding import Bound
from korch.ranges.form import Dimension, Sizes, range_text
from korch.ranges.state import LARGEST_BYTE, PAST, ROWS, TOTAL, State, states_of, with_kept_rows, with_states
from korch.report.progress import Progress, Update
from korch.runtime.combine import Combined
from korch.runtime.record import ModelRecord
from korch.runtime.rows import RowCounter, StatefulModel, StateTensor
from korch.runtime.runnable import random_feeds
from korch.runtime.stateful import StatefulExecutable, States, Steps
from korch.system.deadline import Deadline
from korch.validation.standard import standard_of

Binding = Mapping[str, tuple[Bound, ...]]

KEPT = {**HALF, "int8": DType.I8}
"""The element types by the value of the option `state`, without that of the model's own."""

PAST_ROWS, NEW_ROWS = range(1024), range(1, 129)
"""The numbers of earlier and of new rows that are assumed."""

STEPS = (1, 8)
"""The numbers of rows of a step that have plans for any number of earlier rows."""

SAMPLE_PAST, MORE_PAST, SAMPLE_ROWS = 11, 12, 3
"""Numbers of rows at which the roles of dimensions are tried."""

MOST_NAMES = 6
"""The most dimensions whose roles are tried."""

COMPARED_PAST = 4
"""The rows after which steps of several rows are compared with single ones, if there is room for as many."""

CAUSAL = 0.02
"""The largest error of rows that are run in parts, relative to the largest element; else rows are not run in parts."""


@dataclass(frozen=True)
class StateSizes:
    """The sizes of a model with states."""

    model: AppendingModel  # the model, whose caches have the rows in use
    roles: Mapping[str, str]  # by the name of a free dimension, what it counts: PAST, ROWS or TOTAL
    fixed: Mapping[str, tuple[int, ...]]  # the sizes of the other dimensions and of inputs
    past: range  # the numbers of earlier rows
    rows: range  # the numbers of new rows
    counts: Mapping[str, str] = field(default_factory=dict)  # what each input that counts rows has
    assumed: tuple[str, ...] = ()  # which of PAST and ROWS are not given
    is_limited: bool = False  # whether the model takes no more earlier rows, because a table of places has no more

    @property
    def sample(self) -> int:
        """A number of new rows; it is not the least one, if there are others."""
        return min(self.rows[0] + 1, self.rows[-1])

    def load(self, rows: int, past: int) -> OperatorGraph:
        """Return the model for some numbers of rows; it raises the errors of `AppendingModel.load`."""
        return self.model.load(self.binding(rows, past), self.counts, past, rows)

    def binding(self, rows: int, past: int) -> dict[str, tuple[int, ...]]:
        """Return the size of each dimension for some numbers of rows."""
        sizes = {PAST: past, ROWS: rows, TOTAL: past + rows}
        return {**self.fixed, **{name: (sizes[role],) for name, role in self.roles.items()}}

    @property
    def text(self) -> str:
        """A line that says which sizes are assumed; empty if all are given."""
        known = {PAST: self.past, ROWS: self.rows}
        texts = [f"--shape {name}={range_text(known[name])}" for name in self.assumed]
        limit = " (the model takes no more earlier rows)" if self.is_limited else ""
        return f"the model has states; sizes that are not given are assumed: {' '.join(texts)}{limit}" if texts else ""

    def limited(self) -> StateSizes:
        """Return sizes with as many earlier rows as the model takes.

        Raises:
            OptionError: more are given.
        """
        rows, most = self.rows[0], self.past[-1] + 1
        low, high = rows + SAMPLE_PAST, most
        reason = self._refusal(rows, most) if most > low else None
        if reason is None or self._refusal(rows, low):
            return self
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._refusal(rows, middle) else (middle, high)
        if PAST not in self.assumed:
            what = f"the model takes at most {low} rows ({reason.where}: {reason.what})"
            raise OptionError(what, "option --shape", f"at most past=0..{low - 1}")
        return replace(self, past=range(low), is_limited=True)

    def _refusal(self, rows: int, total: int) -> ModelError | UnsupportedError | None:
        """Return why the model can't be read with as many rows after a step; None if it can."""
        try:
            self.load(rows, total - rows)
        except (ModelError, UnsupportedError) as error:
            return error
        return None


def state_sizes(model: LoadedModel, given: Binding) -> StateSizes | None:
    """Return the sizes of a model with states; None if it has none, or their numbers of rows are fixed.

    A dimension of a state's rows counts earlier rows. The roles of the others follow from what the model accepts.
    `given`: sizes by name; PAST and ROWS may stand for the dimensions with these roles.

    Raises:
        OptionError: a size is given for a dimension that follows from others, or the model takes fewer rows.
        UnsupportedError: a range of earlier rows is given, but the model's cache can't be used in sessions; or the
            output of one of its caches is missing.
    """
    found = appending(model)
    past = _past_names(found)
    sizes = {name: bound[0] for name, bound in given.items() if len(bound) == 1}
    if found.refused and isinstance(sizes.get(PAST), range):
        raise found.refused[0]
    if not past or "" in past or found.refused or any(isinstance(sizes.get(name), int) for name in (*past, PAST)):
        return None
    known = _read(found, past, given)
    if not isinstance(known, StateSizes):
        if known is not None and found.needs and isinstance(sizes.get(PAST), range):
            raise known
        return None
    if (error := unreturned(found)) is not None:
        raise error
    ranges: dict[str, range] = {} if ROWS in known.roles.values() else {ROWS: known.rows}
    for name, bound in sizes.items():
        role = known.roles.get(name, name)
        if role == TOTAL:
            raise OptionError(
                f"the size of {name!r} is that of the rows before and in a run", "option --shape", "no size"
            )
        if role == ROWS and isinstance(bound, range) and ROWS not in known.roles.values():
            what = f"no dimension of the model counts new rows: it takes {known.rows[0]}"
            raise OptionError(what, f"option --shape {name}", "the name of the dimension that counts them, or no size")
        if role in (PAST, ROWS) and isinstance(bound, range):
            ranges[role] = bound
        elif role == ROWS and isinstance(bound, int):
            ranges.setdefault(ROWS, range(bound, bound + 1))
    most = found.capacity or PAST_ROWS[-1] + 1
    if PAST in ranges and found.capacity and ranges[PAST][-1] >= most:
        raise OptionError(f"the model's cache has {most} rows", "option --shape", f"at most past=0..{most - 1}")
    assumed = {PAST: range(min(most, len(PAST_ROWS))), ROWS: NEW_ROWS}
    own, left = {**assumed, **ranges}, tuple(name for name in assumed if name not in ranges)
    return replace(known, past=own[PAST], rows=own[ROWS], assumed=left).limited()


def fixed_rows(model: LoadedModel, given: Binding) -> Binding:
    """Return a binding with a size for each dimension that follows from one number of earlier rows.

    `given`: sizes by name; PAST and ROWS may stand for the dimensions with these roles. It is returned as it is if it
    has no such number, or the model has no states. One new row is assumed.

    Raises:
        OptionError: the number of new rows is a range.
    """
    found = appending(model)
    past = _past_names(found)
    sizes = {name: bound[0] for name, bound in given.items() if len(bound) == 1}
    counts = [size for name in (*past, PAST) if isinstance(size := sizes.get(name), int)]
    known = _read(found, past, {n: b for n, b in given.items() if n not in past}) if past and counts else None
    if not isinstance(known, StateSizes):
        return given
    rows = sizes.get(ROWS, known.rows[0] if ROWS not in known.roles.values() else 1)
    if not isinstance(rows, int):
        expected = "one number, or a range of earlier rows, too"
        raise OptionError("the new rows are a range, and the earlier ones are not", "option --shape rows", expected)
    dims = {dim.dim_param for item in model.declared for dim in item.type.tensor_type.shape.dim}
    own = {name: size for name, size in known.binding(rows, counts[0]).items() if name in dims}
    return {**{name: bound for name, bound in given.items() if name not in (PAST, ROWS) or name in dims}, **own}


def _past_names(model: AppendingModel) -> list[str]:
    """Return the names of the dimensions that count the rows of caches; "" for one without a name."""
    dims = {item.name: item.type.tensor_type.shape.dim for item in model.model.declared}
    return sorted({dims[cache.input][cache.axis].dim_param for cache in model.caches})


def _read(
    model: AppendingModel, past: Sequence[str], given: Binding
) -> StateSizes | ModelError | UnsupportedError | None:
    """Return sizes with the role of each dimension that a binding leaves free, or why there are none."""
    items = [*model.model.declared, *(counter.item for counter in model.counters)]
    fixed = {name: tuple(n if isinstance(n, int) else -1 for n in own) for name, own in given.items() if len(own) > 1}
    fixed |= {name: (own[0],) for name, own in given.items() if len(own) == 1 and isinstance(own[0], int)}
    dims = (dim.dim_param for item in items for dim in item.type.tensor_type.shape.dim)
    free = dict.fromkeys(name for name in dims if name and name not in {*past, *fixed})
    fixed |= {name: (1,) for name in free if is_batch(name) and name not in given}
    return _roles(model, past, [name for name in free if name not in fixed], fixed)


def _roles(
    model: AppendingModel, past: Sequence[str], others: Sequence[str], fixed: Mapping[str, tuple[int, ...]]
) -> StateSizes | ModelError | UnsupportedError | None:
    """Return sizes with the role of each free dimension, or why the model can be read with no choice of them."""
    if len(others) > MOST_NAMES:
        return None
    declared = model.model.declared
    unfit: ModelError | UnsupportedError | None = None
    static = {d.dim_value for item in declared for d in item.type.tensor_type.shape.dim if d.HasField("dim_value")}
    counts = sorted({1, *(n for n in static if 0 < n <= NEW_ROWS[-1]), *(n for own in fixed.values() for n in own)})
    for own in sorted(itertools.product((ROWS, TOTAL), repeat=len(others)), key=lambda own: _unlikely(others, own)):
        roles = {**dict.fromkeys(past, PAST), **dict(zip(others, own, strict=True))}
        kept = {n: s for n, s in fixed.items() if n not in (PAST, ROWS)}
        for rows, counted in itertools.product((SAMPLE_ROWS,) if ROWS in own else counts, model.choices):
            sizes = StateSizes(model, roles, kept, PAST_ROWS, range(rows, rows + 1), counted)
            try:
                types = sizes.load(rows, SAMPLE_PAST).types
            except (ModelError, UnsupportedError) as error:
                unfit = unfit or error
                continue
            if any(SAMPLE_PAST + rows in types[name].shape for name in model.model.outputs if name in types):
                return sizes
    return unfit


def _unlikely(names: Sequence[str], roles: Sequence[str]) -> int:
    """Return how many names are unlikely for their roles."""
    likely = [TOTAL if "+" in name or "total" in name or "mask" in name else ROWS for name in names]
    return sum(a != b for a, b in zip(likely, roles, strict=True))


@dataclass(frozen=True)
class _Model:
    """A model with states, at some numbers of rows."""

    sizes: StateSizes
    operators: Callable[[int, int], OperatorGraph]  # for a number of new rows and one of earlier rows
    states: tuple[State, ...]
    capacity: int  # the most rows of a state
    kept: DType | None = None  # the type in which sessions keep states of float32; None for their own

    @staticmethod
    def of(sizes: StateSizes, kept: str = "float32") -> _Model:
        operators = lru_cache(4)(sizes.load)
        states = states_of(fission(operators(sizes.sample, SAMPLE_PAST)))
        if not states:
            raise UnsupportedError("what is appended to its states is not computed as a part of a static graph")
        return _Model(sizes, operators, states, sizes.past[-1] + 1, KEPT.get(kept))

    def step(self, rows: int) -> Source:
        """Return the source of a step of some rows; its size is the number of rows after the step."""

        def primitives(sizes: Sizes, *, with_loops: bool = True) -> PrimitiveGraph:
            found = fission(self.operators(rows, sizes[0] - rows), with_loops=with_loops)
            return with_states(found, self.states, self.kept)

        least = rows + max(1, self.sizes.past[0])
        dimension = Dimension(TOTAL, None, least, self.capacity)
        return self._source(dimension, primitives, lambda own: self.operators(rows, own[0] - rows))

    def first(self) -> Source:
        """Return the source of rows that follow no others; its size is their number."""

        def primitives(sizes: Sizes, *, with_loops: bool = True) -> PrimitiveGraph:
            found = fission(self.operators(sizes[0], 0), with_loops=with_loops)
            return found if self.kept is None else with_kept_rows(found, self.states, self.kept)

        dimension = Dimension(ROWS, None, self.sizes.rows[0], min(self.sizes.rows[-1], self.capacity))
        return self._source(dimension, primitives, lambda own: self.operators(own[0], 0))

    def sources(self) -> dict[int, Source]:
        """Return the source of each plan by its number of new rows; 0 for first rows."""
        sizes = self.sizes
        counts = [n for n in STEPS if n in sizes.rows and n + max(1, sizes.past[0]) < self.capacity] or [sizes.rows[0]]
        found = {rows: self.step(rows) for rows in counts}
        if 0 in sizes.past and len(sizes.rows) > 1:
            found[0] = self.first()
        return found

    def _source(
        self, dimension: Dimension, primitives: Primitives, operators: Callable[[Sizes], OperatorGraph]
    ) -> Source:
        return Source.made(self.sizes.model.model, (dimension,), primitives, lambda own: (operators(own), {}))

    def described(self) -> StatefulModel:
        """Return what each axis of the inputs and outputs counts."""
        rows, least = self.sizes.sample, self.sizes.rows[0]
        first, more = self.operators(rows, SAMPLE_PAST), self.operators(rows, MORE_PAST)
        fewer = self.operators(least, SAMPLE_PAST)

        def described(name: str) -> StateTensor:
            shapes = [graph.types[name].shape for graph in (first, fewer, more)]
            return StateTensor(name, first.types[name].dtype.value, _axes(shapes))

        inputs, outputs = map(described, first.inputs), map(described, first.outputs)
        bindings = [self.sizes.binding(*own) for own in ((rows, SAMPLE_PAST), (least, SAMPLE_PAST), (rows, MORE_PAST))]
        counters = []
        for counter in self.sizes.model.counters:
            axes = _axes([counter.shape(binding) for binding in bindings])
            tensor = StateTensor(counter.item.name, counter.dtype.value, axes)
            counters.append(RowCounter(tensor, self.sizes.counts[tensor.name]))
        most = self.sizes.rows[-1]
        found = StatefulModel(tuple(inputs), tuple(outputs), self.states, self.capacity, most, counters=tuple(counters))
        return found if self.kept is None else replace(found, kept=self.kept.value)


def step_sources(sizes: StateSizes) -> dict[int, Source]:
    """Return the source of each plan of a model with states by its number of new rows; 0 for first rows."""
    return _Model.of(sizes).sources()


def _axes(shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    """Return what axes count: `shapes` for some numbers of rows, for fewer new rows, and for one more earlier row."""
    return tuple(
        str(a) if a == b == c else ROWS if a == c else PAST if a == SAMPLE_PAST else TOTAL
        for a, b, c in zip(*shapes, strict=True)
    )


def optimize_stateful(
    sizes: StateSizes,
    options: Options,
    progress: Progress,
    deadline: Deadline,
    watch: Watch | None,
    record: ModelRecord,
) -> StatefulExecutable:
    """Return an executable of sessions; `record` has the file of the model.

    Raises:
        UnsupportedError: a node can't be run for all numbers of rows.
        InaccurateError: the results for the inputs that the options give differ from the model's.
        KorchError: as `optimize_model`.
    """
    known = _Model.of(sizes, options.state)
    sources = known.sources()
    combined, steps = Combined(), []
    # A state's memory is that of its largest size, so that all plans have the same.
    options = replace(options, search=replace(options.search, range_least=known.capacity))
    for i, (rows, source) in enumerate(sources.items()):
        own = replace(options.for_search(i, "rows"), inputs=None)
        executables, ranges = plans_for_all(source, own, progress, deadline.shared(len(sources) - i), watch)
        combined.take(executables)
        del executables  # with their weights, before the next ones are made
        steps.append(Steps(rows, ranges))
    artifacts, shared = combined.finish(builder_of(options))
    for i, artifact in enumerate(artifacts):
        model = replace(artifact.plan.model, path=record.path, sha256=record.sha256)
        artifacts[i] = replace(artifact, plan=replace(artifact.plan, model=model))
    executable = StatefulExecutable(artifacts, shared, States(known.described(), tuple(steps)))
    executable.described = replace(executable.described, is_causal=_is_causal(executable))
    if known.kept is not None:
        executable.described = replace(executable.described, kept_error=_kept_error(known, executable))
        what = f"states in {options.state}: the outputs of a step differ by up to {executable.described.kept_error:.1e}"
        progress(Update("build", f"{what} of their largest element"))
    _check_inputs(known, executable, options)
    return executable


def _is_causal(executable: StatefulExecutable) -> bool:
    """Return whether rows that are run one after another have the same results as rows that are run together."""
    rows = [n for n in executable.by_rows if n]
    if len(rows) == 1:
        return False
    least = max(own.ranges.dimensions[0].low - n for n, own in executable.by_rows.items() if n)
    past = max(least, min(COMPARED_PAST, executable.described.capacity - max(rows)))
    named = random_feeds(executable.inputs_at(past, max(rows)))
    tensors = [t for t in executable.described.inputs if ROWS in t.axes and TOTAL not in t.axes]
    kept = {executable.described.inputs[state.input].name for state in executable.described.states}
    whole = {t.name: named[t.name] for t in executable.described.inputs if not {ROWS, TOTAL, *kept} & {*t.axes, t.name}}
    before = [named[executable.described.inputs[state.input].name] for state in executable.described.states]
    found = []
    for count in (max(rows), min(rows)):
        session, outputs = executable.session(), []
        session.assign(before, past)
        for begin in range(0, max(rows), count):
            parts = {t.name: named[t.name].take(range(begin, begin + count), t.axis(ROWS)) for t in tensors}
            outputs.append(session.run(**parts, **whole))
        found.append([*session.joined(outputs), *session.states()])
    pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(*found, strict=True)]
    return all(np.abs(a - b).max(initial=0) <= CAUSAL * np.abs(a).max(initial=0) for a, b in pairs)


def _kept_error(known: _Model, executable: StatefulExecutable) -> float:
    """Return the largest difference of an output of a step from the exact one, relative to its largest element."""
    rows = min(executable.by_rows.keys() - {0})
    past = max(executable.by_rows[rows].ranges.dimensions[0].low, executable.described.capacity // 2) - rows
    feeds = random_feeds(executable.inputs_at(past, rows))
    exact = reference.run(fission(known.operators(rows, past)), feeds)
    found, names = dict(zip(exact, executable(*feeds.values()), strict=True)), executable.plain_outputs
    return max_error([found[name] for name in names], [exact[name] for name in names])


def _check_inputs(known: _Model, executable: StatefulExecutable, options: Options) -> None:
    """Compare the executable with the model on the inputs that the options give, if they give any."""
    if options.inputs is None:
        return
    where = where_of(options.inputs)
    infos = {info.name: info for info in executable.get_inputs()}
    types = {name: known.operators(known.sizes.sample, SAMPLE_PAST).types[name] for name in infos}
    arrays = named_arrays(options.inputs, types, where)
    given = {name: converted(name, arrays[name], infos[name].dtype, where) for name in infos}
    rows, past = executable.counts_of([given[name] for name in infos])
    primitives = fission(known.operators(rows, past))
    planned = with_states(primitives, known.states, known.kept) if known.kept else primitives
    if known.kept is DType.I8 and options.tolerance is None:  # as many roundings as other types may have
        options = replace(options, tolerance=ROUNDINGS / (2 * LARGEST_BYTE))
    standard = standard_of(primitives, planned, replace(options, inputs=given))
    errors, wrong = standard.judge(dict(zip(standard.expected, executable(*given.values()), strict=True)))
    if wrong:
        what = f"the error of output {wrong[0]!r} is {errors[wrong[0]].of_largest:.2e} of its largest element"
        raise InaccurateError(what, where, hint="Report this with the model")
