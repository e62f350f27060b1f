"""Extents of which only the first elements are needed keep how many in blocks, in merged axes and in programs."""

import math

import pytest

from korch.primitive.types import DType
from korch.ranges.form import Extent, extent
from korch.ranges.live import Live, affine, blocks, count_of, flattened, joined, live, rounded
from korch.tile.ir.bind import bind
from korch.tile.ir.index import var
from korch.tile.ir.parameters import PART, by_outer, parametric
from korch.tile.ir.program import Axis, Buffer, Level, Literal, Pass, Stage, Store, TileProgram

ROWS = live(40, (extent(0, 2),))
HALVES = live(20, (extent(0, 1, 1, 2), Extent(0, 0, 3)))
BATCH = live(6, (extent(1),))
SIZES = [(n, b) for n in (1, 2, 7, 19, 20) for b in (1, 5, 6)]


def needed(size: int, sizes: tuple[int, int]) -> int:
    assert isinstance(size, Live)
    return -(-min(size.limit, size.count.at(sizes)) // size.over)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_needed_elements_of_blocks_and_merged_axes(sizes: tuple[int, int]) -> None:
    n, b = sizes
    half = max((n + 1) // 2, 3)
    assert (needed(ROWS, sizes), needed(HALVES, sizes)) == (2 * n, half)
    assert needed(blocks(ROWS, 7), sizes) == math.ceil(2 * n / 7)
    assert needed(blocks(blocks(ROWS, 7), 2), sizes) == math.ceil(math.ceil(2 * n / 7) / 2)
    assert needed(affine(ROWS, 3, -1), sizes) == 6 * n - 1
    assert needed(affine(blocks(ROWS, 4), 5), sizes) == 5 * math.ceil(2 * n / 4)
    assert needed(affine(HALVES, 5), sizes) == 5 * half
    assert needed(flattened((1, HALVES, 1, 5)), sizes) == 5 * half
    assert needed(flattened((BATCH, ROWS, 3)), sizes) == b * 2 * n * 3
    assert needed(rounded(ROWS, 16), sizes) == min(48, 16 * math.ceil(2 * n / 16))


def test_numbers_are_those_of_the_largest_size() -> None:
    found = (ROWS, HALVES, blocks(ROWS, 7), affine(ROWS, 3, -1), flattened((BATCH, ROWS, 3)), rounded(ROWS, 16))
    assert found == (40, 20, 6, 119, 720, 48)


def test_where_all_elements_are_needed() -> None:
    """Needed elements that are not the first ones, and the union of different ones."""
    for size in (
        flattened((3, ROWS)),
        joined(ROWS, live(40, (extent(0),))),
        ROWS + 1,
        live(40, ()),
        live(1, (extent(0),)),
    ):
        assert count_of(size) is None
    assert count_of(joined(ROWS, ROWS)) == count_of(ROWS)
    assert count_of(live(40, (extent(0), extent(1)))) is None


def written(rows: int) -> TileProgram:
    """A program that writes a number to some rows, in tasks of 7 rows, and in a second stage in one task."""
    grid, row = Axis("g", blocks(rows, 7)), Axis("i", 7, ragged=("g", rows))
    one = Literal("one", DType.F32, 1.0)
    stages = (
        Stage((grid,), (Pass((row,), "i", (one,), (Store("o0", var("i"), "one"),)),)),
        Stage((), (Pass((Axis("j", rows),), "j", (one,), (Store("o0", var("j"), "one"),)),)),
    )
    return TileProgram((Buffer("o0", Level.OUTPUT, DType.F32, int(rows)),), stages)


def test_loops_end_at_parameters() -> None:
    program, counts = parametric(written(ROWS))
    ((name, count),) = counts.items()
    bound = bind(program, {name: count.at((9, 1))})
    ((first,), (second,)) = (stage.passes for stage in bound.stages)
    assert (bound.stages[0].tasks, first.axes[0].ragged, second.axes[0].ragged) == (3, ("g", 18), ("all", 18))
    assert parametric(written(40)) == (written(40), {})


def test_rows_of_two_axes_have_two_parameters_or_one() -> None:
    whole = written(flattened((BATCH, ROWS)))
    assert PART in parametric(whole)[1]
    _, counts = parametric(by_outer(whole))
    assert [count.at((9, 5)) for count in counts.values()] == [5 * 40]
