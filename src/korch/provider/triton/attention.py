"""Attention as one Triton kernel: chooses the blocks for the programs of `korch.schedule.device_attention`."""

import re
from collections.abc import Sequence

from korch.candidate.candidate import Group, Offer, Refusal
from korch.candidate.shape import around
from korch.cuda.kernel import CudaKernel
from korch.cuda.target import CudaTarget
from korch.primitive.types import DType
from korch.provider.attention.groups import attention_groups
from korch.provider.attention.match import match_group
from korch.provider.content import content_version
from korch.provider.triton.fused import print_kernel
from korch.schedule.contraction import NotFusedError
from korch.schedule.device_attention import DeviceAttention
from korch.tile.ir.program import Product
from korch.tile.lower.staging import DEVICE
from korch.tile.triton.launch import LaunchOptions
from korch.tile.triton.text import power_of_two

WIDEST_HEAD = 256
"""The most terms of the first product, and the most columns of the second."""

BLOCKS = ((128, 64, 8, 2), (64, 64, 4, 2), (32, 32, 4, 2), (16, 32, 2, 2), (16, 16, 1, 2))
"""Queries, keys and warps of a program, and pipeline stages: how many blocks of keys are loaded at a time."""

BLOCKS_OF_HALF = ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3))
"""Additional choices for 16-bit operands, which take half the memory."""


class TritonAttentionProvider:
    """Makes kernels for groups of two products with a softmax between them."""

    name = "triton-attention"
    version = content_version("provider/triton", "provider/attention", "cuda")
    group_shapes = (around("matmul"), attention_groups)

    def offer(self, group: Group, target: CudaTarget) -> Sequence[Offer] | Refusal:
        """Offer blocks of queries and keys that fit into shared memory, in the plain layout."""
        schedule = _schedule(group)
        if isinstance(schedule, Refusal):
            return schedule
        if max(schedule.terms, schedule.columns) > WIDEST_HEAD:
            return Refusal("the heads are too wide")
        try:
            schedule.program(BLOCKS[-1][0], BLOCKS[-1][1], target.products(schedule.scores.dtype)[0])
        except NotFusedError as error:
            return Refusal(str(error))
        wide, size = _width(schedule.terms) + _width(schedule.columns), schedule.scores.dtype.size_bytes
        blocks = (*BLOCKS_OF_HALF, *BLOCKS) if size == DType.F16.size_bytes else BLOCKS
        return [
            Offer(*group.plain_layouts, f"{queries}x{keys}w{warps}s{stages} {product.value}")
            for queries, keys, warps, stages in blocks
            for product in target.products(schedule.scores.dtype)
            if queries < 2 * max(16, schedule.rows)
            and keys < 2 * max(16, schedule.keys)
            and (queries + stages * keys) * wide * size <= target.shared_bytes
        ] or Refusal("no block fits into shared memory")

    def build(self, group: Group, offer: Offer, target: CudaTarget) -> CudaKernel | Refusal:
        """Print the kernel."""
        schedule = _schedule(group)
        if isinstance(schedule, Refusal):
            return schedule
        sizes, product = offer.variant.split(" ")
        queries, keys, warps, stages = map(int, re.findall(r"\d+", sizes))
        try:
            program = schedule.program(queries, keys, Product(product))
        except NotFusedError as error:
            return Refusal(str(error))
        return print_kernel(group, offer, program, target, LaunchOptions(warps, stages))


def _schedule(group: Group) -> DeviceAttention | Refusal:
    """Return the schedule of a group, or why the group is not attention on non-empty tensors."""
    found = match_group(group)
    if isinstance(found, Refusal):
        return found
    if min(type_.size for type_ in group.body.types) == 0:
        return Refusal("a tensor is empty")
    try:
        return DeviceAttention(group, found, group.plain_layouts, DEVICE)
    except NotFusedError as error:
        return Refusal(str(error))


def _width(n: int) -> int:
    return max(16, power_of_two(n))
