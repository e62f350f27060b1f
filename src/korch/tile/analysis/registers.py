"""The default register blockings of contractions."""

from __future__ import annotations

from korch.tile.ir.program import Registers

BYTE_REGISTERS = {16: Registers(12, 2), 8: Registers(6, 2)}
"""The default register blocking of a contraction of bytes, by number of lanes."""

FEW_BYTE_REGISTERS = Registers(4, 2)
"""The default for other numbers of lanes: widened terms need registers, too."""

DOT_REGISTERS = Registers(14, 2)
"""The largest register blocking of a contraction of bytes if one instruction adds four products: none are widened."""

REGISTERS = {16: Registers(12, 2)}
"""The default register blocking of a contraction, by number of lanes: there are 32 registers of 16 lanes."""

FEW_REGISTERS = Registers(6, 2)
"""The default for other numbers of lanes, with at least 16 registers."""


def largest_of_bytes(lanes: int, has_dot: bool) -> Registers:
    """Return the largest register blocking of a contraction of bytes, perhaps by an instruction for four products."""
    return DOT_REGISTERS if has_dot else BYTE_REGISTERS.get(lanes, FEW_BYTE_REGISTERS)


LONG_BLOCK = 1024
"""The number of vector multiply-adds that take about as long as fetching a line from memory."""
