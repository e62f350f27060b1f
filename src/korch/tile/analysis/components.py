"""Operands that are split into bfloat16 components: which passes make them, and when.

The operand that is split last, right before a contraction, is split block by block while products are computed. If
instead the second operand is given in components, which are prefetched while products are computed, the first operand
is split completely beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from korch.system.alignment import round_up
from korch.target import EDGE
from korch.tile.analysis.panels import panels
from korch.tile.ir.program import Buffer, Contract, Loop, Pass, Split, Stage, Step, TileProgram

WINDOW_AXES = 6
"""The axes of a contraction over windows: rows, columns and channels of results, rows and columns of a window,
and channels of the image."""


def split_of(buffer: Buffer) -> Split | None:
    """Return how the elements of a buffer are split, or None."""
    return next((layout for layout in buffer.layout if isinstance(layout, Split)), None)


def is_split(program: TileProgram, step: Step) -> bool:
    """Return whether a step is a pass that splits an operand into components."""
    return isinstance(step, Pass) and any(split_of(program.buffer(sink.buffer)) for sink in step.sinks)


def passing(program: TileProgram, steps: Sequence[Step]) -> Iterator[str]:
    """Yield the tiles of components that are computed block by block while products are computed."""
    last = ""
    for step in steps:
        if isinstance(step, Loop):
            yield from passing(program, step.body)
        elif isinstance(step, Pass) and is_split(program, step):
            last = step.sinks[0].buffer
        elif isinstance(step, Contract) and last in (step.a.buffer, step.b.buffer):
            yield from () if step.registers is not None and step.registers.fetches_b else (last,)


def reader_of(stage: Stage, name: str) -> Contract:
    """Return the contraction that multiplies the components of a buffer."""
    found = (step for _, step in stage.leaves if isinstance(step, Contract))
    return next(step for step in found if name in (step.a.buffer, step.b.buffer))


@dataclass(frozen=True, slots=True)
class Pixels:
    """The pixels of an image that a contraction over windows reads, numbered row by row.

    Attributes:
        down: pixels from a row of results to the next one.
        across: pixels from a result of a row to the next one.
        taps: pixels from a position of a window to the next one, down and across.
        pitch: the pixels of a row of the image.
        window: the pixels from a result's first one to the last one of the row's last result.
    """

    down: int
    across: int
    taps: tuple[int, int]
    pitch: int
    window: int

    def count(self, rows: int) -> int:
        """Return how many pixels some rows of results read; for 0 rows, what is added to their number times `down`."""
        return rows * self.down + self.window + 1 - self.down


def pixels_of(program: TileProgram, step: Contract) -> Pixels:
    """Return the pixels that a contraction over windows of components reads."""
    layout, (y, x, _, t0, t1, _) = panels(program.buffer(step.a.buffer)), step.axes
    assert layout is not None
    down, across, *taps = ((step.a.index.coefficient(a.name) or 0) // layout.columns for a in (y, x, t0, t1))
    makers = (s for stage in program.stages for _, s in stage.leaves if is_split(program, s) and isinstance(s, Pass))
    maker = next(s for s in makers if s.sinks[0].buffer == step.a.buffer)
    pitch = maker.axes[1].extent
    window = (x.extent - 1) * across + (t0.extent - 1) * taps[0] + (t1.extent - 1) * taps[1]
    return Pixels(down or pitch, across, (taps[0], taps[1]), pitch, window)


def tile_in_use(program: TileProgram, stage: Stage, tile: Buffer) -> Buffer:
    """Return the part of a tile of components that holds elements at one time."""
    layout, moves = panels(tile), tile.name in passing(program, stage.steps)
    assert layout is not None
    step, is_left = reader_of(stage, tile.name), layout.group == 1
    if len(step.axes) == WINDOW_AXES:
        y, *_, t0, t1, c = step.axes
        channels = round_up(c.extent, EDGE)
        rows = step.registers.rows if moves and step.registers is not None else y.extent
        units = t0.extent * t1.extent * channels
        size = pixels_of(program, step).count(rows) * channels
        return replace(tile, elements=size if is_left else (EDGE if moves else layout.columns) * units)
    terms = layout.columns if is_left else tile.size // layout.columns
    return replace(tile, elements=min(tile.size, EDGE * terms)) if moves else tile
