"""Estimates how long the source text of a group's kernel would be, before it is lowered.

A kernel recomputes a value that it does not store wherever it is read. If a value is read at several
indices, through slices or pads, each index needs an operation of its own, and in a chain of such steps
the number of operations doubles with every step. Pads also become guards, and loops are split where
the result of a guard changes.
"""

from korch.errors import InvalidGraphError
from korch.primitive.graph import PrimitiveGraph
from korch.primitive.op import Category

MOST_OPERATIONS = 2048
"""The maximum number of operations of one loop nest of a kernel."""

MOST_SPLIT_OPERATIONS = 1 << 14
"""The maximum of a kernel's operations times the parts into which its pads may split loops."""


class UnprintableError(InvalidGraphError):
    """A program can't be printed, or its size is unknown where it must be known."""


class TextLimitError(Exception):
    """The text of a kernel would be too long."""


def grows_too_large(body: PrimitiveGraph) -> bool:
    """Return whether the kernel of a group of several primitives would be too long.

    This counts the different chains of layout primitives from stored values to each value: equal
    chains give one operation. The count is an upper bound; a single primitive needs none.
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
            found = {-1 - number}  # it is stored, and readers load it from memory
        if primitive.row.category is Category.LAYOUT:
            found = {hash((chain, number)) for chain in found}
        for value in primitive.inputs:
            chains[value] |= found
    return False
