"""The provider of generated convolutions: sizes from shapes and caches, source from the match."""

from __future__ import annotations

from collections.abc import Sequence

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices
from korch.candidate.shape import around
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.provider.conv.bytes import ByteConvolutions, multiplies_bytes
from korch.provider.conv.chains import chain_groups
from korch.provider.conv.linked import chain_kernel, chain_plans
from korch.provider.conv.match import ConvChain, match_group
from korch.provider.conv.shape import Layer, Shape, can_split, shape_of
from korch.provider.conv.split import split_plans
from korch.provider.conv.vectors import Plan, plans_of
from korch.provider.epilogue import RESULT
from korch.provider.matrix_units import TOGETHER, constants_of
from korch.provider.provider import SPLIT, Kernel, Threading, named_kernel
from korch.target import Target
from korch.tile.cpp_text import literal, stored_type

LEAST_CHAIN_CHANNELS = 64
"""Channels of a chain, read or written, from which on matrix units are tried if they fill tiles; else twice as many."""

SPLIT_SHARE = 0.6
"""The part of the level-2 cache for a chain's split weights."""


class ConvProvider:
    """Makes kernels for groups around one convolution, or around a chain of them."""

    name = "conv"
    version = content_version("provider/conv")
    group_shapes = (around("conv", widens=True), chain_groups)

    def __init__(self) -> None:
        """Begin without plans; those of offered groups are kept until they are built."""
        self._plans: dict[tuple[str, Target], tuple[Plan, ...] | Refusal] = {}
        self._bytes = ByteConvolutions()

    def _windows(self, group: Group, target: Target) -> tuple[Plan, ...] | Refusal:
        """Return the ways to compute a group with one convolution by a tile program."""
        key = (group.key, target)
        if key not in self._plans:
            is_chain = len(group.body.linear) != 1
            plans = chain_plans(group, target) if is_chain else plans_of(group, target)
            if not is_chain and not isinstance(plans, Refusal):
                plans = (*plans, *split_plans(group, target))
            self._plans[key] = plans
        return self._plans[key]

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer blocks of channels and channels-last, with threads that share rows or channels."""
        if multiplies_bytes(group):
            return self._bytes.offers(group, target)
        plans = self._windows(group, target)
        if isinstance(plans, Refusal):
            return plans
        is_split = target.isa == "amx" and len(group.body.linear) > 1
        split = _split_offers(group, target) if is_split else ()
        return (*(plan.offer for plan in plans), *split)

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        if multiplies_bytes(group):
            return self._bytes.build(group, offer, target)
        if offer.variant == SPLIT and len(group.body.linear) > 1:
            return _split_kernel(group, offer, target)
        plans = self._windows(group, target)
        found = [] if isinstance(plans, Refusal) else [plan for plan in plans if plan.offer == offer]
        return chain_kernel(group, found[0], target) if found else Refusal("this was not offered")


def _split_offers(group: Group, target: Target) -> Sequence[Offer]:
    """Return the offers of kernels of chains whose matrix units multiply numbers that are split."""
    match = match_group(group)
    if isinstance(match, Refusal) or not _chain_suits_matrix_units(group, match, target):
        return ()
    offers = []
    shape = shape_of(group, match, target, _is_by_channels(group, match, target))
    for source, sink in _layouts(group, match, target):
        inputs = _inputs(group, match, shape, source, sink, target)
        if inputs is not None and not source.is_plain:
            outputs = (sink,) * len(group.outputs)
            offers.append(Offer(inputs, outputs, SPLIT, 0, ALL_PAIRS, _vector_flop(group, shape)))
    return tuple(dict.fromkeys(offers))


def _split_kernel(group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
    """Print such a kernel."""
    match = match_group(group)
    if isinstance(match, Refusal):
        return match
    position = match.image.position
    image = group.input_types[position]
    _, pixel = _form(image.shape, offer.inputs[position], target)
    shape = shape_of(group, match, target, _is_by_channels(group, match, target), pixel)
    floats = target.threads * shape.floats
    element = stored_type(image.dtype)
    operand = f"static_cast<const {element}*>(buffers[{position}])"
    text = _print(group, match, shape, offer, target, (element, operand))
    return named_kernel(text, workspace_bytes=4 * floats, threading=Threading.TEAM)


def _is_by_channels(group: Group, match: ConvChain, target: Target) -> bool:
    """Return whether threads share the channels of a chain's result."""
    channels = group.output_types[0].shape[1]
    return can_split(match) and channels % (TOGETHER * target.threads) == 0


def _vector_flop(group: Group, shape: Shape) -> int:
    """Return the operations of a chain's convolutions that matrix units don't do."""
    rest = [layer.link for layer in shape.layers if layer.link and not layer.on_tiles]
    is_chain = any(layer.on_tiles for layer in shape.layers)
    return sum(group.body.work_flop(link.primitive) for link in rest) if is_chain else 0


def _chain_suits_matrix_units(group: Group, match: ConvChain, target: Target) -> bool:
    """Return whether they may for a chain: split weights stay in the cache.

    For few channels it takes as long to split them as to multiply by vectors.
    """
    widths = [group.body.types[link.primitive.output].shape[1] for link in match.links]
    if any(width % target.lanes for width in (widths if match.links[-1].is_depthwise else widths[:-1])):
        return False
    shape = shape_of(group, match, target, _is_by_channels(group, match, target))
    channels = [layer.channels for layer in shape.layers if layer.on_tiles]
    pieces = 4 * sum(layer.pieces for layer in shape.layers) // shape.parts
    is_kept = 0 < pieces <= SPLIT_SHARE * target.l2_bytes
    least = (LEAST_CHAIN_CHANNELS * (2 if any(n % TOGETHER for n in c) else 1) for c in channels)
    return is_kept and all(max(c) >= n for c, n in zip(channels, least, strict=True))


def _layouts(group: Group, match: ConvChain, target: Target) -> list[tuple[Layout, Layout]]:
    """Return the layouts of the image and of the result that are offered."""
    x, y = group.input_types[match.image.position], group.output_types[0]
    choices = layout_choices(x, target.lanes), layout_choices(y, target.lanes)
    kinds = (channels_blocked(4, target.lanes), channels_last(4))
    sinks = [k.normalized(y.shape) for k in kinds if k.normalized(y.shape) in choices[1]]
    pairs = []
    for kind in kinds:
        source, sink = kind.normalized(x.shape), kind.normalized(y.shape)
        if source in choices[0] and sink in sinks:
            pairs.append((source, sink))
    return pairs


def _form(shape: tuple[int, ...], source: Layout, target: Target) -> tuple[str, int]:
    """Return how an image lies, and how many of its channels are neighbours."""
    if source == channels_last(4).normalized(shape):
        return "LAST", shape[1]
    return "BLOCKED", target.lanes


def _run(table: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the longest run of neighbours in a table of sources: begin, end, and the shift."""
    best = (0, 0, 0)
    begin = 0
    for i, source in enumerate(table):
        if i == 0 or min(source, table[i - 1]) < 0 or source != table[i - 1] + 1:
            begin = i
        if source >= 0 and i + 1 - begin > best[1] - best[0]:
            best = (begin, i + 1, source - i)
    return best


def _inputs(
    group: Group, match: ConvChain, shape: Shape, source: Layout, sink: Layout, target: Target
) -> tuple[Layout, ...] | None:
    """Return the layout of each input; None if one would be read in two."""
    found: dict[int, Layout] = {match.image.position: source}
    for layer in shape.layers:
        if layer.link is None:
            continue
        order = (0, 1, 2, 3) if layer.kind == "DEPTHWISE" else (0, 2, 3, 1)
        layout = Layout(order, ((0, layer.vectors * target.lanes),))
        if found.setdefault(layer.link.weights, layout) != layout:
            return None
    for position in match.full:
        if found.setdefault(position, sink) != sink:
            return None
    return tuple(found.get(i, Layout.plain(type_.rank)) for i, type_ in enumerate(group.input_types))


def _print_layer(layer: Layer, name: str) -> str:
    """Return a layer as a C++ struct."""
    rows, line, margin, at = layer.ring
    numbers = {
        "C": layer.channels[0],
        "N": layer.channels[1],
        "H": layer.size[0],
        "WIDTH": layer.size[1],
        "OUT_H": layer.out[0],
        "OUT_WIDTH": layer.out[1],
        "KH": layer.window[0],
        "KW": layer.window[1],
        "SH": layer.strides[0],
        "SW": layer.strides[1],
        "DH": layer.dilations[0],
        "DW": layer.dilations[1],
        "TOP": layer.pads[0],
        "LEFT": layer.pads[1],
        "NV": layer.vectors,
        "ROWS": layer.pixels,
        "SPLIT": int(layer.is_split),
        "TILES": int(layer.on_tiles),
        "RING": rows,
        "LINE": line,
        "MARGIN": margin,
        "PIXEL": layer.pixel,
        "AT": at,
        "WEIGHTS": layer.link.weights if layer.link else 0,
    }
    constants = constants_of(numbers)
    lines = "".join(f"    {line}\n" for line in (layer.link.steps if layer.link else (f"return {RESULT};",)))
    return f"""struct {name} {{
  static constexpr int KIND = korch_conv::{layer.kind};
{constants}  template <int W>
  static KORCH_INLINE korch::Vec<float, W> finish([[maybe_unused]] void* const* buffers,
                                                  korch::Vec<float, W> y, [[maybe_unused]] long at,
                                                  [[maybe_unused]] long channel) {{
{lines}  }}
}};
"""


def _sizes(group: Group, match: ConvChain, shape: Shape, offer: Offer, target: Target) -> dict[str, object]:
    """Return the constants of a kernel."""
    image, channels, height, width = group.input_types[match.image.position].shape
    source, sink = offer.inputs[match.image.position], offer.outputs[0]
    out_shape = group.output_types[0].shape
    form, _ = _form((image, channels, height, width), source, target)
    run, run_end, shift = _run(match.image.columns)
    return {
        "W": target.lanes,
        "FORM": f"korch_conv::{form}",
        "OUT_LAST": int(sink == channels_last(4).normalized(out_shape)),
        "IMAGES": image,
        "C": channels,
        "H": height,
        "WIDTH": width,
        "BLOCK": shape.block,
        "CHUNKS": shape.chunks,
        "PARTS": shape.parts,
        "UNIT": shape.unit,
        "FLOATS": shape.floats,
        "PIECES": shape.pieces,
        "THREADS": target.threads,
        "OUTPUT": len(group.inputs),
        "RUN": run,
        "RUN_END": run_end,
        "SHIFT": shift,
    }


def _print(group: Group, match: ConvChain, shape: Shape, offer: Offer, target: Target, operand: tuple[str, str]) -> str:
    """Return the kernel; `operand` is the element type of the image, and where it is."""
    layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
    comment = f"{group.text}layouts {layouts}"
    head = "".join(f"// {line}\n" for line in comment.splitlines())
    constants = constants_of(_sizes(group, match, shape, offer, target))
    layers = "".join(_print_layer(layer, f"NAME_l{i}") for i, layer in enumerate(shape.layers))
    names = ", ".join(f"NAME_l{i}" for i in range(len(shape.layers)))
    tables = "".join(
        f"static const int32_t NAME_{axis}[] = {{{', '.join(map(str, table))}}};\n"
        for axis, table in (("rows", match.image.rows), ("columns", match.image.columns))
    )
    workspace = len(group.inputs) + len(group.outputs)
    own = f"{operand[1]}, static_cast<float*>(buffers[{workspace}])"
    return f"""{head}#include "korch_conv_chain_amx.h"

{tables}{layers}
struct NAME_kernel {{
  typedef korch_conv::Chain<{names}> Layers;
  typedef {operand[0]} Element;
  typedef {stored_type(group.output_types[0].dtype)} Result;
{constants}  static constexpr float FILL = {literal(DType.F32, match.image.fill)};
  static long row(long i) {{ return NAME_rows[i]; }}
  static long column(long i) {{ return NAME_columns[i]; }}
}};

extern "C" int NAME_run(void*, void* const* buffers) {{
  return korch_conv::run_tiles<NAME_kernel>(buffers, {own});
}}
"""
