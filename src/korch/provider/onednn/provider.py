"""Kernels of oneDNN: convolution, matrix product and pooling with what follows fused in.

Each combination of layouts that the library runs with code made for it is an offer; its reference
implementations are not, save where nothing else would run a primitive. Constant weights are asked
for in the layout that the library prefers, so that they are packed at build time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, layout_choices
from korch.provider.onednn.api import OneDnn
from korch.provider.onednn.geometry import conv_steps, conv_weights, operand, tag_for
from korch.provider.onednn.match import Binary, Match, match_group
from korch.provider.onednn.source import print_source
from korch.provider.provider import Kernel
from korch.target import Target

SCHEMA = 1
"""Raise it whenever the sources change in speed or meaning."""


class OneDnnProvider:
    """oneDNN's kernels.

    Raises:
        ImportError: oneDNN is not installed.
    """

    name = "onednn"

    def __init__(self) -> None:
        self._library = OneDnn()
        self.version = f"{self._library.version}-{SCHEMA}"

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer a linear primitive with its post-operations, a pooling, or a change of layout."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        offers = list(dict.fromkeys(self._offers(group, found, target)))
        return offers or Refusal("oneDNN has no code for it but its reference")

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the calls that make and run the primitive."""
        found = match_group(group)
        if isinstance(found, Refusal):
            return found
        layouts = " ".join(map(str, (*offer.inputs, "->", *offer.outputs)))
        text = print_source(group, found, offer, f"{group.text}layouts {layouts}")
        symbol = "k_" + hashlib.sha256(text.encode()).hexdigest()[:16]
        return Kernel(symbol, text.replace("NAME", symbol), has_state=True, libraries=("dnnl",))

    def _offers(self, group: Group, found: Match, target: Target) -> Iterator[Offer]:
        match found.op:
            case "reorder":
                choices = layout_choices(group.input_types[0], target.lanes)
                yield from (Offer((a,), (b,)) for a in choices for b in choices if a != b)
            case "matmul":
                yield from self._matmul_offers(group, found)
            case "pool_max" | "pool_average":
                outputs = layout_choices(group.output_types[0], target.lanes)
                for layout in layout_choices(group.input_types[0], target.lanes):
                    if layout in outputs:
                        yield _offer(group, found, (layout,), layout)
            case _:
                yield from self._conv_offers(group, found, target)

    def _conv_offers(self, group: Group, found: Match, target: Target) -> Iterator[Offer]:
        x_type, w_type = (group.input_types[i] for i in found.inputs)
        y_type = group.output_types[0]
        for x in layout_choices(x_type, target.lanes):
            for y in layout_choices(y_type, target.lanes):
                weights = self._weights(
                    group, found, x_type.shape, x, w_type.shape, y_type.shape, y
                )
                is_plain = x.is_plain and y.is_plain
                if weights is None:
                    if is_plain:
                        yield _offer(group, found, (x, Layout.plain(w_type.rank)), y)
                    continue
                yield _offer(group, found, (x, weights), y)

    def _weights(
        self, group: Group, found: Match, x: tuple[int, ...], x_layout: Layout,
        w: tuple[int, ...], y: tuple[int, ...], y_layout: Layout,
    ) -> Layout | None:  # fmt: skip
        """Return the weights' layout for which oneDNN has code of its own, or None."""
        kind, dims, plain = conv_weights(found, w)
        steps = conv_steps(found)
        is_constant = found.inputs[1] in group.constant_inputs
        wanted = ["any"] if is_constant and found.op == "conv" else []
        for tag in (*wanted, plain):
            answer = self._library.convolution(
                kind, x, str(x_layout), dims, tag, y, str(y_layout), *steps
            )
            if answer is None or answer[0].startswith("ref"):
                continue
            if tag != "any":
                return Layout.plain(len(w))
            layout = answer[1]
            if layout is None or not self._library.has_tag(str(layout)):
                continue
            mapped = _without_groups(layout, len(w), dims)
            if mapped is not None and tag_for(mapped, len(dims)) == str(layout):
                return mapped
        return None

    def _matmul_offers(self, group: Group, found: Match) -> Iterator[Offer]:
        a, b = (group.input_types[i].shape for i in found.inputs)
        plain = (Layout.plain(len(a)), Layout.plain(len(b)))
        output = Layout.plain(len(group.output_types[0].shape))
        yield _offer(group, found, plain, output)
        if found.inputs[1] not in group.constant_inputs or found.transposed[1]:
            return
        dims, strides = operand(a, found.transposed[0])
        y = group.body.types[found.primitive.output].shape if found.primitive else ()
        answer = self._library.matmul(dims, strides, b, "any", y)
        if answer is not None and answer[1] is not None and self._library.has_tag(str(answer[1])):
            yield _offer(group, found, (plain[0], answer[1]), output)


def _offer(group: Group, found: Match, own: Sequence[Layout], output: Layout) -> Offer:
    """Return the offer: the primitive's own inputs, then tensors of the output's layout."""
    inputs = [Layout.plain(type_.rank) for type_ in group.input_types]
    for position, layout in zip(found.inputs, own, strict=True):
        inputs[position] = layout
    shape = group.output_types[0].shape
    for operation in found.post:
        if isinstance(operation, Binary) and operation.dims == shape:
            inputs[operation.input] = output
    return Offer(tuple(inputs), (output,))


def _without_groups(layout: Layout, rank: int, dims: tuple[int, ...]) -> Layout | None:
    """Return a layout of weights with groups as one of ONNX's, where the two axes are one."""
    if len(layout.order) == rank:
        return layout
    is_depthwise = dims[1] == 1
    if not is_depthwise or any(axis == 1 for axis, _ in layout.blocks):
        return None
    order = tuple(max(axis - 1, 0) for axis in layout.order if axis != 1)
    return Layout(order, tuple((max(axis - 1, 0), size) for axis, size in layout.blocks))
