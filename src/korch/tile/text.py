"""Tile program -> text, one item a line, to be read and compared.

    buffer i0: input f32[40]
    stage g0<4
      pass v1<10 | r2<3 vector v1
        x0 = f32 load i0[10*g0 + v1]
        sum o0[g0] = x0

A pass lists its kept loops, then, behind a bar, those that it reduces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from korch.tile.program import Accumulate, Apply, Axis, Inside, Literal, Load, Pass, Select, Sink, TileOp, TileProgram


def format_program(program: TileProgram) -> str:
    """Return the text form of a program; equal programs have equal texts."""
    return "".join(line + "\n" for line in _lines(program))


def format_op(op: TileOp) -> str:
    """Return one operation as it stands in the text form."""
    head = f"{op.name} = {op.dtype.value}"
    match op:
        case Load(buffer=buffer, index=index, guards=guards):
            return f"{head} load {buffer}[{index}]{_condition(guards)}"
        case Literal(value=value):
            return f"{head} {value!r}"
        case Apply(op=name, arguments=arguments):
            return f"{head} {name}({', '.join(arguments)})"
        case Select(guards=guards, inside=inside, outside=outside):
            return f"{head} {inside}{_condition(guards)} else {outside}"


def format_sink(sink: Sink) -> str:
    """Return one store or accumulator as it stands in the text form."""
    verb = sink.op if isinstance(sink, Accumulate) else "store"
    return f"{verb} {sink.buffer}[{sink.index}] = {sink.value}"


def _lines(program: TileProgram) -> Iterator[str]:
    for buffer in program.buffers:
        yield f"buffer {buffer.name}: {buffer.level.value} {buffer.dtype.value}[{buffer.size}]"
    for stage in program.stages:
        yield " ".join(("stage", *map(_axis, stage.grid)))
        for pass_ in stage.passes:
            yield f"  {_head(pass_)}"
            yield from (f"    {format_op(op)}" for op in pass_.ops)
            yield from (f"    {format_sink(sink)}" for sink in pass_.sinks)


def _head(pass_: Pass) -> str:
    words = ["pass", *(_axis(axis) for axis in pass_.axes if not axis.is_reduced)]
    reduced = [_axis(axis) for axis in pass_.axes if axis.is_reduced]
    words += ["|", *reduced] if reduced else []
    words += ["vector", pass_.vector] if pass_.vector else []
    words += ["across", pass_.across] if pass_.across else []
    return " ".join(words)


def _axis(axis: Axis) -> str:
    if axis.ragged is None:
        return f"{axis.name}<{axis.extent}"
    outer, total = axis.ragged
    return f"{axis.name}<min({axis.extent}, {total} - {axis.extent}*{outer})"


def _condition(guards: Iterable[Inside]) -> str:
    texts = [f"{guard.low} <= {guard.expr} < {guard.high}" for guard in guards]
    return f" if {' and '.join(texts)}" if texts else ""
