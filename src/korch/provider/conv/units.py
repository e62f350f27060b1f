"""Chooses the blocking of the tile programs of byte convolutions on matrix units."""

import math

from korch.candidate.candidate import Group
from korch.candidate.layout import Layout
from korch.primitive.graph import Primitive
from korch.primitive.ops.linear import ConvAttributes
from korch.provider.cache_room import cache_room
from korch.provider.conv.rows import lines_of_task
from korch.provider.gemm.units import tiled_program_of
from korch.provider.gemm.vectors import require_rows
from korch.provider.matrix_units import LEAST_ROWS_OF_BYTES, LEAST_TERMS_OF_BYTES, TOGETHER
from korch.schedule.byte_units import ByteWindows, WindowBlocking, pixel_quads, unit_of
from korch.schedule.contraction import Layouts, contraction_of, extent
from korch.schedule.sides import sides_of
from korch.system.alignment import ceil_div, round_up
from korch.target import Target
from korch.tile.ir.program import QUAD, TileProgram
from korch.tile.lower.staging import Machine

LEAST_RESULTS = 8
"""The least channels of a result for which matrix units are used."""


def can_use_units(group: Group, root: Primitive, target: Target) -> bool:
    """Return whether matrix units may run a convolution of bytes."""
    weights, attributes = group.body.types[root.inputs[1]].shape, root.attributes_as(ConvAttributes)
    is_dense = attributes.groups == 1 and len(weights) in (3, 4)
    has_rows = group.body.types[root.output].size >= LEAST_ROWS_OF_BYTES * weights[0]
    has_terms = math.prod(weights[1:]) >= LEAST_TERMS_OF_BYTES or not is_pointwise(group, root)
    return target.isa == "amx" and is_dense and has_rows and has_terms and weights[0] >= LEAST_RESULTS


def is_pointwise(group: Group, root: Primitive) -> bool:
    """Return whether a convolution is computed as one matrix product, with pixels or whole windows as rows."""
    sides = sides_of(group, root)
    return len(sides) != 2 or all((side.window, side.stride, side.size) == (1, 1, side.out) for side in sides)


def weights_in_steps(group: Group, root: Primitive) -> Layout:
    """Return the layout of weights: strips of channels, in whole steps of terms, four terms adjacent."""
    shape = group.body.types[root.inputs[1]].shape
    order = (0, *range(2, len(shape)), 1)
    if not is_pointwise(group, root):
        return Layout(order, ((1, pixel_quads(group, root)), (0, TOGETHER), (1, QUAD)))
    innermost = next((axis for axis in reversed(order[1:]) if shape[axis] > 1), 1)  # an axis of one channel is skipped
    terms = extent(contraction_of(group, root, last=True).terms)
    return Layout(order, ((innermost, unit_of(terms) // QUAD), (0, TOGETHER), (innermost, QUAD)))


def program_on_units(group: Group, root: Primitive, layouts: Layouts, target: Target) -> TileProgram:
    """Return the program of a convolution of bytes on matrix units.

    Raises:
        NotFusedError: the convolution, or a primitive before or after it, can't be computed so.
    """
    if is_pointwise(group, root):
        return tiled_program_of(group, root, layouts, target, True)
    windows = ByteWindows(group, root, layouts, Machine.of(target))
    program = windows.program(window_blocking(windows, target))
    require_rows(program, target.lanes)
    return program


def window_blocking(windows: ByteWindows, target: Target) -> WindowBlocking:
    """Return the blocking of a convolution.

    The channels of the result are divided among the threads if the weights have more bytes than the image, otherwise
    lines are. Weights that fit into the cache are kept there while lines are streamed.
    """
    strips, teams = ceil_div(windows.results, TOGETHER), target.threads
    weights_bytes, room = windows.terms * windows.results, int(cache_room("operand", target))
    by_channels = strips >= teams and weights_bytes > windows.copied_bytes(windows.down.out) * windows.images
    channels = (
        min(windows.results, round_up(ceil_div(windows.results, teams), TOGETHER)) if by_channels else windows.results
    )
    fitting = max(1, windows.down.out * room // (2 * windows.copied_bytes(windows.down.out)))
    tasks = windows.images * (teams if by_channels else 1)
    lines = lines_of_task(windows.down.out, fitting, tasks, target.threads)
    return WindowBlocking(lines, channels, by_channels or windows.terms * channels > room)
