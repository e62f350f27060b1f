"""Prints contractions over the windows of an image as calls of micro-kernels that read the image in place."""

from __future__ import annotations

from collections.abc import Mapping

from korch.tile.analysis.panels import panels, strips
from korch.tile.analysis.sums import batches_of
from korch.tile.analysis.windows import row_of_window, rows_of_window
from korch.tile.cpp.loops import print_ends
from korch.tile.cpp.text import CppWriter
from korch.tile.ir.index import Ranges
from korch.tile.ir.program import Buffer, Contract, refused


def window_contraction(step: Contract, second: Buffer, lanes: int, a: Mapping[str, int], b: Mapping[str, int]) -> str:
    """Return the type of the micro-kernel for floats whose first operand depends on the channel.

    Args:
        step: a contraction of one axis of positions, channels, and the terms of a window, the last along the positions.
        second: the buffer of the second operand, in panels of one vector of channels.
        lanes: the lanes of a vector.
        a: the memory step of the first operand along each axis.
        b: the same for the second operand.

    Raises:
        InvalidGraphError: the micro-kernel does not support the layout of the operands.
    """
    places, columns, *taps = step.axes
    last, registers = taps[-1], step.registers
    layout = panels(second)
    is_beside = a[columns.name] == 1 and b[places.name] == 0 and b[last.name] in (0, lanes)
    is_packed = layout is not None and (layout.width, layout.group) == (lanes, 1)
    if layout is None or not is_packed or not is_beside or places.ragged or registers is None:
        raise refused("of windows, only channels side by side and weights in panels of one vector can be printed")
    stride, dilation, unit, before, width = row_of_window(step, a)
    over = (places.extent - 1) * stride + (last.extent - 1) * dilation + 1 - before - width
    panel = second.size // layout.columns * lanes
    row, behind = a[taps[-2].name] or 1, sum((axis.extent - 1) * a[axis.name] for axis in taps[:-1])
    total = columns.ragged[1] if columns.ragged else 0
    is_partial = columns.extent % lanes != 0 or not isinstance(total, int) or total % lanes != 0
    flags = ("true" if flag else "false" for flag in (registers.fetches_out, is_partial))
    sizes = (lanes, min(registers.rows, places.extent), str(places.extent), last.extent, stride, dilation, unit)
    more = (before, over, panel, str(row), str(behind), *flags)
    return f"korch::WindowContraction<{', '.join(map(str, (*sizes, *more)))}>"


def dense_contraction(step: Contract, second: Buffer, lanes: int, a: Mapping[str, int], b: Mapping[str, int]) -> str:
    """Return the type of the micro-kernel for floats whose first operand is the same for all columns.

    Args:
        step: a contraction of one axis of positions, columns, and the terms of a window, the last along the positions.
        second: the buffer of the second operand, in panels.
        lanes: the lanes of a vector.
        a: the memory step of the first operand along each axis.
        b: the same for the second operand.

    Raises:
        InvalidGraphError: the micro-kernel does not support the layout of the operands.
    """
    places, columns, *taps = step.axes
    registers = step.registers
    if registers is None or panels(second) is None or places.ragged or a[columns.name] or b[places.name]:
        raise refused("of windows of one image for all columns, only weights in panels can be printed")
    steps = (b[taps[-1].name], *strips(second, registers.vectors, lanes, 1))
    sizes = (lanes, min(registers.rows, places.extent), registers.vectors, places.extent, taps[-1].extent)
    return f"korch::DenseContraction<{', '.join(map(str, (*sizes, *row_of_window(step, a), *steps)))}>"


def print_rows(out: CppWriter, step: Contract, ranges: Ranges, a: Mapping[str, int], b: Mapping[str, int]) -> str:
    """Print the function that visits those rows of a window that are inside the image; return its name."""
    outer = rows_of_window(step)
    ends = [print_ends(out, axis, guards, ranges) for axis, guards in outer.items()]
    name = f"rows{out.lambdas}"
    out.lambdas += 1
    out.open(f"const auto {name} = [=](const auto& turn) __attribute__((always_inline))")
    for axis, (begin, end) in zip(outer, ends, strict=True):
        out.line(f"for (long {axis.name} = {begin}; {axis.name} < {end}; ++{axis.name})")
    places = (" + ".join(f"{steps[axis.name]} * {axis.name}" for axis in outer) or "0" for steps in (a, b))
    out.line(f"  turn({', '.join(places)});")
    out.close("};")
    return name


def axes_around(step: Contract) -> tuple[str, str]:
    """Return the names of the axis of channel blocks and the axis of rows around a contraction of windows."""
    batch = [axis.name for axis in batches_of(step)]
    blocks = [name for name in batch if name in step.b.index.variables]
    rows = [name for name in batch if name not in blocks]
    if len(rows) > 1 or len(blocks) > 1:
        raise refused("the sums of windows that are split have one axis of rows and one of blocks of channels")
    return (blocks or ["q"])[0], (rows or ["y"])[0]
