"""Sums that are computed without matrix units: of few rows or columns, or short ones as in depthwise convolutions."""

import re

from korch.candidate.candidate import Group, Offer
from korch.candidate.layout import Layout, replaced
from korch.primitive.graph import Primitive
from korch.schedule.contraction import Contraction, Layouts, extent
from korch.schedule.device import DeviceProduct
from korch.tile.ir.program import TileProgram
from korch.tile.triton.launch import USUAL, LaunchOptions

MOST_DIRECT = 64
"""Terms of the longest sum that is unrolled."""

FEWEST_COLUMNS = 8
"""Products with fewer rows or columns waste most of a tile, which pays if their sums are long: weights take longer."""

ADJACENT_TERMS = ("4x1024w4s0", "8x512w4s4", "16x256w4s4")
"""Variants of sums whose terms are adjacent: results and terms of a tile, warps, pipeline stages (0: none)."""

ADJACENT_RESULTS = ("32x64w4s4", "64x32w4s4")
"""The same for sums whose results are adjacent."""

SIDE_BY_SIDE = ("2 of 256x1w4s0", "4 of 128x1w4s0", "4 of 256x1w4s0", "8 of 128x1w4s0")
"""Variants of depthwise convolutions: the rows of an image that a task computes, tasks of a tile, and the rest."""

MOST_UNROLLED = 256
"""The most products that a task adds up."""


def direct_offers(group: Group, root: Primitive, layouts: Layouts, found: Contraction, has_tiles: bool) -> list[Offer]:
    """Return offers in some layouts, with constant matrices in another one where that is better.

    `has_tiles`: whether matrix units can compute the group, too.
    """
    inputs, outputs = layouts
    narrow, terms = min(extent(found.rows), extent(found.columns)), extent(found.terms)
    is_short = terms <= MOST_DIRECT
    if has_tiles and narrow >= (2 if is_short else 1) * FEWEST_COLUMNS:
        return []
    offers = [Offer(inputs, outputs, "direct")]
    if root.op == "matmul" and not is_short and narrow < FEWEST_COLUMNS:
        turned = with_adjacent_terms(group, root, inputs)
        offers += [Offer(inputs, outputs, f"direct {tile}") for tile in ADJACENT_RESULTS]
        offers += [Offer(turned, outputs, f"direct {tile}") for tile in ADJACENT_TERMS if turned != inputs]
    rows = next((n for name, n in found.rows if name.startswith("p")), 1)
    if root.op == "conv" and is_short and not found.columns:
        inputs = _with_adjacent_channels(group, root, inputs)
        for variant in SIDE_BY_SIDE:
            count = int(variant.split(" ")[0])
            if count <= rows and count * terms <= MOST_UNROLLED:
                offers.append(Offer(inputs, outputs, f"direct {variant}"))
    return offers


def direct_program(schedule: DeviceProduct, variant: str) -> tuple[TileProgram, LaunchOptions]:
    """Return the program of an offer, and how it is printed."""
    *count, rows, columns, warps, ahead = map(int, re.findall(r"\d+", variant)) if variant != "direct" else (0, 0, 0, 0)
    options = LaunchOptions(warps, tile=(rows, columns), ahead=ahead) if rows else USUAL
    return schedule.side_by_side(count[0]) if count else schedule.direct(), options


def with_adjacent_terms(group: Group, root: Primitive, inputs: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Return layouts of inputs in which the terms of a constant matrix are adjacent."""
    rank, place = group.body.types[root.inputs[1]].rank, _constant_weights(group, root)
    if root.op != "matmul" or place is None:
        return inputs
    turned = Layout((*range(rank - 2), rank - 1, rank - 2))
    return replaced(inputs, place, turned.normalized(group.input_types[place].shape))


def _with_adjacent_channels(group: Group, root: Primitive, inputs: tuple[Layout, ...]) -> tuple[Layout, ...]:
    """Return layouts of inputs in which the channels of constant weights are adjacent if those of images are."""
    place, image = _constant_weights(group, root), group.position.get(root.inputs[0])
    if place is None or image is None or inputs[image].is_plain:
        return inputs
    turned = Layout((*range(2, group.input_types[place].rank), 1, 0))
    return replaced(inputs, place, turned.normalized(group.input_types[place].shape))


def _constant_weights(group: Group, root: Primitive) -> int | None:
    """Return the position of the second operand if it is a constant input; else None."""
    place = group.position.get(root.inputs[1])
    return place if place in group.constant_inputs else None
