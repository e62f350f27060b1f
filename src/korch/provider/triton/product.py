"""Matrix products and convolutions as Triton, with what comes before and after them.

Three forms. *Tiled*: a program computes a tile of rows and columns, terms in blocks, on matrix
units where the types allow it. *Split*: the terms are cut into parts, for few tiles; a second
launch adds up the parts. *Direct*: an element is a short sum, without matrix units, for depthwise
convolutions and few terms. Elementwise and layout primitives before the product are computed while
its arguments are loaded, those after it on the tile of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Primitive
from korch.primitive.types import DType, ValueType
from korch.provider.content import content_version
from korch.provider.triton.printer import KernelPrinter
from korch.schedule.contraction import Axes, Contraction, Fusion, NotFusedError, contraction_of, extent, root_of
from korch.tile.triton_text import COLUMNS, ROWS, Coordinate, Text, power_of_two

MOST_DIRECT = 64
"""Terms of the longest sum that is unrolled."""

FEWEST_COLUMNS = 8
"""Products with fewer rows or columns waste most of a tile."""

OFFERED = 3
"""Tiles that are offered: the best by the model."""

BAND = 8
"""Tiles of rows that run together, so that they share columns in the cache."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of a program's work.

    Attributes:
        rows: of its results.
        columns: of its results.
        terms: that are loaded at a time.
        warps: of the program.
        stages: loads under way.
        parts: into which the terms are cut.
    """

    rows: int
    columns: int
    terms: int
    warps: int
    stages: int
    parts: int = 1

    def __str__(self) -> str:
        text = f"{self.rows}x{self.columns}x{self.terms}w{self.warps}s{self.stages}"
        return text if self.parts == 1 else f"{text}p{self.parts}"

    @staticmethod
    def parse(text: str) -> Tile:
        """Return the tile that prints as `text`."""
        sizes, _, rest = text.partition("w")
        warps, _, rest = rest.partition("s")
        stages, _, parts = rest.partition("p")
        rows, columns, terms = map(int, sizes.split("x"))
        return Tile(rows, columns, terms, int(warps), int(stages), int(parts or 1))


SHAPES = tuple(
    Tile(rows, columns, terms, warps, stages)
    for rows, columns, warps in (
        (16, 16, 1),
        (16, 32, 1),
        (32, 16, 1),
        (32, 32, 2),
        (16, 64, 2),
        (64, 16, 2),
        (32, 64, 4),
        (64, 32, 4),
        (64, 64, 4),
        (64, 128, 4),
        (128, 32, 4),
        (128, 64, 4),
        (128, 128, 8),
    )
    for terms, stages in ((32, 3), (64, 3))
)


class TritonProductProvider:
    """Makes kernels for groups with one matrix product or convolution."""

    name = "triton-product"
    version = content_version("provider/triton", "cuda")
    group_shapes = (around("conv", "matmul"),)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer tiles and layouts by the model of their cost."""
        root = root_of(group, "matmul", "conv")
        if isinstance(root, Refusal):
            return root
        offers = []
        for inputs, outputs in product_layouts(group):
            offer = Offer(inputs, outputs)
            found = contraction_of(group, root, _is_last(group, root, offer))
            try:
                _check(group, offer, root, found)
            except NotFusedError as error:
                return Refusal(str(error))
            dtype = group.body.types[root.output].dtype
            variants = [str(tile) for tile in tiles_for(found, dtype, target)]
            is_short = extent(found.terms) <= MOST_DIRECT
            if not variants or (is_short and _is_narrow(found)):
                variants.append("direct")
            offers += [Offer(inputs, outputs, variant) for variant in variants]
        return offers

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the kernel."""
        root = root_of(group, "matmul", "conv")
        if isinstance(root, Refusal):
            return root
        found = contraction_of(group, root, _is_last(group, root, offer))
        printer = ProductPrinter(group, offer, root, found, target)
        try:
            if offer.variant == "direct":
                return printer.direct()
            return printer.tiled(Tile.parse(offer.variant))
        except NotFusedError as error:
            return Refusal(str(error))


def product_layouts(group: Group) -> list[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    """Return the layouts that are offered: plain, images channels-last, and from one to the other.

    Weights are constants, in the order of the terms.
    """

    def choose(types: Sequence[ValueType], last: bool) -> tuple[Layout, ...]:
        return tuple(
            channels_last(t.rank).normalized(t.shape) if last and t.rank in (4, 5) else Layout.plain(t.rank)
            for t in types
        )

    inputs, outputs = group.input_types, group.output_types
    return list(
        dict.fromkeys(
            (choose(inputs, before), choose(outputs, after))
            for before, after in ((False, False), (True, True), (False, True), (True, False))
        )
    )


def _is_last(group: Group, root: Primitive, offer: Offer) -> bool:
    """Return whether the image that a convolution reads has its channels side by side."""
    by_value = {value: offer.inputs[i] for i, (_, value) in enumerate(group.body.inputs)}
    layout = by_value.get(root.inputs[0])
    return layout is not None and not layout.is_plain


def _is_narrow(found: Contraction) -> bool:
    return min(extent(found.rows), extent(found.columns)) < 2 * FEWEST_COLUMNS


def _check(group: Group, offer: Offer, root: Primitive, found: Contraction) -> None:
    """Raise NotFusedError if something around the product does not fit."""
    fusion = Fusion(group, (offer.inputs, offer.outputs), root)
    emitter = fusion.emitter(found.ranges)
    fusion.argument(emitter, root.inputs[0], found.a)
    fusion.argument(emitter, root.inputs[1], found.b)
    fusion.outputs(emitter, root, found.out, "result")


def tiles_for(found: Contraction, dtype: DType, target: CudaTarget) -> list[Tile]:
    """Return the tiles that promise the shortest times, best first.

    The model: programs run in waves over the multiprocessors; a program's time is its terms times
    what loading and multiplying a block of them takes, the longer of both counting.
    """
    batch, m, n, k = map(extent, (found.batch, found.rows, found.columns, found.terms))
    if min(m, n) < FEWEST_COLUMNS or k < FEWEST_COLUMNS:
        return []
    is_float = dtype is DType.F32
    per_processor = target.product_flop_per_s(dtype) / target.processors
    cached = target.l2_bytes_per_s / target.processors
    scored = []
    for shape in SHAPES:
        if shape.terms > 32 and (is_float or k < 64):
            continue
        if shape.rows >= 2 * max(16, m) or shape.columns >= 2 * max(16, n):
            continue
        shared = shape.stages * shape.terms * (shape.rows + shape.columns) * dtype.size_bytes
        if shared > target.shared_bytes:
            continue
        tiles = batch * -(-m // shape.rows) * -(-n // shape.columns)
        for parts in (1, 2, 4, 8):
            if parts > 1 and (tiles * parts > 2 * target.processors or k < 64 * parts):
                continue
            blocks = -(-k // (shape.terms * parts))
            flop = 2 * shape.rows * shape.columns * shape.terms
            moved = shape.terms * (shape.rows + shape.columns) * dtype.size_bytes
            # Small tiles leave matrix units idle while they load.
            busy = min(1.0, shape.rows * shape.columns / 4096) ** 0.5
            step_s = max(flop / (per_processor * busy), moved / cached)
            waves = max(1.0, tiles * parts / target.processors)
            seconds = -(-tiles * parts // target.processors) * 0.5 * blocks * step_s
            seconds += 0.5 * waves * blocks * step_s
            if parts > 1:
                seconds += 1e-9 * target.launch_ns
                seconds += 8 * parts * batch * m * n / target.l2_bytes_per_s
            tile = Tile(shape.rows, shape.columns, shape.terms, shape.warps, shape.stages, parts)
            scored.append((seconds, str(tile), tile))
    scored.sort(key=lambda entry: entry[:2])
    best: dict[tuple[int, int, int], Tile] = {}
    for _, _, tile in scored:
        best.setdefault((tile.rows, tile.columns, tile.parts), tile)
    return list(best.values())[:OFFERED]


class ProductPrinter(KernelPrinter):
    """Prints the launches of one product."""

    def __init__(self, group: Group, offer: Offer, root: Primitive, found: Contraction, target: CudaTarget) -> None:
        super().__init__(group, offer, target, root)
        self.root = root
        self.found = found

    # Forms

    def tiled(self, tile: Tile) -> CudaKernel:
        """Print a tile of results per program; with several parts, their sum too."""
        found, text = self.found, Text()
        batch, m, n, k = map(extent, (found.batch, found.rows, found.columns, found.terms))
        down, across = -(-m // tile.rows), -(-n // tile.columns)
        programs = batch * down * across
        _place(text, tile, batch, down, across)
        beside = text.split("batch", list(found.batch), frozenset()) if batch > 1 else {}
        rows = beside | text.split("m", list(found.rows), ROWS)
        columns = beside | text.split("n", list(found.columns), COLUMNS)
        text.line(f"acc = tl.zeros([{tile.rows}, {tile.columns}], tl.float32)")
        blocks = -(-k // tile.terms)
        per_part = -(-blocks // tile.parts)
        begin = f"part * {per_part * tile.terms}" if tile.parts > 1 else "0"
        text.line(f"for k in range(0, {per_part * tile.terms}, {tile.terms}):")
        text.depth += 1
        text.line(f"ka = {begin} + k + tl.arange(0, {tile.terms})[None, :]")
        text.line(f"kb = {begin} + k + tl.arange(0, {tile.terms})[:, None]")
        short = k % (tile.terms * per_part * tile.parts) != 0
        self.argument(
            text, "a", 0, rows, "m", m % tile.rows != 0 and m, "ka", short and k, f"[{tile.rows}, {tile.terms}]"
        )
        self.argument(
            text,
            "b",
            1,
            columns,
            "n",
            n % tile.columns != 0 and n,
            "kb",
            short and k,
            f"[{tile.terms}, {tile.columns}]",
        )
        text.line(f'acc = tl.dot(a, b, acc, input_precision="{self.precision}")')
        text.depth -= 1
        masks = {}
        if m % tile.rows:
            masks[0] = f"(m < {m})"
        if n % tile.columns:
            masks[1] = f"(n < {n})"
        shape = f"[{tile.rows}, {tile.columns}]"
        if tile.parts == 1:
            self.results(text, "acc", rows | columns, masks, shape)
            self.finish(text, programs, tile.warps, tile.stages)
            return self.kernel()
        size = batch * m * n
        self.scratch["s0"] = (DType.F32, tile.parts * size)
        place = f"part * {size} + " + (f"batch * {m * n} + " if batch > 1 else "")
        mask = f", mask={' & '.join(masks.values())}" if masks else ""
        text.line(f"tl.store({text.pointer('s0')} + ({place}m * {n} + n), acc{mask})")
        self.finish(text, programs * tile.parts, tile.warps, tile.stages)
        self._sum(tile.parts, size)
        return self.kernel()

    def _sum(self, parts: int, size: int) -> None:
        """Print the launch that adds up parts."""
        text, found = Text(), self.found
        block = min(256, power_of_two(size))
        text.line(f"c = tl.program_id(0) * {block} + tl.arange(0, {block})[None, :]")
        masks = {1: f"(c < {size})"} if size % block else {}
        mask = f", mask={masks[1]}, other=0" if masks else ""
        text.line(f"acc = tl.zeros([1, {block}], tl.float32)")
        text.line(f"for part in tl.static_range({parts}):")
        text.line(f"    acc += tl.load({text.pointer('s0')} + (part * {size} + c){mask})")
        at = text.split("c", [*found.batch, *found.rows, *found.columns], COLUMNS)
        self.results(text, "acc", at, masks, f"[1, {block}]")
        self.finish(text, -(-size // block), 1 if block < 256 else 2, 2)

    def direct(self) -> CudaKernel:
        """Print a short sum per element."""
        text, found = Text(), self.found
        axes = self._in_memory_order()
        size = extent(axes)
        block = min(512 if size >= 512 * 4 * self.target.processors else 128, power_of_two(size))
        text.line(f"c = tl.program_id(0) * {block} + tl.arange(0, {block})[None, :]")
        masks = {1: f"(c < {size})"} if size % block else {}
        at = text.split("c", list(axes), COLUMNS)
        text.line(f"acc = tl.zeros([1, {block}], tl.float32)")
        terms = extent(found.terms)
        loop = "tl.static_range" if terms <= MOST_DIRECT else "range"
        text.line(f"for k in {loop}({terms}):")
        text.depth += 1
        here = at | text.split("k", list(found.terms), frozenset())
        values: dict[str, str] = {}
        names = []
        for side, index in ((0, found.a), (1, found.b)):
            emitter = self.fusion.emitter(found.ranges)
            name = self.fusion.argument(emitter, self.root.inputs[side], index)
            values = {}
            text.ops(emitter.ops, here, masks, values, {})
            names.append(values[name])
        text.line(f"acc += {names[0]} * {names[1]}")
        text.depth -= 1
        self.results(text, "acc", at, masks, f"[1, {block}]")
        self.finish(text, -(-size // block), max(1, block // 128), 2)
        return self.kernel()

    def _in_memory_order(self) -> Axes:
        """Return the axes of the result, outermost first as the first output lies in memory."""
        found = self.found
        axes = (*found.batch, *found.rows, *found.columns)
        emitter = self.fusion.emitter(found.ranges)
        _, _, place, _ = self.fusion.outputs(emitter, self.root, found.out, "acc")[0]
        steps = {name: place.coefficient(name) for name, _ in axes}
        return tuple(sorted(axes, key=lambda axis: -(steps[axis[0]] or 0)))

    # Parts

    def argument(
        self,
        text: Text,
        name: str,
        side: int,
        at: dict[str, Coordinate],
        outer: str,
        outer_limit: int,
        inner: str,
        inner_limit: int,
        shape: str,
    ) -> None:
        """Write the load of a tile of one argument, [rows, terms] or [terms, columns].

        Args:
            text: what is written.
            name: the variable that takes it.
            side: which argument.
            at: coordinates of batch and rows, or batch and columns.
            outer: the variable of rows or columns.
            outer_limit: their number, if it must be checked.
            inner: the variable of terms.
            inner_limit: their number, if it must be checked.
            shape: the tile's.
        """
        axis = 1 if side == 0 else 0
        here = at | text.split(inner, list(self.found.terms), frozenset((axis,)))
        masks = {}
        if inner_limit:
            masks[axis] = f"({inner} < {inner_limit})"
        if outer_limit:
            masks[1 - axis] = f"({outer} < {outer_limit})"
        index = self.found.a if side == 0 else self.found.b
        self.load(text, name, self.root.inputs[side], index, self.found.ranges, here, masks, shape)

    def results(self, text: Text, result: str, at: dict[str, Coordinate], masks: dict[int, str], shape: str) -> None:
        """Write what follows the product, and the stores."""
        found = self.found
        emitter = self.fusion.emitter(found.ranges)
        stores = self.fusion.outputs(emitter, self.root, found.out, "result")
        self.write(text, emitter.ops, stores, {"result": (result, DType.F32)}, at, masks, shape)


def _place(text: Text, tile: Tile, batch: int, down: int, across: int) -> None:
    """Print which part, matrix, rows and columns a program computes.

    Args:
        text: the kernel so far.
        tile: sizes of a program's tile.
        batch: matrices.
        down: tiles in a column of a matrix.
        across: tiles in a row of it.
    """
    text.line("pid = tl.program_id(0)")
    if tile.parts > 1:
        text.line(f"part = pid % {tile.parts}")
        text.line(f"pid = pid // {tile.parts}")
    if batch > 1:
        text.line(f"batch = pid // {down * across}")
        text.line(f"pid = pid % {down * across}")
    band = min(BAND, down)
    text.line(f"first = (pid // {band * across}) * {band}")
    text.line(f"height = tl.minimum({down} - first, {band})")
    text.line(f"row = first + (pid % {band * across}) % height")
    text.line(f"column = (pid % {band * across}) // height")
    text.line(f"m = row * {tile.rows} + tl.arange(0, {tile.rows})[:, None]")
    text.line(f"n = column * {tile.columns} + tl.arange(0, {tile.columns})[None, :]")
