"""Fused elementwise, layout and reduction primitives as Triton kernels, printed from the tile program."""

from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import FUSED
from korch.cuda.kernel import CudaKernel, kernel_of
from korch.cuda.target import CudaTarget
from korch.primitive.op import Category
from korch.primitive.types import DType
from korch.provider.content import content_version
from korch.provider.offers import offered_layouts
from korch.provider.tile_kernel import comment_of
from korch.tile.ir.growth import TextLimitError, grows_too_large
from korch.tile.ir.program import TileProgram
from korch.tile.lower.lower import lower
from korch.tile.lower.staging import DEVICE
from korch.tile.triton.launch import USUAL, LaunchOptions
from korch.tile.triton.print import print_triton, stage_is_splittable
from korch.tile.triton.text import COMPUTE, is_printable

Ports = list[tuple[str, DType]]
"""Names and element types of buffers."""

AHEAD, AHEAD_OPTIONS = "ahead", LaunchOptions(ahead=4)
"""The variant of long reductions that loads tiles ahead, and its options."""


class TritonProvider:
    """Korch's own kernel generator for CUDA devices."""

    name = "triton"
    version = content_version("provider/triton", "cuda")
    group_shapes = (FUSED,)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer the group in each suitable layout; long reductions both with and without split rows."""
        body = group.body
        for primitive in body.primitives:
            if primitive.row.category in (Category.LINEAR, Category.OPAQUE):
                return Refusal(f"{primitive.op} is not fused here")
            is_elementwise = primitive.row.category is Category.ELEMENTWISE
            dtype = body.types[primitive.inputs[0]].dtype
            if is_elementwise and not is_printable(primitive.op, dtype):
                return Refusal(f"{primitive.op} of {dtype.value} has no Triton form")
        for type_ in body.types:
            if type_.dtype not in COMPUTE:
                return Refusal(f"elements of type {type_.dtype.value} are not generated")
        if grows_too_large(body):
            return Refusal("its text would be too long")
        is_long = _has_long_reduction(group)
        return [
            Offer(inputs, outputs, variant)
            for inputs, outputs in dict.fromkeys(offered_layouts(group, target.lanes))
            for variant in (("", AHEAD, "split", f"split {AHEAD}") if is_long else ("",))
        ]

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Lower and print the group."""
        try:
            program = lower(group.body, offer.inputs, offer.outputs, DEVICE)
        except TextLimitError as error:
            return Refusal(str(error))
        if offer.variant.startswith("split") and not _is_splittable(program, target):
            return Refusal("no row is worth splitting")
        kernel = print_kernel(group, offer, program, target, AHEAD_OPTIONS if AHEAD in offer.variant else USUAL)
        if AHEAD in offer.variant and not any("num_stages" in launch.source for launch in kernel.launches):
            return Refusal("no row is added up in a loop")
        return kernel


def print_kernel(
    group: Group, offer: Offer, program: TileProgram, target: CudaTarget, options: LaunchOptions = USUAL
) -> CudaKernel:
    """Return the kernel of a group's program, printed with the offer as a comment.

    `offer`: the layouts; its variant may ask for split rows.
    """
    comment = f"{comment_of(group, offer)}\nvariant {offer.variant}"
    printed = print_triton(program, comment, target.processors, offer.variant.startswith("split"), options)
    return kernel_of(printed, *ports(group))


def ports(group: Group) -> tuple[Ports, Ports]:
    """Return the names and element types of a group's inputs and outputs."""
    body = group.body
    return (
        [(name, body.types[value].dtype) for name, value in body.inputs],
        [(name, body.types[value].dtype) for name, value in body.outputs],
    )


def _has_long_reduction(group: Group) -> bool:
    body = group.body
    return any(
        primitive.row.category is Category.REDUCE
        and body.types[primitive.inputs[0]].size >= 4096 * body.types[primitive.output].size
        for primitive in body.primitives
    )


def _is_splittable(program: TileProgram, target: CudaTarget) -> bool:
    return any(stage_is_splittable(program, stage, target.processors) for stage in program.stages)
