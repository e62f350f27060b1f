"""Matrix products and convolutions as Triton: layouts, and the tiles that `korch.schedule.device` makes programs of."""

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
from korch.provider.triton.fused import print_kernel
from korch.schedule.blocks import PRODUCTS
from korch.schedule.contraction import Contraction, Layouts, NotFusedError, contraction_of, extent, root_of
from korch.schedule.device import Blocks, DeviceProduct
from korch.tile.program import Product

MOST_DIRECT = 64
"""Terms of the longest sum that is unrolled."""

FEWEST_COLUMNS = 8
"""Products with fewer rows or columns waste most of a tile."""

OFFERED = 3
"""Tiles that are offered: the best by the model."""


@dataclass(frozen=True, slots=True)
class ProgramTile:
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
    def parse(text: str) -> ProgramTile:
        """Return the tile that prints as `text`."""
        sizes, _, rest = text.partition("w")
        warps, _, rest = rest.partition("s")
        stages, _, parts = rest.partition("p")
        rows, columns, terms = map(int, sizes.split("x"))
        return ProgramTile(rows, columns, terms, int(warps), int(stages), int(parts or 1))


SHAPES = tuple(
    ProgramTile(rows, columns, terms, warps, stages)
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
        offers: list[Offer] = []
        for inputs, outputs in product_layouts(group):
            try:
                schedule = _schedule(group, root, (inputs, outputs))
                if not offers:  # layouts change where elements are, not whether they can be computed
                    schedule.direct()
            except NotFusedError as error:
                return Refusal(str(error))
            found = schedule.contraction
            variants = [str(tile) for tile in tiles_for(found, schedule.dtype, target)]
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
        try:
            schedule = _schedule(group, root, (offer.inputs, offer.outputs))
            if offer.variant == "direct":
                return print_kernel(group, offer, schedule.direct(), target)
            tile = ProgramTile.parse(offer.variant)
            blocks = Blocks(tile.rows, tile.columns, tile.terms, tile.parts)
            program = schedule.blocked(blocks, product_for(schedule.dtype, target))
            return print_kernel(group, offer, program, target, tile.warps, tile.stages)
        except NotFusedError as error:
            return Refusal(str(error))


def product_layouts(group: Group) -> list[Layouts]:
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


def _schedule(group: Group, root: Primitive, layouts: Layouts) -> DeviceProduct:
    """Return what makes the programs; channels are the innermost terms where the image has them side by side."""
    by_value = {value: layouts[0][i] for i, (_, value) in enumerate(group.body.inputs)}
    layout = by_value.get(root.inputs[0])
    is_last = layout is not None and not layout.is_plain
    return DeviceProduct(group, root, layouts, contraction_of(group, root, is_last))


def product_for(dtype: DType, target: CudaTarget) -> Product:
    """Return how elements of a type are multiplied."""
    return Product.TF32 if dtype is DType.F32 and target.allow_tf32 else PRODUCTS[dtype, dtype]


def _is_narrow(found: Contraction) -> bool:
    return min(extent(found.rows), extent(found.columns)) < 2 * FEWEST_COLUMNS


def tiles_for(found: Contraction, dtype: DType, target: CudaTarget) -> list[ProgramTile]:
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
            tile = ProgramTile(shape.rows, shape.columns, shape.terms, shape.warps, shape.stages, parts)
            scored.append((seconds, str(tile), tile))
    scored.sort(key=lambda entry: entry[:2])
    best: dict[tuple[int, int, int], ProgramTile] = {}
    for _, _, tile in scored:
        best.setdefault((tile.rows, tile.columns, tile.parts), tile)
    return list(best.values())[:OFFERED]
