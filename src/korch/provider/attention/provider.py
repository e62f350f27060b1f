"""The provider of generated attention kernels. All tensors are plain; the scores are never stored in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import around
from korch.errors import InvalidGraphError
from korch.provider.attention.groups import attention_groups
from korch.provider.attention.match import match_group
from korch.provider.cache_room import cache_room
from korch.provider.content import content_version
from korch.provider.matrix_units import TOGETHER
from korch.provider.provider import Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.attention import AttentionBlocking, Attentions, Packing
from korch.schedule.contraction import NotFusedError, refuse_types
from korch.schedule.heads import Attention
from korch.schedule.split_attention import program_of
from korch.schedule.split_products import operand_components, pairs_of
from korch.system.alignment import ceil_div
from korch.target import Target
from korch.tile.analysis.registers import usual_registers
from korch.tile.ir.growth import TextLimitError, UnprintableError
from korch.tile.lower.staging import Machine

FEW_ROWS = 16
"""The most rows that share keys and values for which these may be read in place."""

LEAST_PACKED = 4
"""The least rows for which packing keys and values may pay."""

BLOCKS_OF_ROWS = (1, 4)
"""Rows of a block, as multiples of the rows that the contraction's kernel holds in registers."""

MANY_KEYS, KEYS = 1024, 512
"""With more keys than the first number, blocks of the second number of keys are offered, too."""

MOST_KEYS = 4096
"""The most keys whose scores are computed at once."""

SPLIT_KEYS = (128, 512)
"""Keys of a task if there are few rows."""

MOST_BYTES = 64 << 20
"""The largest workspace of a thread, for packed keys and values."""


class AttentionProvider:
    """Makes kernels for groups of two products with a softmax between them."""

    name = "attention"
    version = content_version("provider/attention")
    group_shapes = (around("matmul", widens=True), attention_groups)

    def __init__(self) -> None:
        self._plans: dict[tuple[str, Target], dict[str, AttentionBlocking] | Refusal] = {}

    def __reduce__(self) -> tuple[type[AttentionProvider], tuple[()]]:
        """Leave the plans out of copies for other processes."""
        return AttentionProvider, ()

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer several sizes of blocks of rows and keys, in the plain layout."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        key = (group.key, target)
        if key not in self._plans:
            self._plans[key] = _plans(group, found, target)
        plans = self._plans[key]
        if isinstance(plans, Refusal):
            return plans
        pairs = min(_pairs(group, found))
        return tuple(
            Offer(*group.plain_layouts, variant, pairs=pairs if blocking.packing is Packing.SPLIT else 0)
            for variant, blocking in plans.items()
        )

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        refusal = self.offer(group, target)
        plans = self._plans.get((group.key, target))
        found = match_group(group)
        if isinstance(refusal, Refusal) or isinstance(found, Refusal):
            return refusal if isinstance(refusal, Refusal) else Refusal("it is no attention")
        if not isinstance(plans, dict) or offer.variant not in plans:
            return Refusal(f"there is no blocking {offer.variant}")
        schedule = _schedule(group, found, target)
        try:
            program = program_of(schedule, plans[offer.variant])
            return kernel_of(program, group, offer, target)
        except (UnprintableError, TextLimitError) as error:
            return Refusal(str(error))


def _pairs(group: Group, found: Attention) -> tuple[int, ...]:
    """Return how many products of components replace a product of two numbers, for each of the two matrix products."""
    return tuple(pairs_of(*operand_components(group.body, product)) for product in (found.first, found.second))


def _schedule(group: Group, found: Attention, target: Target) -> Attentions:
    return Attentions(group, found, group.plain_layouts, Machine.of(target))


def _plans(group: Group, found: Attention, target: Target) -> dict[str, AttentionBlocking] | Refusal:
    """Return the blockings for which a program can be made, by the variants of their offers."""
    types = group.body.types
    if target.lanes < 4:
        return Refusal("the target has no vector registers")
    if min(type_.size for type_ in types) == 0:
        return Refusal("a tensor is empty")
    bytes_ = {p.inputs[0] for p in group.body.primitives if group.body.is_widening(p, of_bytes=True)}
    refusal = refuse_types(group.body, found.first, found.second, inside=found.inside | bytes_)
    if refusal is not None:
        return refusal
    plans: dict[str, AttentionBlocking] = {}
    refusal = Refusal("there are too many keys to pack")
    try:
        schedule = _schedule(group, found, target)
    except NotFusedError as error:
        return Refusal(str(error))
    for blocking in (*blockings(schedule, target), *split_blockings(schedule, target)):
        variant = f"{blocking.packing.value} {blocking.rows}x{blocking.keys}{' split' if blocking.is_split else ''}"
        try:
            program_of(schedule, blocking)
        except (NotFusedError, InvalidGraphError, TextLimitError) as error:
            refusal = Refusal(str(error))
        else:
            plans[variant] = blocking
    return plans or refusal


def blockings(schedule: Attentions, target: Target) -> Iterator[AttentionBlocking]:
    """Yield the blockings for vector units that may be the fastest."""
    rows, keys = schedule.rows, schedule.keys
    if rows <= FEW_ROWS:
        yield from (AttentionBlocking(rows, n, Packing.NONE, is_split=True) for n in SPLIT_KEYS if n < keys)
        if keys <= MOST_KEYS:
            yield AttentionBlocking(rows, keys, Packing.NONE)
    if rows < LEAST_PACKED or schedule.packed_bytes > MOST_BYTES:
        return
    together = usual_registers(target.lanes).rows
    chunks = _chunks(schedule, target, 1, together)
    packing = Packing.STAGE if schedule.tasks * chunks % target.threads else Packing.TASK
    blocks = [n * together for n in BLOCKS_OF_ROWS]
    if keys <= MOST_KEYS:
        yield from (
            AttentionBlocking(n, keys, packing, chunks=chunks) for n in blocks[: 1 if rows <= together else None]
        )
    if keys > MANY_KEYS:
        yield AttentionBlocking(blocks[-1], KEYS, packing, chunks=chunks)


def _chunks(schedule: Attentions, target: Target, least: int, together: int) -> int:
    """Return into how many chunks, at least `least`, to divide a head's rows to keep all threads busy, if not small."""
    chunks = least
    while schedule.tasks * chunks % target.threads and schedule.rows // (chunks + 1) >= 2 * together:
        chunks += 1
    return chunks


def split_blockings(schedule: Attentions, target: Target) -> Iterator[AttentionBlocking]:
    """Yield the blockings for matrix units that may be the fastest; keys are split again for each block of rows."""
    rows, keys = schedule.rows, schedule.keys
    is_full = min(keys, schedule.terms, schedule.columns) >= TOGETHER // 2
    pairs = _pairs(schedule.scores.group, schedule.found)
    if not all(map(target.sums_components, pairs)) or rows <= FEW_ROWS or keys > MOST_KEYS or not is_full:
        return
    most = max(TOGETHER, int(cache_room("operand", target)) // (4 * keys))
    seen = set()
    for least in (1, 2):
        block = ceil_div(rows, _chunks(schedule, target, ceil_div(rows, most) * least, TOGETHER))
        if block not in seen:
            seen.add(block)
            yield AttentionBlocking(block, keys, Packing.SPLIT)
