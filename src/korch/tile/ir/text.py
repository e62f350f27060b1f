"""The text form of tile programs, one item per line.

    parameter k: 0..512
    buffer i0: input f32[40*k]
    buffer t0: tile f32[128] panels(16, 8)
    stage g0<4
      pass v1<10 | r2<3 vector v1
        x0 = f32 load i0[10*g0 + v1]
        sum o0[g0] = x0
      loop j<(k + 7)/8 carries t1
        contract m<10 n<16 | p<min(8, k - 8*j) by split in 5 x 2 fetch b
          t1[16*m + n] += i0[8*j + p] * t0[16*p + n] rescale t2[m]
      loop e<4 only w1[g0]
    stage
      sort 8 rows of i1 in 4 groups by 2 to w0, w1, w2
    stage g0<16
      top 2 largest of 8 in 16 rows of i0 to values o0 places o1

Passes and contractions list their kept loops and then, after a bar, their reduced loops. The first line
of a pass or contraction may end with a guard such as `if 0 <= 4*t + v1 < 10`: points where it fails are
skipped. A contraction may state how many rows and vectors of columns it holds in registers, and which
operands it prefetches.
"""

from collections.abc import Iterable, Iterator
from typing import assert_never

from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Buffer,
    Contract,
    Inside,
    Literal,
    Load,
    Loop,
    Panels,
    Pass,
    Registers,
    Select,
    Sink,
    Split,
    Step,
    TileOp,
    TileProgram,
)


def format_program(program: TileProgram) -> str:
    """Return the text form of a program; equal programs have equal texts."""
    return "".join(line + "\n" for line in _lines(program))


def format_op(op: TileOp) -> str:
    """Return one operation in the text form."""
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
        case _:
            assert_never(op)


def format_sink(sink: Sink) -> str:
    """Return one store or accumulator in the text form."""
    verb = sink.op if isinstance(sink, Accumulate) else "store"
    return f"{verb} {sink.buffer}[{sink.index}] = {sink.value}"


def format_contract(step: Contract) -> str:
    """Return the second line of a contraction in the text form: what it adds to what."""
    rescale = f" rescale {_at(step.rescale)}" if step.rescale else ""
    factor = f" * {_at(step.factor)}" if step.factor else ""
    part = f" part {step.part}" if step.part else ""
    return f"{_at(step.out)} += {_at(step.a)} * {_at(step.b)}{part}{factor}{rescale}"


def format_loop(loop: Loop) -> str:
    """Return the first line of a loop in the text form."""
    carries = f" carries {', '.join(loop.carried)}" if loop.carried else ""
    only = f" {'nearest' if loop.is_nearest else 'only'} {_at(loop.only)}" if loop.only else ""
    return f"loop {_axis(loop.axis)}{only}{carries}"


def _lines(program: TileProgram) -> Iterator[str]:
    for parameter in program.parameters:
        yield f"parameter {parameter.name}: {parameter.low}..{parameter.high}"
    for buffer in program.buffers:
        yield " ".join((_buffer(buffer), *_layouts(buffer)))
    for stage in program.stages:
        yield " ".join(("stage", *map(_axis, stage.grid)))
        if stage.sort is not None:
            yield f"  {stage.sort.text}"
        for step in stage.steps:
            yield from (f"  {line}" for line in _step(step))


def _step(step: Step) -> Iterator[str]:
    match step:
        case Pass():
            vector = f" vector {step.vector}" if step.vector else ""
            across = f" across {step.across}" if step.across else ""
            yield f"pass{_axes(step.axes)}{vector}{across}{_condition(step.where)}"
            yield from (f"  {format_op(op)}" for op in step.ops)
            yield from (f"  {format_sink(sink)}" for sink in step.sinks)
        case Contract():
            how = f"{step.product.value}{_registers(step.registers)}{_condition(step.where)}"
            yield f"contract{_axes(step.axes)} by {how}"
            yield f"  {format_contract(step)}"
        case Loop():
            yield format_loop(step)
            for inner in step.body:
                yield from (f"  {line}" for line in _step(inner))
        case _:
            assert_never(step)


def _registers(registers: Registers | None) -> str:
    if registers is None:
        return ""
    operands = {"b": registers.fetches_b, "out": registers.fetches_out, "a": registers.fetches_a}
    fetched = [name for name, is_fetched in operands.items() if is_fetched]
    where = "tiles" if registers.in_tiles else ""
    words = (f"{registers.rows} x {registers.vectors}", where, "fetch" if fetched else "", *fetched)
    return f" in {' '.join(word for word in words if word)}"


def _buffer(buffer: Buffer) -> str:
    return f"buffer {buffer.name}: {buffer.level.value} {buffer.dtype.value}[{buffer.elements}]"


def _layouts(buffer: Buffer) -> Iterator[str]:
    for layout in buffer.layout:
        match layout:
            case Panels(columns, width, group):
                yield f"panels({columns}, {width}{f', {group}' if group > 1 else ''})"
            case Split(components, dtype):
                yield f"split({components}, {dtype.value})"
            case _:
                assert_never(layout)


def _at(at: At) -> str:
    return f"{at.buffer}[{at.index}]"


def _axes(axes: Iterable[Axis]) -> str:
    kept = [f" {_axis(axis)}" for axis in axes if not axis.is_reduced]
    reduced = [f" {_axis(axis)}" for axis in axes if axis.is_reduced]
    return "".join([*kept, " |" if reduced else "", *reduced])


def _axis(axis: Axis) -> str:
    if axis.ragged is None:
        return f"{axis.name}<{axis.size}"
    outer, total = axis.ragged
    return f"{axis.name}<min({axis.size}, {total} - {axis.size}*{outer})"


def _condition(guards: Iterable[Inside]) -> str:
    texts = [f"{guard.low} <= {guard.expr} < {guard.high}" for guard in guards]
    return f" if {' and '.join(texts)}" if texts else ""
