"""A tile program -> a text diagram: the grid, the memory level of each buffer, and the steps in their loops.

8 x 4 tasks (g_a0, g_a1), each:
+- memory: reads i0 8.0 KiB, i1 32 KiB; writes o0 8.0 KiB
|  cache:  t0 4.0 KiB, r1 64 B (carried)
|  for each a0<16: r1 = 0
|  +- loop g_a2, 4 times, carries r1
|  |  t0[a0, a1] += i0 * i1 along a2, 6 x 2 vectors in registers
|  |  for each a0<16: r1 = sum of exp(sub(t0, ..)) along a1
|  +-
+-
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from korch.report.units import size_text
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    Axis,
    Buffer,
    Contract,
    Level,
    Literal,
    Load,
    Loop,
    Pass,
    Select,
    Stage,
    Step,
    TileProgram,
)

MOST_CHARACTERS = 150
"""The limit of an expression's text."""


def picture(program: TileProgram) -> list[str]:
    """Return the lines of a program's diagram."""
    lines: list[str] = []
    for stage in program.stages:
        lines += _stage(stage, program.buffers)
    return lines


def _stage(stage: Stage, buffers: Iterable[Buffer]) -> Iterator[str]:
    counts = " x ".join(str(axis.size) for axis in stage.grid)
    names = ", ".join(axis.name for axis in stage.grid)
    carried = {name for step in stage.steps if isinstance(step, Loop) for name in step.carried}
    yield f"1 task ({names}):" if counts == "1" else f"{counts} tasks ({names}), each:"
    verbs = {Level.INPUT: "reads", Level.OUTPUT: "writes"}
    memory = (f"{verbs[b.level]} {_sized(b)}" for b in buffers if b.level in verbs)
    yield f"+- memory: {', '.join(memory)}"
    tiles = [_sized(b) + (" (carried)" if b.name in carried else "") for b in buffers if b.level is Level.TILE]
    yield f"|  cache:  {', '.join(tiles) or 'nothing'}"
    if stage.sort is not None:
        yield f"|  {stage.sort.text}"
    for step in stage.steps:
        yield from (f"|  {line}" for line in _step(step))
    yield "+-"


def _sized(buffer: Buffer) -> str:
    size = size_text(buffer.elements * buffer.dtype.size_bytes) if isinstance(buffer.elements, int) else buffer.elements
    return f"{buffer.name} {size}{' in panels' if buffer.layout else ''}"


def _step(step: Step) -> Iterator[str]:
    match step:
        case Pass():
            yield f"{_each(step.axes)}{_effects(step)}"
        case Contract():
            reduced = ", ".join(axis.name for axis in step.axes if axis.is_reduced)
            rescaled = f", its old sum rescaled by {step.rescale.buffer}" if step.rescale else ""
            scaled = f" * {step.factor.buffer}" if step.factor else ""
            held = f", {step.registers.rows} x {step.registers.vectors} vectors in registers" if step.registers else ""
            text = f"{step.out.buffer} += {step.a.buffer} * {step.b.buffer}{scaled} along {reduced}{rescaled}{held}"
            yield f"{_each(axis for axis in step.axes if not axis.is_reduced)}{text}"
        case Loop():
            carries = f", carries {', '.join(step.carried)}" if step.carried else ""
            turns = f"only turn {step.only.buffer}[{step.only.index}]" if step.only else f"{step.axis.size} times"
            yield f"+- loop {step.axis.name}, {turns}{carries}"
            for inner in step.body:
                yield from (f"|  {line}" for line in _step(inner))
            yield "+-"
        case _:
            assert_never(step)


def _each(axes: Iterable[Axis]) -> str:
    """Return the axes that are not reduced; axes of size 1 are omitted."""
    kept = [f"{axis.name}<{axis.size}" for axis in axes if not axis.is_reduced and axis.size != 1]
    return f"for each {', '.join(kept)}: " if kept else ""


def _effects(step: Pass) -> str:
    """Return the stores of a pass; the operations are written as one expression for each store."""
    texts: dict[str, str] = {}
    for op in step.ops:
        match op:
            case Load():
                texts[op.name] = op.buffer
            case Literal():
                texts[op.name] = f"{op.value:g}"
            case Apply():
                texts[op.name] = f"{op.op}({', '.join(texts[a] for a in op.arguments)})"
            case Select():
                texts[op.name] = f"({texts[op.inside]} or {texts[op.outside]})"
            case _:
                assert_never(op)
    reduced = ", ".join(axis.name for axis in step.axes if axis.is_reduced)
    return "; ".join(
        f"{sink.buffer} = {f'{sink.op} along {reduced} of ' if isinstance(sink, Accumulate) else ''}"
        f"{_short(texts[sink.value])}"
        for sink in step.sinks
    )


def _short(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 4]} ..."
