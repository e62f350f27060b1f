"""Arranges the loops of a pass: merges loops, chooses the vector axis and the loop order, and cuts the grid."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from korch.primitive.types import DType
from korch.ranges.live import affine, blocks, count_of
from korch.tile.ir.index import ZERO, Expr, Ranges, add, scale, substitute, var
from korch.tile.ir.passes import guards_of, map_indices, map_places, places, turns_on
from korch.tile.ir.program import Accumulate, Axis, Inside, Load, Pass, Stage

TASK_POINTS = 8192
"""The maximum number of points of a task of a free stage: enough to outweigh the cost of starting it."""

TILE_SIDE = 64
"""Elements along each side of a task of transposed squares: the data that it reads and writes stays in
the L1 cache, and each row has four lines, enough to amortize the cost of starting on a row."""

LONGEST_ROW = 256
"""The longest rows in elements that a task of squares writes whole; twice as many for rows that do not
begin at a cache line boundary."""

ALIASED_ELEMENTS = 256
"""Elements at multiples of this distance map to a few sets of the L1 cache."""

PAGE_ELEMENTS = 1024
"""Elements at multiples of this distance map to one set of the L1 cache."""

LARGE_ELEMENTS = 4 << 20
"""The minimum number of elements of a value that is too large for a core's private cache."""

NEAR = (1, 2)
"""Steps between elements at which whole vectors are read; at other steps the elements are read one by one."""

LINE_ELEMENTS = 16
"""Four-byte elements per cache line."""

SHORT_VECTORS = 4
"""In inner loops of fewer vectors than this, a partly filled last vector is expensive."""

LEAST_SIDE = 4
"""The smallest side of a square that is transposed in registers."""


SQUARE_TYPES = (DType.F32, DType.I32, DType.U32)
"""The element types for which squares are transposed in registers."""


def arrange(pass_: Pass, lanes: int, sizes: Mapping[str, int], grid: Ranges) -> Pass:
    """Return a pass with its loops merged and ordered, and its vector axis chosen.

    Args:
        pass_: the pass, with its axes in the order of the value's axes.
        lanes: elements of a vector.
        sizes: elements of each buffer.
        grid: the ranges of the stage's grid axes.
    """
    pass_ = _merge_all(pass_, lanes)
    squares = _square_axes(pass_, sizes, grid) if lanes >= LEAST_SIDE else None
    vector, across = squares or (_vector_axis(pass_, lanes, sizes), "")
    reference = _reference(pass_, sizes)

    is_along = not across or _is_along(pass_, vector, across, sizes, lanes)
    last = {across: 0, vector: 1} if is_along else {vector: 0, across: 1}

    def key(axis: Axis) -> tuple[bool, int, int]:
        step = reference.coefficient(axis.name)
        return axis.is_reduced, last.get(axis.name, -1), -(abs(step) if step else 0)

    axes = tuple(sorted(pass_.axes, key=key))
    return dataclasses.replace(pass_, axes=axes, vector=vector, across=across)


def _is_along(pass_: Pass, vector: str, across: str, sizes: Mapping[str, int], lanes: int) -> bool:
    """Return whether the loop over squares runs along the rows that are written, not those that are read.

    It is best to run along the rows with the larger stride, as those with the smaller stride are close
    together in a tile. Rows that map to the same L1 sets do not stay in the cache for long, so they are
    read, or written, in one go. Large values are written past the caches in whole lines, in any order;
    if that is not possible, in consecutive lines.
    """
    sink = max(pass_.sinks, key=lambda sink: sizes[sink.buffer])
    if sizes[sink.buffer] >= LARGE_ELEMENTS:
        return lanes < LINE_ELEMENTS or _share_lines(pass_, across)
    written = abs(sink.index.coefficient(across) or 0)
    loads = [op.index for op in pass_.ops if isinstance(op, Load)]
    steps = [i.coefficient(vector) or 0 for i in loads if i.coefficient(across) == 1]
    read = max(map(abs, steps), default=0)
    is_aliased = written % ALIASED_ELEMENTS == 0 or (read and read % PAGE_ELEMENTS == 0)
    return is_aliased or read <= written


def grid_for(pass_: Pass, threads: int, lanes: int) -> Stage:
    """Return the stage of a free pass: outer loops become grid axes, and a long loop is cut into tiles."""
    axes, grid = list(pass_.axes), list[Axis]()
    while len(axes) > 1 and math.prod(axis.extent for axis in axes) > TASK_POINTS:
        if axes[0].is_reduced or (axes[0].extent <= 4 and turns_on(pass_, axes[0].name)):
            break
        if pass_.across and len(axes) == 2:
            return _grid_of_squares(pass_, grid, threads, lanes)
        grid.append(axes.pop(0))
    tasks = math.prod(axis.extent for axis in grid)
    last = axes[0] if len(axes) == 1 else None
    is_whole = last is None or last.is_reduced or turns_on(pass_, last.name)
    if last is not None and not is_whole and last.extent > TASK_POINTS // 2:
        wanted = -(-last.extent // max(1, 4 * threads // tasks))
        tile = min(TASK_POINTS, max(TASK_POINTS // 4, wanted))
        shares = _shares(threads, tasks)
        tiles = -(-last.extent // (tile * shares)) * shares
        tile = -(-last.extent // (tiles * 4 * lanes)) * 4 * lanes
        if tile < last.extent:
            pass_ = _cut(pass_, grid, last, tile)
            axes = [axis for axis in pass_.axes if axis.name == last.name]
    return Stage(tuple(grid), (dataclasses.replace(pass_, axes=tuple(axes)),))


def _grid_of_squares(pass_: Pass, grid: list[Axis], threads: int, lanes: int) -> Stage:
    """Cut the two axes of squares into tiles, which are ordered along the rows that are read.

    Short rows are written whole by one thread: if two threads shared a row, its prefetched lines and
    the line where two parts meet would move back and forth between cores. Of a long row, each thread
    writes a part; it is computed from rows that no other thread reads.
    """

    def axis(name: str) -> Axis:
        return next(a for a in pass_.axes if a.name == name)

    along, across = axis(pass_.vector), axis(pass_.across)
    side, step = side_of(along.extent, lanes), side_of(across.extent, lanes)
    shares = _shares(threads, math.prod(a.extent for a in grid))
    least, longest = TILE_SIDE, LONGEST_ROW
    if _share_lines(pass_, across.name):
        least, longest = step, 2 * LONGEST_ROW
    is_whole = along.extent <= longest and across.extent >= shares * least
    if is_whole or turns_on(pass_, along.name):
        width = along.extent
        height = min(TASK_POINTS // along.extent, LONGEST_ROW)
        height = _tile(across.extent, max(step, min(across.extent, height)), step, shares)
    else:
        width = _tile(along.extent, min(along.extent, TILE_SIDE), side, shares)
        height = _tile(across.extent, min(across.extent, TILE_SIDE), step, 1)
    for name, tile in ((along.name, width), (across.name, height)):
        if tile < axis(name).extent:
            pass_ = _cut(pass_, grid, axis(name), tile)
    return Stage(tuple(grid), (dataclasses.replace(pass_, axes=pass_.axes[-2:]),))


def _share_lines(pass_: Pass, across: str) -> bool:
    """Return whether rows may begin inside cache lines, which cores that write adjacent rows then share."""
    return any((s.index.coefficient(across) or 0) % LINE_ELEMENTS for s in pass_.sinks)


def _shares(threads: int, tasks: int) -> int:
    """Return the number of which an axis's tile count must be a multiple so that threads get equally many tiles."""
    return threads // math.gcd(threads, tasks)


def _tile(extent: int, wanted: int, step: int, shares: int) -> int:
    """Return a tile size, a multiple of `step` near `wanted`, whose last tile is no shorter than `step`.

    Among these, it is the size with which the busiest of `shares` threads has the least work.
    """
    wanted = max(1, wanted // step) * step

    def is_whole(tile: int) -> bool:
        return extent % tile == 0 or extent % tile >= step

    def padded(tile: int) -> int:
        return -(-extent // (tile * shares)) * shares * tile

    near = [tile for tile in range(wanted, wanted // 2, -step) if is_whole(tile)]
    if near:
        return min(near, key=padded)
    return next((t for t in range(wanted + step, 4 * wanted + 1, step) if is_whole(t)), wanted)


def _cut(pass_: Pass, grid: list[Axis], axis: Axis, tile: int) -> Pass:
    """Cut an axis into tiles; the loop over them becomes a grid axis."""
    outer = Axis(f"{axis.name}t", blocks(axis.extent, tile))
    ragged = (outer.name, axis.extent) if axis.extent % tile or count_of(axis.extent) else None
    inner = Axis(axis.name, tile, ragged=ragged)
    whole = add(scale(var(outer.name), tile), var(axis.name))
    axes = tuple(inner if a is axis else a for a in pass_.axes)
    ranges = {a.name: (0, a.extent - 1) for a in (*grid, outer, *axes)}
    pass_ = map_indices(pass_, lambda expr: substitute(expr, {axis.name: whole}, ranges))
    grid.append(outer)
    return dataclasses.replace(pass_, axes=axes)


def _merge_all(pass_: Pass, lanes: int) -> Pass:
    """Merge pairs of loops that a single loop over the same elements can replace in every index."""
    merged = True
    while merged:
        merged = False
        for outer, inner in itertools.permutations(pass_.axes, 2):
            if _can_merge(pass_, outer, inner, lanes):
                pass_ = _merge(pass_, outer, inner)
                merged = True
                break
    return pass_


def _can_merge(pass_: Pass, outer: Axis, inner: Axis, lanes: int) -> bool:
    """Return whether two loops can be merged into one.

    A guard on the outer loop alone can also be written as a guard on the merged loop. This is used only
    if the inner loop leaves vectors partly filled, because axes with guards are not cut into tasks.
    """
    if outer.is_reduced != inner.is_reduced or 0 in (outer.extent, inner.extent):
        return False
    if count_of(inner.extent) and outer.extent > 1:  # the needed elements would not be the first ones
        return False
    if outer.ragged or inner.ragged:
        return False
    if any(not _steps_on(expr, outer, inner) for expr in places(pass_)):
        return False
    is_short = inner.extent < SHORT_VECTORS * lanes and inner.extent % lanes != 0
    return all(
        _steps_on(guard.expr, outer, inner) or (is_short and _is_of_outer(guard.expr, outer, inner))
        for guard in guards_of(pass_)
    )


def _steps_on(expr: Expr, outer: Axis, inner: Axis) -> bool:
    step, small = expr.coefficient(outer.name), expr.coefficient(inner.name)
    return step is not None and small is not None and step == small * inner.extent


def _is_of_outer(expr: Expr, outer: Axis, inner: Axis) -> bool:
    return expr.coefficient(outer.name) == 1 and inner.name not in expr.variables


def _merge(pass_: Pass, outer: Axis, inner: Axis) -> Pass:
    def joined(guard: Inside) -> Inside:
        if not _is_of_outer(guard.expr, outer, inner):
            return dataclasses.replace(guard, expr=_without(guard.expr, outer.name))
        # A multiple of n is in [low*n, high*n) if and only if all numbers up to the next multiple are.
        n = inner.extent
        expr = add(scale(_without(guard.expr, outer.name), n), var(inner.name))
        return Inside(expr, guard.low * n, guard.high * n)

    pass_ = map_places(pass_, lambda expr: _without(expr, outer.name), joined)
    axis = dataclasses.replace(inner, size=affine(outer.extent, int(inner.extent)))
    axes = tuple(axis if a is inner else a for a in pass_.axes if a is not outer)
    return dataclasses.replace(pass_, axes=axes)


def _without(expr: Expr, name: str) -> Expr:
    kept = tuple(term for term in expr.terms if name not in Expr(0, (term,)).variables)
    return Expr(expr.constant, kept)


def side_of(extent: int, lanes: int) -> int:
    """Return the side of the squares along an axis; 1 if there are none."""
    side = min(lanes, 1 << (extent.bit_length() - 1))
    return side if side >= LEAST_SIDE else 1


def is_across(load: Load, vector: str, across: str, ranges: Ranges) -> bool:
    """Return whether a load is contiguous along `across` and strided along `vector`."""
    index = substitute(load.index, {}, ranges)
    is_wide = load.dtype in SQUARE_TYPES and index.coefficient(vector) not in (0, 1, None)
    return is_wide and index.coefficient(across) == 1


def _square_axes(pass_: Pass, sizes: Mapping[str, int], grid: Ranges) -> tuple[str, str] | None:
    """Return (vector, across): stores are contiguous along the first, and loads strided along it along the second."""
    if pass_.is_reduction:
        return None
    sink = max(pass_.sinks, key=lambda sink: sizes[sink.buffer])
    ranges = dict(grid) | {axis.name: (0, max(axis.extent - 1, 0)) for axis in pass_.axes}
    long = [axis.name for axis in pass_.axes if axis.extent >= LEAST_SIDE]
    for vector in (name for name in long if sink.index.coefficient(name) == 1):
        scores = {
            name: sum(
                sizes[op.buffer] for op in pass_.ops if isinstance(op, Load) and is_across(op, vector, name, ranges)
            )
            for name in long
            if name != vector and not turns_on(pass_, name)
        }
        across = max(scores, key=lambda name: scores[name], default="")
        if across and scores[across]:
            return vector, across
    return None


def _vector_axis(pass_: Pass, lanes: int, sizes: Mapping[str, int]) -> str:
    """Return the axis along which the most elements are contiguous; stores count double."""
    extents = {axis.name: axis.extent for axis in pass_.axes if axis.extent > 1}
    scores = dict.fromkeys(extents, 0)
    for name, extent in extents.items():
        for op in pass_.ops:
            if isinstance(op, Load):
                scores[name] += beside(op, name, sizes)
        for sink in pass_.sinks:
            if not isinstance(sink, Accumulate) and sink.index.coefficient(name) == 1:
                scores[name] += 2 * sizes[sink.buffer]
        scores[name] *= min(extent, lanes)
    return max(scores, key=lambda name: (scores[name], extents[name]), default="")


def beside(load: Load, name: str, sizes: Mapping[str, int]) -> int:
    """Return how many elements of a buffer a load reads with vectors along an axis; 0 if its step is not in `NEAR`."""
    step = load.index.coefficient(name)
    return sizes.get(load.buffer, 0) // step if step in NEAR else 0


def _reference(pass_: Pass, sizes: Mapping[str, int]) -> Expr:
    """Return the index that determines the loop order: the largest store's or, in a reduction, the largest load's."""
    if not pass_.is_reduction:
        return max(pass_.sinks, key=lambda sink: sizes[sink.buffer]).index
    loads = [op for op in pass_.ops if isinstance(op, Load)]
    return max(loads, key=lambda op: sizes[op.buffer]).index if loads else ZERO
