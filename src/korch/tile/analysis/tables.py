"""Finds values of a pass that depend on four bits of a loaded byte only; a table lookup replaces their computation."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from korch.primitive.op import Array
from korch.primitive.types import DType
from korch.tile.check.arithmetic import Typed
from korch.tile.ir.program import Apply, Inside, Literal, Load, Pass, Select, TileOp, arguments_of

BITS = 4
"""The number of index bits: a table has 16 entries, which a vector register holds."""

BYTE = 8


@dataclass(frozen=True, slots=True)
class ByteTable:
    """A table of 16 values, indexed by the four bits of a byte that begin at bit `shift`."""

    byte: str  # the name of the load of the byte
    shift: int  # the position of the lowest index bit
    entries: tuple[float, ...]  # the values

    @property
    def bits(self) -> tuple[int, ...]:
        """The entries as bits of float32."""
        return tuple(np.array(self.entries, np.float32).view(np.uint32).tolist())


def tables_of(ops: Sequence[TileOp]) -> Mapping[str, ByteTable]:
    """Return the table of each float32 value that depends on four bits of a loaded byte only, by the value's name."""
    every = np.arange(1 << BYTE, dtype=np.uint8)
    loads = {op.name: op.name for op in ops if isinstance(op, Load) and op.dtype is DType.U8}
    values: dict[str, Array] = dict.fromkeys(loads, every)
    found: dict[str, ByteTable] = {}
    for op in ops if loads else ():
        if isinstance(op, Literal):
            values[op.name] = Typed().literal(op.dtype, op.value)
        elif isinstance(op, Apply) and all(name in values for name in op.arguments):
            bytes_ = {loads[name] for name in op.arguments if name in loads}
            if len(bytes_) != 1:
                continue
            values[op.name] = Typed().apply(op.op, op.dtype, [values[name] for name in op.arguments])
            loads[op.name] = bytes_.pop()
            if op.op == "cast" and op.dtype is DType.F32:
                table = _table(loads[op.name], values[op.name])
                found |= {op.name: table} if table is not None else {}
    return found


def _table(byte: str, values: Array) -> ByteTable | None:
    """Return the table for the values that 256 bytes give, or None if they depend on more than four bits."""
    every = np.arange(1 << BYTE)
    for shift in range(0, BYTE - 1, 2):
        index = every >> shift & (1 << BITS) - 1
        entries = values[(np.arange(1 << BITS) << shift) & (1 << BYTE) - 1]
        if np.array_equal(entries[index], values):
            return ByteTable(byte, shift, tuple(entries.tolist()))
    return None


def live_ops(
    pass_: Pass, tables: Mapping[str, ByteTable], all_hold: Callable[[Sequence[Inside]], bool | None]
) -> list[TileOp]:
    """Return the operations that the sinks of a pass need.

    `tables`: the values that are looked up, by name. `all_hold`: whether guards hold at all points (True), one of them
    at none (False), or neither is known (None).
    """
    needed = {sink.value for sink in pass_.sinks}
    found: list[TileOp] = []
    for op in reversed(pass_.ops):
        if op.name not in needed:
            continue
        found.append(op)
        if op.name in tables:
            needed.add(tables[op.name].byte)
        elif isinstance(op, Select):
            decided = all_hold(op.guards)
            needed.update(() if decided is False else (op.inside,))
            needed.update(() if decided is True else (op.outside,))
        else:
            needed.update(arguments_of(op))
    return found[::-1]
