"""The default register blockings of contractions, and their sizes on matrix units."""

from korch.system.alignment import ceil_div
from korch.tile.ir.program import Registers

BYTE_REGISTERS = {16: Registers(12, 2), 8: Registers(6, 2)}
"""The default register blocking of a contraction of bytes, by number of lanes."""

FEW_BYTE_REGISTERS = Registers(4, 2)
"""The default for other numbers of lanes: widened terms need registers, too."""

DOT_REGISTERS = {16: Registers(14, 2), 4: Registers(6, 4)}
"""The largest of a contraction of bytes if one instruction adds four products, by number of lanes: none are widened."""

REGISTERS = {16: Registers(12, 2)}
"""The default register blocking of a contraction, by number of lanes: there are 32 registers of 16 lanes."""

FEW_REGISTERS = Registers(6, 2)
"""The default for other numbers of lanes, with at least 16 registers."""


def usual_registers(lanes: int) -> Registers:
    """Return the default register blocking of a contraction, by number of lanes."""
    return REGISTERS.get(lanes, FEW_REGISTERS)


def largest_of_bytes(lanes: int, has_dot: bool) -> Registers:
    """Return the largest register blocking of a contraction of bytes, perhaps by an instruction for four products."""
    return DOT_REGISTERS[lanes] if has_dot else BYTE_REGISTERS.get(lanes, FEW_BYTE_REGISTERS)


LONG_BLOCK = 1024
"""The number of vector multiply-adds that take about as long as fetching a line from memory."""

STRIP = 32
"""The columns that are computed together on matrix units; also the width of a panel."""

MOST_QUADS = 16
"""The maximum number of quads (groups of four terms) of a step."""


def steps_of(quads: int) -> int:
    """Return the number of equal steps in which a number of quads of terms is multiplied."""
    return next(count for count in range(ceil_div(quads, MOST_QUADS), quads + 1) if quads % count == 0)


def whole_quads(quads: int) -> int:
    """Return the number of quads rounded up so that they divide into the minimum number of equal steps."""
    steps = ceil_div(quads, MOST_QUADS)
    return steps * ceil_div(quads, steps)
