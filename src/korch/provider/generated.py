"""Kernels that Korch writes itself: any group without a linear or an opaque primitive.

The group is lowered to a tile program and printed as C++. Offered layouts: all values in one
layout (plain, channels-last, or blocks of channels), and, where a value of the group is alone on
its side, each pair of layouts, so that a change of layout can ride in a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices
from korch.primitive.op import Category
from korch.primitive.types import ValueType
from korch.provider.provider import Kernel
from korch.target import Target
from korch.tile.cpp import C_TYPE, print_cpp
from korch.tile.lower import KEEP_OPS, Machine, lower

SCHEMA = 5
"""Raise it whenever generated kernels change in speed or meaning."""

MIXED_PRIMITIVES = 2
"""Groups of at most this size are offered with an output in another layout than the input."""


class GeneratedProvider:
    """Korch's own kernel generator."""

    name = "generated"
    version = str(SCHEMA)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer the group in each layout that suits it."""
        for primitive in group.body.primitives:
            if primitive.row.category in (Category.LINEAR, Category.OPAQUE):
                return Refusal(f"{primitive.op} is not generated")
        for type_ in group.body.types:
            if type_.dtype not in C_TYPE:
                return Refusal(f"elements of type {type_.dtype.value} are not generated")
        return [
            Offer(inputs, outputs, variant)
            for inputs, outputs in dict.fromkeys(_layouts(group, target.lanes))
            for variant in _variants(group)
        ]

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Lower and print the group."""
        machine = Machine(target.lanes, target.threads)
        program = lower(group.body, offer.inputs, offer.outputs, machine, offer.variant == "keep")
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        comment = f"{group.text}layouts {layouts}"
        symbol, source, workspace_bytes = print_cpp(program, comment, target.lanes)
        return Kernel(symbol, source, workspace_bytes=workspace_bytes)


def _variants(group: Group) -> tuple[str, ...]:
    """Recompute transcendental values that several passes read, or keep them in tiles."""
    body = group.body
    for primitive in body.primitives:
        readers = [body.primitives[p] for p in body.consumers[primitive.output]]
        feeds = any(reader.row.category is Category.REDUCE for reader in readers)
        if primitive.op in KEEP_OPS and feeds and len(readers) > 1:
            return ("", "keep")
    return ("",)


def _layouts(group: Group, lanes: int) -> Iterator[tuple[tuple[Layout, ...], tuple[Layout, ...]]]:
    inputs, outputs = group.input_types, group.output_types
    variable = [t for i, t in enumerate(inputs) if i not in group.constant_inputs]
    computed = sum(p.op not in ("broadcast", "slice") for p in group.body.primitives)
    choices = {choice: None for t in (*inputs, *outputs) for choice in _kinds(t, lanes)}
    for source in choices:
        for sink in choices:
            is_mixed = source != sink
            # Beyond small groups a change of layout is left to a kernel of its own.
            if is_mixed and (len(variable) > 1 or len(outputs) > 1 or computed > MIXED_PRIMITIVES):
                continue
            yield (
                tuple(
                    _realize(t, "plain" if i in group.constant_inputs else source, lanes)
                    for i, t in enumerate(inputs)
                ),
                tuple(_realize(t, sink, lanes) for t in outputs),
            )


def _kinds(type_: ValueType, lanes: int) -> list[str]:
    names = {"plain": Layout.plain(type_.rank)}
    if type_.rank >= 2:
        names["last"] = channels_last(type_.rank)
        names["blocked"] = channels_blocked(type_.rank, lanes)
    available = layout_choices(type_, lanes)
    return [name for name, layout in names.items() if layout in available]


def _realize(type_: ValueType, kind: str, lanes: int) -> Layout:
    """Return the layout of a kind for a type; the plain one if it has none."""
    plain = Layout.plain(type_.rank)
    if kind not in _kinds(type_, lanes):
        return plain
    named = {"plain": plain, "last": channels_last(type_.rank)}
    return named[kind] if kind in named else channels_blocked(type_.rank, lanes)
