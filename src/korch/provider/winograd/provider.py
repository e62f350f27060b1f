"""The provider of Winograd's convolutions: sizes of blocks from the caches, source from the match.

All constants of a kernel follow from the shapes and the target by `Blocking.of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices
from korch.candidate.shape import around
from korch.primitive.ops.winograd import WinogradAttributes, tile_counts
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.provider.matrix_units import TOGETHER
from korch.provider.provider import SPLIT, Kernel, Threading, named_kernel
from korch.provider.winograd.match import WinogradConv, match_group
from korch.provider.winograd.split import LEAST_CHANNELS, LEAST_TILES, Split, split_of
from korch.target import Target
from korch.tile.cpp_text import literal, stored_type

CACHE_SHARE = 0.9
"""The part of the level-2 cache that a group of transformed tiles may fill."""

LINE_FLOATS = 16
"""Size of a line of the level-1 cache."""

MANY_WEIGHTS_BYTES = 8 << 20
"""From here on it may be better that each thread reads only its part of the weights."""


@dataclass(frozen=True, slots=True)
class Blocking:
    """Sizes of a kernel's blocks.

    Attributes:
        vectors: vectors of output channels that are computed together.
        rows: tiles that are computed together in registers.
        group: tiles that go together through transform, products and inverse.
        is_shared: whether the threads share a group, each with its own output channels.
    """

    vectors: int
    rows: int
    group: int
    is_shared: bool

    @staticmethod
    def of(points: int, tiles: int, channels_in: int, channels_out: int, target: Target, is_shared: bool) -> Blocking:
        """Choose the sizes.

        Args:
            points: elements of a transformed tile.
            tiles: in all.
            channels_in: input channels.
            channels_out: output channels.
            target: its caches, registers and threads.
            is_shared: whether the threads share a group.
        """
        blocks = channels_out // target.lanes
        vectors = next(n for n in (2, 3, 1) if blocks % n == 0)
        most_rows = (target.registers - 4) // vectors
        tile_bytes = 4 * points * channels_in
        room = CACHE_SHARE * target.l2_bytes * (target.threads if is_shared else 1)
        most = max(most_rows // 2, int(room / tile_bytes))
        teams = 1 if is_shared else target.threads
        per_team = -(-tiles // teams)
        group = -(-per_team // -(-per_team // most))
        candidates = range(max(1, most_rows // 2), most_rows + 1)
        rows = min(candidates, key=lambda r: (-(-group // r) * r * (1 + 1 / r), -r))
        return Blocking(vectors, rows, -(-group // rows) * rows, is_shared)


class WinogradProvider:
    """Makes kernels for groups around one `winograd` primitive."""

    name = "winograd"
    version = content_version("provider/winograd")
    group_shapes = (around("winograd", widens=True),)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer blocks of channels and channels-last, with threads that share tiles or channels."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        x, y = group.input_types[found.image], group.output_types[0]
        if target.lanes < 4 or x.shape[1] % target.lanes or y.shape[1] % target.lanes:
            return Refusal("the channels do not fill a vector register")
        if y.size == 0:
            return Refusal("the result is empty")
        weights = group.input_types[found.weights].size_bytes
        variants = ["tiles"] if weights < MANY_WEIGHTS_BYTES else ["tiles", "channels"]
        if _can_split(group, found, target):
            variants.append(SPLIT)
        offers = []
        for wanted in (channels_blocked(4, target.lanes), channels_last(4)):
            source, sink = wanted.normalized(x.shape), wanted.normalized(y.shape)
            choices = layout_choices(x, target.lanes), layout_choices(y, target.lanes)
            if source in choices[0] and sink in choices[1]:
                outputs = (sink,) * len(group.outputs)
                for variant in variants:
                    is_split = variant == SPLIT
                    inputs = _layouts(group, found, source, sink, target, is_split)
                    offers.append(Offer(inputs, outputs, variant, is_split=is_split))
        return tuple(dict.fromkeys(offers)) or Refusal("no layout fits both the inputs and the outputs")

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        blocking = _blocking(group, found, target, offer.variant == "channels")
        x, y = group.input_types[found.image], group.output_types[0]
        last = channels_last(4)
        constants = _constants(group, found, blocking, target) | {
            "IN_LAST": int(offer.inputs[found.image] == last.normalized(x.shape)),
            "OUT_LAST": int(offer.outputs[0] == last.normalized(y.shape)),
        }
        is_split = offer.variant == SPLIT
        constants["BY_POINT"] = int(is_split)
        split = _split(group, found, target) if is_split else None
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        text = _print(group, found, constants, split, f"{group.text}layouts {layouts}")
        teams = 1 if blocking.is_shared else target.threads
        steps = teams * constants["V_STEP"] + target.threads * constants["M_STEP"]
        floats = (constants["TILE"] + 2) ** 2 * steps
        if split is not None:
            own = target.threads * split.floats
            floats = max(floats, (constants["TILE"] + 2) ** 2 * split.step + own)
        return named_kernel(text, workspace_bytes=4 * floats, threading=Threading.TEAM)


def _can_split(group: Group, found: WinogradConv, target: Target) -> bool:
    """Return whether matrix units may pay: where their tiles are mostly full."""
    *_, terms, channels = group.input_types[found.weights].shape
    is_wide = min(terms, channels) >= LEAST_CHANNELS and channels % TOGETHER == 0
    return target.isa == "amx" and is_wide and _tiles(group, found)[0] >= LEAST_TILES


def _split(group: Group, found: WinogradConv, target: Target) -> Split:
    tiles, points = _tiles(group, found)
    x, y = group.input_types[found.image], group.output_types[0]
    return split_of(points, tiles, x.shape[1], y.shape[1], target)


def _tiles(group: Group, found: WinogradConv) -> tuple[int, int]:
    """Return how many tiles there are, and the points of each."""
    y, attributes = group.output_types[0], found.primitive.attributes
    assert isinstance(attributes, WinogradAttributes)
    tiles = y.shape[0] * math.prod(tile_counts(y.shape, attributes.tile))
    return tiles, (attributes.tile + 2) ** 2


def _spread(floats: int) -> int:
    """Return the least odd number of cache lines that holds that many numbers."""
    return (-(-floats // LINE_FLOATS) | 1) * LINE_FLOATS


def _blocking(group: Group, found: WinogradConv, target: Target, is_shared: bool) -> Blocking:
    x, y = group.input_types[found.image], group.output_types[0]
    tiles, points = _tiles(group, found)
    return Blocking.of(points, tiles, x.shape[1], y.shape[1], target, is_shared)


def _layouts(
    group: Group, found: WinogradConv, source: Layout, sink: Layout, target: Target, is_split: bool
) -> tuple[Layout, ...]:
    block = _blocking(group, found, target, False).vectors * target.lanes
    return tuple(
        source
        if i == found.image
        else Layout((0, 1, 3, 2) if is_split else (3, 0, 1, 2), ((3, block),))
        if i == found.weights
        else sink
        if i in found.full
        else Layout.plain(type_.rank)
        for i, type_ in enumerate(group.input_types)
    )


def _constants(group: Group, found: WinogradConv, blocking: Blocking, target: Target) -> dict[str, int]:
    x, y = group.input_types[found.image], group.output_types[0]
    attributes = found.primitive.attributes_as(WinogradAttributes)
    down, across = tile_counts(y.shape, attributes.tile)
    return {
        "TILE": attributes.tile,
        "W": target.lanes,
        "C": x.shape[1],
        "O": y.shape[1],
        "H": x.shape[2],
        "WIDTH": x.shape[3],
        "OUT_H": y.shape[2],
        "OUT_WIDTH": y.shape[3],
        "DOWN": down,
        "ACROSS": across,
        "TILES": y.shape[0] * down * across,
        "NV": blocking.vectors,
        "ROWS": blocking.rows,
        "GROUP": blocking.group,
        "V_STEP": _spread(blocking.group * x.shape[1]),
        "M_STEP": _spread(blocking.group * blocking.vectors * target.lanes),
        "THREADS": target.threads,
        "SHARED": int(blocking.is_shared),
    }


def _print(group: Group, found: WinogradConv, constants: dict[str, int], split: Split | None, comment: str) -> str:
    rows, columns = found.sources
    workspace = len(group.inputs) + len(group.outputs)
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    numbers = _numbers(constants)
    header, run, sizes = "korch_winograd.h", "run<NAME_kernel>", ""
    if split is not None:
        header, run = "korch_winograd_amx.h", "run_split<NAME_kernel, NAME_sizes>"
        sizes = f"struct NAME_sizes {{\n{_numbers(split.numbers)}}};\n\n"
    steps = "".join(f"    {line}\n" for line in found.steps)
    return f"""{head}#include "{header}"

static const int32_t NAME_rows[] = {{{", ".join(map(str, rows))}}};
static const int32_t NAME_columns[] = {{{", ".join(map(str, columns))}}};

struct NAME_kernel {{
  typedef {stored_type(group.input_types[found.image].dtype)} Element;
{numbers}  static constexpr float FILL = {literal(DType.F32, found.fill)};
  static long row(long i) {{ return NAME_rows[i]; }}
  static long column(long i) {{ return NAME_columns[i]; }}
  static KORCH_INLINE void finish(void* const* buffers, korch::Vec<float, W> y, long at,
                                  long channel) {{
{steps}  }}
}};

{sizes}extern "C" int NAME_run(void*, void* const* buffers) {{
  return korch_winograd::{run}(
      buffers, static_cast<const NAME_kernel::Element*>(buffers[{found.image}]),
      static_cast<const float*>(buffers[{found.weights}]),
      static_cast<float*>(buffers[{workspace}]));
}}
"""


def _numbers(constants: dict[str, int]) -> str:
    return "".join(f"  static constexpr long {name} = {n};\n" for name, n in constants.items())
