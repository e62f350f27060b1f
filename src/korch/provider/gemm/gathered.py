"""Offers and kernels for a product in which an index selects the matrix for each row (`matmul_gathered`)."""

from dataclasses import replace

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, replaced
from korch.candidate.shape import GroupShape
from korch.primitive.graph import Primitive
from korch.primitive.op import Category
from korch.primitive.ops.gathered import GATHERED
from korch.primitive.types import DType
from korch.provider.cache_room import cache_room
from korch.provider.gemm.match import source_of
from korch.provider.gemm.units import is_split_right, split_right
from korch.provider.gemm.vectors import require_rows
from korch.provider.matrix_units import SPLIT_BYTES, TOGETHER
from korch.provider.provider import SPLIT, Kernel
from korch.provider.tile_kernel import kernel_of
from korch.schedule.contraction import FLOATS, NotFusedError, root_of
from korch.schedule.gathered import Gathered, GatheredBlocking
from korch.schedule.split_products import operand_components, pairs_of
from korch.system.alignment import ceil_div, round_up
from korch.target import Target
from korch.tile.analysis.registers import usual_registers
from korch.tile.ir.program import Registers, TileProgram
from korch.tile.lower.staging import Machine

AROUND_GATHERED = GroupShape(
    (GATHERED,), frozenset({Category.LAYOUT, Category.BROADCAST, Category.ELEMENTWISE}), widens=True
)
"""The primitives that may be fused: into the copy of the rows, and into the epilogue."""

BLOCK_ROWS = 96
"""The most rows of a block on vector units."""

LEAST_SPLIT_ROWS, SPLIT_ROWS = 64, 288
"""The least and the most rows of a block on matrix units; fewer if there are fewer rows."""

BLOCK_COLUMNS = {False: 1024, True: 1152}
"""The most columns of a task on vector units (False) and on matrix units (True)."""

LEAST_MEAN = 8
"""The least mean number of rows per matrix for which matrix units are tried.

With fewer rows, the product is bound by reading its matrices, which have 1.5 times the bytes when split: with 4 rows,
matrix units take 1.9 to 2.7 times as long, with 8 rows 0.85 times as long.
"""


def offer_gathered(group: Group, target: Target) -> tuple[Offer, ...] | Refusal:
    """Offer the product with its matrices in strips of columns, or in components for matrix units."""
    root = root_of(group, GATHERED)
    if isinstance(root, Refusal):
        return root
    types, index = group.body.types, set(_reshaped_from(group, root.inputs[2]))
    if any(t.dtype not in FLOATS for value, t in enumerate(types) if value not in index):
        return Refusal("the elements are not floats of at most 32 bits")
    if any(types[value].dtype is not DType.F32 for value in root.inputs[:2]):
        return Refusal("the product is not one of float32")
    position = source_of(group, root.inputs[1])
    if position is None or position not in group.constant_inputs or group.input_types[position].rank != 3:
        return Refusal("the matrices are no constants")
    if target.lanes < 4:
        return Refusal("the target has no vector registers")
    offers = []
    for is_split in (False, True) if _can_split(group, root, target) else (False,):
        offer = _offer(group, root, position, target, is_split)
        try:
            program_of(group, root, offer, target)
        except NotFusedError as error:
            return Refusal(str(error))
        offers.append(offer)
    return tuple(offers)


def build_gathered(group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
    """Print the kernel of an offer."""
    root = root_of(group, GATHERED)
    if isinstance(root, Refusal):
        return root
    # Which tasks have work is known only at run time, so no other kernel's tasks may run together with these.
    return replace(kernel_of(program_of(group, root, offer, target), group, offer, target), program=None)


def _reshaped_from(group: Group, value: int) -> list[int]:
    """Return a value and the values from which it is computed by reshapes only."""
    found, body = [value], group.body
    while makers := [body.primitives[p] for p in body.producers[found[-1]] if body.primitives[p].op == "reshape"]:
        found.append(makers[0].inputs[0])
    return found


def _can_split(group: Group, root: Primitive, target: Target) -> bool:
    (rows, terms), (matrices, _, columns) = (group.body.types[value].shape for value in root.inputs[:2])
    is_large = rows >= LEAST_MEAN * matrices and min(terms, columns) >= TOGETHER
    return is_large and target.sums_components(_pairs(group, root))


def _pairs(group: Group, root: Primitive) -> int:
    """Return how many products of components replace one product of two numbers."""
    return pairs_of(*operand_components(group.body, replace(root, inputs=root.inputs[:2])))


def _offer(group: Group, root: Primitive, position: int, target: Target, is_split: bool) -> Offer:
    blocking = _blocking(group, root, target, is_split)
    packed = Layout((0, 2, 1), ((2, blocking.strip),))
    if is_split:
        packed = split_right(3, group.input_types[position].dtype is DType.F32)
    inputs, outputs = group.plain_layouts
    offer = Offer(replaced(inputs, position, packed), outputs)
    return replace(offer, variant=SPLIT, pairs=_pairs(group, root)) if is_split else offer


def _blocking(group: Group, root: Primitive, target: Target, is_split: bool) -> GatheredBlocking:
    """Choose the sizes of blocks, assuming that the rows select all matrices about equally often."""
    (rows, terms), (matrices, _, columns) = (group.body.types[value].shape for value in root.inputs[:2])
    usual, each = usual_registers(target.lanes), 2 * ceil_div(rows, matrices)
    strip = TOGETHER if is_split else usual.vectors * target.lanes
    parts = round_up(ceil_div(columns, BLOCK_COLUMNS[is_split]), target.threads)  # threads divide each matrix
    width = min(columns, round_up(ceil_div(columns, parts), strip))
    if is_split:
        block = min(rows, SPLIT_ROWS, max(LEAST_SPLIT_ROWS, round_up(each, TOGETHER)))
        steps = int(cache_room("operand", target) / (SPLIT_BYTES * round_up(block, TOGETHER) * TOGETHER))
        turns = ceil_div(terms, max(1, steps) * TOGETHER)
        chunk = min(terms, round_up(ceil_div(terms, turns), TOGETHER))
        registers = Registers(TOGETHER, TOGETHER // target.lanes, fetches_b=True)
        return GatheredBlocking(block, width, chunk, strip, registers, True)
    block = 1 if 2 * rows <= matrices else min(rows, BLOCK_ROWS, round_up(each, usual.rows))
    registers = Registers(min(usual.rows, block), usual.vectors, fetches_b=True)
    return GatheredBlocking(block, width, terms, strip, registers, False)


def program_of(group: Group, root: Primitive, offer: Offer, target: Target) -> TileProgram:
    """Return the program of an offer.

    Raises:
        NotFusedError: the primitives before or after the product can't be fused with it.
    """
    is_split = any(is_split_right(layout) for layout in offer.inputs)
    plain = tuple(Layout.plain(len(layout.order)) for layout in offer.inputs)
    schedule = Gathered(group, root, (plain, offer.outputs), Machine.of(target))
    program = schedule.program(_blocking(group, root, target, is_split))
    require_rows(program, target.lanes)
    return program
