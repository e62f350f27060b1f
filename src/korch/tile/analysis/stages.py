"""What printers need to know about the stages of a program: barriers, large buffers, and where tiles are in memory."""

import itertools

from korch.system.alignment import round_up
from korch.tile.analysis.sums import tiles_in_registers
from korch.tile.ir.program import Buffer, Contract, Level, Stage, TileProgram, read_by, written_by
from korch.tile.lower.buffers import LINE_BYTES, computed_bytes
from korch.tile.lower.loops import SQUARE_TYPES

SERIAL_POINTS = 6000
"""Programs with fewer points run in the calling thread: a parallel region would cost more."""


LARGEST_ARRAY_BYTES = 16 << 10
"""The maximum size of a tile on the stack in stages with contractions; larger ones are in the workspace."""


def stages_that_wait(program: TileProgram) -> list[bool]:
    """Return, by stage, whether a barrier follows it: before a stage that reads results since the last barrier.

    After the last stage, the end of the parallel region is the barrier.
    """
    waits: list[bool] = []
    written: set[str] = set()
    for stage, following in itertools.zip_longest(program.stages, program.stages[1:]):
        written |= written_by(stage.steps) | (stage.sort.written.keys() if stage.sort is not None else set())
        read = read_by(following.steps) if following is not None else set()
        waits.append(bool(written & read))
        written = set() if waits[-1] else written
    return waits


def streamed_outputs(program: TileProgram, stream_bytes: int) -> frozenset[str]:
    """Return the outputs that are written past the caches: large ones that the program does not read again.

    Lines that are written whole then need not be read first, and they evict nothing from the caches.
    """
    read = read_by(tuple(step for stage in program.stages for step in stage.steps))
    return frozenset(
        buffer.name
        for buffer in program.buffers
        if buffer.level is Level.OUTPUT
        and buffer.dtype in SQUARE_TYPES
        and buffer.size * buffer.dtype.size_bytes >= stream_bytes
        and buffer.name not in read
    )


def large_inputs(program: TileProgram, large_bytes: int) -> frozenset[str]:
    """Return the inputs that are too large for a core's private cache."""
    return frozenset(
        buffer.name
        for buffer in program.buffers
        if buffer.level is Level.INPUT and buffer.size * buffer.dtype.size_bytes >= large_bytes
    )


def tiles_of(program: TileProgram, stage: Stage) -> list[Buffer]:
    """Return the tiles that a stage needs memory for."""
    used = written_by(stage.steps) - tiles_in_registers(program, stage.steps)
    return [b for b in program.buffers if b.level is Level.TILE and b.name in used]


def tile_bytes(buffer: Buffer) -> int:
    """Return the size of a tile of whole elements in the printed code, in bytes, rounded up to whole cache lines."""
    return round_up(buffer.size * computed_bytes(buffer), LINE_BYTES)


def is_large_tile(stage: Stage, size_bytes: int) -> bool:
    """Return whether a tile of a stage is in the workspace of each thread, not on its stack."""
    has_contraction = any(isinstance(step, Contract) for _, step in stage.leaves)
    return has_contraction and size_bytes > LARGEST_ARRAY_BYTES
