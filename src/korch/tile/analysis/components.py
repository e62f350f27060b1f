"""Operands that are split into bfloat16 components: which passes make them, and when.

The operand that is split last, right before a contraction, is split block by block while products are computed. If
instead the second operand is given in components, which are prefetched while products are computed, the first operand
is split completely beforehand.
"""

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
    """The pixels of an image that a contraction over windows reads.

    Rows and pixels of a row that are a stride apart are those of adjacent results. Rows of an image are in classes, in
    which those of adjacent rows of results follow each other, with zeros after the last one.
    """

    strides: tuple[int, int]  # rows and pixels from a result to the next one
    dilations: tuple[int, int]  # rows and pixels from a position of a window to the next one
    window: int  # the rows of a window
    pitch: int  # the pixels of a row of the image
    width: int  # the pixels that the results of a row read
    classes: int  # the classes of rows

    @property
    def extra(self) -> int:
        """The pixels after the last row of a class, which are 0."""
        return max(0, self.width - self.pitch)

    def met(self, rows: int) -> int:
        """Return how many rows of the image some rows of results read."""
        return (rows - 1) * self.strides[0] + (self.window - 1) * self.dilations[0] + 1

    def of_class(self, rows: int) -> int:
        """Return the pixels of a class that some rows of results read."""
        return -(-self.met(rows) // self.classes) * self.pitch + self.extra


def pixels_of(program: TileProgram, step: Contract, *, in_classes: bool) -> Pixels:
    """Return the pixels that a contraction over windows of components reads, with rows in classes or in one class."""
    layout, (y, x, _, t0, t1, _) = panels(program.buffer(step.a.buffer)), step.axes
    assert layout is not None
    makers = (s for stage in program.stages for _, s in stage.leaves if is_split(program, s) and isinstance(s, Pass))
    maker = next(s for s in makers if s.sinks[0].buffer == step.a.buffer)
    pitch = maker.axes[1].extent
    down, across, *taps = ((step.a.index.coefficient(a.name) or 0) // layout.columns for a in (y, x, t0, t1))
    strides, dilations = (max(1, down // pitch), max(1, across)), (taps[0] // pitch, taps[1])
    width = (x.extent - 1) * strides[1] + (t1.extent - 1) * dilations[1] + 1
    return Pixels(strides, dilations, t0.extent, pitch, width, strides[0] if in_classes else 1)


def units_at_once(step: Contract) -> int:
    """Return for how many steps of terms of windows the weights are split together: a divisor of all of them."""
    *_, t0, t1, c = step.axes
    units = t0.extent * t1.extent * -(-c.extent // EDGE)
    most = units if step.registers is None else step.registers.vectors
    return next(n for n in range(min(units, most), 0, -1) if units % n == 0)


def kept_sums(step: Contract, image: Pixels) -> int:
    """Return the rows of sums that are kept while the weights of a window are split part by part; 0 if they are not."""
    y, x, _, t0, t1, c = step.axes
    if units_at_once(step) == t0.extent * t1.extent * -(-c.extent // EDGE):
        return 0
    return round_up((y.extent - 1) * (image.pitch // image.strides[1]) + x.extent, EDGE)


def tile_in_use(program: TileProgram, stage: Stage, tile: Buffer, *, on_units: bool) -> Buffer:
    """Return the part of a tile of components that holds elements at one time.

    On matrix units, one block is multiplied while the next one is split.
    """
    layout, split, moves = panels(tile), split_of(tile), tile.name in passing(program, stage.steps)
    assert layout is not None and split is not None
    step, is_left, blocks = reader_of(stage, tile.name), layout.group == 1, 2 if on_units else 1
    if len(step.axes) == WINDOW_AXES:
        y, *_, t0, t1, c = step.axes
        channels, image = round_up(c.extent, EDGE), pixels_of(program, step, in_classes=on_units)
        if is_left:
            rows = step.registers.rows if moves and step.registers is not None else y.extent
            size = image.classes * image.of_class(rows) * channels * (blocks if rows < y.extent else 1)
            return replace(tile, elements=size + EDGE * EDGE * image.strides[1])
        if not moves:
            return replace(tile, elements=round_up(layout.columns, EDGE) * t0.extent * t1.extent * channels)
        if not on_units:
            return replace(tile, elements=EDGE * t0.extent * t1.extent * channels)
        kept = -(-kept_sums(step, image) * EDGE * 4 // (split.components * split.dtype.size_bytes))
        return replace(tile, elements=blocks * units_at_once(step) * EDGE * EDGE + kept)
    if step.factor is not None and not is_left and on_units:
        return replace(tile, elements=blocks * EDGE * step.axes[-1].extent)
    terms = layout.columns if is_left else tile.size // layout.columns
    return replace(tile, elements=min(tile.size, blocks * EDGE * terms)) if moves else tile
