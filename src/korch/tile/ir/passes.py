"""What the operations of a pass refer to: visits and changes their indices and guards."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from korch.tile.ir.index import Expr
from korch.tile.ir.program import Apply, At, Contract, Inside, Literal, Load, Pass, Select, Sink, TileOp, arguments_of


def needed(ops: Sequence[TileOp], *names: str) -> list[TileOp]:
    """Return the operations that compute some values, in their order."""
    used = set(names)
    for op in reversed(ops):
        if op.name in used:
            used.update(arguments_of(op))
    return [op for op in ops if op.name in used]


def expressions_of(op: TileOp) -> Iterator[Expr]:
    """Yield the index of an operation, if it loads, and the expressions of its guards."""
    if isinstance(op, Load):
        yield op.index
    if isinstance(op, Load | Select):
        yield from (guard.expr for guard in op.guards)


def turns_on(pass_: Pass, name: str) -> bool:
    """Return whether a guard of a pass depends on a loop variable."""
    guards = (guard for op in pass_.ops if isinstance(op, Load | Select) for guard in op.guards)
    return any(name in guard.expr.variables for guard in guards)


def places(pass_: Pass) -> Iterator[Expr]:
    """Yield the index of every load and store of a pass."""
    yield from (op.index for op in pass_.ops if isinstance(op, Load))
    yield from (sink.index for sink in pass_.sinks)


def guards_of(pass_: Pass) -> Iterator[Inside]:
    """Yield every guard of a pass."""
    for op in pass_.ops:
        if isinstance(op, Load | Select):
            yield from op.guards
    yield from pass_.where


def map_indices(pass_: Pass, change: Callable[[Expr], Expr]) -> Pass:
    """Return a pass with a function applied to every index expression."""
    return map_places(pass_, change, lambda guard: dataclasses.replace(guard, expr=change(guard.expr)))


def map_step(step: Pass | Contract, change: Callable[[Expr], Expr]) -> Pass | Contract:
    """Return a pass or contraction with a function applied to every index and every guard's expression."""
    if isinstance(step, Pass):
        return map_indices(step, change)

    def moved(at: At) -> At:
        return At(at.buffer, change(at.index))

    where = tuple(dataclasses.replace(guard, expr=change(guard.expr)) for guard in step.where)
    rescale, factor = step.rescale and moved(step.rescale), step.factor and moved(step.factor)
    out, a, b = moved(step.out), moved(step.a), moved(step.b)
    return dataclasses.replace(step, out=out, a=a, b=b, rescale=rescale, factor=factor, where=where)


def map_places(pass_: Pass, change: Callable[[Expr], Expr], condition: Callable[[Inside], Inside]) -> Pass:
    """Return a pass with a function applied to the index of every load and store, and one to every guard."""

    def changed(guards: tuple[Inside, ...]) -> tuple[Inside, ...]:
        return tuple(condition(guard) for guard in guards)

    ops: list[TileOp] = []
    for op in pass_.ops:
        if isinstance(op, Load):
            op = dataclasses.replace(op, index=change(op.index), guards=changed(op.guards))
        elif isinstance(op, Select):
            op = dataclasses.replace(op, guards=changed(op.guards))
        ops.append(op)
    sinks: list[Sink] = [dataclasses.replace(s, index=change(s.index)) for s in pass_.sinks]
    return dataclasses.replace(pass_, ops=tuple(ops), sinks=tuple(sinks), where=changed(pass_.where))


def is_nonpositive(name: str, ops: Sequence[TileOp]) -> bool:
    """Return whether a value is the minimum of another value and a number that is at most 0."""
    by_name = {op.name: op for op in ops}
    match by_name.get(name):
        case Apply(op="min", arguments=(_, least)):
            number = by_name.get(least)
            return isinstance(number, Literal) and number.value <= 0
    return False
