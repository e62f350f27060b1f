"""The provider of generated Winograd convolutions, on vector units and on matrix units."""

from collections.abc import Sequence

from korch.candidate.candidate import ALL_PAIRS, Group, Offer, Refusal
from korch.candidate.layout import Layout, channels_blocked, channels_last, layout_choices, replaced
from korch.candidate.shape import around
from korch.primitive.graph import Primitive
from korch.provider.content import content_version
from korch.provider.provider import SPLIT, Kernel
from korch.provider.tile_kernel import kernel_of
from korch.provider.winograd.matrix_units import WEIGHTS, split_blocking, suits_matrix_units
from korch.provider.winograd.vectors import blocking_for
from korch.schedule.contraction import Layouts, NotFusedError, is_of_bytes, refuse_outputs, refuse_types
from korch.schedule.products import PAIR_LANES
from korch.schedule.split_winograd import SplitWinograd
from korch.schedule.winograd import elements_of
from korch.target import Target
from korch.tile.ir.program import Product

MANY_WEIGHTS_BYTES = 8 << 20
"""From this size on, it may be faster if each thread reads only its part of the weights."""

TILES, CHANNELS = "tiles", "channels"
"""The variants on vector units: what is divided among the threads."""


class WinogradProvider:
    """Makes kernels for groups around one `winograd` primitive."""

    name = "winograd"
    version = content_version("provider/winograd")
    group_shapes = (around("winograd", widens=True),)

    def offer(self, group: Group, target: Target) -> Sequence[Offer] | Refusal:
        """Offer blocked and channels-last layouts, with tiles or channels divided among the threads."""
        root = _root(group, target)
        if isinstance(root, Refusal):
            return root
        weights = group.position[root.inputs[1]]
        is_large = group.input_types[weights].size_bytes >= MANY_WEIGHTS_BYTES
        variants = (TILES, CHANNELS) if is_large else (TILES,)
        offers: list[Offer] = []
        refusal = Refusal("no layout fits both the inputs and the outputs")
        is_bytes = is_of_bytes(group.body, root)
        blocked = () if is_bytes else (channels_blocked(4, target.lanes),)
        for wanted in (*blocked, channels_last(4)):
            layouts = _layouts(group, root, wanted, target)
            if layouts is None:
                continue
            schedule = SplitWinograd(group, root, layouts, target.lanes)
            try:
                schedule.check()
            except NotFusedError as error:
                refusal = Refusal(str(error))
                continue
            block = blocking_for(schedule, target, False).vectors * target.lanes
            terms = ((2, schedule.product.group),) if is_bytes else ()
            inputs = replaced(layouts[0], weights, Layout((3, 0, 1, 2), ((3, block), *terms)))
            offers += [Offer(inputs, layouts[1], variant) for variant in variants]
            if suits_matrix_units(schedule, target):
                inputs = replaced(layouts[0], weights, WEIGHTS)
                offers.append(Offer(inputs, layouts[1], SPLIT, pairs=ALL_PAIRS))
        return tuple(dict.fromkeys(offers)) or refusal

    def build(self, group: Group, offer: Offer, target: Target) -> Kernel | Refusal:
        """Print the kernel."""
        root = _root(group, target)
        if isinstance(root, Refusal):
            return root
        inputs = replaced(offer.inputs, group.position[root.inputs[1]], Layout.plain(4))
        schedule = SplitWinograd(group, root, (inputs, offer.outputs), target.lanes)
        try:
            if offer.variant == SPLIT:
                program = schedule.split_program(split_blocking(schedule, target))
            else:
                program = schedule.program(blocking_for(schedule, target, offer.variant == CHANNELS))
        except NotFusedError as error:
            return Refusal(str(error))
        return kernel_of(program, group, offer, target)


def _root(group: Group, target: Target) -> Primitive | Refusal:
    """Return the Winograd convolution of a group, or why vector units can't compute the group."""
    found = [p for p in group.body.primitives if p.op == "winograd"]
    if len(found) != 1:
        return Refusal("it is not one convolution in Winograd's space")
    root, types = found[0], group.body.types
    refusal = refuse_types(group.body, root, with_bytes=target.lanes in PAIR_LANES) or refuse_outputs(group.body, root)
    if refusal is not None:
        return refusal
    if group.position.get(root.inputs[1]) not in group.constant_inputs:
        return Refusal("the weights are not constant")
    channels = types[root.inputs[0]].shape[1], types[root.output].shape[1]
    product = Product.S16S16 if is_of_bytes(group.body, root) else Product.F32
    if target.lanes < 4 or channels[0] % elements_of(product, target.lanes) or channels[1] % target.lanes:
        return Refusal("the channels do not fill a vector register")
    if types[root.output].size == 0 or 0 in channels:
        return Refusal("the result is empty")
    return root


def _layouts(group: Group, root: Primitive, wanted: Layout, target: Target) -> Layouts | None:
    """Return layouts with all images in the wanted one and the weights as plain; None if an image can't have it."""
    body, result = group.body, group.body.types[root.output].shape
    before = {root.inputs[0]}
    for primitive in reversed(body.primitives):
        before.update(primitive.inputs if primitive.output in before else ())
    types = (*group.input_types, *group.output_types)
    values = [value for _, value in (*body.inputs, *body.outputs)]
    found = []
    for value, type_ in zip(values, types, strict=True):
        is_image = type_.rank == 4 and (value in before or type_.shape == result)
        layout = wanted.normalized(type_.shape) if is_image else Layout.plain(type_.rank)
        if is_image and layout not in layout_choices(type_, target.lanes):
            return None
        found.append(layout)
    count = len(group.input_types)
    return tuple(found[:count]), tuple(found[count:])
