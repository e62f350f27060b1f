"""The provider of generated matrix products.

Constant right operands are packed at build time; all other operands are read in place.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_last, layout_choices, replaced
from korch.candidate.shape import around
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.ops.stored import STORED
from korch.primitive.types import DType, ValueType
from korch.provider.cache_room import cache_room
from korch.provider.content import content_version
from korch.provider.gemm.gathered import AROUND_GATHERED, build_gathered, offer_gathered
from korch.provider.gemm.match import MatchedProduct, is_widened, match_group
from korch.provider.gemm.stored import build_stored, offer_stored
from korch.provider.gemm.units import columns_in_steps, is_split_right, split_program_of, split_right, tiled_program_of
from korch.provider.gemm.vectors import require_neighbours, schedule_of
from korch.provider.matrix_units import BYTE_PAIRS, LEAST_ROWS_OF_BYTES, LEAST_TERMS_OF_BYTES, SPLIT_BYTES, TOGETHER
from korch.provider.provider import SPLIT, TILES, Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.blocks import Blocked
from korch.schedule.contraction import Layouts, NotFusedError, contraction_of, is_of_bytes
from korch.schedule.products import terms_together
from korch.schedule.split_products import operand_components, pairs_of
from korch.target import Target
from korch.tile.ir.program import TileProgram

LEAST_ROWS = 16
"""Matrix units are tried for float32 with more rows than this; with fewer components per number, the limit is lower
in proportion."""

LEAST_ROWS_ON_VECTORS = 9
"""The least rows for vector units that multiply bfloat16: they compute 16 rows at a time."""

WHOLE_PANELS = 64
"""A multiple of this many columns consists of whole panels of vectors on any target."""


class Way(Enum):
    """What multiplies: vector units; matrix units on components (B split in each run or beforehand) or on bytes."""

    VECTORS = ""
    SPLIT = SPLIT
    SPLIT_B = "split b"
    TILES = TILES


class GemmProvider:
    """Makes kernels for groups around one `matmul` primitive."""

    name = "gemm"
    version = content_version("provider/gemm")
    group_shapes = (around("matmul", widens=True), around(STORED), AROUND_GATHERED)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the product in plain and channels-last layouts, with a constant right operand packed."""
        other = _other_product(group)
        if other is not None:
            return other[0](group, target)
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        if target.lanes < 4:
            return Refusal("the target has no vector registers")
        offers = []
        refusals: dict[Layouts, Refusal | None] = {}
        ways = _ways(group, found, target)
        packed = {way: _packed(group, found, target, way) for way in ways}
        follows, root = _positions_after(group, found), found.primitive
        is_bytes = is_of_bytes(group.body, root)
        pairs = BYTE_PAIRS if is_bytes else pairs_of(*operand_components(group.body, root))
        for layouts in _layouts(group, target):
            after = tuple(layouts[0][i] for i in follows), layouts[1]
            if after not in refusals:
                refusals[after] = _refusal(group, found, layouts, target)
            for way in ways if refusals[after] is None else ():
                second = packed[way]
                offer = Offer(layouts[0] if second is None else replaced(layouts[0], found.b, second), layouts[1])
                variant = TILES if way is Way.TILES else SPLIT
                offers.append(offer if way is Way.VECTORS else replace(offer, variant=variant, pairs=pairs))
        reasons = [refusal for refusal in refusals.values() if refusal is not None]
        return tuple(offers) or reasons[-1]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        other = _other_product(group)
        if other is not None:
            return other[1](group, offer, target)
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        inputs = tuple(
            Layout.plain(type_.rank) if layout.blocks else layout
            for layout, type_ in zip(offer.inputs, group.input_types, strict=True)
        )
        has_split_b = is_split_right(offer.inputs[found.b])
        way = Way.SPLIT_B if has_split_b else Way(offer.variant)
        program = _program(group, found, target, (inputs, offer.outputs), way)
        return kernel_of(program, group, offer, target)


OfferOf = Callable[[Group, Target], tuple[Offer, ...] | Refusal]
BuildOf = Callable[[Group, Offer, Target], Kernel | Refusal]

OTHERS: Mapping[str, tuple[OfferOf, BuildOf]] = {
    STORED: (offer_stored, build_stored),
    GATHERED: (offer_gathered, build_gathered),
}
"""The functions that offer and build kernels for products other than `matmul`, by operation."""


def _other_product(group: Group) -> tuple[OfferOf, BuildOf] | None:
    linear = group.body.linear
    return OTHERS.get(linear[0].op) if len(linear) == 1 else None


def _positions_after(group: Group, found: MatchedProduct) -> list[int]:
    """Return the positions of the inputs that primitives other than the product may read, too."""
    body = group.body
    alone = {i for i in (found.a, found.b) if len(body.consumers[body.inputs[i][1]]) == 1}
    return [i for i in range(len(group.inputs)) if i not in alone]


def _refusal(group: Group, found: MatchedProduct, layouts: Layouts, target: Target) -> Refusal | None:
    """Return why layouts don't fit. Operands are inputs that are at most moved, so only the steps after it matter."""
    contraction = contraction_of(group, found.primitive, last=False)
    try:
        require_neighbours(Blocked(group, found.primitive, layouts, contraction).after_all(), target.lanes)
    except NotFusedError as error:
        return Refusal(str(error))
    return None


def _strips(rank: int, columns: int, terms: int = 1) -> Layout:
    """Return the layout of a right operand in strips of columns, in which `terms` terms of a column are adjacent."""
    order = (*range(rank - 2), rank - 1, rank - 2)
    group = ((rank - 2, terms),) if terms > 1 else ()
    return Layout(order, ((rank - 1, columns), *group))


def _can_split(group: Group, found: MatchedProduct, target: Target) -> bool:
    """Return whether matrix units may pay: whether the product has enough rows, columns and terms for their tiles."""
    _, m, n, terms = _sizes(group, found)
    if is_of_bytes(group.body, found.primitive):
        is_wide = n >= TOGETHER // 2 and terms >= LEAST_TERMS_OF_BYTES
        return target.isa == "amx" and m >= LEAST_ROWS_OF_BYTES and is_wide
    pairs = pairs_of(*operand_components(group.body, found.primitive))
    rows = 1 + LEAST_ROWS * pairs // ALL_PAIRS if target.isa == "amx" else LEAST_ROWS_ON_VECTORS
    return target.sums_components(pairs) and m >= rows and min(n - 1, terms) >= TOGETHER // 2


def _ways(group: Group, found: MatchedProduct, target: Target) -> list[Way]:
    """Return the ways in which the product may be multiplied.

    A constant right operand is split at build time. Three components have 1.5 times the bytes of a float32. A
    memory-bound product may be faster if the operand is split in each run, so that way is offered, too.
    """
    if not _can_split(group, found, target):
        return [Way.VECTORS]
    if is_of_bytes(group.body, found.primitive):
        return [Way.TILES]
    weights = group.input_types[found.b]
    if not _is_packed(group, found) or weights.dtype not in (DType.F32, DType.BF16):
        return [Way.VECTORS, Way.SPLIT]
    stays = weights.dtype is DType.BF16 or SPLIT_BYTES * weights.size <= cache_room("constant", target)
    return [Way.VECTORS, Way.SPLIT_B] if stays else [Way.VECTORS, Way.SPLIT_B, Way.SPLIT]


def _layouts(group: Group, target: Target) -> Iterator[Layouts]:
    """Yield the layouts to consider: tensors of rank 4 are plain or channels-last, all others plain."""

    def layout(type_: ValueType, is_last: bool) -> Layout:
        last = channels_last(type_.rank) if type_.rank == 4 else Layout.plain(type_.rank)
        is_choice = is_last and last in layout_choices(type_, target.lanes)
        return last if is_choice else Layout.plain(type_.rank)

    seen = set()
    for source, sink in itertools.product((False, True), repeat=2):
        inputs = tuple(
            layout(type_, source and i not in group.constant_inputs) for i, type_ in enumerate(group.input_types)
        )
        chosen = (inputs, tuple(layout(type_, sink) for type_ in group.output_types))
        if chosen not in seen:
            seen.add(chosen)
            yield chosen


def _packed(group: Group, found: MatchedProduct, target: Target, way: Way) -> Layout | None:
    """Return the layout of a right operand that is packed at build time, or None if it is not packed."""
    if not _is_packed(group, found, by_batch=way is Way.VECTORS):
        return None
    weights = group.input_types[found.b]
    rank = weights.rank
    if way is Way.TILES:
        return columns_in_steps(rank, weights.shape[-2])
    if way is Way.SPLIT_B:
        return split_right(rank, weights.dtype is DType.F32)
    if way is Way.SPLIT:
        return _strips(rank, TOGETHER)
    terms = terms_together(target.lanes) if is_of_bytes(group.body, found.primitive) else 1
    _, blocking = schedule_of(group, found.primitive, group.plain_layouts, target, True)
    return _strips(rank, blocking.panels, terms)


def _program(group: Group, found: MatchedProduct, target: Target, layouts: Layouts, way: Way) -> TileProgram:
    packed, root = _packed(group, found, target, way), found.primitive
    if way is Way.VECTORS:
        schedule, blocking = schedule_of(group, root, layouts, target, packed is not None)
        return schedule.program(blocking)
    if way is Way.TILES:
        return tiled_program_of(group, root, layouts, target, packed is not None)
    return split_program_of(group, root, layouts, target, packed, found.b)


def _is_packed(group: Group, found: MatchedProduct, by_batch: bool = False) -> bool:
    """Return whether the right operand is packed at build time: it is a constant, at most widened by a cast.

    It must be one matrix for all batches. With `by_batch`, each batch may have its own matrix in whole panels instead.
    """
    shape, out = group.input_types[found.b].shape, group.body.types[found.primitive.output].shape
    value = found.primitive.inputs[1]
    makers = [group.body.primitives[p] for p in group.body.producers[value]]
    if len(makers) == 1 and is_widened(group, makers[0]):
        value = makers[0].inputs[0]
    is_constant = found.b in group.constant_inputs and value in group.position
    is_own = by_batch and shape[:-2] == out[:-2] and shape[-1] % WHOLE_PANELS == 0
    return is_constant and (math.prod(shape[:-2]) == 1 or is_own)


def _sizes(group: Group, found: MatchedProduct) -> tuple[int, int, int, int]:
    """Return the number of batches, m, n and the number of terms."""
    *batch, m, n = group.body.types[found.primitive.output].shape
    return math.prod(batch), m, n, group.body.types[found.primitive.inputs[0]].shape[-1]
