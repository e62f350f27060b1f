"""Matrix products and convolutions as Triton: chooses layouts and tiles for the programs of `korch.schedule.device`."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.primitive.graph import Primitive
from korch.primitive.types import DType, ValueType
from korch.provider.content import content_version
from korch.provider.triton.direct import FEWEST_COLUMNS, MOST_DIRECT, direct_offers, direct_program, with_adjacent_terms
from korch.provider.triton.fused import print_kernel
from korch.schedule.contraction import Contraction, Layouts, NotFusedError, contraction_of, extent, root_of
from korch.schedule.device import Blocks, DeviceProduct
from korch.tile.ir.program import Product
from korch.tile.triton.launch import LaunchOptions

OFFERED = 5
"""How many of the best tiles by the cost model are offered. Variants of the best tile come on top."""

JOINED = 2
"""How many of the offered tiles with split sums are also offered in one launch."""

MOST_WARPS = 8


@dataclass(frozen=True, slots=True)
class ProgramTile:
    """The tile that one program computes, and how."""

    rows: int  # the rows of its tile of results
    columns: int  # the columns of its tile of results
    terms: int  # the terms (elements along the reduction axis) that are loaded at a time
    warps: int  # the warps of the program
    stages: int  # the pipeline stages: the number of loads in flight
    parts: int = 1  # the number of parts into which the terms are split, each computed by another program
    product: Product = Product.F32  # how elements are multiplied
    joins: bool = False  # whether the last program of a tile adds up its parts, not a second launch
    whole: int = 0  # the first tiles along the rows, computed by a launch of their own, whose terms are not split

    def __str__(self) -> str:
        text = f"{self.rows}x{self.columns}x{self.terms}w{self.warps}s{self.stages}"
        text += f"{'q' if self.joins else 'p'}{self.parts}" if self.parts > 1 else ""
        text += f"t{self.whole}" if self.whole else ""
        return f"{text} {self.product.value}"

    @staticmethod
    def parse(text: str) -> ProgramTile:
        """Return the tile that prints as `text`."""
        sizes, product = text.split(" ")
        rows, columns, terms, warps, stages, *more = map(int, re.findall(r"\d+", sizes))
        parts, whole, *_ = *more, *(1, 0)[len(more) :]
        return ProgramTile(rows, columns, terms, warps, stages, parts, Product(product), "q" in sizes, whole)

    @property
    def options(self) -> LaunchOptions:
        """The options with which its program is printed and launched."""
        return LaunchOptions(self.warps, self.stages, joins=self.joins)

    def shared_bytes(self, dtype: DType) -> int:
        """Return the bytes of shared memory that blocks of operands in all stages take."""
        return self.stages * self.terms * (self.rows + self.columns) * dtype.size_bytes

    def fits(self, dtype: DType, target: CudaTarget) -> bool:
        """Return whether the blocks of operands in all stages fit into shared memory."""
        return self.shared_bytes(dtype) <= target.shared_bytes


SIZES = (
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
    (128, 128, 4),
    (64, 256, 4),
    (128, 256, 8),
    (256, 128, 8),
)
"""Choices of rows, columns and warps of a program."""

LINES = (128, 64, 256)
"""Choices of how many bytes along the reduction axis are loaded at a time, the usual one first."""

STAGES = (3, 4, 5)

REGISTERS = 1 << 16
"""Registers of a multiprocessor."""

TURN_S = 0.05e-6
"""The overhead of one iteration of a program's loop, in seconds: synchronizing its warps, computing addresses."""

LATENCY_S = 0.65e-6
"""The latency of a load in seconds, measured on an H100 (2 stages of 16 x 64 x 32: 0.64 us per iteration)."""

RATIO = {Product.SPLIT: 2.0, Product.F32: 1.3}
"""The ratio of measured to estimated times of some ways to multiply, on an H200; about 1 for the others."""

SINGLE = 4.0
"""How many times as long programs take that read single elements of the first operand, on an H200."""


class TritonProductProvider:
    """Makes kernels for groups with one matrix product or convolution."""

    name = "triton-product"
    version = content_version("provider/triton", "cuda")
    group_shapes = (around("conv", "matmul"),)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer layouts, each with the tiles that the cost model ranks best."""
        root = root_of(group, "matmul", "conv")
        if isinstance(root, Refusal):
            return root
        offers: list[Offer] = []
        is_tf32 = target.products(group.body.types[root.inputs[1]].dtype)[:1] == (Product.TF32,)
        for inputs, outputs in product_layouts(group):
            given = with_adjacent_terms(group, root, inputs) if is_tf32 else inputs  # as matrix units read TF32
            try:
                schedule = _schedule(group, root, (given, outputs))
                if not offers:  # layouts change where elements are, not whether they can be computed
                    schedule.direct()
            except NotFusedError as error:
                return Refusal(str(error))
            found = schedule.contraction
            factor = SINGLE if schedule.reads_single_elements else 1.0
            tiles = tiles_for(found, schedule.dtype, target)
            more_ns = _around_ns(group, root, target)
            for tile in tiles:
                guess_ns = more_ns + factor * tile_ns(sizes_of(found), tile, schedule.dtype, target)
                offers.append(Offer(given, outputs, str(tile), guess_ns=int(guess_ns)))
            offers += direct_offers(group, root, (inputs, outputs), found, bool(tiles))
        return offers

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the kernel."""
        root = root_of(group, "matmul", "conv")
        if isinstance(root, Refusal):
            return root
        try:
            schedule = _schedule(group, root, (offer.inputs, offer.outputs))
            if offer.variant.startswith("direct"):
                program, options = direct_program(schedule, offer.variant)
                return print_kernel(group, offer, program, target, options)
            tile = ProgramTile.parse(offer.variant)
            blocks = Blocks(tile.rows, tile.columns, tile.terms, tile.parts, tile.joins, tile.whole)
            program = schedule.blocked(blocks, tile.product)
            return print_kernel(group, offer, program, target, tile.options)
        except NotFusedError as error:
            return Refusal(str(error))


def product_layouts(group: Group) -> list[Layouts]:
    """Return the layouts to offer: all plain, all images channels-last, and changes from one to the other.

    Weights are constants; they are stored in the order of the terms.
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
    """Return the schedule; channels are the innermost terms if the image's layout is not plain (channels-last)."""
    by_value = {value: layouts[0][i] for i, (_, value) in enumerate(group.body.inputs)}
    layout = by_value.get(root.inputs[0])
    is_last = layout is not None and not layout.is_plain
    return DeviceProduct(group, root, layouts, contraction_of(group, root, is_last))


def tiles_for(found: Contraction, dtype: DType, target: CudaTarget) -> list[ProgramTile]:
    """Return the tiles to offer: those with the shortest estimated times, and variants of the best one.

    The variants have another number of warps or stages, whose effects the model does not estimate.
    """
    tiles = ranked_tiles(found, dtype, target)
    if not tiles:
        return []
    best = tiles[0]
    variants = [
        replace(best, stages=best.stages - 1),
        replace(best, stages=best.stages + 1),
        replace(best, warps=min(MOST_WARPS, 2 * best.warps)),
    ]
    chosen = promising(tiles)
    variants += [replace(tile, joins=True) for tile in chosen if tile.parts > 1][:JOINED]
    variants += [cut for tile in chosen if (cut := with_split_tail(sizes_of(found), tile, dtype, target))][:JOINED]
    return [*dict.fromkeys((*chosen, *(v for v in variants if v.fits(dtype, target))))]


def with_split_tail(sizes: tuple[int, ...], tile: ProgramTile, dtype: DType, target: CudaTarget) -> ProgramTile | None:
    """Return the tile with split terms where the last wave of programs would leave most multiprocessors idle."""
    batch, m, n, k = sizes
    down, across = -(-m // tile.rows), -(-n // tile.columns)
    wave = target.processors * _resident(tile, dtype, target)
    whole = down * across // wave * wave // across
    tail = (down - whole) * across
    parts = next((p for p in (8, 4, 2) if tail * p <= wave and k >= 64 * p), 1)
    if batch > 1 or tile.parts > 1 or parts == 1 or whole == 0 or tail == 0:
        return None
    return replace(tile, parts=parts, joins=True, whole=whole)


def promising(tiles: Sequence[ProgramTile]) -> list[ProgramTile]:
    """Return the first tiles, the first one of each way to multiply, and of the best way one per number of parts."""
    by_product = {tile.product: tile for tile in reversed(tiles)}
    by_parts = {tile.parts: tile for tile in reversed(tiles) if tile.product is tiles[0].product}
    return [*dict.fromkeys((*tiles[:OFFERED], *by_product.values(), *by_parts.values()))]


def ranked_tiles(found: Contraction, dtype: DType, target: CudaTarget, is_exact: bool = False) -> list[ProgramTile]:
    """Return tiles ordered by estimated time: the best one for each shape, number of parts and way to multiply.

    `is_exact`: whether operands must not be rounded even if the target allows it.
    """
    return list(_ranked(sizes_of(found), dtype, target, is_exact))


def tile_ns(sizes: tuple[int, ...], tile: ProgramTile, dtype: DType, target: CudaTarget) -> float:
    """Return the estimated time of a tile's programs in nanoseconds, with their launches."""
    if tile.whole:
        batch, m, n, k = sizes
        begin, rest = tile.whole * tile.rows, replace(tile, whole=0)
        first_ns = tile_ns((batch, begin, n, k), replace(rest, parts=1), dtype, target)
        return first_ns + tile_ns((batch, m - begin, n, k), rest, dtype, target)
    return target.launch_ns + 1e9 * RATIO.get(tile.product, 1.0) * _expected_s(sizes, tile, dtype, target)


def _around_ns(group: Group, root: Primitive, target: CudaTarget) -> float:
    """Return the nanoseconds to read and write what a group has more than its product, such as a second output."""
    own_bytes = sum(group.body.types[value].size_bytes for value in (*root.inputs, root.output))
    all_bytes = sum(type_.size_bytes for type_ in (*group.input_types, *group.output_types))
    return 1e9 * max(0, all_bytes - own_bytes) / target.l2_bytes_per_s


def sizes_of(found: Contraction) -> tuple[int, ...]:
    """Return the batches, rows, columns and terms of a product."""
    return tuple(map(extent, (found.batch, found.rows, found.columns, found.terms)))


@lru_cache(maxsize=1024)  # groups that differ in what surrounds a product, and layouts, ask for the same sizes
def _ranked(sizes: tuple[int, ...], dtype: DType, target: CudaTarget, is_exact: bool) -> tuple[ProgramTile, ...]:
    batch, m, n, k = sizes
    if k < FEWEST_COLUMNS or (min(m, n) < FEWEST_COLUMNS and k <= MOST_DIRECT):
        return ()
    scored = []
    for (rows, columns, warps), product in itertools.product(SIZES, target.products(dtype, is_exact)):
        if rows >= 2 * max(16, m) or columns >= 2 * max(16, n) or rows * columns > _largest(product):
            continue
        tiles = batch * -(-m // rows) * -(-n // columns)
        for line, stages, parts in itertools.product(LINES, STAGES, (1, 2, 4, 8)):
            terms = line // dtype.size_bytes
            tile = ProgramTile(rows, columns, max(16, terms), warps, stages, parts, product)
            is_split_well = parts == 1 or (tiles * parts <= 2 * target.processors and k >= 64 * parts)
            longest = 2 * LINES[0] if product is not Product.F32 else LINES[0]  # unrolled multiply-adds spill
            if is_split_well and tile.fits(dtype, target) and line <= longest and (line == min(LINES) or terms <= k):
                scored.append((_expected_s(sizes, tile, dtype, target), tile))
    scored.sort(key=lambda entry: entry[0])
    best: dict[tuple[int, int, int, int, Product], ProgramTile] = {}
    for _, tile in scored:
        best.setdefault((tile.rows, tile.columns, tile.warps, tile.parts, tile.product), tile)
    return tuple(best.values())


def _largest(product: Product) -> int:
    """Return the elements of the largest tile; operands split in three and plain multiply-adds need more registers."""
    return 128 * 128 if product in (Product.SPLIT, Product.F32, Product.F64) else 128 * 256


def _expected_s(sizes: tuple[int, ...], tile: ProgramTile, dtype: DType, target: CudaTarget) -> float:
    """Return the estimated time of a tile's programs in seconds.

    Programs run in waves over the multiprocessors, several at a time on each. An iteration of their loops takes as
    long as loading or multiplying their blocks, or the part of a load's latency that other loads in flight don't hide.
    """
    batch, m, n, k = sizes
    programs = batch * -(-m // tile.rows) * -(-n // tile.columns) * tile.parts
    turns = -(-k // (tile.terms * tile.parts))
    resident = min(_resident(tile, dtype, target), -(-programs // target.processors))
    # A small tile uses each loaded operand element for few products; this holds for reads of shared memory, too.
    busy = math.pow(min(1.0, tile.rows * tile.columns / 32768), 0.3)
    multiply_s = (
        2 * tile.rows * tile.columns * tile.terms * target.processors / (target.flop_per_s(tile.product) * busy)
    )
    load_s = tile.terms * (tile.rows + tile.columns) * dtype.size_bytes * target.processors / target.l2_bytes_per_s
    turn_s = TURN_S + max(resident * max(multiply_s, load_s), LATENCY_S / (tile.stages - 1))
    waves = programs / (target.processors * resident)
    # While one program stores its results, other programs on its multiprocessor continue.
    store_s = 4 * tile.rows * tile.columns * target.processors / target.copy_bytes_per_s / min(2, resident)
    seconds = 0.5 * (math.ceil(waves) + max(1.0, waves)) * (turns * turn_s + LATENCY_S + store_s)
    if tile.parts > 1:
        seconds += LATENCY_S if tile.joins else 1e-9 * target.launch_ns
        seconds += 8 * tile.parts * batch * m * n / target.l2_bytes_per_s
    return seconds


def _resident(tile: ProgramTile, dtype: DType, target: CudaTarget) -> int:
    """Return how many programs a multiprocessor runs at a time, limited by shared memory and by registers for sums."""
    threads = 32 * tile.warps
    registers = min(255, 48 + tile.rows * tile.columns // threads) * threads
    return max(1, min(target.shared_bytes // tile.shared_bytes(dtype), REGISTERS // registers))
