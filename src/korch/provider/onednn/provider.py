"""Kernels of oneDNN: convolutions, matrix products and poolings with fused post-operations.

Each combination of layouts for which the library has optimized code is an offer. Its slow reference
implementations are offered only for primitives that no other kernel would run. Constant weights use the
layout that the library prefers, and are packed at build time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.layout import Layout, layout_choices
from korch.candidate.shape import FUSED, around
from korch.provider.content import content_version
from korch.provider.onednn.api import OneDnn
from korch.provider.onednn.call import PrimitiveCall
from korch.provider.onednn.geometry import describe, follows_output, model_layout, weights_axes
from korch.provider.onednn.match import OneDnnOp, Other, match_group
from korch.provider.onednn.source import print_source
from korch.provider.provider import Kernel, named_kernel
from korch.provider.tile_kernel import comment_of
from korch.target import Target


class OneDnnProvider:
    """oneDNN's kernels.

    Args:
        propagate_nan: offer no kernel that loses NaN or infinity (see `korch.provider.onednn.match`).

    Raises:
        ImportError: oneDNN is not installed.
    """

    name = "onednn"
    group_shapes = (FUSED, around("conv", "conv_transpose", "matmul"))

    def __init__(self, propagate_nan: bool = True) -> None:
        self._library = OneDnn()
        self._propagate_nan = propagate_nan
        self.version = f"{self._library.version}-{content_version('provider/onednn')}" + "-nan" * propagate_nan

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer a linear primitive or a pooling with its post-operations, or a change of layout."""
        found = match_group(group, self._propagate_nan)
        if isinstance(found, Refusal):
            return found
        offers = tuple(dict.fromkeys(offer for offer, _ in self._calls(group, found, target)))
        return offers or Refusal("oneDNN has only reference code for it")

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the calls that create and run the oneDNN primitive."""
        found = match_group(group, self._propagate_nan)
        if isinstance(found, Refusal):
            return found
        calls = self._calls(group, found, target, offer)
        call = next((call for made, call in calls if made == offer), None)
        answer = self._library.ask(call, target.threads) if call is not None else None
        if call is None or answer is None:
            return Refusal("oneDNN does not run it in these layouts")
        comment = f"{comment_of(group, offer)}\nruns {answer.implementation}"
        workspace = len(group.inputs) + len(group.outputs), answer.workspace_bytes
        text = print_source(call, workspace, comment, target.isa)
        return named_kernel(text, has_state=True, workspace_bytes=answer.workspace_bytes, libraries=("dnnl",))

    def implementation(self, group: Group, offer: Offer, target: Target) -> str:
        """Return the library's name of the implementation behind an offer; "" if it is no offer of this provider."""
        found = match_group(group, self._propagate_nan)
        if isinstance(found, OneDnnOp):
            for made, call in self._calls(group, found, target, offer):
                answer = self._library.ask(call, target.threads)
                if made == offer and answer is not None:
                    return answer.implementation
        return ""

    def _calls(
        self, group: Group, found: OneDnnOp, target: Target, only: Offer | None = None
    ) -> Iterator[tuple[Offer, PrimitiveCall]]:
        """Yield each offer with its call, or only those with the layouts of the offer `only`."""
        for x, y in _layouts(group, found, target):
            if only is not None and (only.inputs[found.inputs[0]], only.outputs[0]) != (x, y):
                continue
            is_lone = len(group.body.primitives) <= 1
            yield from self._calls_in(group, found, target, x, y, is_lone)

    def _calls_in(
        self, group: Group, found: OneDnnOp, target: Target, x: Layout, y: Layout, is_lone: bool
    ) -> Iterator[tuple[Offer, PrimitiveCall]]:
        """Yield the offers and calls for one layout of the input and one of the output."""
        if len(found.inputs) == 1:
            offer, call = _offer(group, found, (x,), y), describe(group, found, x, y)
            yield from self._legal(offer, call, target, found.op == "reorder")
            return
        position = found.inputs[1]
        rank = group.input_types[position].rank
        packed = False
        # The library's layout applies to the reshaped view, so it can't be used as the layout of the value itself.
        is_reshaped = bool(found.views) and found.views[1].shape != group.input_types[position].shape
        if position in group.constant_inputs and not is_reshaped:
            call = describe(group, found, x, y)
            answer = self._library.ask(call, target.threads)
            if answer is not None and answer.weights is not None and not answer.is_reference:
                axes = weights_axes(group, found)
                layout = model_layout(answer.weights, call.tensors[1].dims, axes)
                if layout is not None and not layout.is_plain:
                    packed = True
                    call = _with_weights(call, str(answer.weights))
                    yield from self._legal(_offer(group, found, (x, layout), y), call, target, False)
        if packed and found.op != "matmul":
            return
        call = describe(group, found, x, y, Layout.plain(rank))
        offer = _offer(group, found, (x, Layout.plain(rank)), y)
        yield from self._legal(offer, call, target, is_lone and x.is_plain and y.is_plain)

    def _legal(
        self, offer: Offer | None, call: PrimitiveCall, target: Target, allow_reference: bool
    ) -> Iterator[tuple[Offer, PrimitiveCall]]:
        """Yield an offer with its call if the library can run it, other than by disallowed reference code."""
        answer = None if offer is None else self._library.ask(call, target.threads)
        if offer is not None and answer is not None and (allow_reference or not answer.is_reference):
            yield offer, call


def _layouts(group: Group, found: OneDnnOp, target: Target) -> Iterator[tuple[Layout, Layout]]:
    """Yield the pairs of input and output layouts to ask the library about."""
    x_type, y_type = group.input_types[found.inputs[0]], group.output_types[0]
    if found.op == "matmul":
        yield Layout.plain(x_type.rank), Layout.plain(y_type.rank)
        return
    for x in layout_choices(x_type, target.lanes):
        for y in layout_choices(y_type, target.lanes):
            is_reorder = found.op == "reorder"
            if is_reorder != (x == y) or found.op.startswith("conv"):
                yield x, y


def _with_weights(call: PrimitiveCall, tag: str) -> PrimitiveCall:
    x, w, y = call.tensors
    return replace(call, tensors=(x, replace(w, form=tag), y))


def _offer(group: Group, found: OneDnnOp, own: Sequence[Layout], output: Layout) -> Offer | None:
    """Return the offer with the layouts `own` for the primitive's own inputs, and those of post-operations' tensors.

    Return None if an input would be read in two layouts.
    """
    inputs: dict[int, Layout] = {}
    others = [
        (operation.input, output if follows_output(group, found, operation) else None)
        for operation in found.post
        if isinstance(operation, Other)
    ]
    for position, layout in (*zip(found.inputs, own, strict=True), *others):
        wanted = layout or Layout.plain(group.input_types[position].rank)
        if inputs.setdefault(position, wanted) != wanted:
            return None
    return Offer(tuple(inputs.get(i, Layout.plain(t.rank)) for i, t in enumerate(group.input_types)), (output,))
