"""Operands of 16-bit floats that a kernel of float32 reads: they are widened in its workspace first.

A pass over an operand takes little beside the product that reads it many times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.alignment import round_up
from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.types import DType
from korch.target import Target
from korch.tile.cpp_text import stored_type

LINE_FLOATS = 16


@dataclass(frozen=True)
class Operands:
    """The operands of a kernel.

    Attributes:
        texts: C++ expressions, one for each position that was asked for, of type `const float*`.
        floats: of workspace, the kernel's own included.
    """

    texts: tuple[str, ...]
    floats: int


def widened(group: Group, layouts: Sequence[Layout], positions: Sequence[int], floats: int, target: Target) -> Operands:
    """Return the operands of a kernel, those of 16 bits in workspace behind its own.

    Args:
        group: what the kernel computes.
        layouts: of the group's inputs.
        positions: of the operands among the group's inputs.
        floats: of workspace that the kernel uses itself.
        target: its threads share the work.
    """
    workspace = f"static_cast<float*>(buffers[{len(group.inputs) + len(group.outputs)}])"
    texts: dict[int, str] = {}
    for position in dict.fromkeys(positions):
        type_ = group.input_types[position]
        texts[position] = f"static_cast<const float*>(buffers[{position}])"
        if type_.dtype is not DType.F32:
            element, start = stored_type(type_.dtype), round_up(floats, LINE_FLOATS)
            size = layouts[position].size_bytes(type_) // type_.dtype.size_bytes
            memory = f"static_cast<const {element}*>(buffers[{position}])"
            texts[position] = f"korch::widened({memory}, {workspace} + {start}, {size}, {target.threads})"
            floats = start + size
    return Operands(tuple(texts[position] for position in positions), floats)
