"""Makes the reductions of a tile program along a coordinate of its inputs end at a size known at run time.

A reduction along a coordinate, such as the sum over the keys of attention, has nothing to add beyond the size that is
in use at run time. So the axes that count the coordinate run only over the existing elements, rounded up to whole
vectors. What other passes compute for later elements, in tiles and workspace buffers, is left out, too. Strides stay
constant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from korch.errors import InvalidGraphError
from korch.tile.ir.index import Choice, Expr, constant, var
from korch.tile.ir.program import Axis, Level, Loop, Parameter, Pass, Size, Stage, Step, TileProgram, parts_of
from korch.tile.trim.coordinates import Coordinates, Counter, Needed, UnclearError, axes_of

KEYS = "keys"
"""The parameter of a program whose reductions end early: the number of coordinates that they cover."""

Cut = tuple[int, Counter]
"""The number of a stage, and a counter whose axes end early in it."""


def ended(program: TileProgram, known: Mapping[str, Needed], step: int) -> TileProgram | None:
    """Return a program with the parameter `KEYS`; None if no axis, or not every reduction, can end early.

    Args:
        program: the program for the largest size.
        known: how inputs have the coordinate, and outputs of which only the first elements along it are needed. All
            have the same extent.
        step: `KEYS` is a multiple of this.
    """
    has_keys = any(p.name == KEYS for p in program.parameters)
    if len({entry.extent for entry in known.values()}) != 1 or has_keys or program.is_sorted:
        return None
    try:
        found = Coordinates(program, known, step)
        cuts = _cuts(program, found, known)
        return _Ender(program, found, cuts).run() if _ends_all(program, cuts, found) else None
    except (UnclearError, InvalidGraphError):  # the latter if an extent is known at run time only
        return None


def _cuts(program: TileProgram, found: Coordinates, known: Collection[str]) -> set[Cut]:
    """Return the cuts that leave out no element that is needed: of outputs not in `known`, or of buffers read whole."""
    outputs = {buffer.name for buffer in program.buffers if buffer.level is Level.OUTPUT} - {*known}
    along = [(visit, (visit.stage, counter)) for visit in found.visits if (counter := found.counter(visit))]
    cuts = {cut for _, cut in along}
    cuts -= {cut for visit, cut in along if visit.access.is_write and visit.access.buffer in outputs}
    while True:
        whole = {visit.access.buffer for visit, cut in along if cut not in cuts and not visit.access.is_write}
        more = {cut for visit, cut in along if visit.access.is_write and visit.access.buffer in whole} & cuts
        if not more:
            return cuts
        cuts -= more


def _ends_all(program: TileProgram, cuts: set[Cut], found: Coordinates) -> bool:
    """Return whether there are cuts, they include all reductions, and no store depends on the last iteration."""
    for number, stage in enumerate(program.stages):
        own = found.counters[number]
        for _, step in stage.leaves:
            for axis in step.axes:
                counter = own.get(axis.name)
                if counter is None:
                    continue
                if axis.is_reduced and (number, counter) not in cuts:
                    return False
                stores = step.sinks if isinstance(step, Pass) and not step.is_reduction else ()
                if any(axis.name not in sink.index.variables for sink in stores):
                    return False
    return bool(cuts)


class _Ender:
    """Makes the axes of some counters end early."""

    def __init__(self, program: TileProgram, found: Coordinates, cuts: set[Cut]) -> None:
        self._program, self._found = program, found
        self._axes = [
            {name: counter for at, counter in cuts if at == number for name in counter.names}
            for number in range(len(program.stages))
        ]
        lengths = [
            found.length(own[axis.name], axis)
            for stage, own in zip(program.stages, self._axes, strict=True)
            for axis in axes_of(stage)
            if axis.name in own and axis.name == own[axis.name].inner
        ]
        if not lengths:  # only blocks end
            raise UnclearError
        self._high = max(lengths)

    def run(self) -> TileProgram:
        """Return the program with the parameter `KEYS`."""
        parameter = Parameter(KEYS, 1, self._high)
        stages = tuple(self._stage(n, stage) for n, stage in enumerate(self._program.stages))
        return replace(self._program, stages=stages, parameters=(*self._program.parameters, parameter))

    def _stage(self, number: int, stage: Stage) -> Stage:
        own, whole = self._axes[number], Axis("all_keys", 1)
        if not own:
            return stage

        def ended(axis: Axis) -> Axis:
            counter = own.get(axis.name)
            if counter is None:
                return axis
            if axis.name == counter.inner:
                total = self._total(self._found.length(counter, axis))
                return replace(axis, ragged=(counter.outer or whole.name, total))
            return replace(axis, ragged=(whole.name, self._turns(axis, counter)))

        def step_of(step: Step) -> Step:
            if isinstance(step, Loop):
                return replace(step, axis=ended(step.axis), body=tuple(map(step_of, step.body)))
            return replace(step, axes=tuple(map(ended, step.axes)))

        grid = tuple(self._of_grid(axis, own.get(axis.name)) for axis in stage.grid)
        return Stage((whole, *grid), tuple(map(step_of, stage.steps)))

    def _of_grid(self, axis: Axis, counter: Counter | None) -> Axis:
        if counter is None:
            return axis
        if axis.name == counter.outer:
            return replace(axis, size=self._turns(axis, counter))
        if counter.outer:
            raise UnclearError
        return replace(axis, size=self._total(axis.extent))

    def _total(self, length: int) -> Expr:
        """Return the number of elements, at most `length`, as an expression."""
        own = var(KEYS)
        if length >= self._high:
            return own
        return Expr(0, ((Choice(own, ((length, own),), constant(length)), 1),))

    def _turns(self, axis: Axis, counter: Counter) -> Size:
        """Return the number of blocks, as an expression."""
        if axis.ragged is not None:
            raise UnclearError
        return parts_of(var(KEYS), counter.block, {KEYS: (1, self._high)})
