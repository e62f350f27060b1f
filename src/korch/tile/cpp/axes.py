"""The axes of a contraction with their steps in memory: template types of micro-kernels, and merging of axes."""

from __future__ import annotations

from collections.abc import Sequence

from korch.tile.analysis.axes import Steps, even_step
from korch.tile.ir.program import Axis


def rows_type(rows: Sequence[Axis], a: Steps) -> str:
    """Return the C++ type that computes where each row of the first operand begins."""
    step = even_step(rows, a)
    if step is not None:
        return f"korch::Rows<{step}>"
    return f"korch::Rows<{a[rows[1].name]}, {rows[1].extent}, {a[rows[0].name]}>"


def turns_type(terms: Sequence[Axis], a: Steps, b: Steps) -> str:
    """Return the C++ type of the loops over terms outside the innermost one."""
    *outer, last = terms
    text = f"korch::Once<{last.extent if outer and last.ragged is None else 0}>"
    for axis in reversed(outer):
        text = f"korch::Turns<{axis.extent}, {a[axis.name]}, {b[axis.name]}, {text}>"
    return text
