"""What the printers can deduce about the sign of a value."""

from __future__ import annotations

from collections.abc import Sequence

from korch.tile.program import Apply, Literal, TileOp


def is_nonpositive(name: str, ops: Sequence[TileOp]) -> bool:
    """Return whether a value is the minimum of another value and a number that is at most 0."""
    by_name = {op.name: op for op in ops}
    match by_name.get(name):
        case Apply(op="min", arguments=(_, least)):
            number = by_name.get(least)
            return isinstance(number, Literal) and number.value <= 0
    return False
