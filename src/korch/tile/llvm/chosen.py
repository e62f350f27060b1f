"""Prints loops that run only the iteration that an element of a buffer chooses."""

from korch.primitive.types import DType
from korch.tile.ir.program import At, refused
from korch.tile.llvm.arithmetic import is_signed
from korch.tile.llvm.emit import SsaValue
from korch.tile.llvm.index import Env, index_of
from korch.tile.llvm.points import KernelContext


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
