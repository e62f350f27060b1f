"""How large the text of a group's kernel would be, before it is lowered.

A kernel computes what it does not keep again wherever it is read. Where a value is read at several
places, through slices or pads, each place is an operation of its own, and a chain of such steps
doubles them with every step. Pads are guards besides, and loops are split where guards turn.
"""

from __future__ import annotations

from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category

MOST_OPERATIONS = 2048
"""Of one loop nest of a kernel."""

MOST_SPLIT_OPERATIONS = 1 << 14
"""Operations of a kernel, times the parts into which its pads may split loops."""


class TextLimitError(Exception):
    """The text of a kernel would be too long."""


def grows_too_large(body: PrimitiveGraph) -> bool:
    """Return whether a group of several primitives would be too long a kernel.

    Counted are the different chains of layout primitives from what is stored to each value: equal
    ones are one operation. The count is an upper bound; of a single primitive none is needed.
    """
    if len(body.primitives) == 1:
        return False
    chains: list[set[int]] = [set() for _ in body.types]
    kept = {value for _, value in body.outputs}
    for value in kept:
        chains[value].add(0)
    operations = parts = 1
    for number in range(len(body.primitives) - 1, -1, -1):
        primitive = body.primitives[number]
        found = chains[primitive.output]
        operations += len(found)
        if primitive.op == "pad":
            parts += len(found)
        if operations > MOST_OPERATIONS or operations * parts > MOST_SPLIT_OPERATIONS:
            return True
        if primitive.output in kept or primitive.row.category is Category.REDUCE:
            found = {-1 - number}  # it is read from memory
        if primitive.row.category is Category.LAYOUT:
            found = {hash((chain, number)) for chain in found}
        for value in primitive.inputs:
            chains[value] |= found
    return False
