"""Mutates tile programs in one place: an index, a size, an operation, an operand, an accumulator, and others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from korch.tile.ir.index import Expr
from korch.tile.ir.program import (
    Accumulate,
    Apply,
    At,
    Axis,
    Contract,
    Literal,
    Load,
    Loop,
    Pass,
    Select,
    Sink,
    Stage,
    Step,
    Store,
    TileOp,
    TileProgram,
)

UNARY = ("exp", "sqrt", "neg", "reciprocal", "sigmoid", "abs", "tanh")
BINARY = ("add", "sub", "mul", "div", "max", "min")
COLLECT = ("sum", "max", "min", "prod")


def mutant(program: TileProgram, rng: np.random.Generator) -> tuple[str, TileProgram]:
    """Return a description of the change, and the changed program; it may still compute the same result."""
    names = [buffer.name for buffer in program.buffers]
    number = int(rng.integers(len(program.stages)))
    stage = program.stages[number]
    variants = list(_of_steps(stage.steps, rng, names))
    what, steps = variants[int(rng.integers(len(variants)))]()
    stages = (*program.stages[:number], Stage(stage.grid, steps), *program.stages[number + 1 :])
    return what, replace(program, stages=stages)


Steps = tuple[Step, ...]
Variant = Callable[[], tuple[str, Steps]]


def _of_steps(
    steps: Steps, rng: np.random.Generator, names: Sequence[str]
) -> Iterator[Callable[[], tuple[str, Steps]]]:
    for i, step in enumerate(steps):

        def around(what: str, made: Steps, i: int = i) -> tuple[str, Steps]:
            return what, (*steps[:i], *made, *steps[i + 1 :])

        yield lambda around=around: around("a step left out", ())  # type: ignore[misc]
        if i + 1 < len(steps):
            yield lambda i=i: ("two steps swapped", (*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]))  # type: ignore[misc]
        if isinstance(step, Loop):
            for inner in _of_steps(step.body, rng, names):

                def in_loop(inner: Variant = inner, loop: Loop = step, i: int = i) -> tuple[str, Steps]:
                    what, body = inner()
                    return what, (*steps[:i], replace(loop, body=body), *steps[i + 1 :])

                yield in_loop
            if step.carried:
                yield (
                    lambda around=around, loop=step: around(  # type: ignore[misc]
                        "a tile no longer carried", (replace(loop, carried=loop.carried[1:]),)
                    )
                )
        elif isinstance(step, Contract):
            for _ in range(4):
                yield lambda around=around, step=step: around(*_wrapped(_contract(step, rng, names)))  # type: ignore[misc]
        else:
            for _ in range(2 + 2 * len(step.ops)):
                yield lambda around=around, step=step: around(*_wrapped(_pass(step, rng, names)))  # type: ignore[misc]


def _wrapped(made: tuple[str, Step]) -> tuple[str, Steps]:
    return made[0], (made[1],)


def _pick(rng: np.random.Generator, options: Sequence[str], but: str = "") -> str:
    left = [option for option in options if option != but] or [but]
    return left[int(rng.integers(len(left)))]


def _index(expr: Expr, rng: np.random.Generator) -> Expr:
    """Return a changed index: a coefficient or the constant is changed, or a term is removed."""
    terms = list(expr.terms)
    choice = int(rng.integers(3))
    if choice == 0 or not terms:
        return Expr(expr.constant + int(rng.choice((-1, 1))), expr.terms)
    at = int(rng.integers(len(terms)))
    atom, coefficient = terms[at]
    terms[at : at + 1] = [] if choice == 1 else [(atom, coefficient + int(rng.choice((-1, 1))))]
    return Expr(expr.constant, tuple(term for term in terms if term[1]))


def _at(at: At, rng: np.random.Generator, names: Sequence[str]) -> At:
    if rng.integers(3):
        return At(at.buffer, _index(at.index, rng))
    return At(_pick(rng, names, at.buffer), at.index)


def _contract(step: Contract, rng: np.random.Generator, names: Sequence[str]) -> tuple[str, Step]:
    match int(rng.integers(5)):
        case 0:
            return "the sum of a contraction moved", replace(step, out=_at(step.out, rng, names))
        case 1:
            return "an operand of a contraction moved", replace(step, a=_at(step.a, rng, names))
        case 2:
            return "an operand of a contraction moved", replace(step, b=_at(step.b, rng, names))
        case 3:
            return "a contraction's rescale", replace(step, rescale=None if step.rescale else step.out)
    return "an axis of a contraction", replace(step, axes=_axes(step.axes, rng))


def _axes(axes: tuple[Axis, ...], rng: np.random.Generator) -> tuple[Axis, ...]:
    if not axes:
        return axes
    at = int(rng.integers(len(axes)))
    axis = axes[at]
    changed = (
        replace(axis, ragged=None) if axis.ragged and rng.integers(2) else replace(axis, size=max(axis.extent - 1, 1))
    )
    return (*axes[:at], changed, *axes[at + 1 :])


def _pass(step: Pass, rng: np.random.Generator, names: Sequence[str]) -> tuple[str, Step]:
    choice = int(rng.integers(8))
    if choice == 0:
        return "an axis of a pass", replace(step, axes=_axes(step.axes, rng))
    if choice <= 2:
        at = int(rng.integers(len(step.sinks)))
        what, sink = _sink(step, step.sinks[at], rng, names)
        return what, replace(step, sinks=(*step.sinks[:at], sink, *step.sinks[at + 1 :]))
    at = int(rng.integers(len(step.ops)))
    what, op = _op(step, at, rng, names)
    return what, replace(step, ops=(*step.ops[:at], op, *step.ops[at + 1 :]))


def _sink(step: Pass, sink: Sink, rng: np.random.Generator, names: Sequence[str]) -> tuple[str, Sink]:
    match sink, int(rng.integers(3)):
        case Accumulate(op=op), 0:
            return "an accumulator", replace(sink, op=_pick(rng, COLLECT, op))
        case Store() | Accumulate(), 1:
            return "what is stored", replace(sink, value=_pick(rng, [op.name for op in step.ops], sink.value))
    place = _at(At(sink.buffer, sink.index), rng, names)
    return "a place of a store", replace(sink, buffer=place.buffer, index=place.index)


def _op(step: Pass, at: int, rng: np.random.Generator, names: Sequence[str]) -> tuple[str, TileOp]:
    op = step.ops[at]
    earlier = [other.name for other in step.ops[:at]]
    match op:
        case Load():
            if op.guards and not rng.integers(3):
                return "a guard", replace(op, guards=op.guards[1:])
            place = _at(At(op.buffer, op.index), rng, names)
            return "a place of a load", replace(op, buffer=place.buffer, index=place.index)
        case Literal():
            return "a number", replace(op, value=float(rng.choice((0.0, 1.0, 2.0, -1.0))))
        case Apply(arguments=arguments):
            if rng.integers(2):
                kind = UNARY if len(arguments) == 1 else BINARY if len(arguments) == 2 else (op.op,)
                return "an operation", replace(op, op=_pick(rng, kind, op.op))
            turn = int(rng.integers(len(arguments)))
            changed = (*arguments[:turn], _pick(rng, earlier, arguments[turn]), *arguments[turn + 1 :])
            return "an operand", replace(op, arguments=changed)
        case Select():
            return "the sides of a choice", replace(op, inside=op.outside, outside=op.inside)
