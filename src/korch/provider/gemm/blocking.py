"""Chooses the block sizes of a matrix product from its sizes and the target's caches and registers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from korch.provider.cache_room import cache_room
from korch.provider.matrix_units import COMPONENT_BYTES, TOGETHER
from korch.system.alignment import round_up
from korch.target import Target

FLOAT_BYTES = 4
PAGE_FLOATS = 1024
"""Elements between cache lines that map to the same set of the level-1 cache."""

WIDE_VECTORS = 4
"""Vectors of a wide strip."""

WIDE_STRIPS = 16
"""Wide strips that each thread must have."""

WIDE_ROWS = 64
"""The least rows for wide strips in a product of many columns and few terms, but more than half of `FEW_TERMS`."""

FEW_TERMS, LONG_ROW = 64, 2048
"""The most terms and the least columns for which storing results takes most of the time if a thread's part of the
right operand is small. Then a few rows are stored from end to
end before the next ones, so that hardware prefetchers predict the stores."""

LEAST_BLOCK = 256
"""A block has at least this many rows (if there are as many), even if they don't fit into the level-2 cache."""

MOST_WASTE = 1.06
"""The most rows computed per row needed; beyond it, fewer rows are computed together."""

SPLIT_ROWS = 384
"""Rows of a block: enough that splitting columns takes little time compared with the products."""

LEAST_GIVEN_ROWS = 192
"""If this many rows fit into the cache with all their terms, a right operand in components is read once per block."""

LEAST_GROUP = 4
"""The least strips that must fit into the cache for them to be kept there while the rows are streamed."""


@dataclass(frozen=True, slots=True)
class VectorBlocking:
    """Sizes of blocks: vectors and rows in registers, rows of a block, parts of the columns.

    For matrix units, `chunk` is the number of terms that are multiplied at a time, and `group` the
    number of strips of columns that are kept in the cache, or 0 if the rows are kept there.
    """

    vectors: int
    rows: int
    block: int
    parts: int
    chunk: int = 0
    group: int = 0

    @staticmethod
    def split(
        sizes: tuple[int, int, int, int], components: tuple[int, int], target: Target, is_given: bool = False
    ) -> VectorBlocking:
        """Choose the sizes for matrix units: whole tiles, and the terms that are multiplied at a time.

        The larger operand is divided among the threads; each thread splits all of the other one.

        `components`: the number of components of each operand's elements. `is_given`: whether the right operand is
        already in components. Then its columns are read block by block, because they need not be split first.
        """
        batch, m, n, terms = sizes
        rows_bytes, columns_bytes = (COMPONENT_BYTES * TOGETHER * count for count in components)
        teams = max(1, target.threads // math.gcd(batch, target.threads))
        strips, vectors = -(-n // TOGETHER), TOGETHER // target.lanes
        room = cache_room("operand", target)
        fitting = int(room / (columns_bytes * round_up(terms, TOGETHER)))
        if not is_given and m >= teams * SPLIT_ROWS // 2 and fitting >= min(strips, LEAST_GROUP):
            block = min(m, -(-m // (teams * TOGETHER)) * TOGETHER)
            group = -(-strips // -(-strips // fitting))
            return VectorBlocking(vectors, 8, block, 1, terms, group)
        blocks, parts = (1, teams) if strips >= teams and n >= m else (teams, 1)
        fitting = int(room / (rows_bytes * -(-terms // TOGETHER)))
        if is_given and fitting >= LEAST_GIVEN_ROWS:  # all terms are multiplied at once, so no partial sums are kept
            blocks *= -(-m // (blocks * fitting))
        else:
            blocks *= max(1, round(m / (blocks * SPLIT_ROWS)))
        block = min(m, -(-m // (blocks * TOGETHER)) * TOGETHER)
        steps = int(room / (rows_bytes * round_up(block, TOGETHER)))
        chunks = -(-terms // (max(8, steps) * TOGETHER))
        chunk = -(-terms // (chunks * TOGETHER)) * TOGETHER
        return VectorBlocking(vectors, 8, block, parts, min(chunk, terms))

    @staticmethod
    def of(batch: int, m: int, n: int, terms: int, target: Target, row_step: int = 0) -> VectorBlocking:
        """Choose the sizes for a product of `batch` times m rows and n columns.

        If the right operand is read in place, in rows `row_step` elements apart, and the cache lines of a
        strip evict each other from the level-1 cache, strips are wide, so that more of each fetched line is
        used at once. Strips are also wide if results are stored after few terms, or if a strip fits into the
        level-1 cache while the rows are streamed: then there are fewer loads per product.

        If rows of the left operand evict each other, a product of one strip of columns computes fewer rows together,
        and one of at most two wide strips has wide strips. (The left operand of others is copied.)
        """
        teams = max(1, target.threads // math.gcd(batch, target.threads))
        vectors = 2 if n > target.lanes else 1
        most = (target.registers - 4) // vectors
        rows_conflict = have_conflicts(min(m, most), terms, target)
        if rows_conflict and n <= vectors * target.lanes:  # a copy takes longer than more blocks of rows
            most = max(1, target.l1_bytes // (FLOAT_BYTES * PAGE_FLOATS) - 1)
        is_long = n >= WIDE_STRIPS * teams * WIDE_VECTORS * target.lanes
        lines_conflict = have_conflicts(terms, row_step, target)
        lines_conflict &= row_step % PAGE_FLOATS != 0  # otherwise strips are packed
        if lines_conflict and is_long and n > m and target.registers >= 32:
            vectors, most = WIDE_VECTORS, target.registers // WIDE_VECTORS - 2
        columns, wide_rows = WIDE_VECTORS * target.lanes, target.registers // WIDE_VECTORS - 2
        can_be_wide = target.registers >= 32 and n % columns == 0
        is_near = FLOAT_BYTES * terms * columns <= target.l1_bytes
        strips = -(-n // (vectors * target.lanes))
        if n > m and (strips % teams == 0 or strips >= 16 * teams):
            rows = _rows(m, most)
            fitting = max(LEAST_BLOCK, target.l2_bytes * 3 // 4 // (FLOAT_BYTES * terms))
            blocks = -(-m // fitting)
            block = m if blocks == 1 else -(-m // (blocks * rows)) * rows
            part_bytes = FLOAT_BYTES * terms * n // teams
            if terms <= FEW_TERMS and n >= LONG_ROW and part_bytes <= cache_room("components", target):
                if can_be_wide and m >= WIDE_ROWS and terms > FEW_TERMS // 2:
                    return VectorBlocking(WIDE_VECTORS, wide_rows, min(m, 8 * wide_rows), teams)
                block = rows
            return VectorBlocking(vectors, rows, block, teams)
        is_near |= rows_conflict and n <= 2 * columns  # wide strips have too few rows for conflicts
        if can_be_wide and is_near and m >= teams * most:
            vectors, most, strips = WIDE_VECTORS, wide_rows, n // columns
        blocks = teams if m >= teams * most // 2 else 1
        per_block = -(-m // blocks)
        rows = _rows(per_block, most)
        largest = rows * max(1, 64 // rows)
        block = min(per_block, largest) if blocks == 1 else round_up(per_block, rows)
        while block > 2 * largest and block % (2 * rows) == 0:
            block //= 2
        parts = 1 if batch * -(-m // block) >= target.threads else min(target.threads, strips)
        if block < m:
            block = round_up(block, rows)
        return VectorBlocking(vectors, rows, block, parts)


def have_conflicts(lines: int, step: int, target: Target) -> bool:
    """Return whether lines that are read together, `step` floats apart, evict each other from the level-1 cache.

    Lines a multiple of a page apart share a set, and a set has as many ways as the cache has pages. If such lines take
    all ways, none is left for the other operand (256 x 1024 times 1024 x 256, 13 rows in 8 ways: 1.5 times the time).
    """
    return lines * math.gcd(step, PAGE_FLOATS) >= target.l1_bytes // FLOAT_BYTES


def _rows(m: int, most: int) -> int:
    """Return how many rows to compute together: as many as possible with little waste beyond m."""
    if m <= most:
        return m
    for rows in range(most, most // 2, -1):
        if round_up(m, rows) <= MOST_WASTE * m:
            return rows
    return most
