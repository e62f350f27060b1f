"""Prints ordering steps, and the heads of loops of which only one iteration may run."""

from __future__ import annotations

from korch.tile.cpp.text import CppWriter, loop_end
from korch.tile.ir.program import At, Axis
from korch.tile.ir.sort import Ordering, Sort


def print_sort(step: Ordering, grid: tuple[Axis, ...]) -> str:
    """Return the call that sorts rows into blocks, or that selects the top elements of a task's row."""
    if not isinstance(step, Sort):
        (row,) = grid
        out = (f"{name} + {step.count} * {row.name}" if name else "nullptr" for name in (step.values, step.places))
        call = f"korch::top<{step.size}, {step.count}, {str(step.is_largest).lower()}>"
        return f"{call}({step.source} + {step.size} * {row.name}, {', '.join(out)});"
    sizes = f"{step.rows}, {step.groups}, {step.block}, {step.blocks}"
    return f"korch::sort_rows<{sizes}>({step.keys}, {step.order}, {step.group}, {step.count});"


def loop_head(out: CppWriter, axis: Axis, only: At | None, is_nearest: bool) -> str:
    """Return the head of a loop; if only one iteration is run, the condition under which it is."""
    if only is None:
        return f"for (long {axis.name} = 0; {axis.name} < {loop_end(axis, axis.extent)}; ++{axis.name})"
    value = f"{only.buffer}[{out.expr(only.index)}]"
    name = axis.name
    if is_nearest:
        return f"if ([[maybe_unused]] const long {name} = korch::nearest({value}, {axis.extent}); true)"
    return f"if ([[maybe_unused]] const long {name} = {value}; {name} >= 0 && {name} < {axis.extent})"
