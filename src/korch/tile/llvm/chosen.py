"""Prints loops that run only the iteration that an element of a buffer chooses."""

from __future__ import annotations

from korch.primitive.types import DType
from korch.tile.ir.program import At, Axis, Load, Loop, Pass, Stage, Store, refused
from korch.tile.llvm.arithmetic import is_signed
from korch.tile.llvm.emit import SsaValue
from korch.tile.llvm.index import Env, index_of
from korch.tile.llvm.points import KernelContext, PointPrinter, PointVector


def chosen_iteration(context: KernelContext, at: At, env: Env, lanes: int = 1) -> SsaValue:
    """Print the load of the number of an iteration, or of the numbers of adjacent elements."""
    emit, dtype, kind = context.emit, context.dtypes[at.buffer], context.kinds[at.buffer]
    if dtype.is_float or dtype is DType.BOOL:
        raise refused(f"the number of an iteration in buffer {at.buffer} is no integer")
    context.era += 1
    address = emit.place(kind, context.bases[at.buffer], index_of(emit, at.index, env))
    found = emit.load(kind, lanes, address, dtype.size_bytes, emit.depth, context.era)
    return emit.convert("sext" if is_signed(dtype) else "zext", found, "i64")


def nearest_iteration(context: KernelContext, at: SsaValue, extent: int) -> SsaValue:
    """Print the nearest iteration of a loop to a number, or to each lane; a negative number counts from the end."""
    emit = context.emit
    at = emit.select(emit.test("icmp slt", at, emit.index(0)), emit.add(at, emit.index(extent)), at)
    return emit.most(emit.index(0), emit.least(at, emit.index(extent - 1)))


def copied_elements(loop: Loop) -> tuple[Loop, Pass] | None:
    """Return the loop and the pass inside a loop that copies one chosen element in each iteration; None for others."""
    match loop.body:
        case (Loop(_, (), (Pass((), _, ops, sinks) as copied,), At() as at, is_nearest=True) as one,):
            name, written = loop.axis.name, {sink.buffer for sink in sinks}
            is_plain = not copied.where and all(isinstance(op, Load) and not op.guards for op in ops)
            is_along = all(isinstance(sink, Store) and sink.index.coefficient(name) == 1 for sink in sinks)
            read = {at.buffer, *(op.buffer for op in ops if isinstance(op, Load))}
            if is_plain and is_along and at.index.coefficient(name) == 1 and not written & read:
                return one, copied
    return None


def copy_chosen(context: KernelContext, axis: Axis, inner: tuple[Loop, Pass], grid: tuple[Axis, ...], env: Env) -> None:
    """Print the copies of a vector of chosen elements.

    The numbers are computed in vectors and the elements loaded one by one: gather instructions are slower on Zen 4.

    `axis`: the axis of the vector; `env` has the value of the first element. `inner`: the loop whose iteration is
    chosen, and the pass in it.
    """
    (one, copied), emit, lanes = inner, context.emit, context.lanes
    assert one.only is not None
    at = nearest_iteration(context, chosen_iteration(context, one.only, env, lanes), one.axis.extent)
    printer = PointPrinter(context, Stage((*grid, axis, one.axis), (copied,)), copied, env)
    found = []
    for i in range(lanes):
        own = {**env, axis.name: emit.add(env[axis.name], emit.index(i)), one.axis.name: emit.lane(at, i)}
        found.append(printer.values(PointVector(own, printer.ranges)))
    for sink in copied.sinks:
        value = emit.joined([values[sink.value] for values in found])
        printer.store(sink.buffer, sink.index, value, PointVector(env, printer.ranges, axis.name, lanes))
