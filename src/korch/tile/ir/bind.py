"""Replaces the parameters of a tile program by numbers, which gives a tile program of known sizes."""

import dataclasses
from collections.abc import Mapping

from korch.errors import InvalidGraphError
from korch.tile.ir.index import Expr, Ranges, constant, substitute
from korch.tile.ir.passes import map_step
from korch.tile.ir.program import At, Axis, Loop, Size, Step, TileProgram


def bind(program: TileProgram, values: Mapping[str, int]) -> TileProgram:
    """Return a program with its parameters replaced by numbers.

    Raises:
        InvalidGraphError: a parameter has no number, or one out of its range.
    """
    for parameter in program.parameters:
        value = values.get(parameter.name)
        if value is None or not parameter.low <= value <= parameter.high:
            what = f"parameter {parameter.name} is {'not given' if value is None else value}"
            expected = f"{parameter.low}..{parameter.high}"
            raise InvalidGraphError(what, where="tile program", expected=expected)
    if not program.parameters:
        return program
    binder = _Binder({p.name: constant(values[p.name]) for p in program.parameters})
    buffers = tuple(dataclasses.replace(b, elements=binder.size(b.elements)) for b in program.buffers)
    stages = []
    for stage in program.stages:
        grid, scope = binder.axes(stage.grid, {})
        steps = tuple(binder.step(step, scope) for step in stage.steps)
        stages.append(dataclasses.replace(stage, grid=grid, steps=steps))
    return TileProgram(buffers, tuple(stages))


class _Binder:
    """Replaces parameters, simplifying under the ranges of the enclosing loops."""

    def __init__(self, values: Mapping[str, Expr]) -> None:
        self.values = values

    def size(self, size: Size) -> Size:
        if isinstance(size, int):
            return size
        bound = substitute(size, self.values, {})
        return bound if bound.terms else bound.constant

    def axes(self, axes: tuple[Axis, ...], scope: Ranges) -> tuple[tuple[Axis, ...], Ranges]:
        """Return the axes with known sizes, and `scope` extended by their ranges."""
        found = []
        for axis in axes:
            ragged = axis.ragged and (axis.ragged[0], self.size(axis.ragged[1]))
            found.append(dataclasses.replace(axis, size=self.size(axis.size), ragged=ragged))
        return tuple(found), {**scope, **{axis.name: (0, max(axis.extent - 1, 0)) for axis in found}}

    def step(self, step: Step, scope: Ranges) -> Step:
        if isinstance(step, Loop):
            (axis,), inside = self.axes((step.axis,), scope)
            only = step.only and At(step.only.buffer, substitute(step.only.index, self.values, scope))
            body = tuple(self.step(inner, inside) for inner in step.body)
            return dataclasses.replace(step, axis=axis, body=body, only=only)
        axes, scope = self.axes(step.axes, scope)
        return map_step(dataclasses.replace(step, axes=axes), lambda expr: substitute(expr, self.values, scope))


def largest(program: TileProgram) -> TileProgram:
    """Return a program for the largest values of its parameters."""
    return bind(program, {p.name: p.high for p in program.parameters})
