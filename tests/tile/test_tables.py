"""Values that depend on four bits of a byte become table entries; other values do not."""

import numpy as np
import pytest

from korch.primitive.types import DType
from korch.tile.analysis.tables import tables_of
from korch.tile.ir.index import var
from korch.tile.ir.program import Apply, Literal, Load, TileOp


def bits_of_a_byte(shift: int, mask: int, zero: int) -> list[TileOp]:
    """Return the operations of (byte >> shift & mask) - zero, as a float."""
    return [
        Load("x0", DType.U8, "i0", var("j")),
        Apply("x1", DType.I32, "cast", ("x0",)),
        Literal("x2", DType.I32, shift),
        Apply("x3", DType.I32, "shift_right", ("x1", "x2")),
        Literal("x4", DType.I32, mask),
        Apply("x5", DType.I32, "bitwise_and", ("x3", "x4")),
        Literal("x6", DType.I32, zero),
        Apply("x7", DType.I32, "sub", ("x5", "x6")),
        Apply("x8", DType.F32, "cast", ("x7",)),
    ]


@pytest.mark.parametrize(("shift", "mask", "first"), [(0, 15, 0), (4, 15, 4), (2, 3, 0), (6, 3, 4), (3, 7, 2)])
def test_a_table_has_what_is_computed(shift, mask, first):
    (found,) = tables_of(bits_of_a_byte(shift, mask, 5)).items()
    name, table = found
    assert (name, table.byte, table.shift) == ("x8", "x0", first)
    every = np.arange(256)
    expected = ((every >> shift & mask) - 5).astype(np.float32)
    np.testing.assert_array_equal(np.array(table.entries, np.float32)[every >> first & 15], expected)
    np.testing.assert_array_equal(np.array(table.bits, np.uint32).view(np.float32), np.float32(table.entries))


def test_more_than_four_bits_have_no_table():
    assert tables_of(bits_of_a_byte(0, 31, 8)) == {}
    assert tables_of(bits_of_a_byte(1, 15, 8)) == {}  # from bit 1 on, which is no even one


def test_what_reads_anything_else_has_no_table():
    ops = bits_of_a_byte(4, 15, 0)
    ops[6] = Load("x6", DType.I32, "i1", var("j"))
    assert tables_of(ops) == {}
    ops[0] = Load("x0", DType.I8, "i0", var("j"))
    assert tables_of(ops) == {}
